"""Exchanges between devices, counted in compiled steps: what one more layer adds, and what there is around the layers.

Eight devices forced on the CPU and, where libtpu is installed, a v5e:2x4 that is not there. Run as a module it compiles
and prints a line of JSON for each case:

    python -m tests.sharding.test_collectives {cpu,tpu} CASE ...
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jaxengine.check.compiled.exchanges import by_place, counts, exchanges, wrong

ROOT = Path(__file__).parents[2]
DENSE, EXPERTS, HEAD_NORMS = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "Olmo2ForCausalLM"
TENSOR, DATA, EXPERT = "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel"
RAGGED = {"all2all_backend": "ragged_all_to_all"}
TWO_SUMS = {"all-reduce": 2}
# Name -> architecture, engine options, what a layer exchanges. The model has two kv heads.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "tp 2": (DENSE, {TENSOR: 2}, TWO_SUMS),
    "tp 4": (DENSE, {TENSOR: 4}, TWO_SUMS | {"all-gather": 1, "reduce-scatter": 1}),
    "tp 4, replicated": (DENSE, {TENSOR: 4, "replicate_kv_heads": True}, TWO_SUMS),
    "norms over heads, tp 4, replicated": (HEAD_NORMS, {TENSOR: 4, "replicate_kv_heads": True}, {"all-reduce": 4}),
    "dp 2": (DENSE, {DATA: 2}, {}),
    "tp 2, dp 2": (DENSE, {TENSOR: 2, DATA: 2}, TWO_SUMS),
    "experts, tp 2, dp 2": (EXPERTS, {TENSOR: 2, DATA: 2}, TWO_SUMS),
    "experts, tp 2, dp 2, ep": (
        EXPERTS,
        {TENSOR: 2, DATA: 2, EXPERT: True},
        TWO_SUMS | {"all-gather": 3, "reduce-scatter": 1},
    ),
    "experts, tp 2, dp 2, ep, ragged": (
        EXPERTS,
        {TENSOR: 2, DATA: 2, EXPERT: True} | RAGGED,
        {"all-reduce": 1, "all-gather": 2, "ragged-all-to-all": 2},
    ),
    "experts, dp 4, ep, ragged": (EXPERTS, {DATA: 4, EXPERT: True} | RAGGED, {"all-gather": 1, "ragged-all-to-all": 2}),
}
# What others show together.
THOROUGH = (
    *("tp 2", "tp 4, replicated", "dp 2", "tp 2, dp 2", "experts, tp 2, dp 2", "experts, dp 4, ep, ragged"),
    *("norms over heads, tp 4, replicated", "experts, tp 2, dp 2, ep, ragged"),
)
# Compiled with its heads too, which take most of the time; the others as a first pipeline stage.
WHOLE = "tp 4"
SEEDED_FAULT = "weights gathered"
# The most exchanges around the layers.
AROUND = {"embed": 3, "logits": 2, "sample": 24, "prompt_logprobs": 9, "results": 11}


def compile_cases(backend: str, *names: str) -> None:
    """Prints what steps exchange: of a stage of one layer, of one of two layers, and of a whole model of one."""
    import jax

    from jaxengine.check.compiled.hlo import parse
    from jaxengine.check.devices import target_devices
    from jaxengine.check.model.programs import open_stages
    from jaxengine.check.model.shapes import SHAPES
    from jaxengine.check.targets import find_target
    from jaxengine.config.base.platforms import PLATFORMS
    from jaxengine.config.engine_config import EngineConfig
    from jaxengine.models.config.experts import ExpertsConfig
    from jaxengine.models.quantization.base import plain as layers
    from jaxengine.runner.executables.cache import compile_program
    from tests.models.tiny import with_attention

    devices = target_devices(find_target("cpu-8" if backend == "cpu" else "v5e-8"))
    shape = dataclasses.replace(SHAPES["llama-3.1-8b"], hidden_size=512, intermediate_size=256, vocab_size=4096)

    def step(name: str, *sizes: int) -> dict[str, Any]:
        """Of the first of the stages that have these numbers of layers."""
        architecture, options, _ = CASES[name]
        experts = ExpertsConfig(4, 2, 64) if architecture == EXPERTS else None
        model = with_attention(
            dataclasses.replace(shape, architecture=architecture, experts=experts),
            num_layers=sum(sizes),
            num_heads=8,
            num_kv_heads=2,
        )
        stages = {"pipeline_parallel_size": len(sizes), "pipeline_layers": sizes}
        config = EngineConfig(max_model_len=256, max_num_seqs=16, max_num_batched_tokens=64, **stages, **options)
        stage = open_stages(model, config, PLATFORMS[backend], devices)[0]
        bucket = stage.buckets(short=True)[1]
        programs = [stage.forward(bucket, stage.num_columns)]
        programs += [stage.epilogue(*each, stage.num_columns) for each in stage.epilogues(short=True)[-2:]]
        found, faults = [], []
        for program in programs:
            with jax.set_mesh(program.mesh):
                traced = jax.jit(program.function, donate_argnums=program.donate).trace(*program.arguments)
                compiled = compile_program(traced.lower(lowering_platforms=(backend,)), backend)
            text = compiled.as_text()
            assert text is not None and program.expected is not None
            found += (own := exchanges(parse(text)))
            faults += wrong(own, program.expected)
        return {"places": by_place(found), "compiled": counts(found), "wrong": faults}

    for name in names:
        row = {"case": name, "one": step(name, 1, 1), "two": step(name, 2, 1)}
        print(json.dumps(row | ({"whole": step(name, 1)} if name == WHOLE else {})), flush=True)

    def matmul_of_gathered(x: jax.Array, weight: jax.Array, *, contract: int = 0) -> jax.Array:
        own = jax.lax.all_gather(weight, "model")[jax.lax.axis_index("model")]
        return matmul(x, own, contract=contract)

    matmul, layers.matmul = layers.matmul, matmul_of_gathered
    jax.clear_caches()  # layers are traced once
    print(json.dumps({"case": SEEDED_FAULT, **step("tp 2", 1, 1)}))


def total(step: dict[str, Any]) -> Counter[str]:
    return sum(map(Counter, step["places"].values()), Counter())


@pytest.mark.parametrize(
    "backend",
    ["cpu", pytest.param("tpu", marks=pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not here"))],
)
def test_a_layer_exchanges_what_it_should_and_nothing_else_does(backend, report, thorough):
    names = [name for name in CASES if thorough or name not in THOROUGH]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    if backend == "cpu":  # whose machine code is not run: the quickest to make will do
        flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    command = [sys.executable, "-m", "tests.sharding.test_collectives", backend, *names]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    seeded = rows.pop()
    assert seeded["case"] == SEEDED_FAULT
    assert any("more than" in text and "gate_up/all_gather" in text for text in seeded["wrong"])
    assert any("layer 0 has" in text for text in seeded["wrong"])
    assert [row["case"] for row in rows] == names
    for row in rows:
        name, one, two = row["case"], row["one"], row["two"]
        whole = row.get("whole", one)
        assert one["wrong"] == two["wrong"] == whole["wrong"] == [], name
        added = total(two)
        added.subtract(total(one))
        assert {kind: count for kind, count in added.items() if count} == CASES[name][2], name
        if "ragged" in name:  # which XLA:CPU does not have
            ragged = [step["compiled"].get("ragged-all-to-all", 0) for step in (one, two)]
            assert ragged == ([2, 4] if backend == "tpu" else [0, 0]), (name, ragged)
        around = {place: kinds for place, kinds in whole["places"].items() if place != "layer 0"}
        number = {place: sum(kinds.values()) for place, kinds in around.items()}
        assert all(count <= AROUND[place] for place, count in number.items()), (name, around)
        report(f"{backend}, {name}: a layer exchanges {CASES[name][2] or 'nothing'}; around them {number}")


if __name__ == "__main__":
    compile_cases(*sys.argv[1:])
