"""The process that compiles for one target: reads a request, writes one JSON line for each thing that happens.

Run as `python -m jaxengine.check.compile`. A process serves one target: Mosaic GPU keeps kernels by their source and
not by their target, and a compiler that aborts takes no other target with it. Standard output belongs to the replies;
what compilers print goes to the log that the request names, where their figures are read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxengine.check import cycles, hlo, inspect, judge
from jaxengine.check.devices import target_mesh
from jaxengine.check.programs import Program, TargetPrograms
from jaxengine.check.shapes import model_config
from jaxengine.check.targets import Target, find_target
from jaxengine.config import PLATFORMS, ConfigError, EngineConfig
from jaxengine.executables import compile_program
from jaxengine.memory import MemoryPlan, device_memory, plan_memory
from models.kv_cache import platform_of

Reply = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Request:
    """What a process is asked to do.

    Attributes:
      options: fields of EngineConfig.
      platform: kernels to use instead of the target's own, a key of PLATFORMS.
      short: the corners of the bucket grid instead of all of it.
      skip: programs done or given up by an earlier process.
      log: file that receives what the compiler prints.
      dumps: folder that receives the compiler's dumps.
      bundle: folder for the executables.
      only: programs to compile, None for all.
      cycles: read what libtpu was told to leave of its schedules.
      num_pages, planned_bytes: the memory plan, known from an earlier process; None to make it.
    """

    target: str
    model: str
    options: dict[str, Any]
    platform: str | None
    short: bool
    skip: list[str]
    log: str
    dumps: str
    bundle: str | None
    only: list[str] | None = None
    cycles: bool = False
    num_pages: int | None = None
    planned_bytes: int | None = None


class Compiler:
    """Compiles the programs of a request one after the other."""

    def __init__(self, request: Request, reply: Reply):
        self.request = request
        self.target: Target = find_target(request.target)
        model = model_config(request.model)
        self.mesh = target_mesh(self.target, model.num_kv_heads)
        self._reply = reply
        device = self.mesh.devices.flat[0]
        config = EngineConfig(**request.options)
        platform = PLATFORMS[request.platform or platform_of(device)]
        self.programs = TargetPrograms(model, config, platform, self.mesh)

    def run(self) -> None:
        """Plans the memory, then compiles what is not to be skipped."""
        programs, request = self.programs, self.request
        num_pages, planned = request.num_pages, request.planned_bytes
        with jax.set_mesh(self.mesh):
            if num_pages is None or planned is None:
                plan = self._plan()
                num_pages, planned = plan.num_pages, plan.weights + plan.kv_bytes + plan.workspace
            self._reply({"event": "plan", "num_pages": num_pages, "planned_bytes": planned})
            # Kernels first: Mosaic GPU tells what it made of a kernel once in a process.
            alone = programs.buckets(short=True) if self.target.num_devices == 1 else []
            todo = [kernel for bucket in alone for kernel in programs.kernels(bucket, num_pages)]
            todo += [programs.step(bucket, num_pages) for bucket in programs.buckets(request.short)]
            todo = [program for program in todo if self._is_wanted(program)]
            self._reply({"event": "programs", "names": [program.name for program in todo]})
            for program in todo:
                self._reply({"event": "start", "name": program.name})
                self._reply({"event": "row", "row": self._row(program, planned)})

    def _is_wanted(self, program: Program) -> bool:
        only, name = self.request.only, program.name
        return name not in self.request.skip and (only is None or name in only)

    def _plan(self) -> MemoryPlan:
        """As the engine plans: the largest step's workspace is measured with a small pool."""
        programs = self.programs
        self._reply({"event": "start", "name": f"memory plan, {programs.largest}"})
        compiled, _ = self._compile(programs.step(programs.largest, programs.num_columns))
        return plan_memory(
            programs.config,
            total=self.target.hbm_bytes or device_memory(jax.devices()[0]),
            weights=programs.weight_bytes,
            workspace=inspect.memory(compiled)["workspace_bytes"] + programs.state_bytes,
            page_bytes=programs.page_bytes,
        )

    def _row(self, program: Program, planned: int) -> dict[str, Any]:
        row: dict[str, Any] = {
            "target": self.target.name,
            "program": program.name,
            "step": program.is_step,
            "planned_bytes": planned,
            "hbm_bytes": self.target.hbm_bytes,
        }
        if self.target.flops:
            seconds = program.work.seconds(self.target.hbm_bandwidth, self.target.flops) / self.target.num_devices
            row["roofline_us"] = seconds * 1e6
        log = Path(self.request.log)
        read_from = log.stat().st_size
        try:
            compiled, row["compile_s"] = self._compile(program)
            text = inspect.program_text(compiled, self._dumps())
            module = hlo.parse(text)
            row |= inspect.memory(compiled)
            row |= {"copies": hlo.copies(module, program.precious), "collectives": hlo.collectives(module)}
            if self.target.backend == "tpu":
                row["fast_bytes"] = inspect.vmem_bytes(text)
            if self.request.cycles:
                row |= cycles.read(Path(self.request.dumps), module)
            if self.target.backend == "cuda":
                row |= inspect.mosaic_gpu(log.read_bytes()[read_from:].decode(errors="replace"))
            payload = inspect.serialized(compiled)
            row["serialized_bytes"] = len(payload)
            if self.request.bundle is not None:
                row["file"] = self._store(program, payload)
        except Exception as error:  # a compiler's refusal is a finding; its classes are jaxlib's own
            row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        row["failures"] = judge.failures(
            row, self.target, planned, is_largest=program.is_step and program.bucket == self.programs.largest
        )
        return row

    def _compile(self, program: Program) -> tuple[Any, float]:
        shutil.rmtree(self.request.dumps)  # so that what is found there afterwards is this program's
        for folder in ("", cycles.LLO, cycles.PROFILE):
            Path(self.request.dumps, folder).mkdir()
        start = time.perf_counter()
        traced = jax.jit(program.function, donate_argnums=program.donate).trace(*program.arguments)
        compiled = compile_program(traced.lower(lowering_platforms=(self.target.backend,)), self.target.backend)
        return compiled, time.perf_counter() - start

    def _dumps(self) -> Path | None:
        return Path(self.request.dumps) if self.target.backend == "tpu" else None

    def _store(self, program: Program, payload: bytes) -> str:
        assert self.request.bundle is not None
        words = "".join(letter if letter.isalnum() else "-" for letter in program.name).replace("--", "-")
        name = f"{self.target.name}-{words}.xla"
        (Path(self.request.bundle) / name).write_bytes(payload)
        return name


def main() -> int:
    """Serves the request on standard input."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")

    request = Request(**json.load(sys.stdin))
    try:
        Compiler(request, reply).run()
    except ConfigError as error:
        reply({"event": "refused", "reason": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
