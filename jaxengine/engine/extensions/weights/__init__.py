"""New weights between two steps, pauses and sleep."""
