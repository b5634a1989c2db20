"""Shadow guard: `models`, `scheduler`, ... are common names, and a foreign one on sys.path must not be run as ours.

Knows where the five packages lie, nothing of what is in them. It looks for them before it imports them, so that foreign
code is not run, and imports all of them at once, so that a folder that is put on sys.path later cannot come in between.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

SIBLINGS = ("models", "scheduler", "sharding", "pallas_kernels")
HOME = Path(__file__).resolve().parent.parent


def take_in(names: Sequence[str] = SIBLINGS, home: Path = HOME) -> None:
    """Imports the sibling packages; ImportError, naming both paths, when one would come from outside `home`."""
    for name in names:
        expected, found = home / name, _places(name)
        if not found:
            raise ImportError(f"jaxengine needs its own package {name!r} at {expected}, and Python finds none.")
        if found != {expected}:
            paths = ", ".join(str(place) for place in sorted(found))
            taken = "has imported" if name in sys.modules else "finds"
            raise ImportError(
                f"jaxengine needs its own package {name!r} at {expected}, but Python {taken} {paths} first. "
                f"Rename that one, or take its folder off sys.path (the current folder counts)."
            )
    for name in names:
        import_module(name)


def _places(name: str) -> set[Path]:
    """Where the package or module lies that `import name` gives, without running it; empty where there is none."""
    if (module := sys.modules.get(name)) is not None:
        places = list(getattr(module, "__path__", None) or [getattr(module, "__file__", None) or f"({name})"])
    elif (spec := find_spec(name)) is not None:
        places = list(spec.submodule_search_locations or [spec.origin or name])
    else:
        places = []
    return {Path(place).resolve() for place in places}


take_in()
