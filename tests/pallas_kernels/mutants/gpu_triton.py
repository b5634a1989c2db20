"""Faults of the Triton kernels of attention: rows, the merge of cut ones, the conversion of codes."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant, attention

SECONDS = 45

_KERNEL, _DISPATCH, _SCHEDULE = "attention/triton/kernel", "attention/triton/attend", "attention/hopper/schedule"
_CODES_OF_BYTES = "triton"


def _on(*cases: str):
    return attention("triton", "bfloat16", *cases)


_ANY, _PAGES, _WIDE = _on("mixed"), _on("page size 64"), _on("production 4/2 heads of 256, pages of 256")
_WINDOW, _BOTH_SIDES, _CHUNKS = _on("window 16"), _on("window on both sides"), _on("chunks of 45")
_SINKS, _CAP = _on("decode window and sinks"), _on("window, sinks and soft cap")
_CODES, _E5M2, _CUT = _on("codes of decodes"), _on("fp8 e5m2 keys and values"), _on("split decodes")
_SPLITS, _PARTS = (("splits", "triton"),), (("many_parts", "triton"),)
_LATENTS, _TILES = _on("latent mixed"), _on("latent of many heads")
_LATENT_CODES, _LATENT_HEADS = _on("latent codes"), _on("latent of two kv heads")
_CODES_OF_BLOCKS = _on("production 8/1 heads of 192, pages of 64, float8_e4m3fn")

MUTANTS = [
    Mutant("page off by one", _KERNEL, "key // page_size]", "key // page_size + 1]", _ANY),
    Mutant("page of a block off by one", _KERNEL, "block // (page_size // num_keys)", "block // page_size + 1", _PAGES),
    Mutant(
        "keys for values",
        _KERNEL,
        "page_size * spec.head_dim + offset[:, None] * spec.v",
        "offset[:, None] * spec.v",
        _ANY,
    ),
    Mutant("heads of another's pages", _KERNEL, "refs.pool, page, head // shape", "refs.pool, page, 0 // shape", _ANY),
    Mutant("queries of another head", _KERNEL, "group, head * group + lane", "group, head + lane", _ANY),
    Mutant("last key dropped", _KERNEL, "seen = (key >= begin) & (key < end)", "seen = key < end - 1", _ANY),
    Mutant("causal off by one", _KERNEL, "(key <= last)", "(key < last)", _ANY),
    Mutant("window one too wide", _KERNEL, "(key > last - spec", "(key >= last - spec", _WINDOW),
    Mutant("window before the row missing", _KERNEL, "seen & (key > last - spec.window)", "seen", _WINDOW),
    Mutant("window after the row one too wide", _KERNEL, "(key < last + spec", "(key <= last + spec", _BOTH_SIDES),
    Mutant("chunk begins late", _KERNEL, "key >= last // spec.chunk", "key >= (last + 1) // spec.chunk", _CHUNKS),
    Mutant(
        "chunk's first block skipped",
        _SCHEDULE,
        "return position // spec.chunk * spec.chunk,",
        "return position // spec.chunk * spec.chunk + 64,",
        _CHUNKS,
    ),
    Mutant("decay of sums dropped", _KERNEL, "acc * decay[:, None] + plt.dot", "acc + plt.dot", _ANY),
    Mutant("decay of totals dropped", _KERNEL, "total * decay + jnp.sum(weights", "total + jnp.sum(weights", _ANY),
    Mutant("scale dropped", _KERNEL, "products * (scale * LOG2E)", "products * LOG2E", _ANY),
    Mutant("soft cap halved", _KERNEL, "(2 * cap * LOG2E) / (1.0", "(cap * LOG2E) / (1.0", _CAP),
    Mutant("scale of keys dropped", _DISPATCH, "spec.sm_scale * (ones if", "spec.sm_scale * (ones if True or", _CODES),
    Mutant("scale of values dropped", _KERNEL, "decay * v_scale / divisor", "decay / divisor", _CODES),
    Mutant("stale values", _KERNEL, "return plt.load(source, mask=mask, other=0)", "return plt.load(source)", _ANY),
    Mutant(
        "stale codes",
        _KERNEL,
        "return jnp.where(mask, widened(",
        "return jnp.where(columns >= 0, widened(",
        _CODES_OF_BLOCKS,
    ),
    Mutant("sign of e4m3 lost", _CODES_OF_BYTES, "(-0x4080)", "(0x3F80)", _CODES),
    Mutant("exponent of e4m3 off", _CODES_OF_BYTES, "* 256.0)", "* 128.0)", _CODES),
    Mutant("e5m2 as e4m3", _CODES_OF_BYTES, "codes.dtype == jnp.float8_e5m2", "codes.dtype == jnp.float16", _E5M2),
    Mutant("half of the last block of wide heads", _KERNEL, "stop * steps, attend", "stop * steps - 1, attend", _WIDE),
    Mutant("sink counted twice", _KERNEL, "jnp.exp2(sink - new", "2 * jnp.exp2(sink - new", _SINKS),
    Mutant("sink of cut rows missing", _KERNEL, "jnp.full((1,), refs.sinks[head])", "jnp.full((1,), NOTHING)", _SPLITS),
    Mutant("merge forgets decay", _KERNEL, "acc * decay[:, None] + jnp.sum", "acc + jnp.sum", _PARTS),
    Mutant("merge skips the last parts", _KERNEL, "pl.cdiv(end - first, most)", "(end - first) // most", _PARTS),
    Mutant("merge takes the next row's parts", _KERNEL, "part < end", "part <= end", _SPLITS),
    Mutant("maxima of another row", _KERNEL, "refs.largest.at[part, lane]", "refs.largest.at[part, 0]", _CUT),
    Mutant("parts over each other", _KERNEL, "refs.part_o.at[part, lane", "refs.part_o.at[0, lane", _CUT),
    Mutant("rest of a latent dropped", _KERNEL, "(value, key - value)) if", "(0, key - value)) if", _LATENTS),
    Mutant("latent of the next token", _KERNEL, "spec.head_dim + column", "spec.v_head_dim + column", _LATENTS),
    Mutant("tile of heads of another", _SCHEDULE, "* head_tiles(spec, most))", ")", _TILES),
    Mutant("tiles for heads of the pool", _KERNEL, "page, head // shape.tiles, start", "page, 0, start", _LATENT_HEADS),
    Mutant(
        "scale of latents' values dropped", _DISPATCH, "ones if kv.value_scale is None", "ones if True", _LATENT_CODES
    ),
    Mutant("log-sum-exp in base 2", _KERNEL, "jnp.log2(divisor)) / LOG2E", "jnp.log2(divisor))", _ANY),
]
