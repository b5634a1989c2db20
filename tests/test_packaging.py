"""The wheel and the sdist hold the one package, and it can be installed next to others that use its folders' names."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("models", "pallas_kernels", "scheduler", "sharding")
# The sources alone, those of more than two hundred model classes among them, with their docstrings; no test, fixture or
# result.
MAX_SDIST_BYTES = 2_720_000


def run(*command: str | Path, cwd: Path) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may be the checkout
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=outside, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def install(python: Path, *arguments: str | Path, cwd: Path) -> None:
    """Have this environment's pip install into that of `python`, which needs none of its own."""
    own = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*own, "install", "--quiet", "--no-compile", *arguments, cwd=cwd)


def make_venv(folder: Path, *packages: str) -> Path:
    """Make an environment that has `packages`, and after them what this one has; return its interpreter."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    install(python, *packages, cwd=folder.parent)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # addsitedir reads .pth files there too. A checkout that one of them names comes after the installed wheel.
    (Path(site) / "zz_base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return python


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """`sdist` and `wheel` of the checkout, `again` the wheel of the unpacked sdist, `python` that has hatchling."""
    folder = tmp_path_factory.mktemp("packaging")
    python = make_venv(folder / "tools", "hatchling", "editables")
    run(python, "-m", "hatchling", "build", "-d", folder / "dist", cwd=ROOT)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run(python, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "again", cwd=source)
    (again,) = (folder / "again").glob("*.whl")
    return {"sdist": sdist, "wheel": wheel, "again": again, "python": python}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def tracked() -> set[str]:
    """Paths in the package of the files that git keeps, the linked folders' among them."""
    paths = run("git", "ls-files", "jaxengine", *LINKED, cwd=ROOT).split("\n")
    links = {f"jaxengine/{name}" for name in LINKED}
    return {path if path.startswith("jaxengine/") else f"jaxengine/{path}" for path in paths if path} - links


def test_the_wheel_is_what_git_keeps_of_the_package(built):
    names = {name for name in contents(built["wheel"]) if ".dist-info/" not in name}
    assert names == tracked()
    assert "jaxengine/py.typed" in names and all(f"jaxengine/{name}/__init__.py" in names for name in LINKED)
    assert {name.rpartition(".")[2] for name in names} >= {"py", "proto", "json", "html"}


def test_the_wheel_has_its_license_and_says_what_it_is(built):
    files = contents(built["wheel"])
    (metadata,) = (files[name].decode() for name in files if name.endswith(".dist-info/METADATA"))
    assert "Classifier: Typing :: Typed\n" in metadata and "Requires-Python: >=3.11\n" in metadata
    assert "# jaxengine\n" in metadata, "the README"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


def test_the_sdist_makes_the_same_wheel(built):
    assert contents(built["again"]) == contents(built["wheel"])
    assert built["again"].name == built["wheel"].name


def test_the_sdist_is_small_and_complete(built):
    assert built["sdist"].stat().st_size < MAX_SDIST_BYTES
    with tarfile.open(built["sdist"]) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    outside = {name for name in members if not name.startswith("jaxengine/")}
    assert outside == {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore"}


def test_it_lives_beside_packages_of_its_folders_names(built, tmp_path):
    """The package `scheduler` of PyPI, and a folder `models` where Python is started."""
    python = make_venv(tmp_path / "user", "scheduler")
    install(python, "--no-deps", built["wheel"], cwd=tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("MINE = True\n")
    code = (
        "import scheduler, models, jaxengine, jaxengine.scheduler, jaxengine.models\n"
        "assert models.MINE\n"
        "print(scheduler.__file__, jaxengine.scheduler.__file__, jaxengine.models.__file__, sep='\\n')\n"
    )
    theirs, ours, models = map(Path, run(python, "-c", code, cwd=tmp_path).split())
    assert theirs != ours and all(path.is_relative_to(tmp_path / "user") for path in (theirs, ours, models))


def test_an_editable_install_is_the_checkout(built, tmp_path):
    python = built["python"]
    install(python, "--no-deps", "--no-build-isolation", "-e", ROOT, cwd=tmp_path)
    code = "import jaxengine.scheduler, jaxengine.models.registry as m; print(jaxengine.scheduler.__file__, m.__file__)"
    paths = [Path(path).resolve() for path in run(python, "-c", code, cwd=tmp_path).split()]
    assert paths == [ROOT / "scheduler" / "__init__.py", ROOT / "models" / "registry.py"]
    assert "jaxengine 0." in run(python.parent / "jaxengine", "--version", cwd=tmp_path)
