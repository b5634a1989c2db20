"""`jaxengine replay`: run a recorded step again, with the same or other kernels, and name the first
array that differs.
"""
