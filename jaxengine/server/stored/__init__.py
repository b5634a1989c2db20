"""Responses that are kept, to be asked for again: in one process, whichever process answers a client."""
