"""Parameter declarations, and what every source of weights has in common: its protocol, errors, files."""
