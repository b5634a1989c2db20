"""Checkpoints to parameters: where weights are read from (sources) and how they become arrays (params).

Importing this package imports nothing else.
"""
