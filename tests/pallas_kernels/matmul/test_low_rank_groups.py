"""What groups of rows get added by matrices of low rank, against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.matmul import low_rank_groups
from jaxengine.pallas_kernels.matmul.low_rank_groups import add_low_rank, tile_rows_of


def operands(rows, groups, size=6, rank=2, widths=(5, 3), dtype="float32"):
    rng = np.random.default_rng(rows)
    shapes = [(rows, sum(widths)), (rows, size), (groups, 2 * rank, size), *((groups, rank, width) for width in widths)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def expected(y, x, group, a, bs, parts):
    y, x, a, *bs = (np.asarray(each, np.float64) for each in (y, x, a, *bs))
    out = y.copy()
    for row, own in enumerate(np.asarray(group)):
        if own < len(a):
            inner = (a[own] @ x[row]).reshape(2, -1)
            out[row] += np.concatenate([inner[part] @ b[own] for part, b in zip(parts, bs, strict=True)])
    return out


@pytest.mark.parametrize(
    ("rows", "groups", "tiles", "kind"),
    [(1, 3, 128, "any"), (40, 5, 2, "any"), (40, 5, 3, "one"), (40, 1, 128, "any"), (40, 5, 2, "none")],
)
def test_every_row_gets_what_its_own_pair_adds(monkeypatch, rows, groups, tiles, kind):
    """Of some rows or none, in one trip or many; rows without a pair are what they were, bit for bit."""
    monkeypatch.setattr(low_rank_groups, "_TRIP_TILES", tiles)
    y, x, a, *bs = operands(rows, groups)
    drawn = np.random.default_rng(0).integers(0, groups + 2, rows)
    group = jnp.asarray({"any": drawn, "one": 0 * drawn + 3, "none": 0 * drawn + groups}[kind], jnp.int32)
    found = np.asarray(
        jax.jit(lambda *operands: add_low_rank(*operands[:4], operands[4:], (1, 0)))(y, x, group, a, *bs)
    )
    np.testing.assert_allclose(found, expected(y, x, group, a, bs, (1, 0)), rtol=1e-5, atol=1e-5)
    without = np.asarray(group) >= groups
    np.testing.assert_array_equal(found[without], np.asarray(y)[without])


def test_sums_are_rounded_once():
    y, x, a, *bs = operands(9, 2, dtype="bfloat16")
    group = jnp.arange(9, dtype=jnp.int32) % 2
    found = add_low_rank(y, x, group, a, bs, (0, 1))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), expected(y, x, group, a, bs, (0, 1)), rtol=0.02, atol=0.1)


def test_tiles():
    """Few rows fill up little; many of a group share the reading of its pair."""
    assert [tile_rows_of(*each) for each in ((8, 64), (2048, 1024), (16384, 1024), (1 << 20, 8))] == [4, 16, 64, 64]


def test_what_does_not_fit():
    y, x, a, *bs = operands(4, 3)
    group = jnp.zeros(4, jnp.int32)
    wrong = [
        (y[:, 1:], x, group, a, bs),
        (y, x[:, 1:], group, a, bs),
        (y, x, group[1:], a, bs),
        (y, x, group, a[1:], bs),
    ]
    for each in [*wrong, (y, x, group, a.astype(jnp.bfloat16), bs), (y, x, group, a[:, 1:], bs)]:
        with pytest.raises(ValueError, match="add_low_rank: y, x, group, a and b must agree"):
            add_low_rank(*each, (0, 1))
