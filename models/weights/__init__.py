"""Loaders that turn checkpoints of every format into arrays."""
