"""The names of the five packages beside other people's, and the lazy public face; each in an interpreter of its own.

Every case runs against the checkout, against what the wheel unpacks, and against the wheel itself, which is a zip file.
"""

from __future__ import annotations

import atexit
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIBLINGS = ("models", "scheduler", "sharding", "pallas_kernels")
# What a package of a user's own may look like, and the place that messages name.
KINDS = {"module": "{}.py", "package": "{}/__init__.py", "folder": "{}/net.py"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A folder with what the wheel holds, as hatchling reads it from pyproject.toml, and the same as wheel.zip."""
    folder = tmp_path_factory.mktemp("wheel") / "site-packages"
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]
    for package in hatch["build"]["targets"]["wheel"]["packages"]:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.make_archive(str(folder.parent / "wheel"), "zip", folder)
    return folder


@pytest.fixture(params=["checkout", "wheel", "zip"])
def home(request, wheel) -> Path:
    """Where the five packages are: a folder or zip file for sys.path."""
    return {"checkout": ROOT, "wheel": wheel, "zip": wheel.parent / "wheel.zip"}[request.param]


@cache
def installed_beside_ours() -> Path:
    """Links to what is installed where jaxengine is installed too, but for our own packages; a folder for sys.path."""
    folder = Path(mkdtemp(prefix="beside-"))
    atexit.register(shutil.rmtree, folder)
    for place in map(Path, sys.path):
        if (place / "jaxengine").is_dir() and place.name == "site-packages":
            for entry in place.iterdir():
                if entry.name not in ("jaxengine", *SIBLINGS):
                    (folder / entry.name).symlink_to(entry)
    return folder


def run_python(code: str, *path: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs `code` in an isolated interpreter with `path` in front of sys.path, where nothing of ours is otherwise."""
    folders = [str(folder) for folder in (*path, installed_beside_ours())]
    # The environment of the tests has an editable install, which is another place of the same packages.
    others = "[place for place in sys.path if not os.path.isdir(os.path.join(place, 'jaxengine'))]"
    program = f"import os, sys; sys.path[:] = {folders[:-1]!r} + {others} + {folders[-1:]!r}\n{code}"
    command = [sys.executable, "-I", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def said(code: str, *path: Path) -> str:
    """The last line of the traceback that `code` ends with."""
    done = run_python(code, *path)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr.strip().splitlines()[-1]


def foreign(folder: Path, name: str, kind: str) -> Path:
    """Makes another package of that name in `folder`; where messages say that it is. Running it ends the process."""
    file = folder / KINDS[kind].format(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("raise SystemExit('the foreign code was run')")
    return file if kind == "module" else file.parent


def test_own_siblings_pass(home):
    done = run_python("import jaxengine; print(jaxengine.__file__)", home)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == home / "jaxengine" / "__init__.py"


@pytest.mark.parametrize("name", SIBLINGS)
@pytest.mark.parametrize("kind", ["module", "package"])
def test_a_foreign_sibling_is_refused_with_both_paths(home, tmp_path, name, kind):
    place = foreign(tmp_path, name, kind)
    assert said("import jaxengine", tmp_path, home) == (
        f"ImportError: jaxengine needs its own package {name!r} at {home / name}, but Python finds {place} first. "
        "Rename that one, or take its folder off sys.path (the current folder counts)."
    )


def test_the_current_folder_counts(tmp_path):
    place = foreign(tmp_path, "models", "package")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(1, {str(ROOT)!r}); import jaxengine"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 1 and f"but Python finds {place} first" in done.stderr, done.stderr


def test_a_foreign_sibling_that_was_imported_before_is_refused(tmp_path):
    (tmp_path / "models.py").write_text("")
    code = f"import models; sys.path.insert(0, {str(ROOT)!r}); import jaxengine"
    assert said(code, tmp_path) == (
        f"ImportError: jaxengine needs its own package 'models' at {ROOT / 'models'}, but Python has imported "
        f"{tmp_path / 'models.py'} first. Rename that one, or take its folder off sys.path (the current folder counts)."
    )


def test_a_missing_sibling_is_named(tmp_path):
    code = (
        "from pathlib import Path; from jaxengine._siblings import take_in\n"
        f"take_in(['no_such_package_here'], Path({str(tmp_path)!r}))"
    )
    assert said(code, ROOT) == (
        "ImportError: jaxengine needs its own package 'no_such_package_here' at "
        f"{tmp_path / 'no_such_package_here'}, and Python finds none."
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_added_after_import_cannot_come_in_between(home, tmp_path, kind):
    for name in SIBLINGS:
        foreign(tmp_path, name, kind)
    code = (
        f"import jaxengine; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from jaxengine import ConfigError, ModelFileError, RequestError, SamplingParams\n"
        "import models.config.rope, scheduler.buckets, sharding.rules, pallas_kernels.registry"
    )
    done = run_python(code, home)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["models", "scheduler"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("statement", ["from {} import net", "import {}.net", "from {}.net import Net"])
def test_who_meant_another_package_is_told_whose_this_is_and_which_one_was_passed_over(
    home, tmp_path, name, kind, statement
):
    place = foreign(tmp_path, name, kind)
    assert said(statement.format(name), home, tmp_path) == (
        f"ModuleNotFoundError: {name!r} is jaxengine's package at {home / name} and has no 'net'; Python took it "
        f"before {place}. To use that one, rename it or move it into a package of your own (from my_project.{name} "
        "import ...), or keep jaxengine in another environment"
    )


def test_a_folder_without_init_loses_wherever_it_is(home, tmp_path):
    """Python takes a package with an __init__.py before a folder without one, in whatever order they are found."""
    place = foreign(tmp_path, "models", "folder")
    assert f"Python took it before {place}. To use that one, rename it" in said("import models.net", tmp_path, home)


def test_where_there_is_no_other_package_the_sentence_says_so(home):
    for statement in ("from models import Net", "import models.Net"):
        assert said(statement, home) == (
            f"ModuleNotFoundError: 'models' is jaxengine's package at {home / 'models'} and has no 'Net'; nothing else "
            "of that name is on sys.path"
        )


def test_an_attribute_that_is_not_there_is_an_attribute_error_with_the_same_sentence(home, tmp_path):
    place = foreign(tmp_path, "models", "package")
    line = said("import models as m; m.Net", home, tmp_path)
    assert line.startswith(f"AttributeError: 'models' is jaxengine's package at {home / 'models'} and has no 'Net'; ")
    assert f"Python took it before {place}." in line


def test_tools_that_ask_a_module_for_this_and_that_get_their_answer(tmp_path):
    """What hasattr, inspect, copy, pickle, pkgutil, doctest and IDEs do with any module."""
    foreign(tmp_path, "models", "folder")
    code = """
import importlib, importlib.util, inspect, pickle, pkgutil
import models, scheduler
for package in (models, scheduler):
    assert not hasattr(package, "__wrapped__") and not hasattr(package, "Net") and not hasattr(package, "_repr_html_")
    assert getattr(package, "pytest_plugins", None) is None
    assert inspect.getdoc(package) and inspect.getmodule(package) is package and inspect.getmembers(package)
    assert inspect.unwrap(package) is package
    assert importlib.import_module(package.__name__) is package and dir(package)
    assert importlib.util.find_spec(package.__name__ + ".__main__") is None
try:
    models.__path_hooks__
except AttributeError as error:
    assert str(error) == "module 'models' has no attribute '__path_hooks__'"
from models import config, families
from scheduler import errors
import models.config as c
assert c is config and [each.name for each in pkgutil.iter_modules(models.__path__)]
try:
    pickle.loads(b"cmodels\\nNet\\n.")
except AttributeError as error:
    assert "Can't get attribute 'Net' on <module 'models'" in str(error)  # pickle's own words
try:
    import models.config.nothing
except ModuleNotFoundError as error:
    assert str(error) == "No module named 'models.config.nothing'"
finders = [finder for finder in sys.meta_path if type(finder).__module__ == "models._names"]
assert len(finders) == 1 and finders[0] is sys.meta_path[-1]
# pytest asks every finder for a test file of a user's own models/ folder.
assert finders[0].find_spec("models.test_net", ["/home/user/models"]) is None
assert finders[0].find_spec("models") is None and finders[0].find_spec("os.path", None) is None
"""
    done = run_python(code, ROOT, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_scheduler_needs_neither_jax_nor_jaxengine():
    code = "import scheduler.scheduler; print([name for name in ('jax', 'jaxengine') if name in sys.modules])"
    done = run_python(code, ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_importing_the_face_imports_nothing_heavy():
    heavy = ("jax", "numpy", "flax", "transformers", "tokenizers", "tqdm")
    done = run_python(f"import jaxengine; print([name for name in {heavy!r} if name in sys.modules])", ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_errors_and_types_of_requests_come_without_jax():
    names = (
        "ConfigError, EngineDeadError, ModelConfigError, ModelFileError, RequestError, OverloadedError, TokensPrompt"
    )
    done = run_python(f"from jaxengine import {names}\nprint('jax' in sys.modules)", ROOT)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


def test_every_public_name_resolves_and_an_unknown_one_is_an_attribute_error():
    code = """
import jaxengine
aliases = {"EngineArgs": "EngineConfig"}
assert sorted(jaxengine._HOMES) == sorted(jaxengine.__all__)
for name in jaxengine.__all__:
    assert getattr(jaxengine, name).__name__ == aliases.get(name, name)
    assert name in dir(jaxengine)
try:
    jaxengine.NoSuchName
except AttributeError as error:
    assert "NoSuchName" in str(error)
else:
    raise SystemExit("an unknown name resolved")
"""
    done = run_python(code, ROOT)
    assert done.returncode == 0, done.stderr


def test_type_checkers_see_the_same_names():
    """The imports under TYPE_CHECKING, __all__ and the table are one list, written three times."""
    text = (ROOT / "jaxengine" / "__init__.py").read_text()
    checked = text.split("if TYPE_CHECKING:")[1].split("__all__")[0]
    lists = re.findall(r"import (?:\(([^)]*)\)|(.+))", checked)
    imported = {name.strip() for pair in lists for name in "".join(pair).split(",") if name.strip()}
    done = run_python("import jaxengine; print(*jaxengine.__all__)", ROOT)
    assert imported == set(done.stdout.split())
