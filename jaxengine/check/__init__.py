"""`jaxengine check`: compile every kernel and step for accelerators that are not there, and read what came out."""
