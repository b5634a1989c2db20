"""Content of KV pages outside of the devices: a tier in host memory, and a folder of files."""
