"""Processes for work that may never end or take all memory: kept, spoken with, limited and killed."""
