"""`scripts/gpu_check` at tiny sizes on the CPU: every section runs, resumes, and survives a row that never ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kernels.attention_cases import AttentionCase, decode_cases, prefill_cases, step_cases

ROOT = Path(__file__).resolve().parents[2]


def gpu_check(folder: Path, section: str, *more: str) -> dict:
    command = [str(ROOT / "scripts" / "gpu_check"), "--platform", "cpu", "--tiny", "--only", section, *more]
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "gpu_check.json").read_text())[section]


def test_attention_rows_compare_with_measured_limits(tmp_path, thorough):
    if not thorough:
        pytest.skip("a fifth of a minute: --thorough")
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


def test_engine_section_reports_steps_and_idle_time(tmp_path, thorough):
    if not thorough:
        pytest.skip("half a minute of compiling: --thorough")
    rows = gpu_check(tmp_path, "engine")["rows"]
    assert rows["start"]["steps"] == 2 and rows["start"]["programs_compiled"] >= 2
    row = rows["2 sequences"]
    assert row["tokens_per_s"] > 0 and row["step_ms"] > 0 and row["device_ms"] > 0
    assert 0 <= row["idle_percent"] <= 100


def test_conformance_section_counts_what_the_suite_found(tmp_path, thorough):
    if not thorough:
        pytest.skip("half a minute of compiling: --thorough")
    found = gpu_check(tmp_path, "conformance")
    assert found["ok"] and found["passed"] >= 2 and not found["failures"]


def test_torch_section_says_what_is_missing(tmp_path):
    rows = gpu_check(tmp_path, "torch")["rows"]
    assert set(rows) == {"flashinfer", "sdpa", "flex"} and all(row["missing"] for row in rows.values())


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
