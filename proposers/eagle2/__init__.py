"""EAGLE-2: a feature-level drafter whose tree follows its own confidence."""
