"""Optional capabilities of the engine loop, one file each; an engine imports only those that it runs."""
