"""What the server's processes tell each other, and the engine as an API process sees it."""
