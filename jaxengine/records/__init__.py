"""What engines record on disk: steps with the pages that they need, the folder that keeps the latest ones, and the form
of traces.
"""
