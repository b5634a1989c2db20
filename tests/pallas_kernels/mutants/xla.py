"""Faults of the XLA work list and of the XLA write."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant, attention

SECONDS = 60

_SCHEDULE, _ATTENTION, _UPDATE = "attention/xla/schedule", "attention/xla/attend", "kv/update_xla"
_PAGES = "kv/pages"


def _on(*cases: str):
    return attention("cpu", "float32", *cases)


_ANY = _on("mixed", "q tile straddles a kv block")
_WINDOW, _SLOPES, _BIASES = _on("window 16"), _on("slopes"), _on("biases")
_WRITE = (("update", "cpu", "float32", "scattered 40"),)
_CODES = _on("fp8 e4m3 keys and values")
_OF_TOKENS = _on("int8 of each token")
_WRITE_SCALES = (("update", "cpu", "int8_per_token_head", "runs"),)
_PAIRS, _LOOP, _SUMS = "matmul/nibbles", "matmul/cpu/quantized", "matmul/xla/quantized"
_ROWS = "matmul/rounding"
# Of tests.pallas_kernels.matmul.test_quantized.CASES, and ROUNDED.
_ONE, _FOUR, _ZEROS, _MANY, _ROW = ((("quantized", "cpu", number),) for number in (2, 6, 4, 5, 9))
_ROUNDED = (("rounded_rows", "cpu", 3),)

MUTANTS = [
    Mutant("causal sees one too many", _SCHEDULE, "position + 1 if", "position + 2 if", _ANY),
    Mutant("causal drops the last key", _SCHEDULE, "position + 1 if", "position if", _ANY),
    Mutant("first key dropped", _SCHEDULE, "jnp.zeros_like(end)", "jnp.ones_like(end)", _ANY),
    Mutant("window one too wide", _SCHEDULE, "first - spec.window", "first - spec.window - 1", _WINDOW),
    Mutant("window one too narrow", _SCHEDULE, "first - spec.window", "first - spec.window + 1", _WINDOW),
    Mutant(
        "window after a token",
        _SCHEDULE,
        "position + spec.window)",
        "position + spec.window + 1)",
        _on("window on both sides"),
    ),
    Mutant("chunk starts a key late", _SCHEDULE, "* spec.chunk, 0)", "* spec.chunk + 1, 0)", _on("chunks of 16")),
    Mutant("a picture's last key dropped", _SCHEDULE, "clip(own, end", "clip(own - 1, end", _on("pictures")),
    Mutant("another token's picture", _SCHEDULE, "[seqs] + index, len", "[seqs] + index + 1, len", _on("pictures")),
    Mutant("text between pictures", _ATTENTION, "| is_seen[:, None]", "| True", _on("mutual pictures")),
    Mutant("another token between pictures", _ATTENTION, ".at[first + new]", ".at[new]", _on("mutual pictures")),
    Mutant("a picture's own token hidden", _ATTENTION, "<= own[..., None]", "< own[..., None]", _on("mutual pictures")),
    Mutant("keys behind the last", _SCHEDULE, "own, end, batch.kv_lens[seqs])", "own, end, own)", _on("pictures")),
    Mutant(
        "last kv block skipped",
        _SCHEDULE,
        "high, axis=-1), block_kv) - 1",
        "high, axis=-1), block_kv) - 2",
        _on("block edges"),
    ),
    Mutant(
        "block past the end walked as whole",
        _SCHEDULE,
        "jnp.min(high // block_kv, axis=-1)",
        "jnp.max(_ceil_div(high, block_kv), axis=-1)",
        _ANY,
    ),
    Mutant(
        "last sequence forgotten",
        _SCHEDULE,
        "< batch.num_seqs\n    q_lens",
        "< batch.num_seqs - 1\n    q_lens",
        _ANY,
    ),
    Mutant("tile follows the wrong sequence", _SCHEDULE, "index[:, None] >= ends", "index[:, None] > ends", _ANY),
    Mutant(
        "decode bucket: token of the wrong sequence",
        _SCHEDULE,
        "tokens[:, None] >= batch",
        "tokens[:, None] > batch",
        _on("runs in a decode bucket"),
    ),
    Mutant("wrong page", _ATTENTION, "block * block_pages + jnp", "block * block_pages + 1 + jnp", _ANY),
    Mutant(
        "values read as keys",
        _ATTENTION,
        "else (keys, gather_columns(flat, rows, key_width, value_width))",
        "else (keys, gather_columns(flat, rows, 0, value_width))",
        _ANY,
    ),
    Mutant(
        "head map off by one",
        _ATTENTION,
        "num_kv_heads + heads[:, None]",
        "num_kv_heads + (heads[:, None] + 1) % num_kv_heads",
        _ANY,
    ),
    Mutant("scale dropped", _ATTENTION, " * step.scale[:, None, None]", "", _ANY),
    Mutant("scale 5 % too large", _ATTENTION, "spec.sm_scale, jnp", "1.05 * spec.sm_scale, jnp", _ANY),
    Mutant("scale of keys dropped", _ATTENTION, "scale = scale * kv.k_scale", "scale = scale * 1", _CODES),
    Mutant("scale of values dropped", _ATTENTION, "o = o * value_scale[:, None, None]", "o = o * 1", _CODES),
    Mutant("scales of tokens' keys dropped", _ATTENTION, "logits * keys.k_scale[:, :, None]", "logits", _OF_TOKENS),
    Mutant("scales of tokens' values dropped", _ATTENTION, "weights * keys.v_scale[:, :, None]", "weights", _OF_TOKENS),
    Mutant(
        "values with their keys' scales", _ATTENTION, "weights * keys.v_scale", "weights * keys.k_scale", _OF_TOKENS
    ),
    Mutant(
        "scales of tokens in the sum of weights",
        _ATTENTION,
        "weights = jnp.exp(logits - shift[..., None])\n",
        "weights = jnp.exp(logits - shift[..., None]) * (1.0 if keys.v_scale is None else keys.v_scale[:, :, None])\n",
        _OF_TOKENS,
    ),
    Mutant(
        "the next token's scale",
        _PAGES,
        "jnp.dtype(jnp.uint8)), jnp.float32)",
        "jnp.dtype(jnp.uint8)), jnp.float32)[..., ::-1]",
        _OF_TOKENS,
    ),
    Mutant("one scale for all heads", _PAGES, "axis=-1, keepdims=True)", "axis=(1, 2), keepdims=True)", _WRITE_SCALES),
    Mutant("a token of zeros divided by 0", _PAGES, "finfo(jnp.float32).tiny", "float32(0)", _WRITE_SCALES),
    Mutant("accumulator not decayed", _ATTENTION, "acc * decay[..., None] +", "acc +", _on("block edges")),
    Mutant("state not reset between tiles", _ATTENTION, "jnp.where(is_first, fresh, running)", "running", _ANY),
    Mutant(
        "unseen values not zeroed",
        _ATTENTION,
        "jnp.where(in_use, values.reshape(shape), 0)",
        "values.reshape(shape)",
        _ANY,
    ),
    Mutant(
        "values taken from the end of a latent",
        _ATTENTION,
        "stored = stored[..., :width]",
        "stored = stored[..., -width:]",
        _on("latent mixed"),
    ),
    Mutant("latent scaled as values are", _ATTENTION, "kv.value_scale", "kv.v_scale", _on("latent codes")),
    Mutant("soft cap not scaled back", _ATTENTION, "cap * jnp.tanh", "jnp.tanh", _on("soft cap 30")),
    Mutant("sinks forgotten", _ATTENTION, "else sinks\n", "else sinks - jnp.inf\n", _on("sinks and window")),
    Mutant("distances to the key after", _ATTENTION, "[..., None] - 1 - positions", "[..., None] - positions", _SLOPES),
    Mutant("slopes of one head for all", _ATTENTION, "step.slopes[:, None, :, None]", "step.slopes[0, 0]", _SLOPES),
    Mutant("biases of the key before", _ATTENTION, "clip(extent - end", "clip(extent + 1 - end", _BIASES),
    Mutant("tree bits shifted", _ATTENTION, "(new % 32)", "((new + 1) % 32)", _on("tree branches")),
    Mutant(
        "run written one token late",
        _ATTENTION,
        "tiles.tokens[tile, 0], axis=1",
        "tiles.tokens[tile, 0] + 1, axis=1",
        _ANY,
    ),
    Mutant(
        "padding written to slot 0",
        _UPDATE,
        "jnp.where(slot_mapping < 0, kv.data.shape[0],",
        "jnp.where(slot_mapping < 0, 0,",
        _WRITE,
    ),
    Mutant(
        "padding wraps to the last page",
        _UPDATE,
        "jnp.where(slot_mapping < 0, kv.data.shape[0],",
        "jnp.where(slot_mapping < 0, kv.data.shape[0] - 1,",
        _WRITE,
    ),
    Mutant(
        "values in the next slot",
        _UPDATE,
        "+ offset * spec.value_width",
        "+ (offset + 1) % spec.page_size * spec.value_width",
        _WRITE,
    ),
    Mutant(
        "values written are ones",
        _UPDATE,
        "to_storage(v, spec, kv.layout, kv.v_scale)",
        "to_storage(v * 0 + 1, spec, kv.layout, kv.v_scale)",
        _WRITE,
    ),
    Mutant("quantized: halves swapped", _PAIRS, "x[..., first::count]", "x[..., count - 1 - first :: count]", _FOUR),
    Mutant("quantized: low half without its sign", _PAIRS, "lax.shift_left(pairs, four), four)", "pairs, four)", _FOUR),
    Mutant("quantized: zeros added", _LOOP, "part - zero[:, None]", "part + zero[:, None]", _ZEROS),
    Mutant(
        "quantized: zeros of a channel without its rows",
        _LOOP,
        "jnp.sum(x, axis=1, keepdims=True) * zero",
        "zero",
        _ONE,
    ),
    Mutant("one row: zeros added", _LOOP, "y - total(", "y + total(", _ROW),
    Mutant("one row: halves swapped", _LOOP, "term, own, None]", "term, 1 - own, None]", _ROW),
    Mutant("one row: low half without its sign", _LOOP, "lax.shift_left(pairs, low), low)", "pairs, low)", _ROW),
    Mutant("one row: first scale for all groups", _LOOP, "sums * scale[0] if", "sums * scale[0][:1] if", _ROW),
    Mutant("quantized: last columns not reached", _LOOP, "-(-out_size // width)", "out_size // width", _FOUR),
    Mutant("quantized: first scale for all groups", _LOOP, "* scale[:, None] for", "* scale[:1, None] for", _FOUR),
    Mutant(
        "quantized: groups take turns",
        _SUMS,
        "own.reshape(rows, count, -1)",
        "own.reshape(rows, -1, count).swapaxes(1, 2)",
        _FOUR,
    ),
    Mutant("quantized: sums of groups without zeros", _SUMS, "return y - jnp.dot(", "return y + 0 * jnp.dot(", _ZEROS),
    Mutant("quantized: last widened columns not reached", _SUMS, "-(-out_size // width)", "out_size // width", _MANY),
    Mutant(
        "rounded rows: a group's scale for the next",
        _ROWS,
        "of_groups(self.scales,",
        "of_groups(jnp.roll(self.scales, 1, 1),",
        _ROUNDED,
    ),
    Mutant(
        "rounded rows: the matrix has a group's scale for the next",
        _SUMS,
        "scales.astype(jnp.float32)[..., None, :]",
        "jnp.roll(scales.astype(jnp.float32), 1, -2)[..., None, :]",
        _ROUNDED,
    ),
    Mutant("rounded rows: not in units of their columns", _SUMS, "y * units * rows.units", "y * rows.units", _ROUNDED),
    Mutant("quantized: widened without a scale", _SUMS, "y * scales.astype(jnp.float32)[:, None]", "y", _FOUR),
]
