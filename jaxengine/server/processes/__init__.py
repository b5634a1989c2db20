"""Processes of a server, and the supervisor that starts, watches and ends them."""
