"""Products on a Blackwell GPU."""
