"""EAGLE-3 drafters: module, training and checkpoint formats; the method eagle2 serves them."""
