"""Multi-process engines: the other processes, and the messages between them."""
