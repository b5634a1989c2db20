"""Faults of attention as machine code."""

from __future__ import annotations

from importlib.util import find_spec

from tests.pallas_kernels.mutants.mutant import Mutant, attention

SECONDS = 60
UNLESS = "" if find_spec("llvmlite") else "llvmlite is not installed"

_CODE, _ATTEND, _COPIES, _PRODUCTS, _SOFTMAX = (
    f"attention/native/{name}" for name in ("code", "attend", "copies", "products", "softmax")
)


def _on(*cases: str, dtype: str = "float32"):
    return attention("native", dtype, *cases)


_INT8, _FP8, _E5M2 = (
    _on("int8 keys and values"),
    _on("fp8 e4m3 keys and values"),
    _on("fp8 e5m2 keys and values"),
)
_OF_TOKENS, _CAP = _on("int8 of each token"), _on("soft cap 30")
_ANY = _on("mixed", "q tile straddles a kv block")
_BF16 = _on("mixed", dtype="bfloat16")
_WORDS = _on("mixed", "q tile straddles a kv block", dtype="bfloat16")
_TRIMMED = _on("infinite unseen slots", "window on both sides", dtype="bfloat16")
_LONG = _on("one long among many short")
_WINDOW, _SINKS, _STALE = (
    _on("window 400 of 900"),
    _on("sinks and window"),
    _on("sinks and window", "infinite unseen slots"),
)

MUTANTS = [
    Mutant("first key of a block for all chunks", _PRODUCTS, "(4 * LANES * (first + chunk),))", "(0,))", _ANY),
    Mutant("products of the first row for all", _PRODUCTS, "logits, 4 * (row * BLOCK", "logits, 4 * (0 * BLOCK", _ANY),
    Mutant("keys that are not transposed", "native/transpose", "lane // 2 + LANES * (lane % 2)", "lane", _ANY),
    Mutant("odd elements as even ones", _COPIES, "b.and_(words, each_lane(-65536)) if index else ", "", _BF16),
    Mutant(
        "bfloat16 in the low half",
        _COPIES,
        "if index else b.shl(words, each_lane(16))",
        "if index else words",
        _BF16,
    ),
    Mutant(
        "last key of a token dropped",
        _SOFTMAX,
        'b.icmp_signed("<", key, ends[1])',
        'b.icmp_signed("<=", b.add(key, each_lane(2)), ends[1])',
        _ANY,
    ),
    Mutant("a key too many", _SOFTMAX, 'b.icmp_signed("<", key, ends[1])', 'b.icmp_signed("<=", key, ends[1])', _ANY),
    Mutant(
        "all keys of a block in part",
        _SOFTMAX,
        'b.icmp_signed(">=", end, I64(CHUNKS * LANES))',
        'b.icmp_signed(">=", end, I64(LANES))',
        _ANY,
    ),
    Mutant(
        "all keys of a block from before a window",
        _SOFTMAX,
        'b.icmp_signed("<=", first, I64(0))',
        'b.icmp_signed("<=", first, I64(LANES))',
        _WINDOW,
    ),
    Mutant(
        "keys before a window",
        _SOFTMAX,
        'b.icmp_signed(">=", key, ends[0])',
        'b.icmp_signed(">=", b.add(key, each_lane(1)), ends[0])',
        _WINDOW,
    ),
    Mutant(
        "no scale",
        _SOFTMAX,
        "b.read(row, 4 * LANES * chunk, FLOATS), scale)",
        "b.read(row, 4 * LANES * chunk, FLOATS), each_lane(1.0))",
        _ANY,
    ),
    Mutant("old sums do not decay", _PRODUCTS, "FLOATS), factors[at // vectors])", "FLOATS), each_lane(1.0))", _LONG),
    Mutant(
        "the old total does not decay",
        _SOFTMAX,
        "b.fmul(b.read(total, 0, F32), factor)",
        "b.read(total, 0, F32)",
        _LONG,
    ),
    Mutant(
        "values before a window",
        _PRODUCTS,
        "with b.loop(begin, end, 1, start)",
        "with b.loop(I64(0), end, 1, start)",
        _STALE,
    ),
    Mutant(
        "largest of the first chunk",
        _SOFTMAX,
        "functools.reduce(functools.partial(_larger, b), logits)",
        "logits[0]",
        _on("large logits"),
    ),
    Mutant("largest of half of the lanes", _SOFTMAX, "step = LANES // 2", "step = LANES // 4", _on("large logits")),
    Mutant("weights of the first row", _PRODUCTS, "(4 * BLOCK * row,)", "(0,)", _ANY),
    Mutant("decay of the first row", _PRODUCTS, "b.read(decay, 4 * row, F32)", "b.read(decay, 0, F32)", _LONG),
    Mutant(
        "the rest of a value left out",
        _PRODUCTS,
        "for vectors in (self.at_once, 1):",
        "for vectors in (self.at_once,):",
        _ANY,
    ),
    Mutant("no sinks", _CODE, "b.select(has_sink, F32(1.0), F32(0.0))", "F32(0.0)", _SINKS),
    Mutant(
        "sinks of the first heads",
        _CODE,
        "b.total((self._head, group), (b.srem(row, group),))",
        "b.srem(row, group)",
        _SINKS,
    ),
    Mutant(
        "first page for all keys",
        _CODE,
        '(self._seq, own["columns"], 4), (column, 4)',
        '(self._seq, own["columns"], 4)',
        _ANY,
    ),
    Mutant("first row of the page table", _CODE, '(self._seq, own["columns"], 4)', '(0, own["columns"], 4)', _ANY),
    Mutant(
        "first KV head",
        _CODE,
        'tile = b.total((page, own["kv_heads"]), (self._head,))',
        'tile = b.total((page, own["kv_heads"]))',
        _ANY,
    ),
    Mutant("keys as values", _CODE, 'b.total((own["page_size"], own["key_bytes"]), (within', "b.total((within", _ANY),
    Mutant(
        "logits capped twice as high",
        _SOFTMAX,
        "b.all_lanes(b.fdiv(scale, cap)), b.all_lanes(cap)",
        "b.all_lanes(b.fdiv(scale, cap)), b.all_lanes(b.fadd(cap, cap))",
        _CAP,
    ),
    Mutant("capped logits scaled again", _CODE, "b.select(has_cap, F32(1.0), scale)", "scale", _CAP),
    Mutant("caps without sign", _SOFTMAX, "b.call(self._copysign, [tanh, x])", "tanh", _CAP),
    Mutant("tanh of half", _SOFTMAX, "each_lane(-2.0)", "each_lane(-1.0)", _CAP),
    Mutant("no caps", _ATTEND, "jnp.float32([spec.soft_cap or 0.0])", "jnp.float32([0.0])", _CAP),
    Mutant("codes without sign", _COPIES, "b.sitofp(b.ashr(", "b.sitofp(b.lshr(", _INT8),
    Mutant("first code of four", _COPIES, "each_lane(24 - 8 * index)", "each_lane(24)", _INT8),
    Mutant(
        "scales of keys as those of a head",
        _COPIES,
        "b.total((row_bytes, key), (num_bytes,))",
        "b.total((num_bytes,))",
        _OF_TOKENS,
    ),
    Mutant(
        "values of tokens are not scaled",
        _COPIES,
        "found = found if scale is None else b.fmul(found, scale)",
        "found = found",
        _OF_TOKENS,
    ),
    Mutant("rows without room for scales", _COPIES, "_SCALE_BYTES * self.has_scales", "0", _OF_TOKENS),
    Mutant("fp8 of another bias", _COPIES, "each_lane(256.0)", "each_lane(128.0)", _FP8),
    Mutant("fp8 without sign", _COPIES, "b.shl(b.and_(codes, each_lane(0x80)), each_lane(8))", "each_lane(0)", _FP8),
    Mutant(
        "e5m2 in the low byte",
        _COPIES,
        "each_lane(8 * index)), each_lane(8)",
        "each_lane(8 * index)), each_lane(0)",
        _E5M2,
    ),
    Mutant("scale of the first KV head", _CODE, 'own["scale"], b.mul(self._head, I64(4))', 'own["scale"], 0', _FP8),
    Mutant("scales of keys left out", _ATTEND, "scale if kv.k_scale is None else scale * kv.k_scale", "scale", _FP8),
    Mutant(
        "values' scales by query head",
        _ATTEND,
        "jnp.repeat(kv.v_scale, spec.group_size)",
        "jnp.tile(kv.v_scale, spec.group_size)",
        _INT8,
    ),
    Mutant("sums that are not divided", _CODE, "b.fdiv(found, divisor)", "found", _ANY),
    Mutant("exp without its power of two", _SOFTMAX, "b.fmul(found, power)", "power", _ANY),
    Mutant("exp of no rest", _SOFTMAX, "b.fsub(each_lane(_ROUNDING), rounded)", "each_lane(0.0)", _ANY),
    Mutant("words of the first chunk", _COPIES, "(first, I64(block))", "(first, I64(0))", _WORDS),
    Mutant("keys of a word exchanged", _COPIES, "part in (lane, LANES + lane)", "part in (LANES + lane, lane)", _WORDS),
    Mutant("one key of a word for both", _COPIES, "(width, 2 * key)", "(width, 0)", _WORDS),
    Mutant(
        "pairs of keys in one place",
        _COPIES,
        "target, b.total((pair, width, 4), (first",
        "target, b.total((first",
        _WORDS,
    ),
    Mutant("first key of a word left as it is", _COPIES, "((begin, -65536), (end", "((end", _TRIMMED),
    Mutant("last key of a word left as it is", _COPIES, "(begin, -65536), (end, 65535)", "(begin, -65536),", _TRIMMED),
    Mutant("the wrong key of a word is cleared", _COPIES, "(begin, -65536)", "(begin, 65535)", _TRIMMED),
    Mutant("last word of keys left out", _PRODUCTS, "b.add(end, I64(self.per_word - 1))", "end", _WORDS),
    Mutant("weights of words as floats", _CODE, "*words, softmax.weigh_words", "*words, softmax.weigh", _WORDS),
    Mutant("queries of words as floats", _CODE, "Steps(2, copies", "Steps(4, copies", _WORDS),
    Mutant(
        "values of words as those of floats", _CODE, "per_word = 4 // self._steps.query_bytes", "per_word = 1", _WORDS
    ),
    Mutant(
        "later items left out", _CODE, 'b.mul(values["tiles_in_use"], values["kv_heads"])', 'values["kv_heads"]', _ANY
    ),
    Mutant(
        "later tiles of a sequence left out",
        _ATTEND,
        "(q_lens + block_q - 1) // block_q",
        "jnp.minimum(q_lens, 1)",
        _on("prefill longer than a tile"),
    ),
    Mutant(
        "tiles from the first token on",
        _ATTEND,
        "batch.cu_q_lens[seqs] + offset, counts",
        "batch.cu_q_lens[seqs], counts",
        _on("prefill longer than a tile"),
    ),
    Mutant(
        "padding is not cleared",
        _ATTEND,
        "jnp.where(valid[..., None], o, 0.0), jnp.where(valid, lse, -jnp.inf)",
        "o, lse",
        _ANY,
    ),
]
