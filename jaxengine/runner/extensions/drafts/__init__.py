"""Drafts: tokens that are proposed for a row of a step, and verified in it."""
