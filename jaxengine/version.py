"""The version of jaxengine, which the wheel, the command line and the processes of an engine compare."""

__version__ = "0.1.0"
