"""Pages of keys and values: how they are stored, and how new ones are written."""
