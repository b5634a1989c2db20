"""Pool of key/value pages: one logical type, and the physical layouts that kernels read.

This module handles the storage of `KVPages`: allocation, size, partitioning, export and import. Only this file, the KV
updates and the attention implementations depend on the physical layout. All other code uses page ids and the canonical
form [n, page_size, 2, K, H], or [n, page_size, 1, K, H] if values are stored within keys.

A platform (jaxengine.pallas_kernels.registry) has one layout, which its kernels read. Several platforms may share one.

- HEAD_TILES: [P, K, page_size * (H + Hv)]. Each page and head has a tile of keys [page_size, H] followed by a tile of
  values [page_size, Hv], flattened.
- HEAD_TILES_AS_BITS: the same, but element types narrower than 32 bits are stored as unsigned integers of equal width,
  which XLA:CPU does not widen in scatters and gathers.
- TOKEN_ROWS: [P, page_size, K * (H + Hv) rounded up to 128]. A token is one row: for each head its key, then its value,
  with `KVSpec.aligned_values` from the next multiple of 128 on.
- SEQUENCES: [T, K, H + Hv], whole sequences without pages, see kv/update_unpaged.py. It is not one of LAYOUTS.

With `KVSpec.values_in_keys`, the first Hv elements of a key are its value, as in the latent of DeepSeek-AI 2024
(arXiv:2405.04434), and only keys are stored.

With `KVSpec.token_scales`, the quantised key and value of a token are each followed by the four bytes of their float32
scale, so a row of a tile is H + 4 bytes wide. Elements and scales are written, gathered, moved, counted and split
together. Platforms whose kernels read tiles without scales do not support this (`check_token_scales`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxengine.pallas_kernels.registry import (
    HEAD_TILES,
    HEAD_TILES_AS_BITS,
    PLATFORMS,
    SEQUENCES,
    TOKEN_ROWS,
    layout_of,
)

LAYOUTS = (HEAD_TILES, HEAD_TILES_AS_BITS, TOKEN_ROWS)
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
LANES = 128  # columns of a TPU register
_UNSIGNED = {1: "uint8", 2: "uint16"}
_SCALE_BYTES = 4  # a token's float32 scale, stored after its codes

# vLLM's names of cache dtypes with one scale per token and kv head, and the dtype of their codes.
PER_TOKEN = {"int8_per_token_head": "int8", "fp8_per_token_head": "float8_e4m3fn"}

Axes = str | tuple[str, ...] | None  # mesh axes over which one dimension is split


@dataclass(frozen=True)
class KVSpec:
    """Logical shape of a pool; raises ValueError for an impossible one.

    Attributes:
      num_pages: rows of the flat pool: num_layers * pages per layer.
      page_size: tokens of a page.
      num_kv_heads, head_dim, v_head_dim: KV heads K, and elements of a key H and of a value Hv.
      dtype: name of the dtype of elements, or one of PER_TOKEN, which sets both dtype and token_scales.
      values_in_keys: whether a key begins with its value, which is then not stored separately.
      token_scales: whether quantised elements have a scale per token and KV head, which is stored after them.
      aligned_values: whether values begin at a multiple of LANES in a row of layout TOKEN_ROWS, even where keys end
        before it, so that a kernel can copy the first head's value alone. Other layouts are the same.
    """

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    values_in_keys: bool = False
    token_scales: bool = False
    aligned_values: bool = False

    def __post_init__(self) -> None:
        """Replace the dtype by its numpy name. For a name in PER_TOKEN it becomes that of the elements, and
        token_scales becomes True.

        Raises TypeError for a name of no dtype, and ValueError, which names the field, for sizes below 1; a v_head_dim
        above head_dim with values_in_keys; token_scales of a dtype wider than one byte; and num_pages * page_size slots
        that do not fit int32.
        """
        if self.dtype in PER_TOKEN:
            object.__setattr__(self, "dtype", PER_TOKEN[self.dtype])
            object.__setattr__(self, "token_scales", True)
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        for name in ("num_pages", "page_size", "num_kv_heads", "head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVSpec.{name} must be at least 1, got {getattr(self, name)}")
        if self.values_in_keys and self.v_head_dim > self.head_dim:
            raise ValueError(
                f"KVSpec.v_head_dim must be at most head_dim ({self.head_dim}) where values lie in keys, "
                f"got {self.v_head_dim}"
            )
        if self.token_scales and jnp.dtype(self.dtype).itemsize != 1:
            raise ValueError(f"KVSpec.token_scales are those of codes of one byte, got {self.dtype}")
        if self.num_pages * self.page_size > np.iinfo(np.int32).max:
            raise ValueError(
                f"KVSpec: num_pages * page_size = {self.num_pages * self.page_size} slots do not fit int32 slot ids"
            )

    @property
    def kv_dtype(self) -> str:
        """Name of the cache dtype: one of PER_TOKEN if there are token scales, otherwise `dtype`."""
        names = {codes: name for name, codes in PER_TOKEN.items()}
        return names[self.dtype] if self.token_scales else self.dtype

    @property
    def key_width(self) -> int:
        """Number of elements of one token's key in one KV head, including its token scale."""
        return self.head_dim + _SCALE_BYTES * self.token_scales

    @property
    def value_width(self) -> int:
        """Number of elements of one token's value in one KV head, including its token scale, if values are stored."""
        return self.v_head_dim + _SCALE_BYTES * self.token_scales

    @property
    def token_width(self) -> int:
        """Number of elements of one token in one KV head: key_width, plus value_width unless values_in_keys."""
        return self.key_width if self.values_in_keys else self.key_width + self.value_width

    @property
    def value_column(self) -> int:
        """Column at which a value begins among those of its KV head in a row of layout TOKEN_ROWS: key_width, rounded
        up to a multiple of LANES with aligned_values.
        """
        return -(-self.key_width // LANES) * LANES if self.aligned_values else self.key_width

    @property
    def row_width(self) -> int:
        """Number of columns of one KV head in a row of layout TOKEN_ROWS."""
        return self.key_width if self.values_in_keys else self.value_column + self.value_width


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """Pool of pages. Every writer donates `data` and returns the new pool.

    A quantised element c of KV head k stands for c * k_scale[k] in keys and c * value_scale[k] in values. With
    `spec.token_scales` it stands for c times the scale that is stored after it, and there are no scales of heads.
    Inside shard_map `data` has fewer heads than `spec`, so implementations take the number of heads from `data`.

    Attributes:
      data: array of the shape `pool_shape` and the dtype `storage_dtype`.
      k_scale, v_scale: f32 [K]; None without scales of heads. v_scale is also None if values are stored within keys.
        They are traced, so that other values do not recompile.
      spec: logical shape of the pool.
      platform: platform whose kernels read and write the pool, one of registry.PLATFORMS or UNPAGED.
      lanes: if several layers share a row of layout TOKEN_ROWS, the range [first, end) of the lanes that hold a page,
        multiples of LANES; None if a page takes the whole row.
    """

    data: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    spec: KVSpec = field(metadata={"static": True})
    platform: str = field(default="cpu", metadata={"static": True})
    lanes: tuple[int, int] | None = field(default=None, metadata={"static": True})

    @property
    def num_pages(self) -> int:
        """Number of pages of the pool."""
        return self.spec.num_pages

    @property
    def page_size(self) -> int:
        """Number of tokens of a page."""
        return self.spec.page_size

    @property
    def dtype(self) -> np.dtype:
        """Logical element type; `data.dtype` is the type in which it is stored."""
        return jnp.dtype(self.spec.dtype)

    @property
    def layout(self) -> str:
        """Layout of `data`, one of LAYOUTS or SEQUENCES."""
        return layout_of(self.platform)

    @property
    def lanes_of_page(self) -> tuple[int, int]:
        """Range [first, end) of the lanes of a row of layout TOKEN_ROWS that hold a page: `lanes` or the whole row."""
        return self.lanes or (0, self.data.shape[2])

    @property
    def value_scale(self) -> jax.Array | None:
        """Scales f32 [K] of values: `v_scale`, or `k_scale` if values are stored within keys; None without scales."""
        return self.k_scale if self.spec.values_in_keys else self.v_scale


def rows_of_tokens(keys: jax.Array, values: jax.Array | None, spec: KVSpec) -> jax.Array:
    """Return rows [..., K * row_width] of layout TOKEN_ROWS of keys [..., K, H] and values [..., K, Hv], which is None
    if they are stored within keys. Both include token scales. spec: that of the pool.
    """
    if values is not None:
        if gap := spec.value_column - spec.key_width:
            keys = jnp.pad(keys, (*[(0, 0)] * (keys.ndim - 1), (0, gap)))
        keys = jnp.concatenate([keys, values], axis=-1)
    return keys.reshape(*keys.shape[:-2], -1)


def tokens_of_rows(rows: jax.Array, spec: KVSpec, num_kv_heads: int) -> tuple[jax.Array, jax.Array | None]:
    """Return (keys [..., K, H], values [..., K, Hv] or None if they are stored within keys) of the first K =
    num_kv_heads heads in rows [..., C] of layout TOKEN_ROWS. Both include token scales. spec: that of the pool.
    """
    heads = rows[..., : num_kv_heads * spec.row_width].reshape(*rows.shape[:-1], num_kv_heads, spec.row_width)
    return heads[..., : spec.key_width], None if spec.values_in_keys else heads[..., spec.value_column :]


def check_token_scales(platform: str, spec: KVSpec) -> None:
    """Raise ValueError if the platform has no pages, or if `spec` has token scales and the platform's kernels cannot
    read them.
    """
    layout_of(platform)
    if spec.token_scales and not (platform in PLATFORMS and PLATFORMS[platform].reads_token_scales):
        allowed = ", ".join(name for name, row in PLATFORMS.items() if row.reads_token_scales)
        raise ValueError(f"kernels of platform {platform!r} read no scales of tokens, allowed: {allowed}")


def _check_layout(layout: str) -> None:
    """Raise ValueError for a layout that is not one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ValueError(f"KV page layout {layout!r} is not implemented, allowed: {', '.join(LAYOUTS)}")


def storage_dtype(spec: KVSpec, layout: str = HEAD_TILES_AS_BITS) -> np.dtype:
    """Return the element type of `KVPages.data` in a layout: the dtype of `spec`; for HEAD_TILES_AS_BITS and 8 or 16
    bits, the unsigned integer of equal width. Raises ValueError for a dtype not in DTYPES or a layout not in LAYOUTS.
    """
    _check_layout(layout)
    if spec.dtype not in DTYPES:
        raise ValueError(f"KVSpec.dtype {spec.dtype!r} is not supported, allowed: {', '.join(DTYPES)}")
    dtype = jnp.dtype(spec.dtype)
    return np.dtype(_UNSIGNED.get(dtype.itemsize, dtype)) if layout == HEAD_TILES_AS_BITS else dtype


def pool_shape(spec: KVSpec, layout: str = HEAD_TILES_AS_BITS) -> tuple[int, ...]:
    """Return the shape of `KVPages.data` for a pool of `spec`, in one of LAYOUTS or SEQUENCES (see the module's text).
    Raises ValueError for another layout.
    """
    if layout == SEQUENCES:
        return (spec.num_pages * spec.page_size, spec.num_kv_heads, spec.token_width)
    _check_layout(layout)
    if layout == TOKEN_ROWS:
        return (spec.num_pages, spec.page_size, -(-spec.num_kv_heads * spec.row_width // LANES) * LANES)
    return (spec.num_pages, spec.num_kv_heads, spec.page_size * spec.token_width)


def holds_heads(kv: KVPages, num_heads: int) -> bool:
    """Return whether `data` has `num_heads` KV heads of the spec's sizes. Inside shard_map it has fewer than `spec`."""
    return kv.data.shape[1:] == pool_shape(replace(kv.spec, num_kv_heads=num_heads), kv.layout)[1:]


def page_bytes(spec: KVSpec, layout: str = HEAD_TILES_AS_BITS) -> int:
    """Return the bytes of one page of a pool of `spec`: keys and values of all heads, and padding. Raises ValueError
    for a dtype not in DTYPES or a layout not in LAYOUTS.
    """
    return math.prod(pool_shape(spec, layout)[1:]) * storage_dtype(spec, layout).itemsize


def is_quantized(spec: KVSpec) -> bool:
    """Return whether the dtype of `spec` has one byte, so that elements are multiplied by a scale."""
    return jnp.dtype(spec.dtype).itemsize == 1


def has_head_scales(spec: KVSpec) -> bool:
    """Return whether elements have a scale per KV head, in KVPages.k_scale and v_scale: one-byte dtypes without token
    scales.
    """
    return is_quantized(spec) and not spec.token_scales


def alloc(spec: KVSpec, *, platform: str = "cpu", sharding: jax.sharding.Sharding | None = None) -> KVPages:
    """Allocate and return a pool of zeros, of which each device only allocates its shard. Scales of heads, which only
    one-byte pools without token scales have, are 1.

    platform: platform whose kernels will read it. sharding: sharding of `data` (see `partition_spec`); None for the
    default device. Raises ValueError for a platform without pages, for token scales that its kernels cannot read, and
    for a dtype not in DTYPES.
    """
    check_token_scales(platform, spec)
    layout = layout_of(platform)
    make = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)
    data = make(pool_shape(spec, layout), storage_dtype(spec, layout))

    def scale(stored: bool) -> jax.Array | None:
        return jnp.ones((spec.num_kv_heads,), jnp.float32) if stored and has_head_scales(spec) else None

    return KVPages(data, scale(True), scale(not spec.values_in_keys), spec, platform)


def partition_spec(layout: str, *, head_axis: Axes = None, data_axis: Axes = None) -> PartitionSpec:
    """Return the PartitionSpec of `KVPages.data`, with pages split over `data_axis` and KV heads over `head_axis`,
    unless these are None. Raises ValueError for a layout not in LAYOUTS.
    """
    _check_layout(layout)
    return (
        PartitionSpec(data_axis, None, head_axis) if layout == TOKEN_ROWS else PartitionSpec(data_axis, head_axis, None)
    )


def to_storage(values: jax.Array, spec: KVSpec, layout: str, scale: jax.Array | None = None) -> jax.Array:
    """Round values [..., K, C] to the pool's dtype, and return them with the element type that `layout` stores.

    For a one-byte pool, values are divided by `scale` f32 [K] and saturate; ValueError is raised if it is None. With
    token scales, `scale` is not used and the result is [..., K, C + 4]: the largest of a token's C values in a head
    becomes the largest representable number, and the scale follows.
    """
    stored = storage_dtype(spec, layout)
    if not is_quantized(spec):
        return bits(values.astype(spec.dtype), stored)
    dtype = jnp.dtype(spec.dtype)
    limit = float(jnp.finfo(dtype).max) if jnp.issubdtype(dtype, jnp.floating) else 127.0
    values = values.astype(jnp.float32)
    if spec.token_scales:
        # The inverse is multiplied, as XLA does for a constant divisor. A scale is never 0, since values are divided.
        scales = jnp.max(jnp.abs(values), axis=-1, keepdims=True) * np.float32(1 / limit)
        scales = jnp.maximum(scales, jnp.finfo(jnp.float32).tiny)
    elif scale is None:
        raise ValueError(f"a pool of {spec.dtype} needs k_scale and v_scale")
    else:
        scales = scale[:, None]
    codes = jnp.clip(values / scales, -limit, limit)
    rows = bits((jnp.round(codes) if dtype == jnp.int8 else codes).astype(dtype), stored)
    if not spec.token_scales:
        return rows
    return jnp.concatenate([rows, bits(lax.bitcast_convert_type(scales[..., 0], jnp.uint8), stored)], axis=-1)


def from_storage(stored: jax.Array, spec: KVSpec) -> jax.Array:
    """Return stored elements of a pool of `spec`, in any layout, as float32 of the same shape, without applying
    scales.
    """
    if stored.dtype == jnp.uint16 and spec.dtype == "bfloat16":
        # A shift instead of a bitcast to bfloat16, so that there is no bf16 array whose widening XLA:CPU could hoist.
        return lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    return bits(stored, jnp.dtype(spec.dtype)).astype(jnp.float32)


def token_scales(rows: jax.Array) -> jax.Array:
    """Return the scales f32 [...] that are stored at the end of rows [..., C + 4]."""
    return lax.bitcast_convert_type(bits(rows[..., -_SCALE_BYTES:], jnp.dtype(jnp.uint8)), jnp.float32)


def bits(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return `array` with its bits reinterpreted as `dtype`, which must have equal width."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


def largest(kv: KVPages, first: jax.Array, count: int) -> tuple[jax.Array, jax.Array | None]:
    """Return the largest magnitudes of keys and of values, each f32 [K], in `count` pages from page `first` i32 [] on.
    The second is None if values are stored within keys.

    All slots count, including those that were never written, which hold zeros. NaN counts as infinity.
    Raises ValueError for a quantised pool.
    """
    spec = kv.spec
    if is_quantized(spec):
        raise ValueError(f"the largest magnitude is not defined for codes, got a pool of {spec.dtype}")
    pages = jnp.abs(from_storage(lax.dynamic_slice_in_dim(kv.data, first, count), spec))
    pages = jnp.where(jnp.isnan(pages), jnp.inf, pages)
    if kv.layout == TOKEN_ROWS:
        k, v = tokens_of_rows(pages.reshape(-1, pages.shape[2]), spec, spec.num_kv_heads)
    else:
        keys = spec.page_size * spec.head_dim
        k, v = pages[..., :keys], None if spec.values_in_keys else pages[..., keys:]
    return jnp.max(k, axis=(0, 2)), None if v is None else jnp.max(v, axis=(0, 2))


def pages_of(rows: jax.Array, head_dim: int, page_size: int, platform: str) -> KVPages:
    """Return a pool for `platform` whose pages are filled in order with rows [n * page_size, K, head_dim + Hv], each of
    which is a key followed by its value. The pool has the dtype of `rows`, float32, bfloat16 or float16; others raise
    ValueError.
    """
    num_tokens, num_heads, width = rows.shape
    spec = KVSpec(num_tokens // page_size, page_size, num_heads, head_dim, width - head_dim, rows.dtype.name)
    layout = layout_of(platform)
    rows = to_storage(rows, spec, layout)
    if layout == TOKEN_ROWS:
        data = rows_of_tokens(rows[..., :head_dim], rows[..., head_dim:], spec).reshape(spec.num_pages, page_size, -1)
        data = jnp.pad(data, ((0, 0), (0, 0), (0, -data.shape[2] % LANES)))
    else:
        pages = rows.reshape(spec.num_pages, page_size, num_heads, width).swapaxes(1, 2)
        tiles = [part.reshape(*pages.shape[:2], -1) for part in jnp.split(pages, (head_dim,), axis=3)]
        data = jnp.concatenate(tiles, axis=2)
    return KVPages(data, None, None, spec, platform)


def _parts(spec: KVSpec) -> int:
    """Return the size of the third dimension of a pool's canonical pages: 2 for keys and values, or 1 if values are
    stored within keys. Raises ValueError if keys and values differ in head dim.
    """
    if spec.values_in_keys:
        return 1
    if spec.head_dim != spec.v_head_dim:
        raise ValueError(
            f"pages with head_dim {spec.head_dim} != v_head_dim {spec.v_head_dim} have no canonical form to exchange"
        )
    return 2


def export_pages(kv: KVPages, page_ids: jax.Array) -> jax.Array:
    """Return a copy of the pool's pages i32 [n] in the canonical form [n, page_size, 2, K, H], bit for bit in the
    logical dtype. Scales are not applied.

    If values are stored within keys, it is [n, page_size, 1, K, H]. With token scales the last dimension is H + 4, and
    its last four bytes are a scale. Page ids must be in range. Raises ValueError if keys and values differ in head dim.
    Not for use in shard_map.
    """
    parts = _parts(kv.spec)
    pages, num_heads, head_dim = kv.data[page_ids], kv.spec.num_kv_heads, kv.spec.key_width
    if kv.layout == TOKEN_ROWS:
        pages = jnp.stack([part for part in tokens_of_rows(pages, kv.spec, num_heads) if part is not None], axis=2)
    else:
        pages = pages.reshape(-1, num_heads, parts, kv.page_size, head_dim).transpose(0, 3, 2, 1, 4)
    return bits(pages, kv.dtype)


def import_pages(kv: KVPages, page_ids: jax.Array, values: jax.Array) -> KVPages:
    """Write canonical pages, as `export_pages` returns them, to the pool's pages i32 [n], and return the new pool.
    Pages whose ids are negative or otherwise out of range are dropped.

    Donate `kv` under jit. Raises ValueError for `values` of another dtype or shape, and if keys and values differ in
    head dim. Not for use in shard_map.
    """
    wanted = (page_ids.shape[0], kv.page_size, _parts(kv.spec), kv.spec.num_kv_heads, kv.spec.key_width)
    if values.shape != wanted or values.dtype != kv.dtype:
        raise ValueError(f"import_pages needs {kv.dtype}{list(wanted)}, got {values.dtype}{list(values.shape)}")
    if kv.layout == TOKEN_ROWS:
        pages = rows_of_tokens(values[:, :, 0], None if kv.spec.values_in_keys else values[:, :, 1], kv.spec)
        pages = jnp.pad(pages, ((0, 0), (0, 0), (0, kv.data.shape[2] - pages.shape[2])))
    else:
        pages = values.transpose(0, 3, 2, 1, 4).reshape(-1, *kv.data.shape[1:])
    pages = bits(pages, kv.data.dtype)
    ids = jnp.where(page_ids < 0, kv.data.shape[0], page_ids)  # out of range: the scatter drops it
    return replace(kv, data=kv.data.at[ids].set(pages, mode="drop"))
