"""How much the proof of kernels delays a start, on a CPU with stand-ins for kernels.

A CPU has no kernels to prove. Here attention, its write of keys and values and products are given to plain XLA under
another name, so that each of their calls is proven as on a TPU or GPU: compiled twice, run, compared; but nothing is
timed, and both programs are compiled for one run, so that the figures do not have what an accelerator's compiler takes
for a kernel. An engine starts twice with one folder of executables, each time in a process of its own: a cold start and
a warm one. Seconds are those of a clock, and of all of the process's threads on processors, which other load changes
less. `share` is the proof's processor seconds relative to the rest of the start; `kept` says whether it is at most 10 %
cold and 1 % warm.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from argparse import Namespace
from typing import Any

from benchmarks.harness import Option
from benchmarks.processes import command
from benchmarks.recorder import Recorder, Row

LIMITS = {"cold": 0.1, "warm": 0.01}
OPTIONS = {
    "options": Option({}, "options of the engine, as JSON", kind=json.loads),
    "proof": Option("quick", "kernel_proof", choices=("quick", "full")),
}


def run(args: Namespace, recorder: Recorder) -> None:
    """Start an engine with args.options, each time in a new process with the same cache folder: once for each of
    LIMITS, cold and then warm. Add a row for each start; "kept" is whether its share keeps its limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"disable_log_stats": True, **args.options, "kernel_proof": args.proof, "compile_cache_dir": folder}
        for start, limit in LIMITS.items():
            line = command(start_here, options=options)
            done = subprocess.run(line, stdout=subprocess.PIPE, check=True, text=True)
            row = json.loads(done.stdout.splitlines()[-1])
            recorder.add({"name": start, **row, "kept": row["share"] <= limit})


def start_here(options: dict[str, Any]) -> None:
    """Start an engine with stand-ins for kernels in this process, and print the row of seconds and counts as JSON.

    options: of the engine.
    """
    import pytest

    from tests.jaxengine.runner.planted_kernels import plant

    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        from jaxengine import LLM
        from jaxengine.runner.start import kernel_proof

        seconds: list[float] = []
        prove = kernel_proof.prove_kernels

        def timed(*arguments: Any) -> Any:
            before = time.monotonic(), time.process_time()
            try:
                return prove(*arguments)
            finally:
                seconds.extend((time.monotonic() - before[0], time.process_time() - before[1]))

        patch.setattr(kernel_proof, "prove_kernels", timed)
        llm = LLM(**options)
        wall, processor = time.monotonic() - begin, time.process_time()
        print(json.dumps(_row(llm, wall, processor, *seconds)))
        llm.shutdown()


def _row(llm: Any, wall: float, processor: float, proof_wall: float, proof_processor: float) -> Row:
    """Return the row of a start. All times are in seconds; those of the start include the proof's. "share" is the
    proof's processor time over that of the rest of the start. "calls": number of verdicts in the compile cache. Numbers
    are rounded.
    """
    from jaxengine.runner.executables.verdicts import all_verdicts

    runner = llm.core.engine.runner
    found = all_verdicts(runner.config.compile_cache_dir)
    return {
        "start s": round(wall, 2),
        "start processor s": round(processor, 2),
        "proof s": round(proof_wall, 2),
        "proof processor s": round(proof_processor, 2),
        "share": round(proof_processor / (processor - proof_processor), 4),
        "calls": sum(len(each["verdicts"]) for each in found),
        "not used": len(runner.stages[0].executables.unused),
        "programs compiled": runner.num_compiled,
        "programs loaded": runner.num_loaded,
    }
