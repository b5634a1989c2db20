"""`scripts/gpu_check`: what it needs, rows that hang, calls that go on, and, at tiny sizes on the CPU, its sections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.engine import engine_gpu, predictions
from benchmarks.harness import parser_of
from benchmarks.kernels import conformance
from benchmarks.kernels.attention_cases import AttentionCase, decode_cases, prefill_cases, step_cases
from benchmarks.kernels.device_check import SECTIONS, Section, requirement, rows, run, settle
from benchmarks.recorder import BEGUN, Recorder

ROOT = Path(__file__).resolve().parents[2]

# A benchmark of three rows: the second hangs, if asked for; the last waits until the first is in the check's own file.
BENCHMARK = """
import json, sys, time
from pathlib import Path
from benchmarks.recorder import Recorder

out = Path(sys.argv[sys.argv.index("--save") + 1])
whole = out.with_name("gpu_check.json")

def first():
    with out.with_name("calls").open("a") as file:
        file.write("x")
    return {"us": 1}

def last():
    for _ in range(100):
        found = json.loads(whole.read_text()) if whole.exists() else {}
        if "first" in found.get("attention", {}).get("rows", ()):
            return {"seen": True}
        time.sleep(0.1)
    return {"seen": False}

recorder = Recorder("attention", out)
recorder.resume()
recorder.measure("first", first)
recorder.measure("hangs", lambda: time.sleep(1000) if "hang" in sys.argv else {"us": 2})
recorder.measure("last", last)
"""
# Three kernels, in a file of the suite's kind: one is wrong, one hangs, one ends its process.
KERNELS = """
import os, time
import pytest

@pytest.mark.parametrize("case", ["device-a", "device-b", "cpu-c"])
def test_wrong(case):
    assert case != "device-a", "wrong numbers"

@pytest.mark.parametrize("case", ["device-a", "device-b"])
def test_hangs(case):
    time.sleep(1000 * (case == "device-a"))

@pytest.mark.parametrize("case", ["device-a"])
def test_ends(case):
    os._exit(9)
"""


def check(folder: Path, sections: dict[str, Section], monkeypatch, *more: str) -> tuple[int, dict]:
    """The exit status and the file of a check of these sections."""
    monkeypatch.setattr("benchmarks.kernels.device_check.SECTIONS", sections)
    recorder = Recorder("gpu_check")
    status = 0
    try:
        run(parser_of("gpu_check").parse_args(["--out", str(folder), *more]), recorder)
    except SystemExit as end:
        status = int(end.code or 0)
    return status or int(recorder.failed), json.loads((folder / "gpu_check.json").read_text())


def section(tmp_path: Path, *words: str, needs: tuple[str, ...] = ("json",)) -> Section:
    script = tmp_path / "benchmark.py"
    script.write_text(BENCHMARK)
    return Section(1, 3.0, needs, (str(script), *words))


def test_a_section_that_lacks_a_package_is_named_and_the_others_run(tmp_path, monkeypatch, capfd):
    needs = ("json", "msgspec_that_is_not_there", "benchmarks.not_asked_for")
    sections = {"engine": section(tmp_path, needs=needs), "attention": section(tmp_path)}
    status, whole = check(tmp_path / "out", sections, monkeypatch)
    assert status == 3
    assert whole["engine"]["status"] == "left out" and set(whole["engine"]["lacks"]) == {needs[1]}
    assert whole["attention"]["status"] == "complete"
    shown = capfd.readouterr().out
    assert "lacks msgspec_that_is_not_there" in shown and "--dest wheels 'msgspec_that_is_not_there'" in shown
    assert "=== engine" not in shown and "=== attention, 7" in shown  # the whole budget is its own


def test_packages_are_named_with_the_versions_of_the_project():
    assert requirement("PIL").startswith("pillow>=") and requirement("flax").endswith("<0.13")
    assert requirement("pytest").startswith("pytest>=8") and requirement("torch") == "torch"


def test_every_section_asks_for_the_packages_that_it_imports():
    assert list(SECTIONS) == ["engine", "predictions", "conformance", "attention", "torch"], "the most telling first"
    assert not {"msgspec", "llguidance", "pytest_asyncio"} & {
        *SECTIONS["conformance"].needs,
        *SECTIONS["attention"].needs,
    }


def test_a_row_that_hangs_is_named_and_the_next_ones_run(tmp_path, monkeypatch):
    status, whole = check(tmp_path, {"attention": section(tmp_path, "hang")}, monkeypatch)
    found = whole["attention"]["rows"]
    assert status == 1 and whole["attention"]["status"] == "failed"
    assert found["hangs"] == {"status": "hung for 3 s"}
    assert found["last"] == {"seen": True}, "the file had the first row before the last one was measured"


def test_a_second_call_goes_on_behind_the_rows_of_the_first(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    assert check(first, {"attention": section(tmp_path)}, monkeypatch)[0] == 0
    path = first / "gpu_check_attention.json"
    cut = json.loads(path.read_text())
    cut["rows"][1:] = [{"name": "hangs", "status": BEGUN}]  # as a run that was ended from outside leaves it
    path.write_text(json.dumps(cut))
    status, whole = check(second, {"attention": section(tmp_path)}, monkeypatch, "--resume", str(first))
    assert status == 0 and not (second / "calls").exists() and (first / "calls").read_text() == "x"
    assert whole["attention"]["rows"] == {"first": {"us": 1}, "hangs": {"us": 2}, "last": {"seen": True}}


def test_a_row_that_was_cut_is_measured_again_and_one_that_crashed_is_not(tmp_path):
    path = tmp_path / "rows.json"
    for ended, expected in (
        ("cut", {}),
        ("hung", {"status": "hung for 7 s"}),
        (-11, {"status": "its process ended with -11"}),
    ):
        path.write_text(json.dumps({"rows": [{"name": "a", "status": BEGUN}]}))
        assert settle(path, ended, 7.0) == "a"
        assert rows(path) == ({"a": expected} if expected else {}), ended
        assert settle(path, ended, 7.0) is None


@pytest.fixture
def kernels():
    """KERNELS as a file below the root, from which pytest counts the names of cases."""
    (ROOT / ".cache").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache") as folder:
        path = Path(folder) / "test_kernels.py"
        path.write_text(KERNELS)
        yield str(path)


def test_a_kernel_that_hangs_is_named_and_the_others_are_tested(tmp_path, kernels):
    path, selection, calls = tmp_path / "rows.json", (kernels, "-k", "device"), []

    def once() -> tuple[str, dict]:
        status = conformance.run(path, 300.0, 3.0, selection, lambda: calls.append(rows(path)))
        return status, {name.partition("::")[2]: row for name, row in rows(path).items()}

    status, found = once()
    assert status == "failed"
    wrong, hangs, ends = (found[f"test_{name}"] for name in ("wrong", "hangs", "ends"))
    assert (wrong["cases"], wrong["done"], wrong["passed"], wrong["turns"]) == (2, 2, 1, 1)
    assert "wrong numbers" in wrong["failed"][0] and not wrong["ended"]
    assert (hangs["cases"], hangs["done"], hangs["passed"], hangs["turns"]) == (2, 2, 1, 2)
    assert hangs["ended"][0].endswith("[device-a]: hung for 3 s") and len(hangs["ended"]) == 1
    assert ends["ended"][0].endswith("[device-a]: its process ended with 9") and ends["turns"] == 1
    assert [row["done"] for row in calls[0].values()][1:] == [0, 0], "results before the other kernels ran"
    assert once() == (status, found), "a second call takes what was tested as it was"


def gpu_check(folder: Path, section: str, *more: str, status: int = 0, check: str = "gpu_check") -> dict:
    command = [str(ROOT / "scripts" / check), "--platform", "cpu", "--tiny", "--only", section, *more]
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((folder / f"{check}.json").read_text())[section]
    return {**found, "shown": done.stdout}


@pytest.mark.thorough("an engine, compiled twice")
def test_tpu_check_compares_line_by_line(tmp_path):
    """A dry run: on the CPU, arrays are as planned to the byte, and a second run goes on with what the first found."""
    found = gpu_check(tmp_path, "predictions", check="tpu_check")
    assert found["status"] == "complete"
    rows = found["rows"]
    for name in ("weights", "KV pages", "slots and sampling", "number of pages"):
        assert rows[name]["predicted"] == rows[name]["measured"] > 0 and rows[name]["kept"]
    assert rows["decode step"]["measured"] > 0 and rows["decode step"]["predicted"] is None  # no roofline of a CPU
    assert rows["bytes of a decode step"]["ratio"] >= 1
    lines = found["shown"].splitlines()
    assert all(any(line.startswith(name) and "1 " in line for line in lines) for name in ("weights", "KV pages"))
    again = gpu_check(tmp_path / "again", "predictions", "--resume", str(tmp_path), check="tpu_check")
    assert again["rows"] == rows


def test_the_model_is_one_that_fits_the_devices():
    assert [predictions.num_devices(0, here) for here in (1, 3, 4, 8, 256)] == [1, 2, 4, 8, 8]
    assert engine_gpu.fitting(16 << 30) == engine_gpu.LLAMA_1B and engine_gpu.fitting(32 << 30) == engine_gpu.LLAMA_8B
    assert predictions.row("bytes", 2, 3, exact=True) == {
        "unit": "bytes", "predicted": 2, "measured": 3, "ratio": 1.5, "kept": False,
    }  # fmt: skip


@pytest.mark.thorough("a fifth of a minute")
def test_attention_rows_compare_with_measured_limits(tmp_path):
    rows = gpu_check(tmp_path, "attention")["rows"]
    limit = rows["copy bandwidth"]["bytes_per_s"]
    for case in (*decode_cases(tiny=True), *prefill_cases(tiny=True)):
        row = rows[f"{case.name}, ours"]
        assert row["us"] > 0 and "error" not in row
        expected = 100 * case.bytes / (row["us"] * 1e-6) / limit
        assert row["percent_of_copy"] == pytest.approx(expected, rel=0.05, abs=0.1)
    assert rows["kv write 4 tokens"]["us"] > 0
    assert "error" in rows[f"{decode_cases(tiny=True)[1].name}, jax"]  # fp8 keys: what a reference lacks is said
    again = gpu_check(tmp_path, "attention")["rows"]
    assert again == rows, "a second run takes the rows as they were"


@pytest.mark.thorough("half a minute of compiling")
def test_engine_section_reports_steps_and_idle_time(tmp_path):
    rows = gpu_check(tmp_path, "engine")["rows"]
    assert rows["start"]["steps"] == 2 and rows["start"]["programs_compiled"] >= 2
    row = rows["2 sequences"]
    assert row["tokens_per_s"] > 0 and row["step_ms"] > 0 and row["device_ms"] > 0
    assert 0 <= row["idle_percent"] <= 100


@pytest.mark.thorough("half a minute of compiling")
def test_conformance_section_counts_what_the_suite_found(tmp_path):
    found = gpu_check(tmp_path, "conformance")
    (row,) = found["rows"].values()
    assert found["status"] == "complete" and row["passed"] >= 2 and not row["failed"]


def test_torch_section_says_what_is_missing(tmp_path):
    found = gpu_check(tmp_path, "torch", status=3)
    assert found["status"] == "left out" and set(found["lacks"]) == {"torch"}


def test_bytes_and_flops_are_of_what_must_be_done():
    decode = AttentionCase(2, 1, 100, num_q_heads=4, num_kv_heads=2, head_dim=8)
    assert decode.kv_bytes == 2 * 2 * 100 * 2 * 8 * 2
    assert decode.bytes == decode.kv_bytes + 2 * (2 * 4 * 8 * 2)
    assert decode.flops == 2 * 4 * 100 * 8 * 4
    prefill = AttentionCase(1, 3, 5, num_q_heads=1, num_kv_heads=1, head_dim=1)
    assert prefill.flops == 4 * (3 + 4 + 5)
    mixed = next(case for case in step_cases() if case.label.startswith("mixed"))
    assert mixed.num_tokens == 416 and mixed.room == (512, 32, 512)
    assert mixed.kv_bytes == 2 * (16 * 450 + 400) * 3 * 64 * 4
    assert mixed.flops == 4 * (16 * 450 + 400 * 401 // 2) * 9 * 64


def test_every_axis_of_the_grid_is_measured():
    decode, prefill = decode_cases(), prefill_cases()
    names = [case.name for case in (*decode, *prefill)]
    assert len(set(names)) == len(names)
    assert {case.num_seqs for case in decode} >= {1, 8, 16, 64, 256}
    assert {case.kv_len for case in decode} >= {1024, 4096, 32768, 131072}
    assert {case.q_len for case in prefill} >= {1024, 2048, 4096, 8192, 16384, 32768}
    for cases in (decode, prefill):
        assert {case.page_size for case in cases} == {16, 64, 128}
        assert {case.num_q_heads // case.num_kv_heads for case in cases} == {4, 8}
        assert {case.kv_dtype for case in cases} == {"bfloat16", "float8_e4m3fn"}
