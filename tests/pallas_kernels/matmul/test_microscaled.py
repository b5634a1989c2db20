"""Rows whose scales are each for a few inputs in plain XLA; the kernel is tests.pallas_kernels.microscaled's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.matmul.microscaled import microscaled_rows
from jaxengine.pallas_kernels.matmul.rounding import E4M3, E8M0, FLOAT32, UE8M0
from jaxengine.pallas_kernels.registry import KERNELS, kernel
from tests.pallas_kernels.implementations import IN_PROCESS
from tests.pallas_kernels.microscaled import EIGHT, FOUR, ROWS, codes_and_ties, microscaled

IMPLEMENTATIONS = {kernel(*row) for row in KERNELS if row[0] == "microscaled_rows" and row[1] != "tpu"}


@pytest.mark.parametrize("implementation", IN_PROCESS, ids=lambda each: each.name)
@pytest.mark.parametrize("name", [name for name in ROWS if name.endswith("recorded")])
def test_recorded_rows(name, implementation):
    microscaled(name, implementation)


# Not of e4m3 with E8M0: there 448 counts as the next power of two.
@pytest.mark.parametrize(("dtype", "kind"), [(FOUR, E8M0), (FOUR, UE8M0), (FOUR, E4M3), (EIGHT, UE8M0), (EIGHT, E4M3)])
@pytest.mark.parametrize("power", [0, -20, 20])
def test_every_code_is_itself_and_ties_are_even(dtype, kind, power):
    """By rounding of ml_dtypes' own, times scales of every size that a power of two may have."""
    row, wanted = codes_and_ties(512, 16, dtype)
    rows = np.stack([row, -row]) * 2.0**power
    # With e4m3, a scale of 1 for all rows, of which those of groups are 2^power.
    whole = jnp.full((1, 1), 2.0**-power, jnp.float32)
    found = microscaled_rows(jnp.asarray(rows, jnp.bfloat16), 16, dtype, kind=kind, global_scale=whole)
    wanted = wanted * (1 if kind == E4M3 else 2.0**power)
    np.testing.assert_array_equal(np.asarray(found, np.float64), np.stack([wanted, -wanted]))


def test_rows_know_nothing_of_others():
    """Nor groups, of those that are not finite."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    plain = np.asarray(microscaled_rows(jnp.asarray(x), 32, FOUR, kind=E8M0))
    x[1, 40], x[2, 0] = np.nan, np.inf
    found = np.asarray(microscaled_rows(jnp.asarray(x), 32, FOUR, kind=E8M0))
    for row, half in ((1, slice(32)), (2, slice(32, 64)), (0, slice(64)), (3, slice(64))):
        np.testing.assert_array_equal(found[row, half], plain[row, half])
    assert np.isnan(found[1, 40])


def test_a_tpu_has_one_kernel():
    x = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16), jax.ShapeDtypeStruct((1, 1), jnp.float32)
    run = jax.jit(lambda x, whole: microscaled_rows(x, 16, FOUR, kind=E4M3, global_scale=whole))
    assert run.trace(*x).lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 1


@pytest.mark.parametrize(
    ("x", "changed", "message"),
    [
        (jnp.zeros((2, 48)), {"group": 32}, "divide 48 inputs"),
        (jnp.zeros((2, 48)), {"group": 24}, "group must be one of"),
        (jnp.zeros((2, 32), jnp.int8), {}, "x must be bfloat16 or float32"),
        (jnp.zeros((2, 32)), {"dtype": "int8"}, "dtype must be of"),
        (jnp.zeros((2, 32)), {"kind": FLOAT32}, "kind of"),
        (jnp.zeros((2, 32)), {"kind": E4M3}, r"global_scale must be float32 \[1, 1\] or \(2, 1\), got None"),
        (jnp.zeros((2, 32)), {"kind": E4M3, "global_scale": jnp.ones((3, 1))}, r"got float32 \(3, 1\)"),
    ],
)
def test_what_does_not_fit_together(x, changed, message):
    given = {"group": 16, "dtype": FOUR, "kind": E8M0, **changed}
    with pytest.raises(ValueError, match=f"microscaled_rows: .*{message}"):
        microscaled_rows(x, **given)
