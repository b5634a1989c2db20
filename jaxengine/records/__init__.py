"""Recorded steps on disk: what a file holds, the folder that keeps the last ones, and which pages a step needs."""
