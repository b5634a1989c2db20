"""Recorded steps run again: the same bits by the same kernels, and one changed bit is found and named."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, SamplingParams
from jaxengine.commands.cli import main
from jaxengine.models.kernel_rows import INTERPRETED, PLATFORMS, layout_of
from jaxengine.records.folder import ENGINE_FILE, find_step, read_about, step_files
from jaxengine.records.step_file import RecordError, num_bytes, write_step
from jaxengine.replay.backends import choose_backend
from jaxengine.replay.page_layouts import converted
from jaxengine.replay.replay import DIFFERS, SAME, Report, replay
from jaxengine.replay.run import run_step
from jaxengine.replay.stage import open_stage
from tests.conftest import TINY_OPTIONS
from tests.fixtures.drawn_weights import checkpoint

OPTIONS: dict[str, Any] = TINY_OPTIONS | {"max_model_len": 64, "block_size": 8, "max_num_seqs": 4}
PROMPTS = [list(range(3, 22)), [5, 6, 7], [9] * 11]


def generate(llm: LLM) -> None:
    """Runs greedy and random requests with penalties, biases and logprobs, one of them with a known prefix."""
    own = [
        {"temperature": 0.9, "seed": 1, "frequency_penalty": 0.5, "logit_bias": {3: -1.0}},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 1.2, "seed": 7, "top_k": 20, "repetition_penalty": 1.2},
    ]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **each) for each in own]
    llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    llm.generate({"prompt_token_ids": [*PROMPTS[0], 1, 2]}, params[0], use_tqdm=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, executables_dir):
    """Engines and their folders of steps by family and options, made once each."""
    made: dict[str, tuple[Path, LLM]] = {}

    def make(name: str, **options: Any) -> tuple[Path, LLM]:
        key = f"{name} {options}"
        if key not in made:
            folder = tmp_path_factory.mktemp("steps") / "here"
            given = {"model": str(checkpoint(name)), "record_steps": folder, "compile_cache_dir": executables_dir}
            llm = LLM(**OPTIONS | given | options)
            generate(llm)
            made[key] = folder, llm
        return made[key]

    return make


@pytest.fixture
def record(recorded):
    return lambda name, **options: recorded(name, **options)[0]


@pytest.fixture
def again(executables_dir):
    def run(folder: Path, step: int | None = None, backend: str = "native", **options: Any) -> Report:
        return replay(folder, step, backend, compile_cache_dir=executables_dir, **options)

    return run


LAYERS = {"record_steps_detail": "layers"}


def changed(folder: Path, number: int, name: str, entry: Any) -> None:
    """Changes one bit of an array of a step, which is written anew with digests of its own."""
    step = find_step(folder, number)
    array = step.arrays[name].copy()
    array[entry].reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << 20)
    write_step(step_files(folder)[number], step.about, {**step.arrays, name: array})


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("llama", LAYERS, (0, 3, -5)),  # prompts, decodes, and a prompt behind a known prefix
        pytest.param("lfm2", {}, (-5,), marks=pytest.mark.thorough("families")),
        pytest.param("qwen3_next", {}, (-5,), marks=pytest.mark.thorough("families")),
        pytest.param("gemma2", {}, (4,), marks=pytest.mark.thorough("families")),
        pytest.param("deepseek_v2", {}, (2,), marks=pytest.mark.thorough("families")),
    ],
    ids=["dense", "states", "delta rule", "windows", "latent"],
)
def test_a_step_gives_the_same_bits(recorded, again, name, options, steps):
    folder, llm = recorded(name, **options)
    numbers = [*step_files(folder)]
    for step in steps:
        report = again(folder, numbers[step])
        assert (report.status, report.first) == (SAME, None), report.lines
    assert llm.core.engine.runner.compiles.count == 0  # while it served


@pytest.mark.thorough("programs of four devices compile long")
def test_a_step_of_four_devices_gives_the_same_bits(tmp_path, executables_dir):
    command = [sys.executable, "-m", "tests.jaxengine.replay.four_devices", str(tmp_path / "steps"), executables_dir]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=400)
    assert done.returncode == SAME, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize(("backend", "options"), [("cpu", {}), ("xla", {})])
def test_other_kernels_agree_within_the_tolerance(record, again, backend, options):
    folder = record("llama", **LAYERS)
    report = again(folder, 3, backend, **options)
    assert report.status == SAME, report.lines


# For each platform beside the CPU how its kernels run here, and the dtype of the step. Mosaic GPU kernels attend in 16
# bits alone, by wgmma, which jax does not interpret; in float32 plain XLA attends in their place, as on the card.
ROWS = {
    "gpu_xla": ("xla", "float32"),
    "gpu_triton": ("interpret", "bfloat16"),
    "gpu": ("interpret", "float32"),
    "gpu_blackwell": ("interpret", "float32"),
    "tpu": ("interpret", "float32"),
}
INTERPRETED_ROWS = pytest.mark.thorough("interpreted")


def recorded_on(platform: str, source: Path, folder: Path, executables: Any) -> Path:
    """A folder with a step as an engine on such a card would record it: pages in its layout, and what its kernels give.

    source: folder of the CPU's step of the same inputs. executables: where compiled steps are kept.
    """
    shutil.copytree(source, folder)
    about, step = read_about(folder), find_step(folder, 3)
    way, _ = ROWS[platform]
    backend = choose_backend(way, platform)
    with backend.context():
        stage = open_stage(about, backend, layers=True, compile_cache_dir=executables)
        arrays = {**step.arrays, **run_step(stage, step, "cpu")}
    pool = stage.programs.kv_shapes(2)
    for name in ("pages/data", "after/pages/data"):
        arrays[name] = converted(arrays[name], layout_of("cpu"), layout_of(platform), pool.spec, pool.data)
    write_step(step_files(folder)[3], step.about, arrays)
    (folder / ENGINE_FILE).write_text(json.dumps({**about, "platform": platform}))
    return folder


def test_every_platform_has_a_row():
    assert {*ROWS, "cpu"} == {*PLATFORMS}
    assert {name for name, (way, _) in ROWS.items() if way == "interpret"} == {*INTERPRETED}


@pytest.mark.parametrize(
    "platform", [pytest.param(name, marks=() if way == "xla" else INTERPRETED_ROWS) for name, (way, _) in ROWS.items()]
)
def test_a_step_of_each_platform_gives_the_same_bits_and_a_changed_one_is_named(
    record, again, tmp_path, executables_dir, platform
):
    way, dtype = ROWS[platform]
    own = {} if dtype == "float32" else {"dtype": dtype}
    folder = recorded_on(platform, record("llama", **LAYERS, **own), tmp_path / "steps", executables_dir)
    report = again(folder, 3, way)
    assert (report.status, report.first) == (SAME, None), report.lines
    count = re.match("([0-9]+) arrays compared, ([0-9]+) with all bits equal", report.lines[3])
    assert count is not None and count[1] == count[2], report.lines
    changed(folder, 3, "layers", (1, 2))
    report = again(folder, 3, way)
    assert (report.status, report.first) == (DIFFERS, "layer 1: hidden states after it"), report.lines
    assert f"{int(count[1]) - 1} with all bits equal" in report.lines[3], report.lines
    assert "1 numbers differ, by " in report.lines[4], report.lines
    with pytest.raises(RecordError, match=f"recorded on '{platform}', and this machine has 'cpu'"):
        again(folder, 3)


@INTERPRETED_ROWS
def test_kernels_that_jax_does_not_interpret_are_said(record, again):
    for kernels, platform in (("hopper", "gpu"), ("blackwell", "gpu_blackwell")):
        with pytest.raises(RecordError, match=f"jax does not interpret an operation of {platform}'s kernels"):
            again(record("llama", **LAYERS, dtype="bfloat16"), 3, "interpret", kernels=kernels)


def test_a_changed_bit_of_a_page_is_named(record, again, tmp_path):
    folder = Path(shutil.copytree(record("llama", **LAYERS), tmp_path / "steps"))
    step = find_step(folder, 3)
    written = {*zip(step.arrays["after/pages/layer"], step.arrays["after/pages/page"], strict=True)}
    places = [*zip(step.arrays["pages/layer"], step.arrays["pages/page"], strict=True)]
    entry = next(at for at, place in enumerate(places) if place[0] == 1 and place not in written)
    content = bytearray(step_files(folder)[3].read_bytes())
    content[content.index(step.arrays["pages/data"][entry].tobytes())] ^= 1
    step_files(folder)[3].write_bytes(content)
    report = again(folder, 3)
    page = f"page {places[entry][1]} of layer 1 of replica 0 before the step"
    assert (report.status, report.first) == (DIFFERS, page), report.lines
    write_step(step_files(folder)[3], step.about, step.arrays)
    changed(folder, 3, "pages/data", entry)
    report = again(folder, 3)
    assert (report.status, report.first) == (DIFFERS, "layer 1: hidden states after it"), report.lines
    assert any("numbers differ, by " in line and "recorded " in line for line in report.lines)


def test_a_changed_bit_of_a_result_is_named(record, again, tmp_path):
    folder = Path(shutil.copytree(record("llama", **LAYERS), tmp_path / "steps"))
    whole = find_step(folder, 3)
    for name, entry, first in (
        ("after/pages/data", 0, "layer 0: keys and values (kv_cache_update)"),
        ("layers", (0, 0), "hidden states before layer 0 (embed)"),
        ("layers", (1, 2), "layer 1: hidden states after it"),
        ("logits", 1, "logits"),
        ("sampled/token_ids", 0, "token_ids (sampler)"),
    ):
        changed(folder, 3, name, entry)
        report = again(folder, 3)
        assert (report.status, report.first) == (DIFFERS, first), report.lines
        write_step(step_files(folder)[3], whole.about, whole.arrays)


def test_a_changed_bit_of_a_weight_is_named(record, again, tmp_path):
    model = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    tensors = dict(load_file(model / "model.safetensors"))
    changed_tensor = tensors["model.layers.1.mlp.down_proj.weight"] = tensors[
        "model.layers.1.mlp.down_proj.weight"
    ].copy()
    changed_tensor.reshape(-1).view(np.uint32)[7] ^= 1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    report = again(record("llama", **LAYERS), 3, model=str(model))
    assert report.status == DIFFERS and re.fullmatch(r"weight .*layers\.1\.mlp\.down.*", report.first), report.lines
    assert any(line.startswith("1 weights differ") for line in report.lines)


def test_what_cannot_be_run_is_said(record, again, tmp_path, capsys):
    folder = record("llama", **LAYERS)
    for options, match in (
        ({"model": str(checkpoint("gemma2"))}, "the steps are of LlamaForCausalLM with 2 layers .* give the steps'"),
        ({"step": 999}, "has no step 999; it has "),
        ({"backend": "gpu"}, "backend is 'gpu'; allowed: native, cpu, interpret, xla"),
        ({"backend": "interpret"}, "platform 'cpu' has no Pallas kernels to interpret"),
        ({"backend": "cpu", "kernels": "tpu"}, "--kernels is for --backend interpret"),
    ):
        with pytest.raises(RecordError, match=match):
            again(folder, **options)
    for words, error in (
        ([str(tmp_path), "--step", "1"], "has no engine.json: it was not written by record_steps"),
        ([str(folder), "--step", "first"], "--step is 'first'; allowed: a number, or last"),
        ([str(folder), "--tolerance", "-1"], "--tolerance is -1.0; allowed: 0 or more"),
    ):
        assert main(["replay", *words]) == 2
        assert error in capsys.readouterr().err


def test_arrays_that_do_not_fit_together_are_refused(record, again, tmp_path):
    folder = Path(shutil.copytree(record("llama", **LAYERS), tmp_path / "steps"))
    step = find_step(folder, 3)
    for name, change, said in (
        ("pages/page", lambda array: array[:0], r"pages/page is \[0\], and pages/rank .* equal length"),
        ("rows/rank", lambda array: array + 10**6, "step 3 names a place that is not there"),
        ("state/page_table", lambda array: array[:0], "an array of the step is int32"),
        ("sampled/token_ids", lambda array: array[:0], "sampled/token_ids is .*; here it is"),
    ):
        write_step(step_files(folder)[3], step.about, {**step.arrays, name: change(step.arrays[name])})
        with pytest.raises(RecordError, match=said):
            again(folder, 3)


def test_of_a_step_that_is_too_large_nothing_is_fetched(recorded, monkeypatch):
    folder, llm = recorded("llama", **LAYERS)
    taker = llm.core.engine.runner.last.extensions["recording"]
    fetched: list[str] = []
    rows = taker._rows
    monkeypatch.setattr(taker, "_rows", lambda name, *own: fetched.append(name) or rows(name, *own))

    def run() -> tuple[list[int], int, int, set[str]]:
        """The tokens of a request, how many of its steps were written and how many not, and what was fetched."""
        fetched.clear()
        before = llm.core.engine.extensions.by_name["recording"].status()["recorded_steps"]
        params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
        tokens = llm.generate({"prompt_token_ids": [*PROMPTS[0], 1, 2]}, params, use_tqdm=False)[0].outputs[0].token_ids
        after = llm.core.engine.extensions.by_name["recording"].status()["recorded_steps"]
        return tokens, after["steps"] - before["steps"], after["too_large"] - before["too_large"], {*fetched}

    tokens, num_steps, num_left, names = run()
    assert num_left == 0 and names == {"pages", "long"}
    steps = [find_step(folder, number).arrays for number in [*step_files(folder)][-num_steps:]]
    pages = min(step["pages/data"].nbytes for step in steps)
    before = [
        {name: step[name] for name in step if name.split("/")[0] in ("message", "state", "pages")} for step in steps
    ]
    # Too large by its pages alone, and by what its sampler adds.
    for limit, found in ((pages - 1, set()), (max(map(num_bytes, before)), {"pages"})):
        monkeypatch.setattr(taker, "_max_bytes", limit)
        kept = [*step_files(folder)]
        assert run() == (tokens, 0, num_steps, found)
        assert [*step_files(folder)] == kept


def test_a_full_disk_ends_the_recording_and_nothing_else(recorded, monkeypatch, caplog):
    folder, llm = recorded("llama", **LAYERS)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
    wanted = llm.generate({"prompt_token_ids": [4, 4, 8]}, params, use_tqdm=False)[0].outputs[0].token_ids
    monkeypatch.setattr("jaxengine.records.folder.write_step", full)
    found = llm.generate({"prompt_token_ids": [4, 4, 8]}, params, use_tqdm=False)[0].outputs[0].token_ids
    assert found == wanted
    said = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1 and "NO MORE STEPS ARE RECORDED" in said[0] and "No space left" in said[0]
    monkeypatch.undo()
    kept = [*step_files(folder)]
    llm.generate({"prompt_token_ids": [4, 4, 8]}, params, use_tqdm=False)
    assert [*step_files(folder)] == kept and not [*folder.glob(".*")]
