"""Exchanges between devices that nothing puts in an order, found in what programs are traced to.

XLA:CPU starts whatever has its operands. It keeps exchanges of one computation in their order, but not one inside of a
conditional or loop and one beside it: two devices may then begin with different ones, and as shard_map gives all the
same channel, each takes the other's data or waits for ever. So one of such two has to need what the other brings.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

EXCHANGES = {"all_gather", "all_to_all", "pmax", "pmin", "ppermute", "psum", "psum_invariant", "reduce_scatter"}
CONTROL_FLOW = {"cond", "scan", "while"}
CALLS = {"closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "shard_map"}
TENSOR, DATA, EXPERT = "tensor_parallel_size", "data_parallel_size", "enable_expert_parallel"
DRAFTS = {"num_speculative_tokens": 3}
# Shapes and options whose programs are traced, on eight devices at most.
CASES: list[tuple[str, dict[str, Any]]] = [
    (
        "llama-3.1-8b:2",
        {TENSOR: 2, DATA: 2, "pipeline_parallel_size": 2, "logprobs_mode": "processed_logprobs", "enable_lora": True}
        | {"speculative_config": {"method": "ngram"} | DRAFTS, "return_sampling_mask": True},
    ),
    ("deepseek-v3:1", {TENSOR: 2, DATA: 2, EXPERT: True, "speculative_config": {"method": "mtp"} | DRAFTS}),
    ("qwen3-moe-30b-a3b:1", {TENSOR: 8, EXPERT: True, "all2all_backend": "ragged_all_to_all"}),
    ("qwen3-next-80b-a3b:4", {TENSOR: 2, DATA: 2, EXPERT: True}),
]
SHORT = CASES[:3]


class Exchange(NamedTuple):
    """One exchange, or a conditional or loop that has some.

    Attributes:
      is_nested: it is such a conditional or loop.
      needs: numbers of those before it whose results it needs.
    """

    name: str
    is_nested: bool
    needs: frozenset[int]


def unordered(jaxpr: Jaxpr) -> list[str]:
    """Pairs of exchanges of a program, one of them inside of control flow, of which neither needs the other."""
    found: list[str] = []
    _walk(jaxpr, [frozenset()] * len(jaxpr.invars), [], found)
    return found


def _walk(
    jaxpr: Jaxpr, inputs: Sequence[frozenset[int]], before: list[Exchange], found: list[str]
) -> list[frozenset[int]]:
    """Adds to `before` the exchanges of a computation, to `found` what is wrong; what its results need.

    inputs: what its arguments need.
    """
    needs: dict[Any, frozenset[int]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variable: Any) -> frozenset[int]:
        return frozenset() if isinstance(variable, Literal) else needs.get(variable, frozenset())

    for equation in jaxpr.eqns:
        name, own = equation.primitive.name, [of(variable) for variable in equation.invars]
        inner = [part for value in equation.params.values() for part in _parts(value)]
        if name == "optimization_barrier":  # which XLA:CPU takes away
            needs.update(zip(equation.outvars, own, strict=True))
            continue
        if name in CALLS:
            needs.update(zip(equation.outvars, _walk(inner[0], own, before, found), strict=True))
            continue
        every = frozenset().union(*own)
        has_some = [_has_exchanges(part, found) for part in inner]
        assert name in CONTROL_FLOW or not any(has_some), name
        if name in EXCHANGES or any(has_some):
            exchange = Exchange(f"{name} of {equation.source_info.name_stack}", any(has_some), every)
            found += [
                f"{other.name} and {exchange.name}"
                for number, other in enumerate(before)
                if number not in every and (other.is_nested or exchange.is_nested)
            ]
            every |= {len(before)}
            before.append(exchange)
        needs.update((variable, every) for variable in equation.outvars)
    return [of(variable) for variable in jaxpr.outvars]


def _has_exchanges(jaxpr: Jaxpr, found: list[str]) -> bool:
    own: list[Exchange] = []
    _walk(jaxpr, [frozenset()] * len(jaxpr.invars), own, found)
    return bool(own)


def _parts(value: Any) -> list[Jaxpr]:
    """The computations in a parameter of an equation."""
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, Jaxpr):
        return [value]
    return [part for each in value for part in _parts(each)] if isinstance(value, tuple | list) else []


def main(cases: list[tuple[str, dict[str, Any]]]) -> None:
    """Prints what is unordered in the programs of every case, a line of JSON for each."""
    from jaxengine.check.model.drafts import drafts
    from jaxengine.check.model.programs import open_stages
    from jaxengine.check.model.shapes import model_config
    from jaxengine.config.base.platforms import PLATFORMS
    from jaxengine.config.engine_config import EngineConfig

    sizes = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    for name, options in cases:
        config = EngineConfig(**sizes, **options)
        model = replace(model_config(name), num_nextn_predict_layers=1)  # which `mtp` alone asks for
        for stage in open_stages(model, config, PLATFORMS["cpu"], jax.devices()):
            programs = [stage.forward(bucket, 64) for bucket in stage.buckets(short=True)]
            programs += [stage.epilogue(*each, 64) for each in stage.epilogues(short=True)]
            programs += drafts(stage, 64, short=True)
            found = {}
            for program in programs:
                with jax.set_mesh(program.mesh):
                    jaxpr = jax.make_jaxpr(program.function)(*program.arguments).jaxpr
                found[program.name] = sorted(set(unordered(jaxpr)))
            print(json.dumps({"case": f"{name} {options}", "found": found}), flush=True)


if __name__ == "__main__":
    main(CASES if "--thorough" in sys.argv else SHORT)
