"""`python -m jaxengine` is the command `jaxengine`."""

from jaxengine.commands.process import main

main()
