"""Compiled programs: made, cut between layers, kept in files and found again."""
