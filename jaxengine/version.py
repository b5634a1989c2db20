"""Version of jaxengine, which the wheel and the command line state, and which processes of one engine compare."""

__version__ = "0.1.0"
