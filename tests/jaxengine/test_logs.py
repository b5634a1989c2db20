"""Log lines: their form, one for each line of a message, and never in the middle of a progress bar."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import re
import sys
from datetime import datetime, timedelta

import pytest
from tqdm import tqdm

from jaxengine import LLM
from jaxengine.config.base.errors import ConfigError
from jaxengine.logs import log_as_json, log_to_stderr, only_warnings
from jaxengine.pallas_kernels.attention.xla import attend
from jaxengine.pallas_kernels.matmul.hopper import quantized
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.processes.api_process import is_news
from tests.test_architecture import nodes_of, sources, where


@pytest.fixture
def start(monkeypatch):
    """`log_to_stderr` in a process that has not set up logging, as this one has for the tests."""
    engine = logging.getLogger("jaxengine")

    def run(process=None):
        monkeypatch.setattr(logging, "root", logging.RootLogger(logging.WARNING))
        monkeypatch.setattr(engine, "parent", logging.root)
        log_to_stderr(process)

    level = engine.level
    yield run
    engine.setLevel(level)


# Modules that hold other packages' loggers to silence them.
CONFIGURES = {"jaxengine.models.weights.formats.orbax"}
LINE = r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[test_logs.py:\d+\] "


def test_each_line_says_level_time_and_place(start, capsys):
    start()
    logging.getLogger("jaxengine.x").info("plan:\n  %s", "a\n  b")
    assert re.fullmatch(f"{LINE}plan:\n{LINE}  a\n{LINE}  b\n", capsys.readouterr().err)


def test_processes_of_a_server_have_names(start, capsys):
    start("engine")
    logging.getLogger("jaxengine.x").info("ready")
    assert re.fullmatch(rf"\(engine pid={os.getpid()}\) {LINE}ready\n", capsys.readouterr().err)


def test_a_line_may_be_a_json_object(start, capsys):
    start("engine")
    log_as_json("engine")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("jaxengine.x").exception("a\n%s", "b")
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert {"level": "ERROR", "process": "engine", "logger": "jaxengine.x", "message": "a\nb"}.items() <= found.items()
    assert found["pid"] == os.getpid() and found["place"].startswith("test_logs.py:")
    assert "ValueError: no" in found["exception"] and datetime.fromisoformat(found["time"]).utcoffset() == timedelta()
    with pytest.raises(ConfigError, match="log_format is 'xml'; allowed: text, json"):
        ServerConfig(log_format="xml")


def test_of_other_packages_only_warnings_are_shown(start, capsys):
    start()
    other = logging.Logger("other")
    other.parent = logging.root
    other.info("no")
    logging.root.info("no")
    logging.root.warning("yes")
    said = capsys.readouterr().err
    assert said.endswith("yes\n") and "no" not in said


def test_kernels_say_that_they_run_as_plain_xla(start, capsys):
    start()
    attend.log_once.__wrapped__("Triton kernels", "a reason")  # said once in a process
    quantized.log_once.__wrapped__("a reason")
    said = capsys.readouterr().err
    instead = "attention runs as plain XLA instead of the Triton kernels: a reason"
    assert re.search(rf"^WARNING .*\[attend.py:\d+\] {instead}$", said, re.MULTILINE)
    assert re.search(r"^INFO .*\[quantized.py:\d+\] a quantised product runs as plain XLA .*: a reason$", said, re.M)


def test_every_logger_that_writes_is_below_the_engines():
    """A module's logger has its module's name, under which `log_to_stderr` shows it; others are only configured."""
    wrong, own = [], 0
    for module, (path, tree) in sources().items():
        if "getLogger" not in path.read_text():
            continue
        for node in nodes_of(tree):
            if not isinstance(node, ast.Assign) or "getLogger" not in ast.unparse(node.value):
                continue
            if ast.unparse(node.value) == "logging.getLogger(__name__)" and module.startswith("jaxengine."):
                own += 1
            elif module not in CONFIGURES:
                wrong.append(f"{where(path, node.lineno)}: {ast.unparse(node.value)}")
    assert not wrong, "\n".join(wrong)
    assert own > 30


def test_an_error_keeps_its_stack(start, capsys):
    start()
    try:
        raise ValueError("because")
    except ValueError:
        logging.getLogger("jaxengine.x").exception("failed")
    assert re.search(r"^ERROR .*\] ValueError: because$", capsys.readouterr().err, re.MULTILINE)


def test_a_chat_is_left_alone(start, capsys):
    start()
    only_warnings()
    logging.getLogger("jaxengine.x").info("Avg prompt throughput")
    logging.getLogger("jaxengine.x").warning("really")
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "really" in said


def test_a_line_does_not_stand_in_a_progress_bar(start, capsys):
    start()
    with tqdm(total=2, desc="Loading", file=sys.stderr) as bar:
        bar.update(1)
        logging.getLogger("jaxengine.x").info("in between")
    before, line, after = re.split(f"({LINE}in between\n)", capsys.readouterr().err)
    assert line and before.endswith("\r") and "Loading" in before and "Loading" in after
    assert before.rstrip(" \r").rpartition("\r")[2].startswith("Loading"), "the bar was there, and was wiped out"


@pytest.mark.parametrize(
    ("path", "status", "expected"),
    [
        ("/status.json", 200, False),
        ("/health", 200, False),
        ("/live", 200, False),
        ("/health", 503, True),
        ("/metrics?name=x", 200, False),
        ("/metricsandmore", 404, True),
        ("/v1/completions", 200, True),
    ],
)
def test_what_is_asked_all_the_time_has_no_line_while_all_is_well(path, status, expected):
    arguments = ("127.0.0.1:1", "GET", path, "1.1", status)  # as uvicorn logs it
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)
    assert is_news(record) is expected


def test_a_start_says_whether_it_compiles_or_loads_its_steps(tiny_options, tmp_path, capsys, caplog):
    few = {"max_model_len": 32, "max_num_seqs": 2, "compile_cache_dir": str(tmp_path), "disable_log_stats": False}
    LLM(**tiny_options | few).shutdown()
    said = capsys.readouterr().err
    assert "Compiling steps: 100%" in said and "steps: :" not in said
    with caplog.at_level(logging.INFO, "jaxengine"):
        LLM(**tiny_options | few).shutdown()
    said = capsys.readouterr().err
    assert "Loading steps: 100%" in said and "Compiling" not in said
    assert "KV pages" in caplog.text and "KV pages" not in said


def test_a_full_disk_behind_standard_error_ends_nothing(monkeypatch, start):
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    start()
    print("lost", file=sys.stderr)
    logging.getLogger("jaxengine").warning("lost")
    with tqdm(total=2, mininterval=0) as bar:
        bar.update(2)
    with contextlib.suppress(OSError):
        full.close()
