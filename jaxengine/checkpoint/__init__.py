"""Resolution of the model that a user names to opened files."""
