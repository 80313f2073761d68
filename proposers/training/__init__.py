"""Training of drafters: data, loop, checkpoints, provenance."""
