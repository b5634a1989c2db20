"""Parameter declarations, and the loaders that turn checkpoints of every format into arrays."""
