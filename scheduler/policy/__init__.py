"""Queues of waiting requests: the order in which they are admitted."""
