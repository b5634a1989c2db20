"""Recorded steps on disk: the format of a file, the folder that keeps the latest ones, and the pages
that a step needs.
"""
