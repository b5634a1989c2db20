"""Plain XLA implementation of ragged paged attention."""
