"""Which of our sources decide what the compiled programs are, and a digest of them.

Owns the walk over imports, from the step programs, the model's family and the kernels of the platform to all that they
can have been traced from. A file that no import leads to (a loader, another family, the server) is not in it, and
docstrings, comments and the places of lines do not count. Reads sources and runs none; knows nothing of jax.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

# What builds the programs, and what says how they are compiled.
_PROGRAMS = ("jaxengine.runner.step_programs", "jaxengine.runner.executables")
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # where a statement keeps other statements


def source_digest(root: Path, modules: Iterable[str]) -> str:
    """A digest of `program_sources`, equal for sources that differ in docstrings, comments and layout only."""
    digest = hashlib.sha256()
    for path, tree in sorted(_sources(root, modules).items()):
        _drop_docstrings(tree)
        digest.update(f"{path.relative_to(root)}\0{ast.dump(tree)}\0".encode())
    return digest.hexdigest()


def program_sources(root: Path, modules: Iterable[str]) -> list[Path]:
    """The files under `root` that the programs can have been traced from.

    Args:
      root: the folder that holds our packages.
      modules: dotted names of what the step programs are handed rather than import: the family, the kernels.

    Imports count wherever they stand, in functions and under TYPE_CHECKING too: an annotation names what is handed in.
    """
    return sorted(_sources(root, modules))


def _sources(root: Path, modules: Iterable[str]) -> dict[Path, ast.Module]:
    found: dict[Path, ast.Module] = {}
    waiting = [*_PROGRAMS, *modules]
    while waiting:
        name = waiting.pop()
        path = _file_of(root, name)
        if path is None or path in found:
            continue
        found[path] = ast.parse(path.read_bytes(), str(path))
        waiting += _imports(root, found[path])
    for path in [*found]:
        # Importing a module runs its packages' own files. What their functions import on demand belongs to others.
        for folder in path.relative_to(root).parents:
            package = root / folder / "__init__.py"
            if package not in found and package.is_file():
                found[package] = ast.parse(package.read_bytes(), str(package))
    return found


def _file_of(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imports(root: Path, tree: ast.Module) -> Iterator[str]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if _file_of(root, name) else node.module for name in names)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement inside of `node`; expressions, which hold none, are left out because they take the time."""
    for block in _BLOCKS:
        for child in getattr(node, block, ()):
            yield child
            yield from _statements(child)


def _drop_docstrings(tree: ast.Module) -> None:
    for node in (tree, *_statements(tree)):
        for block in _BLOCKS:
            if statements := getattr(node, block, None):
                setattr(node, block, [statement for statement in statements if not _is_text(statement)])


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
