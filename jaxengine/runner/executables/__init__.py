"""Compiled programs: compilation, cuts between layers, storage in files and loading."""
