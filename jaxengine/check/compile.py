"""Process that compiles for one target: reads a request and writes a line of JSON for each event.

Run as `python -m jaxengine.check.compile`. Each target has its own process: Mosaic GPU caches kernels without regard to
it, and a compiler may abort. Standard output carries the replies; the compilers' own output goes to the log that the
request names, from which figures are read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxengine.check import inspect, judge
from jaxengine.check.compiled import counts, cycles, exchanges, hlo
from jaxengine.check.devices import target_devices
from jaxengine.check.model.code import layers_with_code
from jaxengine.check.model.drafts import accepted_states, drafting, drafts, settled
from jaxengine.check.model.programs import CheckedProgram, StagePrograms, open_stages
from jaxengine.check.model.shapes import model_config
from jaxengine.check.model.towers import encoders
from jaxengine.check.targets import Target, find_target
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.cache import plain_cards, platform_of
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.kernel_rows import PLATFORM_OF_OPTION
from jaxengine.runner.base.garbage import few_collections
from jaxengine.runner.base.memory import (
    MemoryPlan,
    StageNeeds,
    device_memory,
    held_bytes,
    kept_bytes,
    plan_memory,
)
from jaxengine.runner.executables.cache import compile_program

Reply = Callable[[dict[str, Any]], None]

# Weights beyond this share of a device leave too little memory for pages.
_MOST_WEIGHTS = 0.85


class TooSmall(Exception):
    """Error of a model that does not fit into the memory of the target's devices."""


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """Request to the compiling process.

    Attributes:
      target: name of the target, as find_target parses it.
      model: name or path, as model_config parses it.
      options: fields of EngineConfig.
      kernels: kernels to use instead of the target's own, a key of PLATFORM_OF_OPTION.
      short: compile only the corners of the bucket grid.
      skip: programs that an earlier process compiled, or in which it died.
      log: file that receives the compiler's output.
      dumps: folder that receives the compiler's dumps.
      only: compile the programs whose name contains it; makes no memory plan if the number of pages is given.
      needs_only: compile only the programs that determine the memory needs of each stage, reply with these, and end.
      profile: compile blocks of kernels, of which libtpu writes a profile, instead of programs.
      num_pages, planned_bytes, planned_held: the memory plan of an earlier process; None to make one. The latter two
        are per stage: bytes planned for one program, and bytes that all loaded programs hold.
    """

    target: str
    model: str
    options: dict[str, Any]
    kernels: str | None
    short: bool
    skip: list[str]
    log: str
    dumps: str
    only: str = ""
    needs_only: bool = False
    profile: bool = False
    num_pages: int | None = None
    planned_bytes: list[int] | None = None
    planned_held: list[int] | None = None


class StagePlan(NamedTuple):
    """Memory plan of a pipeline stage.

    Attributes:
      of_all: plan of the stage with all its layers.
      beside: bytes that the largest compiled forward pass takes in addition to weights and pages.
      held: bytes that all compiled programs hold while loaded.
    """

    of_all: MemoryPlan
    beside: int
    held: int


class Compiler:
    """Compiler of a request's programs, one after another.

    Attributes:
      request: what to compile.
      target: device that programs are compiled for.
      stages: pipeline stages with the layers to compile.
    """

    def __init__(self, request: CompileRequest, reply: Reply):
        """Read the model's configuration and open its stages on the target's devices.

        request: what to compile; its file `log` must exist. reply: called with each message. Raises ConfigError for an
        unknown target, and for options that an engine refuses, and jax's errors if the target's compiler is missing.
        """
        self.request = request
        self.target: Target = find_target(request.target)
        self._devices = target_devices(self.target)
        self._reply = reply
        self._figures_of_kernels: dict[str, dict[str, int | None]] = {}
        self._config = EngineConfig(**request.options)
        own = platform_of(self._devices[0])
        self._platform = PLATFORMS[PLATFORM_OF_OPTION[request.kernels] if request.kernels else own]
        self._model = self._read(whole=False)
        config = settled(self._config, self._model)
        self.stages = open_stages(self._model, config, self._platform, self._devices)

    def _read(self, *, whole: bool) -> ModelConfig:
        """Return the configuration of the request's model, with all its layers if `whole`, else with those to compile.
        Raises ConfigError for a name that is no model, and for another quantization than the model's.
        """
        asked, keep_tables = self.request.options.get("quantization"), self._platform.keeps_tables
        return model_config(self.request.model, asked, whole=whole, keep_tables=keep_tables)

    @cached_property
    def whole(self) -> list[StagePrograms]:
        """Stages with all layers, for which memory is planned; computed once.

        They are `stages` itself unless only the first few layers are compiled. Raises ConfigError for options that an
        engine refuses.
        """
        if (model := self._read(whole=True)) == self._model:
            return self.stages
        config = dataclasses.replace(settled(self._config, model), pipeline_layers=None)
        return open_stages(model, config, self._platform, self._devices)

    def run(self) -> None:
        """Plan the memory, then compile all programs that are not to be skipped, with a reply for each.

        A plan in the request is used instead of a new one. Nothing is planned either (0 bytes) if only some programs
        are asked for and the number of pages is given. Replies are "plan", "programs" (the names), then "start" and
        "row" for each program. With `needs_only` the only reply is "needs", the memory needs of each stage. Raises
        TooSmall if the model does not fit into the target, ConfigError for options that an engine refuses. A compiler's
        error becomes a row, except while memory is planned, where it is raised.
        """
        request = self.request
        if request.needs_only:
            needs = [self._stage_needs(*each)[0] for each in zip(self.stages, self.whole, strict=True)]
            self._reply({"event": "needs", "needs": [[each.programs, each.workspace] for each in needs]})
            return
        num_pages, planned, held = request.num_pages, request.planned_bytes, request.planned_held
        given = request.options.get("num_gpu_blocks_override")
        plans: list[StagePlan] = []
        if request.only and given is not None and planned is None:
            num_pages, planned, held = given, [0] * len(self.stages), [0] * len(self.stages)
        if num_pages is None or planned is None or held is None:
            plans = [self._plan(*each) for each in zip(self.stages, self.whole, strict=True)]
            num_pages = min(plan.of_all.num_pages for plan in plans)
            planned = [
                stage.weight_bytes + plan.beside + num_pages * stage.page_bytes
                for plan, stage in zip(plans, self.stages, strict=True)
            ]
            held = [plan.held for plan in plans]
        self._reply({"event": "plan", "num_pages": num_pages, "planned_bytes": planned, "planned_held": held})
        todo = [
            (program, number)
            for number, stage in enumerate(self.stages)
            for program in self._programs(stage, num_pages)
            if program.name not in request.skip and request.only in program.name
        ]
        self._reply({"event": "programs", "names": [program.name for program, _ in todo]})
        for program, number in todo:
            self._reply({"event": "start", "name": program.name})
            row = self.row(program, planned[number]) | {"stage": number, "planned_held": held[number]}
            if plans and program.is_largest:
                row["plan"] = self._plan_row(plans[number].of_all, self.whole[number])
            self._reply({"event": "row", "row": row})

    def _programs(self, stage: StagePrograms, num_pages: int) -> Iterator[CheckedProgram]:
        """Yield the programs of a stage, with a pool of `num_pages` pages. With the request's `profile` it yields only
        blocks of kernels, and nothing for stages after the first.

        Kernels by themselves (of the first stage only) come first, because Mosaic GPU prints a kernel's figures only
        once per process.
        """
        if self.request.profile:
            yield from stage.blocks() if stage is self.stages[0] else ()
            return
        for bucket in stage.buckets(short=True) if stage is self.stages[0] else ():
            yield from stage.kernels(bucket, num_pages)
        for bucket in stage.buckets(self.request.short):
            yield stage.forward(bucket, num_pages)
        for name, size in stage.epilogues(self.request.short):
            yield stage.epilogue(name, size, num_pages)
        yield from drafts(stage, num_pages, short=self.request.short)
        yield from encoders(stage, short=self.request.short)
        yield from accepted_states(stage, short=self.request.short)

    def _plan(self, stage: StagePrograms, whole: StagePrograms) -> StagePlan:
        """Return a stage's memory plan, made as an engine makes it from its compiled programs. Compiles the largest
        ones.

        stage: with the layers that are compiled. whole: the same stage with all layers, to which the bytes held by
        programs are scaled. Raises TooSmall if the model does not fit; ConfigError instead if the number of pages is
        given or the target's memory is not known, except for weights alone that are too large for a known memory.
        """
        total, given = self.target.hbm_bytes, self.request.options.get("num_gpu_blocks_override")
        if total and whole.weight_bytes > _MOST_WEIGHTS * total:
            raise TooSmall(f"weights take {whole.weight_bytes >> 20:,} MiB of a device's {total >> 20:,} MiB")
        stage_needs, forward, held, of_others = self._stage_needs(stage, whole)
        own = drafting(whole)
        weights, page_bytes = whole.weight_bytes, whole.page_bytes
        if own is not None:
            weights, page_bytes = weights + own.weight_bytes, page_bytes + own.page_bytes
        try:
            plan = plan_memory(
                whole.config,
                total=total or device_memory(jax.devices()[0]) // self.target.num_devices,
                weights=weights,
                needs=stage_needs,
                page_bytes=page_bytes,
                windows=whole.windows,
                shared=self.target.num_devices if self.target.backend == "cpu" else 0,
            )
        except ConfigError as error:
            if total and given is None:
                raise TooSmall(str(error)) from None
            raise
        kept = stage.slot_bytes + stage.steps.memory().get("states", 0)
        return StagePlan(plan, forward["workspace_bytes"] + forward["code_bytes"] + kept, held + of_others)

    def _stage_needs(self, stage: StagePrograms, whole: StagePrograms) -> tuple[StageNeeds, dict[str, int], int, int]:
        """Compile the largest programs of a stage; return (StageNeeds, figures of the largest forward pass, bytes that
        all compiled forward passes hold, bytes that all other programs hold).

        stage: with the layers that are compiled. whole: the same stage with all layers, to which StageNeeds.programs is
        scaled.
        """
        forward, held = self._needs(stage.forward(stage.largest, stage.num_columns))
        held, of_others, beside = held * len(stage.buckets(short=False)), 0, 0
        sizes = stage.epilogues(short=False)
        for name, size in dict(stage.epilogues(short=True)).items():  # the largest of a name comes last
            epilogue, held_by_one = self._needs(stage.epilogue(name, size, stage.num_columns))
            of_others += held_by_one * sum(each == name for each, _ in sizes)
            beside = max(beside, stage.forwarded_bytes(name, size) + epilogue["workspace_bytes"])
        others = drafts(stage, stage.num_columns, short=True), encoders(stage, short=True)
        for program in (*others[0], *others[1], *accepted_states(stage, short=True)):
            found, held_by_one = self._needs(program)
            beside, of_others = max(beside, found["workspace_bytes"]), of_others + held_by_one
        counts = (layers_with_code(self.target.backend, len(each.model.stage.layers)) for each in (whole, stage))
        of_whole, of_stage = counts
        programs = held * of_whole // of_stage + of_others
        workspace = forward["workspace_bytes"] + beside + whole.slot_bytes
        own = drafting(whole)
        extensions = whole.steps.memory(() if own is None else (own.programs,))
        kept = kept_bytes(forward["workspace_bytes"]) + kept_bytes(beside)
        return StageNeeds(programs, workspace, extensions, kept), forward, held, of_others

    def _plan_row(self, plan: MemoryPlan, whole: StagePrograms) -> dict[str, Any]:
        """Return a memory plan as a dict for the report.

        It has MemoryPlan.parts (bytes by purpose); "total", "page_bytes", "page_size", "num_pages", "pages_per_seq" and
        "max_model_len" of the plan; "num_requests", how many requests of max_model_len tokens fit, to one decimal;
        "layers", their number; "windows" of the cache groups; and "ranks", the number of replicas. whole: the stage
        with all its layers.
        """
        found = {"layers": len(whole.model.stage.layers), "windows": list(whole.windows), **plan.parts}
        names = ("total", "page_bytes", "page_size", "num_pages", "pages_per_seq", "max_model_len")
        found |= {name: getattr(plan, name) for name in names}
        return found | {"num_requests": round(plan.num_requests, 1), "ranks": whole.model.mesh.num_ranks}

    def _needs(self, program: CheckedProgram) -> tuple[dict[str, int], int]:
        """Compile a program; return (its figures from `inspect.memory`, bytes that it holds while loaded).

        Replies with a "start" message first. Unlike `row`, it raises the compiler's errors.
        """
        self._reply({"event": "start", "name": f"memory plan, {program.name}"})
        read_from = Path(self.request.log).stat().st_size
        compiled, _ = self._compile(program)
        if self.target.backend == "cuda":
            self._kernel_figures(program, read_from)
        memory = inspect.memory(compiled)
        stored = 0 if memory["code_bytes"] else len(inspect.serialized(compiled))
        return memory, held_bytes(memory["code_bytes"], stored, self.target.backend)

    def row(self, program: CheckedProgram, planned: int) -> dict[str, Any]:
        """Compile a program and return its row of figures, with a text for everything wrong with it in "failures".

        The row has "target", "program", "step" (whether it is one), "planned_bytes" and "hbm_bytes"; the keys of
        `inspect.memory`; "copies", "collectives", "exchanges", "exchanged_bytes", "wrong_exchanges", "operations",
        "moved_bytes", "attention_kernels", "serialized_bytes", "held_bytes" and "compile_s". What the program's parts
        need is in "needs" and "dtype" (products), "experts", and "attentions" and "latent_bytes" (kernels of
        attention); "roofline_us" is there if the target's speed is known. TPUs add "fast_bytes", and "block" and
        "cycles" for a block; CUDA devices add "launches", "layer_launches" and the keys of `inspect.mosaic_gpu`.
        planned: bytes that the memory plan grants it on a device. A compiler's error becomes the row's "error"; the
        figures after it are then missing. Raises OSError without the log.
        """
        row: dict[str, Any] = {
            "target": self.target.name,
            "program": program.name,
            "step": program.is_step,
            "planned_bytes": planned,
            "hbm_bytes": self.target.hbm_bytes,
        }
        if program.products is not None:
            most = max(program.work.flops, program.products.flops)
            row["needs"] = {"operations": most, **dataclasses.asdict(program.products)}
            row["dtype"] = program.dtype
        if program.experts is not None:
            row["experts"] = program.experts._asdict()
        if program.num_attentions and self.request.kernels is None:
            row |= {"attentions": program.num_attentions, "latent_bytes": program.latent_bytes}
        if self.target.flops:
            row["roofline_us"] = program.work.seconds(self.target.hbm_bandwidth, self.target.flops) * 1e6
        read_from = Path(self.request.log).stat().st_size
        try:
            compiled, row["compile_s"] = self._compile(program)
            text = inspect.program_text(compiled, self._dumps())
            module = hlo.parse(text)
            row |= inspect.memory(compiled)
            row["copies"] = hlo.copies(module, program.must_not_copy)
            found = exchanges.exchanges(module)
            row |= {"collectives": exchanges.counts(found), "exchanges": exchanges.by_place(found)}
            row["exchanged_bytes"] = exchanges.exchanged_bytes(found)
            row["wrong_exchanges"] = [] if program.expected is None else exchanges.wrong(found, program.expected)
            row["operations"] = counts.operations(module)
            row["moved_bytes"] = counts.moved_bytes(module, program.must_not_copy.pools)
            row["attention_kernels"] = hlo.attending_places(module)
            if self.target.backend == "tpu":
                row["fast_bytes"] = inspect.vmem_bytes(text)
                if (on_device := inspect.device_bytes(Path(self.request.dumps))) is not None:
                    least = row["argument_bytes"] + row["workspace_bytes"]
                    row["peak_bytes"] = max(least, on_device) + row["code_bytes"]
            if program.block is not None:
                sizes = program.block.sizes[0]
                row["block"] = {"name": program.block.name, "trips": program.block.trips}
                row["block"] |= {"tokens": sizes.block_q, "keys": sizes.block_kv}
                row["cycles"] = cycles.read(Path(self.request.dumps), module)
            if self.target.backend == "cuda":
                row["launches"], row["layer_launches"] = counts.launches(module), counts.launches(module, "layer_1")
                row |= self._kernel_figures(program, read_from)
            payload = inspect.serialized(compiled)
            row["serialized_bytes"] = len(payload)
            row["held_bytes"] = held_bytes(row["code_bytes"], len(payload), self.target.backend)
        except Exception as error:  # a compiler error is a finding; its classes are jaxlib's
            row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        row["failures"] = judge.failures(row, self.target, planned, is_largest=program.is_largest)
        return row

    def _kernel_figures(self, program: CheckedProgram, read_from: int) -> dict[str, int | None]:
        """Return the largest figures of a program's kernels, from this compilation's log and from the program's earlier
        compilation.

        read_from: offset in the log, in bytes, where this compilation's output begins. A figure that neither has is
        None. Both are needed because each kernel's figures are printed only once per process; they are stored by
        program.
        """
        text = Path(self.request.log).read_bytes()[read_from:].decode(errors="replace")
        found = inspect.mosaic_gpu(text)
        before = self._figures_of_kernels.setdefault(program.name, found)
        both = {name: [each for each in (found[name], before[name]) if each is not None] for name in found}
        return {name: max(found, default=None) for name, found in both.items()}

    def _compile(self, program: CheckedProgram) -> tuple[Any, float]:
        """Empty the folder of dumps and compile a program for the target; return (compiled program, seconds)."""
        shutil.rmtree(self.request.dumps)  # dumps found afterwards belong to this program
        for folder in ("", cycles.PROFILE):
            Path(self.request.dumps, folder).mkdir()
        start = time.perf_counter()
        with jax.set_mesh(program.mesh):
            traced = jax.jit(program.function, donate_argnums=program.donate).trace(*program.arguments)
            lowered = traced.lower(lowering_platforms=(self.target.backend,))
            compiled = compile_program(lowered, self.target.backend)
        return compiled, time.perf_counter() - start

    def _dumps(self) -> Path | None:
        """Return the folder of the compiler's dumps for a TPU, None for other targets."""
        return Path(self.request.dumps) if self.target.backend == "tpu" else None


def main() -> int:
    """Serve the request on standard input: write replies to standard output, and the compilers' output to standard
    error.

    Returns 0. A model or option that is refused (TooSmall, ConfigError) is a reply too; other errors are raised.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")

    request = CompileRequest(**json.load(sys.stdin))
    try:
        with few_collections(), plain_cards() if request.kernels == "xla" else nullcontext():
            Compiler(request, reply).run()
    except TooSmall as error:
        reply({"event": "refused", "reason": str(error), "too_small": True})
    except ConfigError as error:
        reply({"event": "refused", "reason": str(error), "too_small": False})
    return 0


if __name__ == "__main__":
    sys.exit(main())
