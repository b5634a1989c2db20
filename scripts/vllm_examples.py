"""vLLM's example scripts with `vllm` replaced by `jaxengine`: which find all names that they import, and which run.

    git clone --depth 1 https://github.com/vllm-project/vllm
    python -m scripts.vllm_examples vllm/examples
    python -m scripts.vllm_examples vllm/examples --run MODEL --only basic/offline_inference

Imports are read from the syntax trees, and resolved without running the scripts. With --run, each script whose names
are all found runs in a process of its own, with MODEL in place of the model that it names. Scripts that need packages
that are not installed fail.
"""

from __future__ import annotations

import argparse
import ast
import json
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOUND, REFUSED, MISSING = "all names found", "refused by name", "a name is missing"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a report on the scripts of a folder, run those that are chosen, and return 0. argv: arguments, None for
    sys.argv.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="vLLM's folder examples")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--run", metavar="MODEL", help="run the scripts whose names are all found, with this model")
    parser.add_argument("--only", default="", metavar="TEXT", help="only scripts whose path contains it")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="limit of one script's run")
    args = parser.parse_args(argv)
    report = report_of(args.folder)
    if args.run is not None:
        for name, row in report["scripts"].items():
            if args.only in name and row["imports"] == FOUND:
                row["run"] = run_apart(args.folder / name, args.run, args.timeout)
    for name, row in report["scripts"].items():
        print(name, row["imports"], *row.get("names", ()), row.get("run", ""), sep="  ")
    print(f"\n{report['num_scripts']} scripts, of which {len(report['scripts'])} import vllm: {report['counts']}")
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def report_of(folder: Path) -> dict[str, Any]:
    """Return a report on the scripts below a folder, in plain JSON values: "num_scripts", their number; "scripts", by
    path for each that imports vllm, the worst result of its "imports" (FOUND, REFUSED or MISSING) and the "names" that
    were not found, if any; and "counts" of these results.
    """
    rows: dict[str, dict[str, Any]] = {}
    paths = sorted(folder.rglob("*.py"))
    for path in paths:
        names = list(imports(ast.parse(path.read_text(encoding="utf-8"))))
        if not names:
            continue
        found = {f"{module}.{name}" if name else module: resolve(module, name) for module, name in names}
        worst = max(found.values(), key=(FOUND, REFUSED, MISSING).index)
        rows[str(path.relative_to(folder))] = {"imports": worst} | (
            {} if worst == FOUND else {"names": sorted(name for name, each in found.items() if each != FOUND)}
        )
    return {
        "num_scripts": len(paths),
        "counts": dict(Counter(row["imports"] for row in rows.values())),
        "scripts": rows,
    }


def imports(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name) of each name imported from vllm, anywhere in the script; name is None for `import
    module`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_vllm(node.module or ""):
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if _is_vllm(alias.name))


def resolve(module: str, name: str | None) -> str:
    """Return FOUND, REFUSED or MISSING, depending on whether jaxengine has a name of a module of vLLM's, or the module
    itself if name is None.
    """
    from jaxengine.vllm_names import NotBuiltImportError

    try:
        found = import_module(_ours(module))
        if name is not None and not hasattr(found, name):
            import_module(f"{_ours(module)}.{name}")
    except NotBuiltImportError:
        return REFUSED
    except ImportError:
        return MISSING
    return FOUND


def run_apart(path: Path, model: str, timeout: float) -> str:
    """Run a script in a separate process, for at most `timeout` seconds. Return "ran", the last line of its error
    output, or a text that says that it did not end or with which status it ended.
    """
    command = [sys.executable, "-c", "from scripts.vllm_examples import run_here; run_here()", str(path), model]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"did not end within {timeout:g} s"
    lines = done.stderr.strip().splitlines()
    return "ran" if done.returncode == 0 else lines[-1] if lines else f"ended with status {done.returncode}"


def run_here() -> None:
    """Run the script that sys.argv[1] names as the main program, with jaxengine under vllm's name and with the model
    that sys.argv[2] names.
    """
    _, path, model = sys.argv
    sys.meta_path.insert(0, _AsVllm())
    _use_model(model)
    sys.argv = [path]
    sys.path[0] = str(Path(path).parent)
    runpy.run_path(path, run_name="__main__")


def _use_model(model: str) -> None:
    """Replace EngineConfig.from_options, so that every engine of this process loads this model, whatever the script
    names.
    """
    from jaxengine.config.engine_config import EngineConfig

    from_options = EngineConfig.from_options.__func__

    def with_model(cls: type[EngineConfig], **options: Any) -> EngineConfig:
        return from_options(cls, **options | {"model": model})

    EngineConfig.from_options = classmethod(with_model)  # pyright: ignore[reportAttributeAccessIssue]


class _AsVllm(MetaPathFinder, Loader):
    """Import finder and loader that returns jaxengine's modules under vllm's names."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if _is_vllm(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(_ours(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has been executed already."""


def _is_vllm(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def _ours(module: str) -> str:
    return "jaxengine" + module.removeprefix("vllm")


if __name__ == "__main__":
    sys.exit(main())
