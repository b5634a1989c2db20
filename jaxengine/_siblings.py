"""Shadow guard: `models`, `scheduler`, ... are common names, and a foreign one on sys.path must not be run as ours.

Knows where the five packages lie, nothing of what is in them: it looks for them without importing them.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

SIBLINGS = ("models", "scheduler", "sharding", "pallas_kernels")
HOME = Path(__file__).resolve().parent.parent


def check_siblings(home: Path = HOME) -> None:
    """Raises ImportError, naming both paths, when a sibling package would be imported from outside `home`."""
    for name in SIBLINGS:
        expected, spec = home / name, find_spec(name)
        if spec is None:
            raise ImportError(f"jaxengine needs its own package {name!r} at {expected}, and Python finds none.")
        found = {Path(place).resolve() for place in spec.submodule_search_locations or [spec.origin or name]}
        if found != {expected}:
            paths = ", ".join(str(place) for place in sorted(found))
            raise ImportError(
                f"jaxengine needs its own package {name!r} at {expected}, but Python finds {paths} first. "
                f"Rename that one, or take its folder off sys.path (the current folder counts)."
            )


check_siblings()
