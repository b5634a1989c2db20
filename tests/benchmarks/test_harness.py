"""The table of benchmarks, their options, and the file of rows that all of them write."""

from __future__ import annotations

import json
import re
import shlex
import socket
import threading
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.engines import ask
from benchmarks.harness import BENCHMARKS, RESULTS, file_of, load, main, parser_of
from benchmarks.recorder import Recorder

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md")
SOURCES = (*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "jaxengine").rglob("*.py"))
# What stands for a value in a text, and one that its option takes.
VALUES = {"NAME": "chat", "FILE": "file.json", "FOLDER": "folder", "MODEL": "model"}


def commands(text: str) -> list[list[str]]:
    """The words behind `python -m benchmarks` of the commands that a text names, in backticks or on indented lines."""
    spans = re.findall(r"`python -m\s+benchmarks\s([^`]*)`", text)
    return [shlex.split(each) for each in (*spans, *re.findall(r"^ {4}python -m benchmarks (.*)$", text, re.M))]


def named() -> dict[str, list[list[str]]]:
    others = [path for path in (*TEXTS, *SOURCES) if path != Path(__file__)]
    found = {str(path.relative_to(ROOT)): commands(path.read_text()) for path in others}
    for name in ("gpu_check", "tpu_check"):
        script = (ROOT / "scripts" / name).read_text()
        lines = re.findall(rf"^#   scripts/{name}((?: --?[\w-]+(?: [\w-]+)?)*)", script, re.M)
        found[f"scripts/{name}"] = [[name, *shlex.split(line)] for line in lines]
    return found


def test_every_command_that_a_text_names_is_one():
    wrong = []
    for place, lines in named().items():
        for name, *words in lines:
            if name == "NAME":
                continue
            try:
                assert name in BENCHMARKS
                parser_of(name).parse_args([VALUES.get(word, word) for word in words])
            except (AssertionError, SystemExit):
                wrong.append((place, name, *words))
    assert not wrong


def test_commands_are_found_in_texts():
    assert commands("see `python -m benchmarks drafts --max-tokens\n64`, and `python -m benchmarks memory`.") == [
        ["drafts", "--max-tokens", "64"],
        ["memory"],
    ]
    found = named()
    assert len(found["benchmarks/README.md"]) > 20 and found["docs/architecture.md"] and found["docs/lora.md"]
    assert ["gpu_check", "--platform", "cpu", "--tiny"] in found["scripts/gpu_check"]
    assert {name for lines in found.values() for name, *_ in lines} >= set(BENCHMARKS)


def test_no_text_names_a_benchmark_by_its_module():
    old = re.compile(r"-m\s+benchmarks\.(?!processes)")
    assert not [path for path in (*TEXTS, *SOURCES) if path != Path(__file__) and old.search(path.read_text())]


def test_every_module_of_a_benchmark_has_options_and_a_run(capsys):
    for name in BENCHMARKS:
        module = load(name)
        assert module.__doc__ and callable(module.run)
        assert set(vars(parser_of(name).parse_args(["x"] * ("folder" in module.OPTIONS)))) == {
            *module.OPTIONS,
            "save",
            "platform",
        }
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in BENCHMARKS)
    assert main(["attentoin"]) == 2 and "attentoin" in capsys.readouterr().err


def test_a_value_is_read_as_the_default_is():
    found = parser_of("kv_tiers").parse_args(["--hidden-size", "64", "--model", "x"])
    assert (found.hidden_size, found.model) == (64, "x")
    assert parser_of("engine_gpu").parse_args(["--num-seqs", "8", "1"]).num_seqs == [8, 1]


def test_where_rows_are_written():
    assert file_of("drafts", None) is None
    assert file_of("drafts", "") == RESULTS / "drafts.json"
    assert file_of("drafts", "cpu") == RESULTS / "drafts_cpu.json"
    assert file_of("drafts", "here/x.json") == Path("here/x.json")


@pytest.mark.parametrize(("words", "name"), [(["--steps", "many"], "--steps"), (["--checks"], "--checks")])
def test_a_wrong_option_is_named(words, name, capsys):
    with pytest.raises(SystemExit):
        main(["padding", *words])
    assert name in capsys.readouterr().err


def test_a_limit_that_is_not_kept_is_the_exit_status(tmp_path, monkeypatch, capsys):
    module = load("recompute")
    for kept, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(module, "run", lambda args, recorder, kept=kept: recorder.add({"n": 1, "kept": kept}))
        path = tmp_path / "rows.json"
        assert main(["recompute", "--save", str(path)]) == status
        found = json.loads(path.read_text())
        assert list(found) == ["benchmark", "command", "when", "machine", "rows"]
        assert found["rows"] == [{"n": 1, "kept": kept}] and found["benchmark"] == "recompute"
        assert found["command"] == f"python -m benchmarks recompute --save {path}" and "cpu" in found["machine"]
    monkeypatch.setattr(module, "run", _refuse)
    with pytest.raises(SystemExit):
        main(["recompute"])
    assert "it needs two cores" in capsys.readouterr().err


def _refuse(args, recorder):
    raise harness.OptionError("it needs two cores")


def test_rows_that_are_not_measured_again_stay(tmp_path):
    path, key = tmp_path / "rows.json", ("kind",)
    path.write_text(json.dumps({"rows": [{"kind": "a", "ms": 1}, {"kind": "b", "ms": 2}], "machine": {"host": 0}}))
    recorder = Recorder("x", path)
    recorder.take_over()
    recorder.add({"kind": "b", "ms": 3}, key)
    recorder.add({"kind": "c", "ms": 4}, key)
    assert json.loads(path.read_text())["rows"] == [
        {"kind": "a", "ms": 1},
        {"kind": "b", "ms": 3},
        {"kind": "c", "ms": 4},
    ]


def test_a_resumed_run_keeps_rows_and_never_repeats_one_that_hung(tmp_path):
    path, calls = tmp_path / "rows.json", []

    def measure(name):
        calls.append(name)
        if name == "hangs":
            raise KeyboardInterrupt  # what a killed process leaves behind: a row that was begun
        if name == "fails":
            raise ValueError("why")
        return {"us": 1}

    def on(host, budget_s=float("inf")):
        recorder = Recorder("x", path, "", budget_s, lambda: {"host": host})
        recorder.resume()
        return recorder

    recorder = on(1)
    recorder.measure("fine", lambda: measure("fine"))
    recorder.measure("fails", lambda: measure("fails"))
    with pytest.raises(KeyboardInterrupt):
        recorder.measure("hangs", lambda: measure("hangs"))
    assert json.loads(path.read_text())["rows"][-1] == {"name": "hangs", "status": "begun"}

    resumed = on(1)
    for name in ("fine", "fails", "hangs", "new"):
        resumed.measure(name, lambda name=name: measure(name))
    assert calls == ["fine", "fails", "hangs", "new"]
    assert resumed.named("hangs") == {"name": "hangs", "status": "the process ended in it"}
    assert resumed.named("fails") == {"name": "fails", "error": "ValueError: why"}
    assert on(2).rows == [], "another machine's rows are not ours"
    assert on(2, -1.0).measure("late", lambda: measure("late")) is None and "late" not in calls


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"])
def test_an_answer_of_a_server_that_is_killed_has_status_0(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert ask(f"http://127.0.0.1:{server.getsockname()[1]}", "/health")[0] == 0
        thread.join()
