"""The shadow guard and the lazy public face, each in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Runs `code` in an isolated interpreter with `path`, then the repository, in front of sys.path."""
    folders = [str(folder) for folder in (*path, ROOT)]
    program = f"import sys; sys.path[:0] = {folders!r}\n{code}"
    return subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=120)


def test_own_siblings_pass():
    done = run_python("import jaxengine; print(jaxengine.__file__)")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "jaxengine" / "__init__.py"


@pytest.mark.parametrize("name", ["models", "scheduler", "sharding", "pallas_kernels"])
@pytest.mark.parametrize("kind", ["module", "package"])
def test_a_foreign_sibling_is_refused_with_both_paths(tmp_path, name, kind):
    if kind == "module":
        foreign = tmp_path / f"{name}.py"
    else:
        foreign = tmp_path / name / "__init__.py"
        foreign.parent.mkdir()
    foreign.write_text("raise SystemExit('the foreign code was run')")
    done = run_python("import jaxengine", tmp_path)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert str(ROOT / name) in done.stderr
    assert str(tmp_path / name) in done.stderr


def test_a_missing_sibling_is_named(tmp_path):
    code = (
        "from pathlib import Path; import jaxengine._siblings as s\n"
        f"s.SIBLINGS = ('no_such_package_here',)\ns.check_siblings(Path({str(tmp_path)!r}))"
    )
    done = run_python(code)
    assert done.returncode == 1
    assert "ImportError" in done.stderr and "no_such_package_here" in done.stderr and str(tmp_path) in done.stderr


def test_importing_the_face_imports_nothing_heavy():
    heavy = ("jax", "numpy", "flax", "transformers", "tokenizers", "tqdm")
    done = run_python(f"import jaxengine; print([name for name in {heavy!r} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_every_public_name_resolves_and_an_unknown_one_is_an_attribute_error():
    code = """
import jaxengine
for name in jaxengine.__all__:
    assert getattr(jaxengine, name).__name__ == name
    assert name in dir(jaxengine)
try:
    jaxengine.NoSuchName
except AttributeError as error:
    assert "NoSuchName" in str(error)
else:
    raise SystemExit("an unknown name resolved")
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
