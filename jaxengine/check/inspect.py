"""Figures of a compiled program: device memory, on-chip memory, registers, code size.

They are read from the program itself, from compiler dumps and from logs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jax.experimental import serialize_executable

from jaxengine.runner.base.memory import workspace_bytes

_DEFAULT_SPACE = re.compile(r"^Memory Space: default .*\nTotal bytes: (\d+)", re.MULTILINE)
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[(.*?)\]')
_SCOPED_VMEM = re.compile(r'"memory_space":"1","offset":"(\d+)","size":"(\d+)"')
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"call ptr @mosaic_gpu_get_function\(.*, i32 (\d+), i32 \d+\)")


def memory(compiled: Any) -> dict[str, int]:
    """Return the device memory of a compiled program in bytes: "peak_bytes", "argument_bytes", "workspace_bytes",
    "result_bytes" and "code_bytes".

    The workspace is what it allocates in addition to its arguments and its code: temporaries, and results that do not
    reuse the memory of donated arguments (result_bytes).
    """
    analysis = compiled.memory_analysis()
    workspace = workspace_bytes(analysis)
    # The compiler's own peak omits the scratch arena on CPU, and the arena can omit a copy on TPU.
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
    """Return the optimised HLO of a compiled program as text.

    dumps: folder of the compiler's dumps; the largest dump after code generation is read, or else the largest after
    optimisations, because jaxlib cannot always parse the HLO of a newer libtpu. Without a dump, or if None, the text
    comes from the compiled program.
    """
    if dumps is not None:
        for pattern in ("*after_codegen.txt", "*after_optimizations.txt"):
            files = sorted(dumps.glob(pattern), key=lambda path: path.stat().st_size)
            if files:
                return files[-1].read_text()
    return compiled.as_text()


def device_bytes(dumps: Path) -> int | None:
    """Return the peak device memory of a TPU program's arguments and temporaries in bytes, from the first of the
    compiler's reports in `dumps` that states it.

    Returns None without a report. The peak that the compiled program itself states includes on-chip memory.
    """
    for path in dumps.glob("*memory-usage-report.txt"):
        if found := _DEFAULT_SPACE.search(path.read_text()):
            return int(found[1])
    return None


def vmem_bytes(text: str) -> int | None:
    """Return the largest number of bytes of VMEM that a kernel of a TPU program reserves; None without kernels.

    text: the program's HLO.
    """
    ends = [int(offset) + int(size) for found in _SCOPED.findall(text) for offset, size in _SCOPED_VMEM.findall(found)]
    return max(ends, default=None)


def mosaic_gpu(log: str) -> dict[str, int | None]:
    """Return maxima over the kernels in a log; None for a figure that the log does not state.

    "registers" are of a thread, "spill_bytes" stores plus loads, "fast_bytes" shared memory. They are printed by ptxas
    (MOSAIC_GPU_DUMP_PTXAS) and in the host code (MOSAIC_GPU_DUMP_HOST_LLVM).
    """
    registers = [int(count) for count in _REGISTERS.findall(log)]
    spills = [int(stores) + int(loads) for stores, loads in _SPILLS.findall(log)]
    return {
        "registers": max(registers, default=None),
        "spill_bytes": max(spills, default=None),
        "fast_bytes": max((int(size) for size in _SHARED.findall(log)), default=None),
    }


def serialized(compiled: Any) -> bytes:
    """Return a compiled program's executable as bytes. Raises errors of jax if it cannot be serialised."""
    return serialize_executable.serialize(compiled)[0]
