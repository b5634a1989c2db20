"""Predictions of `jaxengine plan` and the roofline for this machine's devices, beside what an engine on them takes.

An 8B-shaped model with random weights, or a smaller one where that does not fit, split over all devices that can split
it. Rows of memory are bytes of one device; arrays must be as predicted, programs and temporaries are an estimate until
they are compiled. Rows of steps are milliseconds; the roofline is the least that a step can take, so what was measured
is a multiple of it. `ratio` is measured over predicted.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.engine_gpu import TINY, fitting, idle
from benchmarks.engines import engine_options, write_config
from benchmarks.harness import Option, shared
from benchmarks.kernels.attention import machine
from benchmarks.recorder import Recorder
from jaxengine.results import table

OPTIONS = {"num_devices": Option(0, "devices to use, a power of two; 0 for all")} | shared(budget_s=1e9, tiny=False)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its load.

    Attributes:
      model: values of benchmarks.engines.SIZES.
      prompt: tokens of a prompt.
      seqs: sequences at once.
      chunk: tokens of a step with prompts.
      steps: steps that are timed.
    """

    model: tuple[int, ...]
    prompt: int
    seqs: int
    chunk: int
    steps: int


def run(args: Namespace, recorder: Recorder) -> None:
    recorder.describe = machine
    recorder.resume()
    if recorder.named("decode step") is None:  # an engine lives in one process: its rows are measured together
        recorder.rows = []
        with tempfile.TemporaryDirectory() as folder:
            measure(args, recorder, folder)
    print(f"\n{compared(recorder.rows)}", flush=True)


def compared(rows: list[dict[str, Any]]) -> str:
    """Return a text table of the rows: what was predicted, what was measured, and their ratio."""
    return table([{name: "-" if value is None else value for name, value in row.items()} for row in rows])


def row(unit: str, predicted: float | None, measured: float, *, exact: bool = False) -> dict[str, Any]:
    """Return the columns of a row; "ratio" is measured over predicted, None without a prediction.

    unit: of both numbers. predicted: None if nothing predicts the number. exact: "kept" is False unless both are equal.
    The ratio is rounded to three digits.
    """
    found = {"unit": unit, "predicted": predicted, "measured": measured}
    found["ratio"] = round(measured / predicted, 3) if predicted else None
    return found | {"kept": not exact or measured == predicted}


def measure(args: Namespace, recorder: Recorder, folder: str) -> None:
    """Plan and start an engine of the chosen size, and add a row for each prediction.

    folder: an empty one, to which the model's config.json is written.
    """
    import jax

    from jaxengine import LLM
    from jaxengine.config.engine_config import EngineConfig
    from jaxengine.plan.fit import chips_of
    from jaxengine.plan.model import open_planned
    from jaxengine.plan.plan import Split, plan_split, platform_for
    from jaxengine.runner.base.memory import device_memory

    devices = jax.devices()[: num_devices(args.num_devices, jax.device_count())]
    chips = chips_of(devices)
    memory_of_all = chips.count * (chips.chip.memory or device_memory(devices[0]))
    sizes = Sizes(TINY, 12, 2, 16, 4) if args.tiny else Sizes(fitting(memory_of_all), 512, 64, 2048, 64)
    write_config(folder, sizes.model, rope_theta=500000.0)
    options: dict[str, Any] = {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": sizes.prompt + 4 * sizes.steps,
        "max_num_seqs": sizes.seqs,
        "max_num_batched_tokens": sizes.chunk,
        "enable_prefix_caching": False,
        "tensor_parallel_size": chips.count,
        **({"compile_cache_dir": ""} if args.tiny else {}),
        **engine_options((sizes.seqs,), (sizes.chunk,)),
    }
    planned = open_planned(EngineConfig(**options), platform_for(chips.chip))
    plan = plan_split(planned, chips, Split(tensor=chips.count))
    planned.close()
    llm = LLM(devices=devices, **options)
    for name, columns in {**memory(plan, llm.core.runner), **steps(plan, llm, sizes)}.items():
        recorder.add({"name": name, **columns})
    llm.shutdown()


def num_devices(asked: int, here: int) -> int:
    """Return `asked`, or if it is 0 the largest power of two of the `here` devices, at most 8."""
    return asked or 1 << (min(here, 8).bit_length() - 1)


def memory(plan: Any, runner: Any) -> dict[str, dict[str, Any]]:
    """Return the rows of memory by name: the plan's bytes of one device, and the engine's arrays on its first device.

    Without a CPU there is one more row, of the bytes that the device says are in use.
    """
    import jax

    def held(arrays: Any) -> int:
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(arrays))

    (stage,), parts = runner.stages, plan.parts()
    slots = sum(parts.get(purpose, 0) for purpose in ("slots", "sampling"))
    state = held(stage._state)
    found = {
        "weights": row("bytes", parts["weights"], held(stage.params), exact=True),
        "KV pages": row("bytes", parts["pages"], held(stage.pages), exact=plan.num_pages == runner.plan.num_pages),
        "slots and sampling": row("bytes", slots, state, exact=True),
        "number of pages": row("pages", plan.num_pages, runner.plan.num_pages),
        "programs": row("bytes", parts.get("programs", 0), runner.plan.programs),
        "temporaries": row("bytes", parts.get("temporaries", 0), max(0, runner.plan.workspace - state)),
    }
    if not runner.on_cpu:
        found["in use, of arrays"] = row("bytes", plan.memory.planned - parts["temporaries"], runner.memory_in_use())
    return found


def steps(plan: Any, llm: Any, sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return the rows of decode steps by name: the roofline's least bytes and milliseconds, and those that were
    measured.

    There is no row of bytes if the compiler does not count them, and no predicted time without the chip's bandwidth.
    Numbers are rounded.
    """
    from jaxengine.check.model.roofline import step_work
    from jaxengine.scheduler.batches.buckets import Bucket

    chip, config, runner = plan.chips.chip, plan.config, llm.core.runner
    bucket = Bucket(sizes.seqs, sizes.seqs)
    work = step_work(plan.stages[0].programs.model, bucket, config.kv_cache_dtype, config.dtype, sizes.prompt)
    prompts = tuple(tuple(range(3, 3 + sizes.prompt)) for _ in range(sizes.seqs))
    timed = idle(llm, prompts, sizes.steps)
    least = work.seconds(chip.bandwidth, chip.flops) * 1e3 if chip.bandwidth else None
    found = {}
    (stage,) = runner.stages
    if (moved := accessed_bytes(stage._forwards.get(bucket))) is not None:
        found["bytes of a decode step"] = row("bytes", work.num_bytes, moved)
    found["decode step"] = row("ms", None if least is None else round(least, 3), timed["device_ms"])
    found["decode step in the engine's loop"] = row("ms", timed["device_ms"], timed["step_ms"])
    return found


def accessed_bytes(compiled: Any) -> int | None:
    """Return the bytes of memory that a compiled program accesses according to its cost analysis; None if it has
    none.
    """
    analysis = compiled.cost_analysis() if hasattr(compiled, "cost_analysis") else None
    accessed = (analysis or {}).get("bytes accessed")
    return None if accessed is None else int(accessed)
