"""`jaxengine check`: compiles every kernel and step for accelerators that are not present, and inspects
the programs.
"""
