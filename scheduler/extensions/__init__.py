"""Optional capabilities of the scheduler, one file each, imported only by an engine that starts with them."""
