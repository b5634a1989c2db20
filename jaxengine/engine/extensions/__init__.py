"""Optional capabilities of the engine's loop, a file each; an engine imports those that it runs."""
