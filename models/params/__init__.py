"""Parameter declarations, and what every source of weights shares: its protocol, errors and files."""
