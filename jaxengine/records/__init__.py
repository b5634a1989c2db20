"""Records of engines on disk: steps with the pages that they need, the folder that keeps the latest, and the form
of traces.
"""
