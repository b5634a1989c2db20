"""Pages in the layouts of other platforms hold the same tokens."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.kv.pages import KVSpec, alloc, export_pages, import_pages
from jaxengine.pallas_kernels.registry import HEAD_TILES, TOKEN_ROWS
from jaxengine.replay.page_layouts import converted
from tests.tables import each_row


@each_row(
    "source, target, dtype",
    [
        (one, other, dtype)
        for one in ("cpu", "gpu", "tpu")
        for other in ("cpu", "tpu")
        for dtype in ("float32", "bfloat16")
    ],
)
def test_pages_keep_their_tokens(source, target, dtype):
    spec = KVSpec(3, 8, 2, 16, 16, dtype)
    values = np.random.default_rng(0).standard_normal((3, 8, 2, 2, 16)).astype(jnp.dtype(dtype))
    ids = jnp.arange(3)
    pools = {name: import_pages(alloc(spec, platform=name), ids, jnp.asarray(values)) for name in (source, target)}
    like = jax.ShapeDtypeStruct(pools[target].data.shape, pools[target].data.dtype)
    found = converted(np.asarray(pools[source].data), pools[source].layout, pools[target].layout, spec, like)
    assert found.tobytes() == np.asarray(pools[target].data).tobytes()
    assert np.asarray(export_pages(pools[target], ids)).tobytes() == values.tobytes()


def test_heads_of_several_devices_end_with_what_fills_up_their_lanes():
    spec = KVSpec(1, 2, 1, 3, 5, "float32")  # of one of two devices
    tiles = np.arange(2 * 2 * 8, dtype=np.float32).reshape(1, 2, 16)
    rows = converted(tiles, HEAD_TILES, TOKEN_ROWS, spec, jax.ShapeDtypeStruct((1, 2, 256), jnp.float32))
    assert rows[0, 0, :8].tolist() == [0, 1, 2, 6, 7, 8, 9, 10] and not rows[0, :, 8:128].any()
    assert rows[0, 0, 128:136].tolist() == [16, 17, 18, 22, 23, 24, 25, 26]
    assert converted(rows, TOKEN_ROWS, HEAD_TILES, spec, tiles).tobytes() == tiles.tobytes()
    aligned = replace(spec, aligned_values=True)
    rows = converted(tiles, HEAD_TILES, TOKEN_ROWS, aligned, jax.ShapeDtypeStruct((1, 2, 512), jnp.float32))
    assert rows[0, 0, :3].tolist() == [0, 1, 2] and rows[0, 0, 128:133].tolist() == [6, 7, 8, 9, 10]
    assert converted(rows, TOKEN_ROWS, HEAD_TILES, aligned, tiles).tobytes() == tiles.tobytes()
