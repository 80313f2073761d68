"""``specplug bench``: compare methods on the same questions in one run."""
