"""The Dockerfile copies what the wheel is made of, names extras that exist, and starts a command that exists."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from jaxengine.commands.cli import build_parser
from jaxengine.server.base.options import ServerConfig

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = "locks/all.txt"


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """(instruction, the rest) of each line, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", "").splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def test_what_the_wheel_is_made_of_is_copied(steps):
    copied = {word for name, rest in steps if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]}
    wheel = set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    wheel |= {path.resolve().name for path in (ROOT / "jaxengine").iterdir() if path.is_symlink()}
    wanted = {*wheel, "pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], LOCK}
    assert copied == wanted and all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*" and {line[1:] for line in ignored if line.startswith("!")} == wanted


def test_the_extras_and_the_model_are_those_of_the_project(steps):
    default = next(rest.partition("=")[2] for name, rest in steps if name == "ARG" and rest.startswith("EXTRAS="))
    assert default in PROJECT["project"]["optional-dependencies"]
    model = re.search(r"^MODEL\s*:= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert model and any(name == "RUN" and f"--no-deps {model[1]}" in rest for name, rest in steps)


def test_the_versions_are_those_of_the_lock(steps, tmp_path):
    (run,) = (rest for name, rest in steps if name == "RUN" and LOCK in rest)
    (command,) = (part.strip() for part in run.split("&&") if LOCK in part)
    (tmp_path / "locks").mkdir()
    (tmp_path / LOCK).write_text((ROOT / LOCK).read_text())
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    written = (tmp_path / command.rpartition(">")[2]).read_text().splitlines()
    pins = re.findall(r"^\S.*?==.*?(?= \\$)", (ROOT / LOCK).read_text(), re.MULTILINE)
    assert written == pins and len(pins) > 50
    assert f"--constraint {command.rpartition('>')[2]} " in run


def test_the_command_exists(steps):
    rest = dict(steps)
    words = [*json.loads(rest["ENTRYPOINT"]), *json.loads(rest["CMD"])]
    assert words[0] == "jaxengine"
    build_parser().parse_args(words[1:])


def test_it_does_not_run_as_root(steps):
    assert steps[-1][0] == "CMD" and dict(steps)["USER"] == "1000"


def test_its_health_is_asked_where_the_server_answers(steps):
    rest = dict(steps)
    *_, source = json.loads(rest["HEALTHCHECK"].partition("CMD ")[2])
    assert f"'http://127.0.0.1:{rest['EXPOSE']}/live'" in source
    assert ServerConfig().port == int(rest["EXPOSE"])


def test_its_labels_are_those_of_the_project(steps):
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', dict(steps)["LABEL"]))
    project = PROJECT["project"]
    assert labels.pop("description")
    assert labels == {"title": project["name"], "source": project["urls"]["Source"], "licenses": project["license"]}


def test_the_manifests_name_the_image_that_is_built():
    (image,) = re.findall(r"docker build -t (\S+) \.\s*#", (ROOT / "docs" / "containers.md").read_text())
    assert f"image: &image {image}" in (ROOT / "docs" / "kubernetes" / "jaxengine.yaml").read_text()
    from jaxengine.version import __version__

    assert image == f"jaxengine:{__version__}"
