"""Stored responses, in one process, so that every process of a server can retrieve them."""
