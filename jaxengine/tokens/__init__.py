"""Text to token ids and back, and the templates of conversations."""
