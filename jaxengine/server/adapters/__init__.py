"""Adapters of a server: where they come from, who owns them, which requests get one."""
