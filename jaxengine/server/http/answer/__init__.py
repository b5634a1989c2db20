"""What an HTTP answer is made of: bodies, streams of events, parts of results."""
