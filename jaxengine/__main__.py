"""`python -m jaxengine` is the command `jaxengine`."""

import sys

from jaxengine.cli import main

sys.exit(main())
