"""Options of what an engine can do besides generating text, and of the model's form."""
