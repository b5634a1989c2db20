"""A step's batch: its rows and slots, its bucket, its packed arrays, its results."""
