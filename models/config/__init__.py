"""Configuration of a model, read from its checkpoint."""
