"""What it means for an implementation to conform: the checks that tests, workers and the mutation gate all run.

A check raises AssertionError with the case, the implementation and what is wrong. One that uses an interpreter also
fails for a race or hazard in any kernel it ran.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages
from tests.pallas_kernels import reference
from tests.pallas_kernels.implementations import Implementation
from tests.pallas_kernels.pools import (
    PER_TOKEN,
    QUANTIZED,
    codes,
    make_pool,
    read_pool,
    token_scale,
    unsigned,
    with_scale,
)
from tests.pallas_kernels.problems import Case, Problem, biases_of, build, expected, rounded, slopes_of

ROW_RMS = {"float32": 2e-5, "bfloat16": 8e-3}
MAX_OF_V = {"float32": 2e-5, "bfloat16": 2.0**-7}
LSE = {"float32": 1e-4, "bfloat16": 1e-3}


@functools.cache
def compiled(implementation: Implementation, spec: AttentionSpec):
    """The jitted attention of one layer; shapes and dtypes are left to jit's own cache."""

    @jax.jit
    def run(q, kv, batch, sinks, tree_mask, kv_limits):
        limits = {} if kv_limits is None else {"kv_limits": kv_limits}
        limits |= {"kv_spec": kv.spec, "q_dtype": q.dtype}
        schedule = implementation.schedule(batch, spec, num_tokens=q.shape[0], page_size=kv.page_size, **limits)
        rest = {"slopes": jnp.asarray(slopes_of(spec))} if spec.has_slopes else {}
        if spec.bias_extent:
            rest["biases"] = jnp.asarray(biases_of(spec, q.shape[0]), q.dtype)
        return implementation.attend(q, kv, batch, schedule, spec=spec, sinks=sinks, tree_mask=tree_mask, **rest)

    return run


@functools.cache
def _executable(implementation: Implementation, spec: AttentionSpec, tree: Any, shapes: tuple) -> Any:
    """`compiled` for these operands. In jax 0.12 a call through jit lowers an interpreted kernel again each time."""
    return compiled(implementation, spec).lower(*jax.tree.unflatten(tree, shapes)).compile()


@functools.cache
def compiled_update(implementation: Implementation):
    return jax.jit(implementation.update, donate_argnums=0)


@contextlib.contextmanager
def watched(implementation: Implementation, label: str) -> Iterator[None]:
    """Fails if an interpreter finds a race or a hazard in what runs inside."""
    implementation.forget()
    yield
    problems = implementation.problems()
    assert not problems, f"{label} on {implementation.name}: {'; '.join(problems)}"


def pool(problem: Problem, platform: str, values_in_keys: bool = False, aligned_values: bool = False) -> KVPages:
    """A pool that holds the problem's pages."""
    held = problem.k_codes, problem.v_codes, platform, problem.k_scale, problem.v_scale
    return make_pool(*held, values_in_keys, aligned_values)


def ragged_batch(problem: Problem) -> RaggedBatch:
    arrays = (problem.cu_q_lens, problem.kv_lens, problem.page_table, problem.slot_mapping)
    return RaggedBatch(*map(jnp.asarray, arrays), jnp.int32(problem.num_seqs), jnp.int32(problem.num_decode))


def operands(case: Case, problem: Problem, dtype: str, implementation: Implementation) -> tuple:
    return (
        jnp.asarray(problem.q, dtype),
        pool(problem, implementation.platform, case.values_in_keys),
        ragged_batch(problem),
        None if problem.sinks is None else jnp.asarray(problem.sinks),
        None if problem.tree_mask is None else jnp.asarray(problem.tree_mask),
        None if problem.kv_limits is None else jnp.asarray(problem.kv_limits),
    )


def attend(case: Case, problem: Problem, dtype: str, implementation: Implementation) -> tuple[np.ndarray, np.ndarray]:
    """Run the implementation: o in float32, lse."""
    arguments = operands(case, problem, dtype, implementation)
    leaves, tree = jax.tree.flatten(arguments)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    o, lse = _executable(implementation, case.spec, tree, shapes)(*arguments)
    assert o.dtype == dtype and lse.dtype == jnp.float32
    return np.asarray(o, np.float32), np.asarray(lse)


def check_attention(case: Case, dtype: str, family: str, implementation: Implementation) -> None:
    """Output and log-sum-exp match the oracle row by row, padding is exactly 0; or the case is refused, if it must."""
    case = implementation.adapted(case)
    problem = build(case, dtype, family)
    label = f"{case.name} {dtype} {family}"
    if (why := implementation.refuses(case, dtype)) is not None:
        check_refused(case, problem, dtype, implementation, f"{label}: {why}")
        return
    want = expected(case, problem)
    with watched(implementation, label):
        got = attend(case, problem, dtype, implementation)
    check_close(got, want, problem, dtype, f"{label} on {implementation.name}")


def check_refused(case: Case, problem: Problem, dtype: str, implementation: Implementation, label: str) -> None:
    try:
        jax.eval_shape(compiled(implementation, case.spec), *operands(case, problem, dtype, implementation))
    except ValueError as error:
        assert str(error), f"{label}: refused without a reason"
        return
    raise AssertionError(f"{label} is not refused by {implementation.name}")


def check_runs_kernels(case: Case, dtype: str, implementation: Implementation) -> None:
    """The kernels that attend a case are those it is said to run: no other, and no fallback to XLA unsaid."""
    if implementation.elsewhere is None:
        return
    case = implementation.adapted(case)
    arguments = operands(case, build(case, dtype, "normal"), dtype, implementation)
    program = str(compiled(implementation, case.spec).trace(*arguments).jaxpr)
    ran, said = set(re.findall(r"\bname=(paged_attention_\w+)", program)), implementation.kernels(case, dtype)
    assert ran == said, f"{case.name} {dtype} on {implementation.name} runs {sorted(ran)}, not {sorted(said)}"


def check_close(got, want, problem: Problem, dtype: str, label: str) -> None:
    """got: (o, lse) of an implementation, want: of the oracle."""
    got_o, got_lse = got
    want_o, want_lse = want
    num_live = int(problem.cu_q_lens[problem.num_seqs])
    assert not got_o[num_live:].any(), f"{label}: padding tokens are not exactly 0"
    assert np.isfinite(got_o).all(), f"{label}: not finite at {np.argwhere(~np.isfinite(got_o))[:3].tolist()}"
    error = np.sqrt(np.mean((got_o - want_o) ** 2, axis=-1))
    scale = np.sqrt(np.mean(want_o**2, axis=-1))
    seen = np.where(np.isfinite(problem.v_pages), np.abs(problem.v_pages), 0.0)
    largest = max(np.max(seen, initial=0.0), 1e-37)
    bad = (error > ROW_RMS[dtype] * scale) & (error > ROW_RMS[dtype] * 0.02 * largest)
    assert not bad.any(), (
        f"{label}: {bad.sum()} rows wrong, first (token, head) {np.argwhere(bad)[:4].tolist()}, "
        f"worst {np.max(error / (scale + 1e-30)):.2e}"
    )
    worst = np.max(np.abs(got_o - want_o), initial=0.0)
    assert worst <= MAX_OF_V[dtype] * largest, f"{label}: max error {worst:.2e} of max |V| {largest:.2e}"
    np.testing.assert_allclose(got_lse, want_lse, rtol=1e-5, atol=LSE[dtype], err_msg=f"{label}: lse")


def update_problem(
    dtype: str,
    slots: np.ndarray,
    *,
    page_size: int = 16,
    heads: int = 3,
    dims=(8, 12),
    seed: int = 0,
    values_in_keys: bool = False,
):
    """A random pool and new tokens for `slots`: codes k, v of the pool, new k, v in float32, and the scales of what is
    in the pool, [K] or of its tokens."""
    rng = np.random.default_rng(seed)
    num_pages = 7
    quantized = dtype in QUANTIZED
    scales = [np.float32(2.0) ** rng.integers(-8, 8, heads).astype(np.float32) if quantized else None for _ in dims]
    old, new = [], []
    for part, (dim, scale) in enumerate(zip(dims, scales, strict=True)):
        values = rng.standard_normal((num_pages, page_size, heads, dim))
        tokens = rng.standard_normal((len(slots), heads, dim)) * 3
        if scale is not None:
            values, tokens = values * scale[:, None], tokens * scale[:, None] * 10
            tokens[1:2] *= 1e9  # beyond every code: saturates
        if dtype in PER_TOKEN:
            tokens[2:3] = 0.0  # nothing to divide by
            scale = scales[part] = token_scale(values, dtype)
        old.append(codes(values, dtype, scale))
        new.append(rounded(tokens, "float32" if quantized else dtype))
    if values_in_keys:
        old[1], new[1], scales[1] = old[0][..., : dims[1]], new[0][..., : dims[1]], scales[0]
    return old, new, scales


def check_update(dtype: str, slots: np.ndarray, implementation: Implementation, aligned=False, **sizes) -> None:
    """New tokens land in their slots, rounded as the oracle rounds, and every other slot keeps its bits."""
    old, new, scales = update_problem(dtype, slots, **sizes)
    values_in_keys = sizes.get("values_in_keys", False)
    label = f"update {dtype} T={len(slots)} {sizes or ''}"
    in_pool = np.where(slots < old[0].shape[0] * old[0].shape[1], slots, -1)
    of_new = [token_scale(x, dtype) for x in new] if dtype in PER_TOKEN else scales
    written = [with_scale(codes(x, dtype, s), s) for x, s in zip(new, of_new, strict=True)]
    held = [with_scale(*each) for each in zip(old, scales, strict=True)]
    if values_in_keys:
        held[1], written[1] = (keys[..., : old[1].shape[-1]] for keys in (held[0], written[0]))
    want = reference.kv_cache_update(*held, *written, in_pool)
    new_dtype = "float32" if dtype in QUANTIZED else dtype
    arguments = [jnp.asarray(x, new_dtype) for x in new]
    if values_in_keys:
        arguments[1] = scales[1] = None
    with watched(implementation, label):
        kv = make_pool(*old, implementation.platform, *scales, values_in_keys, aligned)
        updated = compiled_update(implementation)(kv, *arguments, jnp.asarray(slots, jnp.int32))
        got = read_pool(updated)
    for name, got_codes, want_codes in zip(("keys", "values"), got, want, strict=True):
        wrong = np.argwhere((got_codes != unsigned(want_codes)).any(-1))
        assert not len(wrong), (
            f"{label} on {implementation.name}: {name} differ at (page, offset, head) {wrong[:5].tolist()}, "
            f"{len(wrong)} in all"
        )


def replaced(implementation: Implementation, **functions) -> Implementation:
    """The implementation with other functions for some operations."""
    return replace(implementation, name=f"{implementation.name} with {', '.join(functions)}", overrides=functions)
