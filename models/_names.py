"""Errors that explain imports meant for another package called `models`, `scheduler` or `sharding`.

The names of the five packages are common, and Python takes the first on its path. An import of a missing name from one
of ours is answered with a message that names the folder passed over. Imports the standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGES = ("models", "scheduler", "sharding", "pallas_kernels")
HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def passed_over(package: str) -> list[str]:
    """List other files and folders for `package` on sys.path, in its order, with or without an __init__.py."""
    found = []
    for entry in dict.fromkeys(sys.path):
        spec = PathFinder.find_spec(package, [entry]) if isinstance(entry, str) else None
        if spec is not None:
            places = spec.submodule_search_locations or [spec.origin or entry]
            found += [os.path.realpath(place) for place in places]
    ours = os.path.realpath(os.path.join(HOME, package))
    return [place for place in dict.fromkeys(found) if place != ours]


def sentence(package: str, name: str) -> str:
    """Message for an import of `name` from our `package`, which has no such name."""
    said = f"{package!r} is jaxengine's package at {os.path.join(HOME, package)} and has no {name!r}"
    others = passed_over(package)
    if not others:
        return f"{said}; nothing else of that name is on sys.path"
    return (
        f"{said}; Python took it before {', '.join(others)}. To use that one, rename it or move it into a package of "
        f"your own (from my_project.{package} import ...), or keep jaxengine in another environment"
    )


def missing(package: str, name: str) -> AttributeError:
    """AttributeError for a package's module __getattr__, plain for special names, which Python itself looks up."""
    if name.startswith("__"):
        return AttributeError(f"module {package!r} has no attribute {name!r}")
    return AttributeError(sentence(package, name))


class _OwnPackages:
    """Finder that comes last and finds nothing: it raises the error for `from models import name` and `import
    models.name`.

    Python drops the AttributeError of a module in the first form, so only an error raised here reaches the user.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        # Names below a subpackage were meant for our package. Special names are looked up by Python and by tools
        # (`models.__main__`), which handle their absence.
        if package not in PACKAGES or not rest or "." in rest or rest.startswith("__"):
            return None
        if path is None or os.path.join(HOME, package) not in map(os.path.abspath, path):
            return None
        raise ModuleNotFoundError(sentence(package, rest), name=package)


def explain_imports() -> None:
    """Append the finder to sys.meta_path, once for each process."""
    if not any(type(finder) is _OwnPackages for finder in sys.meta_path):
        sys.meta_path.append(_OwnPackages())
