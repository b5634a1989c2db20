"""Optional capabilities of the scheduler, one a file; each is imported by who starts an engine with it."""
