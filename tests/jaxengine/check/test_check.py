"""The whole tool on this machine's own CPU, with a tiny model, and the faults it must report."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxengine.check import children, compile, report
from jaxengine.check.model.roofline import Work, product_work, step_work, visible_keys
from jaxengine.check.model.shapes import SHAPES, model_config
from jaxengine.check.targets import TARGETS
from jaxengine.commands.cli import main
from jaxengine.config.engine_config import ConfigError
from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.params.declare import declared_params
from jaxengine.models.registry import build_model
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.layout import MeshLayout
from tests.fast_compile import fast_compile, fast_compile_environment
from tests.models.tiny import with_attention
from tests.tables import each_row

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
LARGE = 1 << 40  # bytes
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
    folder = model

    def make(target: str = "cpu", *, model: str = folder, **options):
        (tmp_path / "log").touch()
        (tmp_path / "dumps").mkdir(exist_ok=True)
        request = compile.CompileRequest(
            target=target,
            model=model,
            options=OPTIONS | options,
            kernels=None,
            short=True,
            skip=[],
            log=str(tmp_path / "log"),
            dumps=str(tmp_path / "dumps"),
        )
        return compile.Compiler(request, lambda message: None)

    return make


def test_a_step_takes_the_token_table_as_it_is_stored(compiler):
    """Row by row; the other weights as the compiler likes them."""
    compiler = compiler()
    (stage,) = compiler.stages
    arguments = stage.forward(DECODE, 100).arguments[0]
    orders = [leaf.format.layout and leaf.format.layout.major_to_minor for leaf in arguments]
    names = [param.name for param in declared_params(stage.model)]
    assert dict(zip(names, orders, strict=True)) == {
        name: (0, 1) if name == "embed.weight.values" else None for name in names
    }


@pytest.mark.thorough("tests/sharding/exchange_order.py traces them")
def test_steps_with_drafts_and_adapters(compiler):
    """They are compiled like others; what adapters add to a product is among what a step has to do."""
    options = {"max_num_seqs": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    made, plain = compiler(**options, enable_lora=True, max_loras=2, max_lora_rank=8), compiler().stages[0]
    row = made.row((stage := made.stages[0]).forward(Bucket(4, 1, 4), 100), 0)
    assert "error" not in row and not row["failures"]
    # Inputs and outputs of q, k and v, of o, of gate and up, of down, for each rank of each slot.
    pools = 2 * 8 * (3 * 64 + 64 + 32 + 32 + 64 + 64 + 2 * 64 + 2 * 96 + 96 + 64)
    own, others = (product_work(each.model, DECODE, "float32") for each in (stage, plain))
    assert own.flops - others.flops == 2 * pools and stage.weight_bytes - plain.weight_bytes == 4 * pools


def test_a_check_of_this_machine(model, tmp_path, capsys, monkeypatch):
    """Everything compiles and nothing is copied."""
    # Of machine code, which nothing here looks at.
    fast = fast_compile_environment()["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", f"{fast} --xla_backend_optimization_level=0")
    base = str(tmp_path / "base.json")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    common = ["check", "--model", model, "--buckets", "short", *flags]
    assert main([*common, "--save", base]) == 0
    shown = capsys.readouterr()
    assert "mixed T=16 S=1" in shown.out and "FAIL" not in shown.out
    assert "cpu  1/" in shown.err
    rows = json.loads(Path(base).read_text())["rows"]
    assert {row["program"] for row in rows if row["step"]} == {"decode S=1", "mixed T=16 S=1", "sample 1", "score 16"}

    # The same command against that baseline, a figure of it having got worse; nothing needs to be compiled again.
    monkeypatch.setattr(children, "check_target", lambda target, job, progress: rows)
    assert main([*common, "--against", base]) == 0
    worse = next(row for row in rows if row["operations"])
    worse["operations"]["f32"] *= 2
    assert main([*common, "--against", base]) == 1
    assert f"FAIL cpu, {worse['program']}: operations in f32 was" in capsys.readouterr().out
    assert main([*common, "--against", base, "--max-logprobs=3"]) == 2


@pytest.mark.thorough("a test above checks steps, and `make check-cpu` those of two devices")
def test_a_check_of_stages_on_meshes(model, tmp_path, capsys, monkeypatch):
    """Every stage is compiled for its own two devices, and what these exchange is accounted for."""
    config = json.loads(Path(model, "config.json").read_text()) | {"num_hidden_layers": 2, "vocab_size": 12000}
    Path(model, "config.json").write_text(json.dumps(config | {"hidden_size": 256, "tie_word_embeddings": False}))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    options = OPTIONS | {"max_num_batched_tokens": 1, "pipeline_parallel_size": 2, "max_model_len": 128}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    found = tmp_path / "found.json"
    assert main(["check", "--targets=cpu-4", "--model", model, *flags, "--json", str(found)]) == 0
    rows = json.loads(found.read_text())["rows"]
    kernels, (first, last, sample, score) = rows[:-4], rows[-4:]
    assert {row["program"].partition(",")[0] for row in kernels} == {"attention", "kv write"}
    assert (first["program"], last["program"]) == ("stage 0, decode S=1", "stage 1, decode S=1")
    assert (sample["program"], score["program"]) == ("stage 1, sample 1", "stage 1, score 1")
    for row in (first, last):
        assert row["exchanges"]["layer 0"] == {"all-reduce": 2}
        assert row["peak_bytes"] <= row["planned_bytes"] * 1.02
    assert "embed" in first["exchanges"] and "embed" not in last["exchanges"]
    assert "sample" in sample["exchanges"] and "prompt_logprobs" in score["exchanges"]
    assert main(["check", "--targets=cpu-4", "--model", model, *flags, "--tensor-parallel-size=4"]) == 2
    assert "tensor_parallel_size is 4; allowed: parallel sizes whose product" in capsys.readouterr().err


def test_seeded_copy_of_the_pool_is_reported(compiler):
    made = compiler()
    step = made.stages[0].forward(DECODE, 100)
    row = made.row(step, LARGE)
    assert row["failures"] == []
    found = made.row(dataclasses.replace(step, donate=()), row["peak_bytes"])["failures"]
    assert any(text.startswith("copies pool: copy") for text in found)
    assert any("above" in text for text in found)


def test_a_program_that_does_not_compile_is_a_row(compiler):
    made = compiler()
    step = made.stages[0].forward(DECODE, 100)
    row = made.row(dataclasses.replace(step, function=lambda *arguments: jnp.zeros(-1)), LARGE)
    assert "does not compile" in row["failures"][0] and "copies" not in row


@pytest.mark.thorough("a whole check is above, and names are compared there")
def test_one_program_alone(model, tmp_path):
    """Its name says which; of a pool of given pages there is nothing to plan."""
    found = tmp_path / "found.json"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    assert main(["check", "--model", model, *flags, "--only=kv write, mixed", "--json", str(found)]) == 0
    (row,) = json.loads(found.read_text())["rows"]
    assert row["program"] == "kv write, mixed T=16 S=1" and row["planned_bytes"] == 0


def test_the_first_layers_of_a_shape():
    assert model_config("llama-3.1-8b:2").attention == SHAPES["llama-3.1-8b"].attention[:2]
    assert model_config("llama-3.1-8b:2", whole=True) == SHAPES["llama-3.1-8b"]
    for name in ("llama-3.1-8b:0", "llama-3.1-8b:33", "llama-3.1-8b:x", "nothing:2"):
        with pytest.raises(ConfigError, match="there is no model at"):
            model_config(name)


def test_memory_is_planned_for_all_layers(compiler, monkeypatch):
    """Of a shape of three layers one is compiled; weights and pages are those of all."""
    shape = with_attention(SHAPES["smollm2-135m"], num_layers=3)
    monkeypatch.setitem(SHAPES, "small", dataclasses.replace(shape, hidden_size=64, intermediate_size=96))
    made, (three,) = compiler(model="small:1", max_model_len=1024), compiler(model="small:3", max_model_len=1024).stages
    (one,) = made.stages
    with fast_compile():
        plan = made._plan(made.stages[0], made.whole[0])
    assert made.stages[0].weight_bytes == one.weight_bytes < plan.of_all.weights == three.weight_bytes
    assert plan.of_all.kv_bytes == 100 * three.page_bytes == 3 * 100 * one.page_bytes
    assert plan.of_all.programs > plan.held
    told = made._plan_row(plan.of_all, made.whole[0])
    assert told["layers"] == 3 and told["num_requests"] == round(100 / plan.of_all.pages_per_seq, 1)
    said = report.summary([{"target": "cpu", "failures": [], "step": True, "plan": told}], {"cpu": 1.0})
    assert "3 layers in" in said and "without the machine code" in said
    assert "without the machine code" not in report.summary([], {"v6e": 1.0})


def test_what_the_engine_would_refuse_is_a_row(model, capsys):
    assert main(["check", "--model", model, "--max-model-len=1000"]) == 1
    assert "FAIL cpu, memory plan: max_model_len is 1000" in capsys.readouterr().out


@needs_libtpu
def test_seeded_overflow_of_vmem_is_reported(compiler, monkeypatch):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def too_large(x):
        def body(x_ref, o_ref, scratch):
            scratch[...] = jnp.zeros_like(scratch)
            o_ref[...] = x_ref[...] + scratch[:8]

        scratch = [pltpu.VMEM((1 << 20, 128), jnp.float32)]
        return pl.pallas_call(body, out_shape=x, scratch_shapes=scratch)(x)

    made = compiler("v6e")
    kernel = next(iter(made.stages[0].kernels(DECODE, 100)))
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=kernel.arguments[0].sharding)
    row = made.row(dataclasses.replace(kernel, function=too_large, arguments=(x,)), LARGE)
    assert "does not compile" in row["failures"][0] and "vmem" in row["failures"][0].lower()


FAKE = """
import json, sys, os
request = json.load(sys.stdin)
reply = lambda **message: print(json.dumps(message), flush=True)
reply(event="plan", num_pages=1, planned_bytes=1, planned_held=1)
todo = [name for name in ("a", "b", "c") if name not in request["skip"]]
reply(event="programs", names=todo)
for name in todo:
    reply(event="start", name=name)
    if name == "b":
        print("F0001 Check failed", file=sys.stderr, flush=True)
        os._exit(134)
    reply(event="row", row={"target": "cpu", "program": name, "step": True, "failures": []})
"""


@pytest.mark.parametrize(
    ("name", "runs"), [("v6e", [False, True]), *((name, [False]) for name in ("v5e", "v5p", "tpu7x", "cpu"))]
)
def test_blocks_are_profiled_where_that_can_be(monkeypatch, name, runs):
    done = []

    def run(target, job, progress, known=None, profile=False):
        done.append(profile)
        return [], {"num_pages": 1}

    monkeypatch.setattr(children, "_run", run)
    job = children.Job("llama-3.1-8b:2", {}, None, True, True)
    children.check_target(TARGETS[name], job, lambda *told: None)
    assert done == runs


def run_instead(monkeypatch, folder, module):
    """Compiling processes run a module of a folder."""
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(children, "replies", partial(children.replies, module=module))


def test_a_compiler_that_dies_costs_one_program(tmp_path, monkeypatch):
    (tmp_path / "fake.py").write_text(FAKE)
    run_instead(monkeypatch, tmp_path, "fake")
    job = children.Job("m", {}, None, True, False)
    rows = children.check_target(children.Target("cpu", "cpu", "", 0, 0.0, 0.0, 0), job, lambda *told: None)
    assert [(row["program"], bool(row["failures"])) for row in rows] == [("a", False), ("b", True), ("c", False)]
    assert "status 134" in rows[1]["failures"][0] and "Check failed" in rows[1]["failures"][0]


SMALL = """
import json, sys
request = json.load(sys.stdin)
reply = lambda **message: print(json.dumps(message), flush=True)
if request["options"]["tensor_parallel_size"] < request["options"]["max_num_seqs"]:
    reply(event="refused", reason="weights take 2 MiB of a device's 1 MiB", too_small=True)
else:
    reply(event="plan", num_pages=1, planned_bytes=[1], planned_held=[1])
    reply(event="programs", names=["a"])
    row = {"program": "a", "step": True, "failures": []}
    reply(event="row", row=row | {"target": request["target"]})
"""


@pytest.mark.parametrize(
    ("needed", "wrong", "told"),
    [
        (2, 0, ["cpu-2 instead of cpu, where weights take 2 MiB", "cpu-2: 1 programs, 0 failed"]),
        (16, 1, ["cpu-8 instead of cpu-4, where weights", "FAIL cpu-8, memory plan: weights take"]),
    ],
)
def test_a_model_takes_as_many_devices_as_it_needs(needed, wrong, told, model, tmp_path, monkeypatch, capsys):
    (tmp_path / "small.py").write_text(SMALL)
    run_instead(monkeypatch, tmp_path, "small")
    assert main(["check", "--model", model, f"--max-num-seqs={needed}"]) == wrong
    shown = capsys.readouterr().out
    assert all(text in shown for text in told)


def test_visible_keys_by_hand():
    assert visible_keys(Bucket(4, 4), 100, None) == (400, 400)
    assert visible_keys(Bucket(4, 4), 100, 30) == (120, 120)
    assert visible_keys(Bucket(8, 4, 2), 100, None) == (400, 800)
    assert visible_keys(Bucket(8, 4, 2), 100, 30) == (124, 240)
    assert visible_keys(Bucket(4, 3), 100, None) == (4, 1 + 2 + 3 + 4)
    assert visible_keys(Bucket(5, 3), 100, 2) == (5, 1 + 2 + 2 + 2 + 2)


def test_the_work_of_a_step_by_hand(model):
    config = model_config(model)
    work = step_work(build_model(config, Build("bfloat16")), Bucket(2, 2), "bfloat16", "bfloat16", 10)
    linear = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    embedding, norms = 160 * 64, 3 * 64
    attention = 2 * 2 * 4 * 16 + 2 * 20 * 2 * 16
    update = 2 * 2 * 2 * 2 * 16
    assert work.num_bytes == 2 * (linear + embedding + norms + 2 * 64 + attention + update)
    assert work.flops == 2 * 2 * (linear + embedding) + 4 * 20 * 4 * 16
    assert Work(100, 10).seconds(10.0, 10.0) == 10.0


def test_a_device_does_its_share_of_a_step():
    """On four devices, two ranks with a bucket of tokens each: half of one rank's products, but for the router's."""
    experts = ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=32)
    config = with_attention(SHAPES["qwen3-0.6b"], num_layers=1)
    config = dataclasses.replace(config, architecture="Qwen3MoeForCausalLM", vocab_size=1024, experts=experts)
    mesh = MeshLayout(data=2, model=2, expert_parallel=True)
    bucket, arguments = Bucket(3, 3), ("bfloat16", "bfloat16", 10)
    alone = step_work(build_model(config, Build("bfloat16")), bucket, *arguments)
    share = step_work(build_model(config, Build("bfloat16", mesh)), bucket, *arguments)
    assert 2 * share.flops == alone.flops + 2 * 3 * 1024 * 8
    # Three tokens go to at most six experts, those of two ranks to all of a device's two.
    assert alone.num_bytes // 2 - share.num_bytes < 2 * 3 * 1024 * 32
    assert share.num_bytes > 2 * 2 * 3 * 1024 * 32


BILLIONS = {
    "smollm2-135m": 0.1345,
    "llama-3.2-1b": 1.236,
    "mistral-7b-v0.3": 7.248,
    "qwen2.5-7b": 7.616,
    "qwen3-8b": 8.191,
    "qwen3-moe-30b-a3b": 30.532,
    "mixtral-8x7b": 46.703,
    "phi-3-mini": 3.821,
    "gemma-2-2b": 2.614,
    "gemma-3-4b": 3.880,
    "gpt-oss-120b": 116.83,
    "qwen3-next-80b-a3b": 79.67,
    "granite-4.0-h-tiny": 6.939,
    "deepseek-v3": 671.03,
    "deepseek-v3.2": 671.88,
}
# Of families above.
MORE_BILLIONS = {
    "llama-3.1-8b": 8.030,
    "llama-3.3-70b": 70.554,
    "mistral-7b-v0.1": 7.242,
    "qwen3-32b": 32.762,
    "gemma-2-9b": 9.242,
    "gemma-3-27b": 27.009,
    "kimi-k2": 1026.4,
}


def assert_billions(name: str, billions: float) -> None:
    model = build_model(SHAPES[name], Build("bfloat16"))
    count = sum(math.prod(param.shape) for param in declared_params(model))
    assert count / 1e9 == pytest.approx(billions, rel=1e-3)


@each_row(("name", "billions"), BILLIONS.items())
def test_built_in_shapes_have_the_published_number_of_parameters(name, billions):
    assert_billions(name, billions)


@pytest.mark.thorough("further sizes of the same families")
@each_row(("name", "billions"), MORE_BILLIONS.items())
def test_further_shapes_have_the_published_number_of_parameters(name, billions):
    assert_billions(name, billions)
