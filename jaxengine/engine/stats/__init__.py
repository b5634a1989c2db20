"""What an engine counts and measures, and its timeline."""
