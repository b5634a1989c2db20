"""Parts of HTTP answers: bodies, streams of events, fields of results."""
