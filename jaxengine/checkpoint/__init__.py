"""From the word a user gives for a model to its opened files."""
