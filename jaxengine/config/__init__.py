"""What an engine is asked for, and what each kind of device suggests."""
