"""What a compiled program tells of itself: memory, on-chip memory, registers, size.

Knows compiled programs and the texts their compilers leave behind; nothing of targets' limits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jax.experimental import serialize_executable

from jaxengine.runner.memory import workspace_bytes

_DEFAULT_SPACE = re.compile(r"^Memory Space: default .*\nTotal bytes: (\d+)", re.MULTILINE)
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[(.*?)\]')
_SCOPED_VMEM = re.compile(r'"memory_space":"1","offset":"(\d+)","size":"(\d+)"')
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"call ptr @mosaic_gpu_get_function\(.*, i32 (\d+), i32 \d+\)")


def memory(compiled: Any) -> dict[str, int]:
    """Bytes of device memory: in all, and of it what is neither argument nor donated nor code, results among it."""
    analysis = compiled.memory_analysis()
    workspace = workspace_bytes(analysis)
    # The compiler's own peak leaves the scratch arena out on CPU, the arena can leave a copy out on TPU.
    code = analysis.generated_code_size_in_bytes
    peak = max(analysis.peak_memory_in_bytes, analysis.argument_size_in_bytes + workspace + code)
    return {
        "peak_bytes": peak,
        "argument_bytes": analysis.argument_size_in_bytes,
        "workspace_bytes": workspace,
        "result_bytes": workspace - analysis.temp_size_in_bytes,
        "code_bytes": code,
    }


def program_text(compiled: Any, dumps: Path | None) -> str:
    """The optimised HLO: from the compiler's dump where there is one, because jaxlib cannot always read back the HLO of
    a newer libtpu."""
    if dumps is not None:
        for pattern in ("*after_codegen.txt", "*after_optimizations.txt"):
            files = sorted(dumps.glob(pattern), key=lambda path: path.stat().st_size)
            if files:
                return files[-1].read_text()
    return compiled.as_text()


def device_bytes(dumps: Path) -> int | None:
    """What arguments and temporaries of a TPU program take of device memory at most, by the report that its compiler
    left; None where it left none. The peak that it tells a program of has on-chip memory in it."""
    for path in dumps.glob("*memory-usage-report.txt"):
        if found := _DEFAULT_SPACE.search(path.read_text()):
            return int(found[1])
    return None


def vmem_bytes(text: str) -> int | None:
    """The most VMEM any one kernel of a TPU program reserves."""
    ends = [int(offset) + int(size) for found in _SCOPED.findall(text) for offset, size in _SCOPED_VMEM.findall(found)]
    return max(ends, default=None)


def mosaic_gpu(log: str) -> dict[str, int | None]:
    """Registers of a thread, bytes spilled and bytes of shared memory: the most that any kernel takes of whose making
    ptxas (MOSAIC_GPU_DUMP_PTXAS) and the host code (MOSAIC_GPU_DUMP_HOST_LLVM) tell in a log."""
    registers = [int(count) for count in _REGISTERS.findall(log)]
    spills = [int(stores) + int(loads) for stores, loads in _SPILLS.findall(log)]
    return {
        "registers": max(registers, default=None),
        "spill_bytes": max(spills, default=None),
        "fast_bytes": max((int(size) for size in _SHARED.findall(log)), default=None),
    }


def serialized(compiled: Any) -> bytes:
    """The executable as a file holds it."""
    return serialize_executable.serialize(compiled)[0]
