"""`jaxengine tune`: search of tile sizes for products with quantised matrices, written to the kernels' table of sizes.

jaxengine.check.tuning, imported on demand, compiles and times them.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxengine.check.targets import CLOCKS, find_target, require_compiler
from jaxengine.config.command_line import positive_int
from jaxengine.config.engine_config import ConfigError
from jaxengine.paths import HOME

TABLE_FILE = HOME / "jaxengine" / "pallas_kernels" / "tuned_products.py"
# Products of a layer of Llama 3.1 8B and 70B.
SHAPES = "4096x6144,4096x4096,4096x28672,14336x4096,8192x10240,8192x8192,8192x57344,28672x8192"
# Name -> dtype of the stored codes, whether there are zeros.
CODES = {"int4": ("uint8", True), "int8": ("int8", False), "e4m3": ("float8_e4m3fn", False)}
_HEAD = '''\
"""Sizes for products with quantised matrices, by chip: rows, inputs, outputs, inputs of a group, codes, sizes.

Written by `jaxengine tune`.
"""

from __future__ import annotations

TABLE: dict[str, tuple[tuple[int, int, int, int, str, dict[str, int]], ...]] = {
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine tune` to its parser, with `run` as the function that executes it."""
    chips = ", ".join(CLOCKS)
    parser.add_argument("--target", required=True, metavar="NAME", help=f"{chips}; timed if this machine has one")
    parser.add_argument("--shapes", default=SHAPES, metavar="KxN,KxN,...", help="inputs and outputs of matrices")
    parser.add_argument("--rows", type=positive_int, nargs="+", default=[8, 64, 256], metavar="M", help="rows of steps")
    parser.add_argument("--group", type=int, choices=(32, 64, 128), default=128, help="inputs that share a scale")
    parser.add_argument("--codes", nargs="+", choices=sorted(CODES), default=["int4"], help="formats of the codes")
    about = "add each result to the table in FILE (default: the one that kernels read)"
    parser.add_argument("--write", metavar="FILE", nargs="?", const=str(TABLE_FILE), help=about)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search tile sizes for `args.target` and print each result as it arrives. Returns 0.

    With --write, each result is added to the table file at once. Raises ConfigError for invalid values, a compiler that
    is not installed, and a table file that cannot be read or written, OSError if it cannot be written any more later,
    and the RuntimeError of `jaxengine.check.tuning.tune`.
    """
    if args.target not in CLOCKS:
        raise ConfigError("target", args.target, ", ".join(CLOCKS))
    target = find_target(args.target)
    problems = _problems(args)
    require_compiler(target)
    path = None if args.write is None else Path(args.write).resolve()
    before = {} if path is None else _table_to_write(path)
    from jaxengine.check.tuning import tune

    found = []
    for row in tune(target, problems):
        found.append(row)
        print(f"{target.name}  {len(found)}/{len(problems)}  {_row_text(row)}", flush=True)
        if path is not None:  # at once, as the next may take minutes and Ctrl-C ends it
            entries = merged(before.get(target.name, ()), found)
            _write_whole(path, table_text({**before, target.name: entries}))
    if path is not None:
        print(f"written to {path}", file=sys.stderr)
    return 0


def _table_to_write(path: Path) -> dict[str, tuple[tuple, ...]]:
    """Return the table to update, by chip; if the file at `path` does not exist, a copy of the kernels' table.

    Writes the file in either case. Raises ConfigError if the file is not a table or cannot be written.
    """
    from jaxengine.models.quantization.base.tuning import TABLE

    try:
        text = path.read_text() if path.exists() else table_text(TABLE)
        (value,) = [each.value for each in ast.parse(text).body if isinstance(each, ast.AnnAssign)]
        table = ast.literal_eval(value or "")
        _write_whole(path, text)  # fails now, not after hours, if the file cannot be written
        return table
    except OSError as error:
        problem = f"{path} cannot be written ({error.strerror})"
        raise ConfigError.because("write", problem, "name another FILE") from None
    except (ValueError, SyntaxError):
        raise ConfigError("write", str(path), "a new file, or one that jaxengine tune wrote") from None


def _write_whole(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` atomically, by renaming a temporary file next to it. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _problems(args: argparse.Namespace) -> list[tuple]:
    """Return the problems to tune, every combination of args.codes, args.shapes and args.rows in this order, the rows
    changing fastest, as tuples of the fields of jaxengine.models.quantization.base.tuning.Problem: rows, inputs,
    outputs, group size, dtype of the codes, whether there are zeros.

    Raises ConfigError for a shape that is not KxN, for a number of inputs that is not a positive multiple of 128, and
    for fewer than 128 outputs.
    """
    shapes = []
    for shape in args.shapes.split(","):
        size, _, out = shape.partition("x")
        whole = shape.isascii() and size.isdigit() and out.isdigit()
        if not (whole and int(size) % 128 == 0 < int(size) and int(out) >= 128):
            allowed = "INPUTSxOUTPUTS with a multiple of 128 inputs, from 128 outputs on"
            raise ConfigError("shapes", shape[:100], allowed)
        shapes.append((int(size), int(out)))
    codes = [CODES[name] for name in args.codes]
    return [(rows, *shape, args.group, *kind) for kind in codes for shape in shapes for rows in args.rows]


def _row_text(row: dict[str, Any]) -> str:
    """Return one line about a result of jaxengine.check.tuning.tune: the product, its best tile sizes, and the time in
    microseconds with these and with the usual sizes. It says so where nothing compiles.
    """
    rows, size, out, group, codes, _ = row["problem"]
    name = f"[{rows}, {size}] x [{size}, {out}] {codes}, groups of {group}"
    if row["best"] is None:
        return f"{name}: nothing compiles"
    usual = "do not compile" if row["usual"] is None else f"take {row['usual']:.1f} us"
    return f"{name}: {row['sizes'] or 'as usual'}, {row['best']:.1f} us; the usual sizes {usual}"


def merged(before: Sequence[tuple], found: Sequence[dict[str, Any]]) -> tuple[tuple, ...]:
    """Return a chip's table entries, sorted by codes and then by the other fields, with new entries replacing those of
    the same problem.

    before: entries of the table, each the first five fields of a problem (`_problems`) and its tile sizes. found:
    results of jaxengine.check.tuning.tune. A result for which nothing compiled changes nothing.
    """
    entries = {tuple(entry[:5]): entry[5] for entry in before}
    entries |= {tuple(row["problem"][:5]): row["sizes"] for row in found if row["best"] is not None}
    return tuple((*key, entries[key]) for key in sorted(entries, key=lambda key: (key[4], *key[:4])))


def table_text(table: dict[str, tuple[tuple, ...]]) -> str:
    """Return the source of a Python module that defines TABLE, chips sorted by name. table: entries, as `merged`
    returns them, by chip.
    """
    lines = []
    for chip in sorted(table):
        rows = [f"        ({', '.join(map(_literal, entry))}),\n" for entry in table[chip]]
        lines.append(f'    "{chip}": (\n{"".join(rows)}    ),\n' if rows else f'    "{chip}": (),\n')
    return f"{_HEAD}{''.join(lines)}}}\n"


def _literal(value: Any) -> str:
    """Return the Python source of a value, with double quotes. The value must not contain quotes itself."""
    return repr(value).replace("'", '"')
