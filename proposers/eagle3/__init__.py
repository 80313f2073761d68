"""EAGLE-3 drafters: their module, training and formats; they are served by the method eagle2."""
