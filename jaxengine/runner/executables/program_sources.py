"""A digest of the source files that compiled programs depend on.

These are all files that can be reached by imports from the step programs, the model's family and the platform's
kernels. Other files (loaders, other families, the server) do not count, nor do docstrings, comments and line numbers. A
family may be a user's own file outside of jaxengine: then the files in its folder that it imports count as well.
Sources are read, never run; jax is not imported.

As parsing is slow, a parsed source is cached under a digest of its bytes: in this process and, by `known_sources` and
`learn_sources`, in later ones.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_PACKAGE = "jaxengine"
# The modules that build the programs, and those that determine how they are compiled.
_PROGRAMS = (
    "jaxengine.runner.programs.step_programs",
    "jaxengine.runner.extensions.build",
    "jaxengine.runner.extensions.drafts.programs",
    "jaxengine.runner.executables.cache",
    "jaxengine.models.layers.drafts.next_token",
    "jaxengine.models.layers.exact",
)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # fields of a statement that contain statements


class _Source(NamedTuple):
    """The content of a source file that programs depend on.

    Attributes:
      digest: digest of its syntax tree without docstrings.
      imports: (module, name imported from it, or "") for each import.
    """

    digest: str
    imports: list[tuple[str, str]]


_known: dict[str, _Source] = {}  # by the SHA-256 of a file's bytes


def source_digest(root: Path, modules: Iterable[str], family: Path | None = None) -> str:
    """Return the SHA-256, in hexadecimal, of the names and syntax trees of the files of `program_sources`, which has
    the same arguments and errors. Docstrings, comments and layout do not count.
    """
    digest = hashlib.sha256()
    for path, source in sorted(_sources(root, modules, family).items()):
        name = path.relative_to(root) if path.is_relative_to(root) else path.name
        digest.update(f"{name}\0{source.digest}\0".encode())
    return digest.hexdigest()


def known_sources() -> bytes:
    """Return the sources that this process has parsed or learnt, as bytes for `learn_sources` in another process with
    the same version of Python.
    """
    return json.dumps(_known).encode()


def learn_sources(known: bytes) -> None:
    """Add the sources that `known_sources` returned in another process to those of this process, which are kept.

    Stops without an error at a damaged entry.
    """
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        for content, (digest, imports) in json.loads(known).items():
            _known.setdefault(content, _Source(digest, [(module, name) for module, name in imports]))


def num_known_sources() -> int:
    """Return how many sources this process has parsed or learnt."""
    return len(_known)


def file_digest(root: Path, file: Path) -> str:
    """Return the `source_digest` of a user's own file, of all that it imports from jaxengine and from its folder, and
    of the step programs.

    root: the folder that holds `jaxengine`. Raises SyntaxError or OSError for a file that cannot be parsed or read.
    """
    return source_digest(root, (), file)


def program_sources(root: Path, modules: Iterable[str], family: Path | None = None) -> list[Path]:
    """Return the paths, sorted, of the files from which the step programs can have been traced.

    Imports count wherever they occur, also in functions and under TYPE_CHECKING: an argument's type is often imported
    only there, and its methods are part of the program. Raises SyntaxError or OSError for a file that cannot be read.

    Args:
      root: the folder that holds `jaxengine`.
      modules: dotted names of modules that the step programs look up rather than import: the kernels.
      family: the file of the model's class; None for programs without a model.
    """
    return sorted(_sources(root, modules, family))


def _sources(root: Path, modules: Iterable[str], family: Path | None) -> dict[Path, _Source]:
    """Return the content of each file of `program_sources`, by path: the modules that build programs, `modules`,
    `family`, everything that these import, and the `__init__` files of all their packages.

    It has the arguments and errors of `program_sources`.
    """
    found: dict[Path, _Source] = {}
    own_file = functools.cache(functools.partial(_own_file, root))
    waiting = [path for name in (*_PROGRAMS, *modules) if (path := own_file(name))]
    waiting += [] if family is None else [family]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = _source(path)
            waiting += _imported(root, path, found[path], own_file)
    for path in [*found]:
        # Importing a module runs the `__init__` files of its packages. What these import is not followed.
        folder = path.parent
        while (package := folder / "__init__.py").is_file():
            if package not in found:
                found[package] = _source(package)
            folder = folder.parent
    return found


def _source(path: Path) -> _Source:
    """Return the content of a file, from `_known` if a file with the same bytes was parsed before.

    Raises SyntaxError or OSError if it cannot be parsed or read.
    """
    content = path.read_bytes()
    key = hashlib.sha256(content).hexdigest()
    if key not in _known:
        tree = ast.parse(content, str(path))
        imports = list(_names(tree))
        _drop_docstrings(tree)
        _known[key] = _Source(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imports)
    return _known[key]


def _imported(root: Path, path: Path, source: _Source, own_file: Callable[[str], Path | None]) -> Iterator[Path]:
    """Yield the files that the source at `path` imports: those of jaxengine, and for a user's source also the user's.

    root: the folder that holds `jaxengine`. own_file: returns the file of a module of jaxengine, None for others.
    """
    is_own = path.is_relative_to(root) and path.relative_to(root).parts[0] == _PACKAGE
    for name, attribute in source.imports:
        found = None
        for wanted in (f"{name}.{attribute}", name) if attribute else (name,):
            found = found or own_file(wanted) or (None if is_own else _file_beside(path, wanted))
        if found is not None:
            yield found


def _names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield (module, name imported from it, or "") for each import in a syntax tree."""
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)


def _own_file(root: Path, module: str) -> Path | None:
    """Return the file of a module of jaxengine, by its dotted name; None for other modules and for missing ones."""
    # In site-packages, `root` also holds other packages.
    return _file_of(root, module) if module.partition(".")[0] == _PACKAGE else None


def _file_beside(path: Path, module: str) -> Path | None:
    """Return the file of a module that a user's source imports, if the file is the user's own; else None.

    Modules are looked up in the folder of the source's outermost package; in site-packages only that package counts as
    the user's own. path: path of the source. module: dotted name, with leading dots for a relative import.
    """
    folder = path.parent
    if module.startswith("."):
        level = len(module) - len(module.lstrip("."))
        return _file_of(folder.joinpath(*[".."] * (level - 1)).resolve(), module.lstrip("."))
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    installed = {"site-packages", "dist-packages"} & set(folder.parts)
    if installed and module.partition(".")[0] != path.relative_to(folder).parts[0]:
        return None
    return _file_of(folder, module)


def _file_of(root: Path, module: str) -> Path | None:
    """Return the file of a module, by its dotted name relative to the folder `root`; None if there is none."""
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement inside `node`, at any depth. Expressions are not searched: they contain no statements."""
    for block in _BLOCKS:
        for child in getattr(node, block, ()):
            yield child
            yield from _statements(child)


def _drop_docstrings(tree: ast.Module) -> None:
    """Delete all statements that are only a string, such as docstrings, from a syntax tree, in place."""
    for node in (tree, *_statements(tree)):
        for block in _BLOCKS:
            if statements := getattr(node, block, None):
                setattr(node, block, [statement for statement in statements if not _is_text(statement)])


def _is_text(statement: ast.AST) -> bool:
    """Whether a statement is only a string."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
