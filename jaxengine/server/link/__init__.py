"""Messages between the server's processes, and the client of the engine for API processes."""
