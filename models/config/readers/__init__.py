"""From config.json or a GGUF header to a model configuration."""
