"""The mutation gate: faults seeded in every kernel, each of which the conformance checks must catch.

    python -m tests.pallas_kernels.mutations [GATE | GATE:MUTANT ...]

A mutant is one replaced piece of a module's source. Each runs in a process of its own, in which importing the module
gives the changed one, through a few jobs of the suite until one fails; a job that does not end counts as failed. A
pattern that no longer occurs exactly once is an error: the gate must not rot silently.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tests.pallas_kernels.mutants import (
    counters,
    gpu_blackwell,
    gpu_blackwell_attention,
    gpu_decode,
    gpu_index,
    gpu_latent,
    gpu_lora,
    gpu_prefill,
    gpu_products,
    gpu_selected,
    gpu_triton,
    gpu_triton_products,
    native,
    native_attention,
    tpu,
    tpu_lora,
    tpu_products,
    tpu_rows,
    tpu_selected,
    tpu_write,
    xla,
)
from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import ROOT, Worker

GATES: dict[str, ModuleType] = {
    "xla": xla,
    "tpu": tpu,
    "tpu-write": tpu_write,
    "tpu-products": tpu_products,
    "tpu-lora": tpu_lora,
    "tpu-rows": tpu_rows,
    "tpu-selected": tpu_selected,
    "native": native,
    "native-attention": native_attention,
    "gpu-decode": gpu_decode,
    "gpu-prefill": gpu_prefill,
    "gpu-latent": gpu_latent,
    "gpu-products": gpu_products,
    "gpu-blackwell": gpu_blackwell,
    "gpu-blackwell-attention": gpu_blackwell_attention,
    "gpu-lora": gpu_lora,
    "gpu-triton": gpu_triton,
    "gpu-triton-products": gpu_triton_products,
    "gpu-selected": gpu_selected,
    "gpu-index": gpu_index,
    "counters": counters,
}


def source_of(mutant: Mutant) -> Path:
    """The file that the fault goes into; ValueError if its pattern does not occur exactly once in all of them."""
    sources = sorted((ROOT / "jaxengine" / "pallas_kernels").glob(f"{mutant.modules}.py"))
    counts = {source: source.read_text().count(mutant.old) for source in sources}
    if sum(counts.values()) != 1:
        raise ValueError(f"mutant {mutant.name!r}: its pattern occurs {sum(counts.values())} times in {mutant.modules}")
    return next(source for source, count in counts.items() if count)


def module_of(mutant: Mutant) -> str:
    """The dotted name under which the file is imported."""
    return ".".join(source_of(mutant).relative_to(ROOT).with_suffix("").parts)


def mutated(mutant: Mutant) -> str:
    """The source with the fault in it."""
    return source_of(mutant).read_text().replace(mutant.old, mutant.new)


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        return compile(mutated(self._mutant), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = module_of(mutant)

    def find_spec(self, fullname, path, target=None):
        if fullname != self._name:
            return None
        found = PathFinder.find_spec(fullname, path)
        assert found is not None and found.origin is not None
        loader = _Loader(fullname, found.origin, self._mutant)
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


def plant(identity: str) -> None:
    """Make this process import the mutant "gate:name"; before anything imports its module."""
    gate, name = identity.split(":", 1)
    mutant = next(mutant for mutant in GATES[gate].MUTANTS if mutant.name == name)
    assert module_of(mutant) not in sys.modules
    sys.meta_path.insert(0, _Finder(mutant))


def why_not(gate: str) -> str:
    """Why a gate's kernels do not run in this jax's interpreter, "" if they do."""
    return getattr(GATES[gate], "UNLESS", "")


def killer(gate: str, mutant: Mutant) -> str | None:
    """The job that catches the mutant and how, None if it survives."""
    source_of(mutant)
    worker = Worker("--mutant", f"{gate}:{mutant.name}")
    try:
        for job in mutant.jobs:
            if (problem := worker.run(job, GATES[gate].SECONDS)) is not None:
                return f"{' '.join(map(str, job[1:3]))}: {_kind(problem)}"
    finally:
        worker.close()
    return None


def _kind(problem: str) -> str:
    """What kind of failure a job's error is, in a word or two."""
    kinds = {
        "it hangs": "hangs",
        "race (": "race",
        "nobody has waited": "not awaited",
        "without a wait for": "not awaited",
        "without wait_load_tmem": "not awaited",
        "without commit_smem": "not committed",
        "without a barrier": "not committed",
        "before wait_smem_to_gmem": "overwritten",
        "still in flight": "in flight",
        "Traceback": "raises",
        "not finite": "not finite",
    }
    return next((kind for text, kind in kinds.items() if text in problem), "wrong")


def main(wanted: list[str]) -> int:
    chosen = [
        (gate, mutant)
        for gate, module in GATES.items()
        for mutant in module.MUTANTS
        if not wanted or gate in wanted or f"{gate}:{mutant.name}" in wanted
    ]
    for gate in sorted({gate for gate, _ in chosen if why_not(gate)}):
        print(f"{gate}: left out, {why_not(gate)}")
    chosen = [(gate, mutant) for gate, mutant in chosen if not why_not(gate)]
    survivors = Counter()

    def run(row):
        start = time.perf_counter()
        return *row, killer(*row), time.perf_counter() - start

    with ThreadPoolExecutor(2) as pool:
        for gate, mutant, caught_by, seconds in pool.map(run, chosen):
            survivors[gate] += caught_by is None
            print(f"{gate:19s} {mutant.name:44s} {caught_by or 'SURVIVED':52s} {seconds:5.1f} s", flush=True)
    for gate, count in Counter(gate for gate, _ in chosen).items():
        print(f"{gate}: {count - survivors[gate]} of {count} caught")
    return survivors.total()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
