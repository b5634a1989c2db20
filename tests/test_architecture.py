"""The house rules, read from the source with `ast`: who may import whom, and what must not appear anywhere."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Packages are folders of the repository; all but the first are linked into it and imported as jaxengine.NAME.
PACKAGES = ("jaxengine", "pallas_kernels", "sharding", "scheduler", "models")
MAX_LINES, MAX_FUNCTION, MAX_METHODS, MAX_FILES = 500, 60, 20, 14
# Folders with a file for each member of a registry, as many as there are members.
ONE_EACH = {
    "benchmarks/client_cases",
    "jaxengine/engine/extensions",
    "jaxengine/media/processors",
    "models/families",
    "models/sound",
    "models/vision",
}
# Larger ones, to be made smaller.
LARGE = {
    "jaxengine.api.async_llm.AsyncLLM",
    "jaxengine.grammars.grammar_worker.GrammarWorker",
    "jaxengine.grammars.request_masks.RequestMasks",
    "jaxengine.media.processors.units.UnitProcessor",
    "jaxengine.models.layers.attention.mla_expanded.attend_expanded",
    "jaxengine.models.layers.attention.mla_expanded.expanded_rows",
    "jaxengine.pallas_kernels.attention.hopper.latent._attend",
    "jaxengine.pallas_kernels.attention.tpu.attend.attend_tiles",
    "jaxengine.pallas_kernels.attention.tpu.attend._call_kernel",
    "jaxengine.pallas_kernels.kv.update_tpu._write_runs",
    "jaxengine.pallas_kernels.matmul.hopper.quantized.multiply",
    "jaxengine.pallas_kernels.matmul.hopper.shape.Shape",
    "jaxengine.pallas_kernels.matmul.tpu.grouped._body",
    "jaxengine.runner.extensions.adapters.store.AdapterStore",
    "jaxengine.runner.model_runner.ModelRunner",
    "jaxengine.runner.programs.step_programs.StepPrograms",
    "jaxengine.runner.stage_runner.StageRunner",
    "jaxengine.sampling.sampler.sample",
    "jaxengine.scheduler.pages.groups.PageTables",
    "jaxengine.scheduler.rank.Rank",
    "jaxengine.scheduler.batches.results.take",
    "jaxengine.scheduler.scheduler.Scheduler",
    "jaxengine.server.link.remote_engine.RemoteEngine",
}

# Distributions whose module has another name.
MODULES = {
    "orbax_checkpoint": "orbax",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "pillow": "PIL",
    "protobuf": "google",
    "grpcio": "grpc",
    "grpcio_health_checking": "grpc_health",
    "grpcio_reflection": "grpc_reflection",
    "grpcio_status": "grpc_status",
    "opentelemetry_api": "opentelemetry",
}

# package -> prefixes of our own modules it may import, itself aside.
ARROWS = {
    "jaxengine": ("jaxengine.scheduler", "jaxengine.models", "jaxengine.sharding"),
    "scheduler": ("jaxengine.models.forward_batch", "jaxengine.models.adapters", "jaxengine.models.config.tower"),
    "models": ("jaxengine.pallas_kernels", "jaxengine.sharding"),
    "pallas_kernels": (),
    "sharding": (),
}
# package -> the only packages from outside the standard library it may import; None: whatever pyproject.toml declares.
OUTSIDE = {
    "jaxengine": None,
    "scheduler": {"numpy"},
    "models": None,
    "pallas_kernels": {"jax", "numpy", "ml_dtypes", "llvmlite"},
    "sharding": {"jax", "numpy"},
}
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# File -> why it may read or set the process environment. Options of the engine are fields of EngineConfig.
ENVIRONMENT_ALLOWED: dict[str, str] = {
    "jaxengine/check/children.py": "the process that compiles gets the compilers' own variables on top of ours",
    "jaxengine/commands/collect_env.py": "it shows variables and heeds none",
    "jaxengine/runner/base/card.py": "XLA's own variable says how much of a card its client has",
    "jaxengine/runner/start/numa.py": "CUDA's and libtpu's own variables say which devices the process may use",
    "jaxengine/runner/executables/executable_files.py": "where a user's caches lie is said by his environment",
    "jaxengine/runner/executables/cache.py": "flags that XLA and libtpu read are part of a saved executable's key",
}
# These run in the peers' interpreters, with the peers' packages, and import nothing of ours.
PEER_SCRIPTS = ROOT / "jaxengine" / "bench" / "peer_scripts"


def files() -> dict[str, Path]:
    """Dotted module name -> file of everything in the five packages but the peers' scripts."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if PEER_SCRIPTS in path.parents or (package == "jaxengine" and parts[1] in PACKAGES):
                continue
            parts = parts if package == "jaxengine" else ("jaxengine", *parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


@cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    """Dotted module name -> (file, syntax tree) of `files`."""
    return {name: (path, ast.parse(path.read_text(), str(path))) for name, path in files().items()}


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a syntax tree; several rules look at each."""
    return tuple(ast.walk(tree))


def package_of(name: str) -> str:
    """The one of PACKAGES that a dotted name of ours is in."""
    second = [*name.split("."), ""][1]
    return second if second in PACKAGES else "jaxengine"


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of each import, those in functions and under TYPE_CHECKING among them. `from a import b`
    yields a.b: the caller shortens it where b is no module."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the full name"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def allowed(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def import_names(requirements: list[str]) -> set[str]:
    names = {re.split(r"[\[<>=~! ]", line, maxsplit=1)[0].lower().replace("-", "_") for line in requirements}
    return {MODULES.get(name, name) for name in names}


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_the_packages_are_here():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tool["hatch"]["build"]["targets"]["wheel"]["packages"] == ["jaxengine"]
    # pyright follows no link inside a folder: without its own entry a package would not be checked.
    types = re.sub(r"(?m)^ *//.*", "", (ROOT / "pyrightconfig.json").read_text())
    assert set(json.loads(types)["include"]) == {"jaxengine", *(f"jaxengine/{package}" for package in PACKAGES[1:])}
    assert {package_of(name) for name in sources()} == set(PACKAGES)
    for package in PACKAGES[1:]:
        assert (ROOT / "jaxengine" / package).resolve() == ROOT / package


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_a_package_has_one_name(package):
    """The folders lie on sys.path of whoever starts Python in a checkout; no module is imported under two names."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"import jaxengine.{package}\n"
        f"try: import {package}\n"
        f"except ImportError as error: print(error)\n"
        f"assert {package!r} not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{package!r} is jaxengine's own folder; import jaxengine.{package}")


def test_imports_follow_the_arrows():
    wrong = []
    for module, (path, tree) in sources().items():
        package = package_of(module)
        for name, line in imports(tree):
            is_ours, target = name.partition(".")[0] == "jaxengine", package_of(name)
            assert name.partition(".")[0] not in PACKAGES[1:], f"{where(path, line)}: {name} is jaxengine.{name}"
            if is_ours and target != package and not allowed(name, ARROWS[package]):
                wrong.append(f"{where(path, line)}: {package} must not import {name}")
    assert not wrong, "\n".join(wrong)


def test_outside_imports_are_declared_and_fit_the_room():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = import_names(project["dependencies"])
    declared = required.union(*map(import_names, project["optional-dependencies"].values()))
    wrong, used = [], set()
    for module, (path, tree) in sources().items():
        room = OUTSIDE[package_of(module)]
        for name, line in imports(tree):
            top = name.partition(".")[0]
            if top == "jaxengine" or top in sys.stdlib_module_names:
                continue
            used.add(top)
            if top not in (declared if room is None else room & declared):
                wrong.append(f"{where(path, line)}: {top} is not among {sorted(declared if room is None else room)}")
    assert not wrong, "\n".join(wrong)
    assert required <= used, f"declared as required and imported nowhere: {sorted(required - used)}"


def test_no_circular_imports():
    modules = dict(sources())
    for path in (ROOT / "benchmarks").rglob("*.py"):
        modules[".".join(path.relative_to(ROOT).with_suffix("").parts)] = (path, ast.parse(path.read_text()))
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, (_, tree) in modules.items():
        for name, _ in imports(tree):
            target = name if name in modules else name.rpartition(".")[0]
            # `import a.b` inside package a runs a/__init__.py first, which every module of a depends on anyway.
            if target in modules and target != module and not module.startswith(target + "."):
                graph[module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("circular import: " + " -> ".join(error.args[1]))


def test_no_file_is_long():
    folders = (*PACKAGES, "tests", "benchmarks", "scripts")
    written = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name]
    lines = {path: len(path.read_text().splitlines()) for path in written}  # protoc writes the others
    long = {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > MAX_LINES}
    assert lines and not long, f"longer than {MAX_LINES} lines: {long}"


def test_folders_have_few_files():
    counts: dict[str, int] = {}
    for folder in (*PACKAGES, "benchmarks", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "__init__.py" and "_pb2" not in path.name:
                name = str(path.parent.relative_to(ROOT))
                counts[name] = counts.get(name, 0) + 1
    crowded = {name: count for name, count in counts.items() if count > MAX_FILES and name not in ONE_EACH}
    assert counts and not crowded, f"more than {MAX_FILES} files, divide them by what they are about: {crowded}"


def test_functions_and_classes_are_small():
    """Whoever shortens one of LARGE takes it off; nothing is added."""
    written = {module: tree for module, (_, tree) in sources().items() if "_pb2" not in module}
    large = {f"{module}.{name}" for module, tree in written.items() for name in large_definitions(tree)}
    assert not large - LARGE, f"more than {MAX_FUNCTION} lines or {MAX_METHODS} methods: {sorted(large - LARGE)}"
    assert not LARGE - large, f"small by now, take them off LARGE: {sorted(LARGE - large)}"


def large_definitions(tree: ast.Module) -> Iterator[str]:
    """Functions of more than MAX_FUNCTION lines, docstrings aside, and classes of more than MAX_METHODS."""
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            for each in ast.walk(node):
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(each) is not None:
                    lines -= (each.body[0].end_lineno or 0) - each.body[0].lineno + 1
            if lines > MAX_FUNCTION:
                yield node.name
        elif isinstance(node, ast.ClassDef):
            if sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body) > MAX_METHODS:
                yield node.name


def test_every_module_says_what_it_owns():
    silent = [path for path, tree in sources().values() if tree.body and not ast.get_docstring(tree)]
    assert not silent, f"no module docstring: {[str(path.relative_to(ROOT)) for path in silent]}"


def test_sections_of_docstrings_are_indented():
    """Entries of Args and Attributes are indented by two, and their further lines by four."""
    entry, wrong = re.compile(r"  [\w`*]([\w`*., ]*[\w`*])?: |    "), []
    for path, tree in sources().values():
        for node in nodes_of(tree):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for section in (ast.get_docstring(node) or "").split("\n\n"):
                head, *lines = section.split("\n")
                if head in ("Args:", "Attributes:") and not all(map(entry.match, lines)):
                    wrong.append(where(path, node.lineno))
    assert not wrong


@pytest.mark.parametrize("package", ["scheduler", "jaxengine"])
def test_light_packages_import_without_jax(package):
    if package == "scheduler":
        names = [name for name in sources() if package_of(name) == "scheduler"]
        names += ["jaxengine.models.forward_batch", "jaxengine.models.adapters"]
    else:
        names = ["jaxengine", "jaxengine.commands.cli", "jaxengine.config.engine_config"]
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "heavy = [name for name in ('jax', 'jaxlib', 'flax', 'transformers') if name in sys.modules]\n"
        "sys.exit(f'imported as well: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_nothing_unsafe_is_imported():
    wrong = [
        f"{where(path, line)}: {name}"
        for path, tree in sources().values()
        for name, line in imports(tree)
        if name.partition(".")[0] in UNSAFE_MODULES
    ]
    assert not wrong, "\n".join(wrong)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """(last name of what is called, the call)."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))  # of what is not named, nothing
            yield name, node


def test_jinja_is_sandboxed_and_numpy_never_unpickles():
    wrong = []
    for path, tree in sources().values():
        for name, call in calls(tree):
            unsafe = [each for each in call.keywords if each.arg in ("allow_pickle", "trust_remote_code")]
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in unsafe}
            if name in ("Environment", "NativeEnvironment", "SandboxedEnvironment", "Template"):
                wrong.append(f"{where(path, call.lineno)}: {name} is not the sandbox of immutable values")
            if options.get("allow_pickle", "False") != "False":
                wrong.append(f"{where(path, call.lineno)}: allow_pickle={options['allow_pickle']}")
            if options.get("trust_remote_code", "False") != "False":
                wrong.append(f"{where(path, call.lineno)}: trust_remote_code={options['trust_remote_code']}")
            if name in ("eval", "exec") and isinstance(call.func, ast.Name):
                wrong.append(f"{where(path, call.lineno)}: {name}()")
    assert not wrong, "\n".join(wrong)


def test_no_switches_in_the_environment():
    wrong = []
    for path, tree in sources().values():
        if str(path.relative_to(ROOT)) in ENVIRONMENT_ALLOWED:
            continue
        for node in nodes_of(tree):
            last = getattr(node, "attr", getattr(node, "id", ""))
            name = ast.unparse(node) if last in ("environ", "getenv", "putenv") else ""
            if name in ("os.environ", "os.getenv", "os.putenv", "environ", "getenv"):
                wrong.append(f"{where(path, node.lineno)}: {name}; an option is a field of EngineConfig")
    assert not wrong, "\n".join(wrong)
    assert all((ROOT / path).exists() for path in ENVIRONMENT_ALLOWED), "allowed, but not there"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import a.b", ["a.b"]),
        ("from a import b, c", ["a.b", "a.c"]),
        ("def f():\n    import a", ["a"]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", ["a", "b"]),
        ("class C:\n    import a", ["a"]),
        ("try:\n    import a\nexcept ImportError:\n    import b", ["a", "b"]),
    ],
)
def test_the_reader_of_imports_sees_them(code, expected):
    """The rules above are only as good as this walk."""
    assert [name for name, _ in imports(ast.parse(code))] == expected
