"""What a model is, read from its checkpoint's configuration."""
