"""Pages of keys and values: their storage, and the write of new tokens."""
