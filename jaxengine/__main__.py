"""`python -m jaxengine` is the command `jaxengine`."""

import sys

from jaxengine.commands.cli import main

sys.exit(main())
