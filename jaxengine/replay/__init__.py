"""`jaxengine replay`: runs a recorded step again, by these or other kernels, and names the first array that differs."""
