"""Recurrent states: rows of slots and snapshots, and what becomes of them when drafts are verified."""
