"""Readers of model configurations: from config.json and from the headers of GGUF files."""
