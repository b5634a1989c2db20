"""Plugins that register model families: which are found, loaded once, and refused with their file and reason."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from jaxengine import ConfigError, EngineConfig
from jaxengine.checkpoint import plugins
from jaxengine.checkpoint.plugins import load_plugins
from jaxengine.commands.cli import build_parser
from jaxengine.config.command_line import given_options
from jaxengine.models.model_classes import MODELS
from tests.tables import each_row

SOURCE = """
from jaxengine import register_model
from jaxengine.models.families.llama import LlamaForCausalLM

class OwnForCausalLM(LlamaForCausalLM):
    gguf_architecture = None

def register():
    register_model("OwnForCausalLM", OwnForCausalLM)
"""
REGISTERED = SOURCE + "\nregister()\nCOUNT.append(1)\n"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder on sys.path, and a process that has loaded no plugin; `own.loaded` counts executions."""
    monkeypatch.setattr(plugins, "_LOADED", set())
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints())
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    MODELS.pop("OwnForCausalLM", None)


def written(folder, name: str, text: str) -> str:
    log = folder / "log"
    (folder / name).write_text(text.replace("COUNT.append(1)", f"open({str(log)!r}, 'a').write('x')"))
    return str(folder / name)


def num_runs(folder) -> int:
    return len((folder / "log").read_text()) if (folder / "log").exists() else 0


@pytest.mark.parametrize(
    "names",
    [["own_plugin"], ["own_plugin.py"], ["own_plugin", "own_plugin.py"], ["link.py", "own_plugin.py"]],
    ids=str,
)
def test_a_module_or_a_file_is_loaded_once(own, names):
    written(own, "own_plugin.py", REGISTERED)
    (own / "link.py").symlink_to(own / "own_plugin.py")
    names = [str(own / name) if name.endswith(".py") else name for name in names]
    for _ in range(2):
        load_plugins(EngineConfig(plugins=names).plugins)
    assert MODELS["OwnForCausalLM"].__name__ == "OwnForCausalLM" and num_runs(own) == 1


def test_a_file_may_have_the_name_of_a_module_that_is_there(own):
    load_plugins([written(own, "json.py", REGISTERED)])
    assert "OwnForCausalLM" in MODELS and not hasattr(sys.modules["json"], "OwnForCausalLM")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.py", None, r"plugin .*/none.py is not a file"),
        ("own_none", None, r"plugin own_none cannot be imported: ModuleNotFoundError: No module named 'own_none'"),
        ("own_a.py", "import own_nothing", r"/own_a.py cannot be imported: .*'own_nothing' \(.*/own_a.py, line 1\)"),
        ("own_b", "x = 1\nx = [][2]", r"plugin own_b cannot .*: IndexError: .* \(.*/own_b.py, line 2\)"),
        ("own_c", "def f(:\n", r"plugin own_c cannot be imported: SyntaxError: .* \(.*/own_c.py, line 1\)"),
        ("own_d", "raise SystemExit('usage')", r"plugin own_d cannot be imported: SystemExit: usage"),
        (
            "own_e",
            SOURCE + "register_model('Other', OwnForCausalLM)",
            r"own_e cannot be .*ConfigError: architecture is",
        ),
    ],
)
def test_what_cannot_be_imported_is_named_with_its_reason(own, name, text, said):
    if text is not None:
        written(own, name if name.endswith(".py") else f"{name}.py", text)
    for _ in range(2):
        with pytest.raises(ConfigError, match=said):
            load_plugins([str(own / name) if name.endswith(".py") else name])


@pytest.mark.parametrize("value", ["own_points:OwnForCausalLM", "own_points:register", "own_registered"])
def test_an_installed_package_names_a_class_a_function_or_a_module(own, monkeypatch, value):
    written(own, "own_points.py", SOURCE)
    written(own, "own_registered.py", REGISTERED)
    entries = EntryPoints([EntryPoint("OwnForCausalLM", value, plugins.GROUP)])
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries.select(group=group))
    load_plugins([])
    load_plugins([])
    assert "OwnForCausalLM" in MODELS


def test_a_broken_installed_package_is_left_out_with_a_warning(own, monkeypatch, caplog):
    entries = EntryPoints([EntryPoint("OwnForCausalLM", "own_gone:Own", plugins.GROUP)])
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries.select(group=group))
    load_plugins([])
    (record,) = caplog.records
    assert "'OwnForCausalLM = own_gone:Own'" in record.message and "No module named 'own_gone'" in record.message


@each_row("value", [3, ["a b"], ["a", 1], {"a": 1}, ["pkg:Class"], [""]])
def test_what_is_no_plugins_name_is_refused(value):
    with pytest.raises(ConfigError, match="^plugins is "):
        EngineConfig(plugins=value)


@each_row(
    "words",
    ["serve m", "chat m", "generate --model m", "demo m", "bench throughput m", "bench latency m", "convert m out"]
    + ["calibrate m texts out"],
)
def test_every_command_that_loads_a_model_takes_plugins(words):
    args = build_parser().parse_args([*words.split(), "--plugin", "a.b", "--plugin", "c"])
    assert given_options(args, EngineConfig)["plugins"] == ["a.b", "c"]
