"""The text and the JSON of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jaxengine.models.kernel_rows import plain_operations, why_no_kernels
from jaxengine.plan.chips import Chips
from jaxengine.plan.model import PlannedModel
from jaxengine.plan.plan import HEAP, LEFT, PROGRAMS, TEMPORARIES, SplitPlan
from jaxengine.plan.speed import Speed, cost_of
from jaxengine.plan.splits import Ranked
from jaxengine.runner.start.memory_bar import text_bar
from jaxengine.sharding.layout import MESH_AXES

MOST_ROWS = 12
_ESTIMATED = PROGRAMS, TEMPORARIES, HEAP  # unless they are compiled
_GIB, _MIB = 2**30, 2**20


def as_json(model: PlannedModel, chips: Chips, ranked: Sequence[Ranked], length: int, price: float | None) -> Any:
    """Return the plans of a model on chips as JSON values: the best split in full, all splits as rows.

    The keys are "chips", "fits", "error" (None if it fits), "length", "note", "file_bytes", "best" (`_json_of_plan`;
    None if it could not be planned) and "splits" (`_json_of_row`). ranked: plans of splits, the best first. length:
    tokens of a sequence to count. price: price of one device for an hour; None for no costs. Speeds and costs are
    included only where they are known.
    """
    best = ranked[0]
    return {
        "chips": str(chips),
        "fits": best.fits,
        "error": None if best.error is None else str(best.error),
        "length": length,
        "note": model.note,
        "file_bytes": model.file_bytes,
        "best": None if best.plan is None else _json_of_plan(best.plan, best.speed, chips, length, price),
        "splits": [_json_of_row(each, length) for each in ranked],
    }


def text(model: PlannedModel, chips: Chips, ranked: Sequence[Ranked], length: int, price: float | None) -> str:
    """Return the plans of a model on chips as lines of readable text.

    ranked: plans of splits, the best first. length: tokens of a sequence to count. price: price of one device for an
    hour; None for no costs.
    """
    return "\n".join(_lines(model, chips, ranked, length, price))


def _lines(
    model: PlannedModel, chips: Chips, ranked: Sequence[Ranked], length: int, price: float | None
) -> Iterator[str]:
    """Yield the lines of `text`, from the same arguments: whether the best split fits, or why not; kernels that are
    missing, and machine code that is left out; its memory, capacity and speed; bytes of the weight files and the note;
    a table of all splits if there are several.
    """
    best = ranked[0]
    flags = f" with {best.split.flags}" if best.split.flags else ""
    yield f"{chips}: {'fits' if best.fits else 'does not fit'}{flags}"
    if chips.chip.platform == "cuda" and (plain := plain_operations(chips.chip.compute_capability)):
        yield f"  no kernels for {plain} ({why_no_kernels(chips.chip.compute_capability)}): plain XLA runs instead"
    if chips.chip.platform == "cpu" and best.plan is not None and best.plan.estimated:
        yield "  estimates are of plain XLA, without the machine code of a start with jaxengine[cpu]"
    if best.error is not None:
        yield f"  {best.error}"
    if best.plan is not None:
        yield from _memory_lines(best.plan)
        if best.fits:
            yield from _capacity_lines(best.plan, length)
            yield from _speed_lines(best.plan, best.speed, length, price)
    if model.file_bytes:
        yield f"  weights on disk: {model.file_bytes / _GIB:.2f} GiB"
    if model.note:
        yield f"  note: {model.note}"
    if len(ranked) > 1:
        yield ""
        yield from _table_lines(ranked, length)


def _memory_lines(plan: SplitPlan) -> Iterator[str]:
    """Yield lines about the memory of a device of the tightest stage: a bar, MiB by purpose with estimates marked, the
    budget, and the sum in GiB.
    """
    parts, total = plan.parts(), plan.total
    stage = f", stage {plan.tightest + 1} of {len(plan.stages)}, which holds the most" if len(plan.stages) > 1 else ""
    yield f"  memory of a device{stage}:"
    yield text_bar(parts, total)
    guessed = dict.fromkeys(_ESTIMATED, "estimate") if plan.estimated else {}
    for purpose, size in parts.items():
        yield f"    {purpose:<20}{size / _MIB:>12,.1f} MiB{'   ' + guessed[purpose] if purpose in guessed else ''}"
    yield f"    {'budget':<20}{plan.budget / _MIB:>12,.1f} MiB"
    addends = " + ".join(f"{size / _GIB:.3f} {purpose}" for purpose, size in parts.items())
    share = f"{total / _GIB:.2f} GiB x {plan.config.gpu_memory_utilization:g}"
    exact = "" if plan.budget == int(total * plan.config.gpu_memory_utilization) else " less what jax keeps for holes"
    yield f"  {share}{exact} = {plan.budget / _GIB:.3f} GiB"
    yield f"    = {addends}"


def _capacity_lines(plan: SplitPlan, length: int) -> Iterator[str]:
    """Yield lines about the number and bytes of pages, bytes of a token, windows (if any), the longest context, how
    many sequences of `length` tokens fit at once, and the number of programs.
    """
    config, ranks = plan.config, plan.layout.num_ranks
    replicas = f" in each of {ranks} replicas" if ranks > 1 else ""
    each = f"{plan.page_bytes:,} bytes of a device each"
    yield f"  {plan.num_pages:,} pages of {config.block_size} tokens{replicas}, {each};"
    yield f"    {plan.kv_bytes_per_token:,} bytes of keys and values a token on all devices"
    windowed = [str(window) for window in plan.windows if window is not None]
    if windowed:
        yield f"  cache groups with windows of {', '.join(windowed)} keys give pages back behind them"
    yield f"  longest context that fits: {plan.longest:,} tokens (max_model_len {config.max_model_len:,})"
    held, slots = plan.pages_for_sequences(length), config.max_num_seqs * ranks
    limit = f"; max_num_seqs allows {slots:,}" if held > slots else ""
    yield f"  sequences of {length:,} tokens at once: {held:,}{limit}"
    yield f"  programs that a first start compiles: {plan.num_programs:,}"


def _speed_lines(plan: SplitPlan, speed: Speed | None, length: int, price: float | None) -> Iterator[str]:
    """Yield lines about the roofline's upper bounds: decoded and prompt tokens a second, milliseconds a token, bytes
    and operations of a step. With a price also the least cost of a million tokens. Nothing if `speed` is None.
    """
    if speed is None:
        return
    yield (
        f"  upper bound by the roofline: {speed.decode:,.0f} tokens a second decoded, by {speed.sequences:,} sequences "
        f"of {length:,} tokens,"
    )
    yield (
        f"    at least {speed.token_seconds * 1e3:.2f} ms a token (a device moves {speed.step_bytes / 1e9:.2f} GB and "
        f"does {speed.step_flops / 1e12:.3f} T operations a step);"
    )
    yield f"    {speed.prefill:,.0f} prompt tokens a second"
    if price is not None:
        count = plan.chips.count
        decode, prefill = (cost_of(rate, price, count) for rate in (speed.decode, speed.prefill))
        yield (
            f"  at {price:g} an hour for each device, a million tokens cost at least {decode:.4f} decoded, "
            f"{prefill:.4f} of prompts"
        )


def _table_lines(ranked: Sequence[Ranked], length: int) -> Iterator[str]:
    """Yield a table of the first MOST_ROWS splits: parallel sizes, weights and room for pages in GiB, longest context,
    sequences of `length` tokens and decoded tokens a second. A split that does not fit has "does not fit" for the last
    three, one that cannot be planned has its error. Further rows are only counted; a legend is last.
    """
    heads = "".join(f"{name:>11}" for name in ("weights", "left", "longest", "sequences", "decode/s"))
    yield f"  {'tp':>4}{'pp':>4}{'dp':>4}  {'ep':<4}{heads}"
    for each in ranked[:MOST_ROWS]:
        split, plan = each.split, each.plan
        sizes = f"  {split.tensor:>4}{split.pipeline:>4}{split.data:>4}  {'yes' if split.experts else 'no':<4}"
        if plan is None:
            yield f"{sizes}  {_short(each)}"
            continue
        row = _json_of_row(each, length)
        decode = f"{row['decode_tokens_per_second']:>11,.0f}" if each.speed is not None else f"{'-':>11}"
        held = "".join(f"{row[name] / _GIB:>7.1f} GiB" for name in ("weight_bytes", "page_room_bytes"))
        fits = f"{row['longest']:>11,}{row['sequences']:>11,}{decode}" if each.fits else "  does not fit"
        yield f"{sizes}{held}{fits}"
    if len(ranked) > MOST_ROWS:
        yield f"  and {len(ranked) - MOST_ROWS} more (--json)"
    yield f"  left: for pages, of a device; sequences: of {length:,} tokens; decode/s: upper bound of all devices"


def _short(each: Ranked) -> str:
    """Return the error of a split in at most 90 characters."""
    said = str(each.error)
    return said if len(said) <= 90 else f"{said[:87]}..."


def _json_of_row(each: Ranked, length: int) -> dict[str, Any]:
    """Return one split as a row of JSON values.

    The keys are its options, "fits" and "error" (None if it fits), then "weight_bytes" and "page_room_bytes" of one
    device of the tightest stage if it could be planned, "longest", "sequences" of `length` tokens and "num_pages" if it
    fits, and "decode_tokens_per_second" and "prefill_tokens_per_second" if its speed is known.
    """
    row = {**each.split.options, "fits": each.fits, "error": None if each.error is None else str(each.error)}
    if (plan := each.plan) is None:
        return row
    parts = plan.parts()
    room = sum(size for purpose, size in parts.items() if purpose in ("pages", "draft pages", LEFT))
    row |= {"weight_bytes": parts["weights"], "page_room_bytes": room}
    if each.fits:
        row |= {"longest": plan.longest, "sequences": plan.pages_for_sequences(length), "num_pages": plan.num_pages}
    if each.speed is not None:
        row |= {"decode_tokens_per_second": each.speed.decode, "prefill_tokens_per_second": each.speed.prefill}
    return row


def _json_of_plan(plan: SplitPlan, speed: Speed | None, chips: Chips, length: int, price: float | None) -> Any:
    """Return the plan of the best split in full, as JSON values.

    The keys are the split's options and "mesh"; of one device "device_bytes", "budget_bytes", "parts_bytes" (by
    purpose) and "estimated" (purposes whose bytes are an estimate); "stages" with "layers" and "arrays_bytes" (by
    purpose) each; "num_pages", "page_size" (tokens), "page_bytes" (of one device), "kv_bytes_per_token" (of all
    devices), "windows", "longest", "sequences" (of `length` tokens; 0 if the plan does not fit), "num_programs" and
    "options", the dtypes, limits and gpu_memory_utilization that were resolved. Where the speed is known there are also
    "decode_tokens_per_second", "prefill_tokens_per_second", "step_bytes", "step_flops" and "token_seconds", and with a
    price "cost_per_million_decoded" and "cost_per_million_prompt". price: price of one device for an hour; None for no
    costs.
    """
    config = plan.config
    found: dict[str, Any] = {
        **plan.split.options,
        "mesh": {axis: getattr(plan.layout, axis) for axis in MESH_AXES},
        "estimated": [name for name in _ESTIMATED if name in plan.parts()] if plan.estimated else [],
        "device_bytes": plan.total,
        "budget_bytes": plan.budget,
        "parts_bytes": plan.parts(),
        "stages": [
            {"layers": len(stage.programs.model.stage.layers), "arrays_bytes": stage.bytes_of(plan.num_pages)}
            for stage in plan.stages
        ],
        "num_pages": plan.num_pages,
        "page_size": config.block_size,
        "page_bytes": plan.page_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "windows": list(plan.windows),
        "longest": plan.longest,
        "sequences": plan.pages_for_sequences(length) if plan.memory is not None else 0,
    }
    names = ("dtype", "kv_cache_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    found["options"] = {name: getattr(config, name) for name in (*names, "gpu_memory_utilization")}
    found["num_programs"] = plan.num_programs
    if speed is not None:
        found |= {"decode_tokens_per_second": speed.decode, "prefill_tokens_per_second": speed.prefill}
        found |= {"step_bytes": speed.step_bytes, "step_flops": speed.step_flops, "token_seconds": speed.token_seconds}
        if price is not None:
            found["cost_per_million_decoded"] = cost_of(speed.decode, price, chips.count)
            found["cost_per_million_prompt"] = cost_of(speed.prefill, price, chips.count)
    return found
