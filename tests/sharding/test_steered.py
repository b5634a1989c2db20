"""Steering where two devices share a model: zeros change no bit, vectors give what edited modules give.

Run as a module it prints a JSON object for each family, with two forced CPU devices:
python -m tests.sharding.test_steered EXECUTABLES FAMILY...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FAMILIES = ("jais", "qwen3_moe", "deepseek_v3", "falcon_h1")
TOLERANCE = 1e-4  # of a log-probability
COUNT, PROMPT, NEW = 6, 9, 12  # requests, and tokens of each
OPTIONS: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 16}


def edited_scores(model: Any) -> Any:
    """Return a compiled function of tokens i32[T] and vectors by tap: f32[T - 1], the log-probability of each token but
    the first, of the model whose modules add these vectors."""
    import jax
    from flax import nnx

    from jaxengine.models.config.taps import RESIDUAL
    from jaxengine.models.layers.taps import replace_part
    from jaxengine.models.unpaged import run_unpaged
    from tests.jaxengine.engine.test_steering import Added

    graph, state = nnx.split(model)

    @jax.jit
    def compute(state: Any, tokens: jax.Array, vectors: dict[str, jax.Array]) -> jax.Array:
        edited: Any = nnx.merge(graph, state)
        layers = list(edited.layers)
        for name in sorted(vectors):  # parts of layers before the layers themselves
            kind, _, layer = name.partition(":")
            added = partial(Added, vector=vectors[name])
            if kind == RESIDUAL:
                layers[int(layer) - 1] = added(layers[int(layer) - 1])
            else:
                replace_part(layers[int(layer)], kind, added)
        edited.layers = nnx.List(layers)
        logits = run_unpaged(edited, tokens[None])[1][0, :-1]
        return jax.nn.log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]

    return partial(compute, state)


def run(family: str, cache: str) -> dict[str, Any]:
    """`taps`: those that are steered; `error`: of log-probabilities; `moved`: by how much vectors change them; `bits`:
    those that zeros change; `compilations`: since the start."""
    from jaxengine import LLM
    from jaxengine.models.config.taps import RESIDUAL, STEERED, all_taps
    from tests.conftest import TINY_OPTIONS
    from tests.fixtures.drawn_weights import checkpoint
    from tests.jaxengine.engine.test_steering import asked, generate, scores
    from tests.models.conftest import load_recorded

    model = load_recorded(family).model
    known = all_taps(model.config, STEERED)
    taps = [f"{kind}:{layers[-1] if kind == RESIDUAL else layers[0]}" for kind, layers in known.items()]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 90, PROMPT) for _ in range(COUNT)]
    size = model.config.hidden_size
    vectors = [
        {tap: rng.standard_normal(size).astype(np.float32) * bool(at % 3) for tap in taps} for at in range(COUNT)
    ]
    none = {tap: np.zeros(size, np.float32) for tap in taps}
    options: dict[str, Any] = TINY_OPTIONS | OPTIONS | {"model": str(checkpoint(family)), "compile_cache_dir": cache}
    with LLM(**options, steer=taps, tensor_parallel_size=2) as llm:

        def made(factor: float | None) -> list[Any]:
            given = [
                [{"at": tap, "vector": factor * vector} for tap, vector in own.items()] if factor is not None else None
                for own in vectors
            ]
            llm.reset_prefix_cache()  # else prompts are computed in steps of other shapes
            return generate(llm, prompts, [asked(each).clone_with(max_tokens=NEW) for each in given])

        plain, zeros, steered = made(None), made(0.0), made(1.0)
        counts = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    bits = sum(scores(one).tobytes() != scores(two).tobytes() for one, two in zip(plain, zeros, strict=True))
    errors, moved, scored = [], [], edited_scores(model)
    for prompt, own, output in zip(prompts, vectors, steered, strict=True):
        tokens = np.array([*prompt, *output.outputs[0].token_ids], np.int32)
        wanted, before = (np.asarray(scored(tokens, each))[PROMPT - 1 :] for each in (own, none))
        errors.append(np.abs(scores(output) - wanted).max())
        if any(each.any() for each in own.values()):
            moved.append(np.abs(wanted - before).max())
    return {
        "family": family,
        "taps": taps,
        "error": float(max(errors)),
        "moved": float(min(moved)),
        "bits": bits,
        "compilations": counts["jaxengine:compilations_since_ready"],
    }


@pytest.mark.thorough("an engine of each family")
def test_two_devices_add_the_vectors_that_one_adds(executables_dir):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.sharding.test_steered", executables_dir, *FAMILIES]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["family"] for row in rows] == [*FAMILIES]
    for row in rows:
        assert row["error"] <= TOLERANCE < 0.01 < row["moved"], row
        assert not row["bits"] and not row["compilations"], row


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(json.dumps(run(name, sys.argv[1])), flush=True)
