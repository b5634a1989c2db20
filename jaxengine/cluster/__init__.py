"""The other processes of one engine, and what they say to each other."""
