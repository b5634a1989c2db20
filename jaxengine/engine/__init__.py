"""The loop and what it counts. Token ids only, no text."""
