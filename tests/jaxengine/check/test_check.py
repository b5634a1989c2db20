"""The whole tool on this machine's own CPU, with a tiny model, and the faults it must report."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxengine.check import children, compile
from jaxengine.check.roofline import Work, step_work, visible_keys
from jaxengine.check.shapes import SHAPES, model_config
from jaxengine.cli import main
from models.declare import declared_params
from models.registry import build_model
from scheduler.buckets import Bucket

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
OPTIONS = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 100}
DECODE = Bucket(1, 1)
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed: make check-deps")


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture
def compiler(model, tmp_path):
    """make(target, **options) of a Compiler in this process, its replies left aside."""

    def make(target: str = "cpu", **options):
        (tmp_path / "log").touch()
        (tmp_path / "dumps").mkdir()
        request = compile.Request(
            target=target,
            model=model,
            options=OPTIONS | options,
            platform=None,
            short=True,
            skip=[],
            log=str(tmp_path / "log"),
            dumps=str(tmp_path / "dumps"),
            bundle=None,
        )
        return compile.Compiler(request, lambda message: None)

    return make


def row_of(compiler, program, planned=1 << 40):
    with jax.set_mesh(compiler.mesh):
        return compiler._row(program, planned)


def test_a_check_of_this_machine(model, tmp_path, capsys, monkeypatch):
    """Everything compiles and nothing is copied."""
    base, bundle = str(tmp_path / "base.json"), tmp_path / "bundle"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    common = ["check", "--model", model, "--buckets", "short", *flags]
    assert main([*common, "--save", base, "--bundle", str(bundle)]) == 0
    shown = capsys.readouterr()
    assert "mixed T=16 S=1" in shown.out and "FAIL" not in shown.out
    assert "cpu  1/" in shown.err
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert all(
        (bundle / entry["file"]).stat().st_size == entry["serialized_bytes"] for entry in manifest["executables"]
    )
    rows = json.loads(Path(base).read_text())["rows"]
    assert {row["program"] for row in rows if row["step"]} == {"decode S=1", "mixed T=16 S=1"}
    assert len(manifest["executables"]) == len(rows)

    # The same command against that baseline, a figure of it having got worse; nothing needs to be compiled again.
    monkeypatch.setattr(children, "check_target", lambda target, job, progress: rows)
    assert main([*common, "--against", base]) == 0
    rows[0]["serialized_bytes"] *= 2
    assert main([*common, "--against", base]) == 1
    assert f"FAIL cpu, {rows[0]['program']}: serialized_bytes was" in capsys.readouterr().out
    assert main([*common, "--against", base, "--max-logprobs=3"]) == 2


def test_a_planted_copy_of_the_pool_is_reported(compiler):
    made = compiler()
    step = made.programs.step(DECODE, 100)
    row = row_of(made, step)
    assert row["failures"] == []
    found = row_of(made, dataclasses.replace(step, donate=()), row["peak_bytes"])["failures"]
    assert any(text.startswith("copies pool: copy") for text in found)
    assert any("above" in text for text in found)


def test_a_program_that_does_not_compile_is_a_row(compiler):
    made = compiler()
    step = made.programs.step(DECODE, 100)
    row = row_of(made, dataclasses.replace(step, function=lambda *arguments: jnp.zeros(-1)))
    assert "does not compile" in row["failures"][0] and "copies" not in row


def test_what_the_engine_would_refuse_is_a_row(model, capsys):
    assert main(["check", "--model", model, "--max-model-len=1000"]) == 1
    assert "FAIL cpu, memory plan: max_model_len is 1000" in capsys.readouterr().out


@needs_libtpu
def test_a_planted_overflow_of_vmem_is_reported(compiler, monkeypatch):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def too_large(x):
        def body(x_ref, o_ref, scratch):
            scratch[...] = jnp.zeros_like(scratch)
            o_ref[...] = x_ref[...] + scratch[:8]

        scratch = [pltpu.VMEM((1 << 20, 128), jnp.float32)]
        return pl.pallas_call(body, out_shape=x, scratch_shapes=scratch)(x)

    made = compiler("v6e")
    kernel = next(iter(made.programs.kernels(DECODE, 100)))
    x = made.programs._replicate(jax.ShapeDtypeStruct((8, 128), jnp.float32))
    row = row_of(made, dataclasses.replace(kernel, function=too_large, arguments=(x,)))
    assert "does not compile" in row["failures"][0] and "vmem" in row["failures"][0].lower()


FAKE = """
import json, sys, os
request = json.load(sys.stdin)
reply = lambda **message: print(json.dumps(message), flush=True)
reply(event="plan", num_pages=1, planned_bytes=1)
todo = [name for name in ("a", "b", "c") if name not in request["skip"]]
reply(event="programs", names=todo)
for name in todo:
    reply(event="start", name=name)
    if name == "b":
        print("F0001 Check failed", file=sys.stderr, flush=True)
        os._exit(134)
    reply(event="row", row={"target": "cpu", "program": name, "step": True, "failures": []})
"""


def test_a_compiler_that_dies_costs_one_program(tmp_path, monkeypatch):
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(children, "_PROGRAM", (str(tmp_path / "fake.py"),))
    job = children.Job("m", {}, None, True, None, False)
    rows = children.check_target(children.Target("cpu", "cpu", "", 0, 0.0, 0.0, 0), job, lambda *told: None)
    assert [(row["program"], bool(row["failures"])) for row in rows] == [("a", False), ("b", True), ("c", False)]
    assert "status 134" in rows[1]["failures"][0] and "Check failed" in rows[1]["failures"][0]


def test_visible_keys_by_hand():
    assert visible_keys(Bucket(4, 4), 100, None) == (400, 400)
    assert visible_keys(Bucket(4, 4), 100, 30) == (120, 120)
    assert visible_keys(Bucket(4, 3), 100, None) == (4, 1 + 2 + 3 + 4)
    assert visible_keys(Bucket(5, 3), 100, 2) == (5, 1 + 2 + 2 + 2 + 2)


def test_the_work_of_a_step_by_hand(model):
    config = model_config(model)
    work = step_work(build_model(config, dtype="bfloat16"), Bucket(2, 2), "bfloat16", "bfloat16", 10)
    linear = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    embedding, norms = 160 * 64, 3 * 64
    attention = 2 * 2 * 4 * 16 + 2 * 20 * 2 * 16
    update = 2 * 2 * 2 * 2 * 16
    assert work.num_bytes == 2 * (linear + embedding + norms + 2 * 64 + attention + update)
    assert work.flops == 2 * 2 * (linear + embedding) + 4 * 20 * 4 * 16
    assert Work(100, 10).seconds(10.0, 10.0) == 10.0


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("llama-3.2-1b", 1.236),
        ("llama-3.1-8b", 8.030),
        ("llama-3.3-70b", 70.554),
        ("mistral-7b-v0.3", 7.248),
        ("qwen2.5-7b", 7.616),
        ("qwen3-8b", 8.191),
        ("qwen3-32b", 32.762),
    ],
)
def test_built_in_shapes_have_the_published_number_of_parameters(name, billions):
    model = build_model(SHAPES[name], dtype="bfloat16")
    count = sum(param.num_bytes // 2 for param in declared_params(model))
    assert count / 1e9 == pytest.approx(billions, rel=1e-3)
