"""Parameter declarations, and how checkpoints of every format become arrays."""
