"""Entry point of `python -m jaxengine`: the command line."""

from jaxengine.commands.process import main

main()
