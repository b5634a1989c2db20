"""The model families, a file each."""
