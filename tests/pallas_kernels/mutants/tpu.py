"""Faults of the TPU attention kernel, its schedule and the arrangement around it."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant, attention

SECONDS = 40

_TPU = "attention/tpu/*"


def _on(*cases: str):
    return attention("tpu-lazy", "bfloat16", *cases)


def _eager(*cases: str):
    return attention("tpu-eager", "bfloat16", *cases)


_ANY = _on("mixed", "q tile straddles a kv block")
_BLOCKS = _on("block edges", "mixed")
_WINDOW = _on("window 16")
_CHUNKS = _on("chunks of 16")
_BLOCKS_IN_WINDOW = _on("window 400 of 900")
_HEADS = attention("tpu-production-lazy", "bfloat16", "production blocks")
_SINKS = _on("sinks and window")
_SUMS = attention("tpu-far-lazy", "bfloat16", "block edges", "mixed")
_CODES = _on("fp8 e4m3 keys and values")

MUTANTS = [
    Mutant(
        "wait dropped",
        _TPU,
        "        wait_for(refs, plan, segment, item, slot)\n",
        "",
        _on("mixed") + _eager("mixed"),
    ),
    Mutant(
        "start dropped",
        _TPU,
        "        _for_pages(plan, segment, item, start)",
        "        _for_pages(plan, segment, item, lambda base, index: None)",
        _ANY,
    ),
    Mutant(
        "buffer reused early",
        _TPU,
        "lax.rem(slot + buffers - 1, buffers)",
        "lax.rem(slot + buffers, buffers)",
        _on("mixed") + _eager("mixed"),
    ),
    Mutant(
        "first page of a block never fetched",
        _TPU,
        "            act(first, index)\n",
        "            act(first, max(index, 1))\n",
        _BLOCKS,
    ),
    Mutant(
        "copies past the last item",
        _TPU,
        "    @pl.when(item[0] < end)\n",
        "    @pl.when(item[0] <= end)\n",
        _ANY,
    ),
    Mutant("values of a page's first tile zeroed alone", _TPU, "tile * rows + word", "tile * 0 + word", _ANY),
    Mutant("page off by one", _TPU, "table[(first + base) + index]", "table[(first + base) + index + 1]", _ANY),
    Mutant(
        "last page dropped",
        _TPU,
        "pl.cdiv(segment.end_key, plan.page_size) - segment",
        "pl.cdiv(segment.end_key - 1, plan.page_size) - segment",
        _on("block edges", "page edges"),
    ),
    Mutant("causal sees one too many", _TPU, "segment.position + row + 1 if", "segment.position + row + 2 if", _ANY),
    Mutant("causal drops the last key", _TPU, "segment.position + row + 1 if", "segment.position + row if", _ANY),
    Mutant(
        "values of a latent eight columns late",
        _TPU,
        "first = 0 if spec.values_in_keys",
        "first = 8 if spec.values_in_keys",
        _on("latent mixed"),
    ),
    Mutant(
        "latents as far apart as keys and values are",
        _TPU,
        "return spec.head_dim if spec.values_in_keys else ",
        "return ",
        _on("latent of two kv heads"),
    ),
    Mutant(
        "keys of a block's first part for all",
        _TPU,
        "part.first_page : part.end_page, :,",
        "0 : part.end_page - part.first_page, :,",
        _on("latent decodes"),
    ),
    Mutant(
        "mask of a block's first part for all",
        _TPU,
        "visible[:, first_key : first_key + scores.shape[1]]",
        "visible[:, : scores.shape[1]]",
        _on("latent decodes"),
    ),
    Mutant(
        "last part with keys skipped", _TPU, "(live <= count, count", "(live <= count + 1, count", _on("latent decodes")
    ),
    Mutant(
        "queries of a tile's first tokens for all",
        _TPU,
        "ref[part.first_row // plan.group : part.end_row // plan.group, part.head]",
        "ref[: (part.end_row - part.first_row) // plan.group, part.head]",
        _on("latent mixed"),
    ),
    Mutant(
        "queries of a tile's first heads for all",
        _TPU,
        "ref[part.head, part.first_row // plan.block_q : part.end_row // plan.block_q]",
        "ref[part.head, : (part.end_row - part.first_row) // plan.block_q]",
        _on("production 8/1 heads of 128, pages of 16"),
    ),
    Mutant(
        "mask of a tile's first tokens for all",
        _TPU,
        "condition[part.first_row // plan.group : part.end_row // plan.group, None]",
        "condition[: (part.end_row - part.first_row) // plan.group, None]",
        _on("latent mixed"),
    ),
    Mutant(
        "end of a latent's queries out of place",
        _TPU,
        "pieces.append(jnp.zeros(",
        "pieces.insert(1, jnp.zeros(",
        attention("tpu-production-lazy", "bfloat16", "production 16/1 heads of 576, pages of 64"),
    ),
    Mutant("window one too wide", _TPU, "key >= end - spec.window", "key >= end - spec.window - 1", _WINDOW),
    Mutant("window one too narrow", _TPU, "key >= end - spec.window", "key > end - spec.window", _WINDOW),
    Mutant("borders inside a tile ignored", _TPU, ">= border, border, starts)", ">= border, starts, starts)", _CHUNKS),
    Mutant("chunk of the last row ignored", _TPU, "+ plan.block_q - 1) // chunk", ") // chunk", _on("chunks of 400")),
    Mutant(
        "window starts a page late",
        _TPU,
        "first_key // page_size, seq.shape)",
        "-(-first_key // page_size), seq.shape)",
        _WINDOW,
    ),
    Mutant(
        "block taken as whole too early",
        _TPU,
        "segment.position + 1 if plan.spec.causal",
        "segment.position + plan.block_q if plan.spec.causal",
        _ANY,
    ),
    Mutant(
        "window ignored for whole blocks",
        _TPU,
        "        whole &= first_key >= segment.position + plan.block_q - plan.spec.window\n",
        "        pass\n",
        _BLOCKS_IN_WINDOW,
    ),
    Mutant(
        "scores of the first head for all heads",
        _TPU,
        "part: _scores(refs, plan, slot, sub, part, visible)",
        "part: _scores(refs, plan, slot, sub, phase[0], visible)",
        _HEADS,
    ),
    Mutant("stale values past the end", _TPU, "(word + row < high)", "(word + row < high + 1)", _ANY),
    Mutant("stale values before the window", _TPU, "(word + row >= low) & ", "", _WINDOW),
    Mutant(
        "another sequence's rows join",
        _TPU,
        "key < jnp.where(member, end, 0)",
        "key < end",
        _on("single tokens behind runs", "mixed"),
    ),
    Mutant(
        "wrong key head",
        _TPU,
        "keys = _operand(refs, plan, slot, window, part)",
        "keys = _operand(refs, plan, slot, plan.keys[0], part)",
        _ANY,
    ),
    Mutant("last heads not folded", _TPU, "(*plan.phases[:parts], ())", "plan.phases[:parts]", _ANY),
    Mutant(
        "keys read as values",
        _TPU,
        "        window = plan.values[part.head]\n        values",
        "        window = plan.keys[part.head]\n        values",
        _on("dims (128, 128)"),
    ),
    Mutant("scale dropped", _TPU, "*= refs.logit_scale[part.head]", "*= refs.logit_scale[0] * 0 + 1", _ANY),
    Mutant("scale of keys dropped", _TPU, "else scale * kv.k_scale)", "else scale)", _CODES),
    Mutant("scale of values dropped", _TPU, " * refs.value_scale[head]", "", _CODES),
    Mutant("decay dropped", _TPU, "_across(decay[part], window.size) * refs.acc", "refs.acc", _BLOCKS),
    Mutant("denominator not decayed", _TPU, "= decay[part] * refs.total", "= refs.total", _BLOCKS),
    Mutant("sums counted twice", _TPU, "jnp.where(lane == 0, 1.0, 0.0)", "jnp.where(lane < 2, 1.0, 0.0)", _SUMS),
    Mutant("sums of the values' columns", _TPU, "product[:, window.size :]", "product[:, :LANES]", _SUMS),
    Mutant("state not reset", _TPU, "        refs.total[...] = jnp.zeros_like(refs.total)\n", "", _ANY),
    Mutant("sink counted twice", _TPU, "+ jnp.exp2(sink - with_sink)", "+ 2 * jnp.exp2(sink - with_sink)", _SINKS),
    Mutant("sinks of the wrong heads", _TPU, "member == index, refs", "member == index + 1, refs", _SINKS),
    Mutant("log-sum-exp in base 2", _TPU, "largest / LOG2E + jnp.log", "largest + jnp.log", _ANY),
    Mutant("soft cap not scaled back", _TPU, "* (cap * LOG2E)", "* LOG2E", _on("soft cap 30")),
    Mutant("tree bits shifted", _TPU, "word, bit & 31", "word, (bit + 1) & 31", _on("tree branches")),
    Mutant("padding tiles not zeroed", _TPU, "        refs.o[...] = jnp.zeros_like(refs.o)\n", "", _ANY),
]
