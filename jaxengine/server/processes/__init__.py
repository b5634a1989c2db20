"""The processes of a server: who starts, watches and ends whom."""
