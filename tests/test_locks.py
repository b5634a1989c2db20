"""What locks/ names is what pyproject.toml and the Makefile ask for, for every Python, with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(path: Path) -> list[tuple[Requirement, list[str]]]:
    """The requirements of a lock and their hashes."""
    joined = path.read_text().replace("\\\n", " ")
    rows = [line.split("--hash", 1) for line in joined.splitlines() if line and not line.startswith("#")]
    return [(Requirement(name.strip()), HASH.findall("--hash" + "".join(rest))) for name, *rest in rows]


def versions(python: str, path: Path) -> dict[str, str]:
    """What is installed on Linux, by name."""
    environment = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    found = {}
    for requirement, _ in entries(path):
        if requirement.marker is None or requirement.marker.evaluate({**environment, "platform_machine": "x86_64"}):
            (pin,) = requirement.specifier
            name = canonicalize_name(requirement.name)
            assert pin.operator == "==" and name not in found, requirement
            found[name] = pin.version
    return found


def test_the_locks_are_here():
    assert [path.name for path in LOCKS] == ["all.txt", "no-deps.txt", "sbom.txt"]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_line_is_pinned_and_hashed_and_names_no_host(path):
    assert "://" not in path.read_text()
    for requirement, hashes in entries(path):
        assert hashes and requirement.url is None, requirement


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_fits_what_is_asked_for(python):
    """`make lock` writes them anew."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in ("demo", "serve", "video", "ray", "dev"):
        wanted += extras[extra]
    installed = versions(python, ROOT / "locks" / "all.txt")
    for line in wanted:
        requirement = Requirement(line)
        version = installed.get(canonicalize_name(requirement.name))
        assert version is not None and requirement.specifier.contains(version, prereleases=True), (line, version)


def test_what_is_installed_without_dependencies_is_what_the_makefile_says():
    makefile = (ROOT / "Makefile").read_text()
    for name, version in versions("3.11", ROOT / "locks" / "no-deps.txt").items():
        assert re.search(rf":= {name.replace('-', '[-_]')}=={re.escape(version)}$", makefile, re.MULTILINE), name
