"""Chooses tile sizes of products with quantised matrices, by time on the chip or else by its compiler's figures.

Run as `python -m jaxengine.check.tuning`. As for `jaxengine.check.compile`, a process serves one target: it reads a
request and writes a JSON line per problem.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxengine.check import inspect
from jaxengine.check.children import environment, replies, tail
from jaxengine.check.devices import target_devices
from jaxengine.check.targets import CLOCKS, Target, find_target
from jaxengine.models.quantization.base.tuning import Candidate, Problem, product_candidates
from jaxengine.sharding.layout import ONE_DEVICE
from jaxengine.sharding.mesh import make_mesh

_PLATFORMS = {"tpu": "tpu", "cuda": "gpu"}
_DUMPS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true"
_BUNDLES = re.compile(r"total scheduled bundles:\s+(\d+)")
_KERNEL = "*quantized_matmul*schedule-analysis_final_bundles.txt"
_REPEATS = 20
# Sizes must be faster than the usual ones by this factor to replace them.
_WORTH = 0.98


def tune(target: Target, problems: Sequence[tuple]) -> Iterator[dict[str, Any]]:
    """Yield the result of each problem, timed on this machine's device if it is of the target's kind, else estimated
    from compiled programs.

    target: one with a clock in targets.CLOCKS, unless it is this machine's. problems: fields of a Problem each. A
    result has "problem"; "sizes", the chosen tile sizes, {} for the usual ones, which others replace only if they take
    at most _WORTH of their time; "best" and "usual" in microseconds, None if not feasible; and "tried", the number of
    feasible choices. Raises RuntimeError if the compiler's process fails.
    """
    if (device := _device_of(target)) is not None:
        for problem in (Problem(*fields) for fields in problems):
            yield _best(problem, target, lambda candidate, problem=problem: _timed(candidate, problem, device))
        return
    with tempfile.TemporaryDirectory(prefix="jaxengine-tune-") as folder:
        log, dumps = Path(folder) / "log", Path(folder) / "dumps"
        dumps.mkdir()
        variables = environment(target, dumps, profile=False)
        if target.backend == "tpu":
            variables["LIBTPU_INIT_ARGS"] = _DUMPS.format(dumps)
        request = {"target": target.name, "problems": problems, "log": str(log), "dumps": str(dumps)}
        for message in replies(request, variables, log, "jaxengine.check.tuning"):
            if message.get("event") != "exit":
                yield message
            elif message["code"]:
                raise RuntimeError(f"the compiler's process ended with status {message['code']}: {tail(log)}")


def _device_of(target: Target) -> Any:
    """Return this process's first device if it is of the target's kind, else None.

    The kind is the compute capability of a GPU, or the generation of a TPU.
    """
    device = jax.devices()[0]
    if device.platform in ("gpu", "cuda") and target.gpu is not None:
        return device if device.compute_capability == "{}.{}".format(*target.gpu.capability) else None
    names = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
    return device if device.platform == "tpu" and device.device_kind == names.get(target.name) else None


def _best(problem: Problem, target: Target, measure: Callable[[Candidate], float | None]) -> dict[str, Any]:
    """Measure all candidates of a problem; return a result as `tune` yields it.

    The usual sizes are kept unless others take at most _WORTH of their time; of equally fast candidates the first is
    chosen. measure: returns the microseconds of a candidate, None if it is not feasible.
    """
    choices = product_candidates(_PLATFORMS[target.backend])
    assert choices is not None
    costs = {}
    for candidate in choices(problem):
        if (cost := measure(candidate)) is not None:
            costs[json.dumps(candidate.sizes)] = cost
    usual = costs.get("{}")
    best = min(costs, key=lambda sizes: costs[sizes], default="{}")
    if usual is not None and costs[best] > usual * _WORTH:
        best = "{}"
    times = {"best": costs.get(best), "usual": usual}
    return {"problem": problem, "sizes": json.loads(best), **times, "tried": len(costs)}


def _timed(candidate: Candidate, problem: Problem, device: Any) -> float | None:
    """Return the median microseconds of a product on the device, with random inputs; None if it does not compile.

    candidate: tile sizes to use. problem: shapes of the product; uint8 codes are packed two to a byte. The median is
    over _REPEATS groups of _REPEATS runs each.
    """
    key = jax.random.key(0)
    packed = 2 if problem.codes == "uint8" else 1
    codes = jax.random.randint(key, (problem.size // packed, problem.out), 0, 120, jnp.int32).astype(problem.codes)
    scales = jnp.full((problem.size // problem.group, problem.out), 0.01, jnp.float32)
    x = jax.random.normal(key, (problem.rows, problem.size), jnp.bfloat16)
    arguments = jax.device_put((x, codes, scales, scales if problem.zeros else None), device)
    try:
        run = jax.jit(candidate.product).lower(*arguments).compile()
    except Exception:  # a compiler's refusal; its classes are jaxlib's own
        return None
    jax.block_until_ready(run(*arguments))
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([run(*arguments) for _ in range(_REPEATS)])
        seconds.append((time.perf_counter() - start) / _REPEATS)
    return statistics.median(seconds) * 1e6


def main() -> int:
    """Serve the request on standard input: write one line of JSON, a result like those of `tune`, for each problem.

    The request has "target", "problems", "log", the file of standard error, and "dumps", a folder, from which all files
    are deleted.
    Results go to standard output, the compilers' output to standard error. Returns 0. Raises ConfigError for an unknown
    target.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    target = find_target(request["target"])
    mesh = make_mesh(ONE_DEVICE, target_devices(target)[:1])
    log, dumps = Path(request["log"]), Path(request["dumps"])
    chip = {"bandwidth": target.hbm_bandwidth, "clock": CLOCKS[target.name]}

    known: dict[str, dict[str, Any]] = {}

    def estimated(candidate: Candidate) -> float | None:
        """Return the estimated microseconds of a candidate, None if it is not feasible.

        Functions that several problems share are compiled once.
        """
        key = f"{candidate.function} {candidate.arguments}"
        if key not in known:
            known[key] = compiled_figures(candidate)
        return candidate.cost({**known[key], **chip})

    def compiled_figures(candidate: Candidate) -> dict[str, Any]:
        """Compile a candidate's function; return its registers, spills and shared memory from the log, and "bundles"
        from the dumps.

        Returns {} if the compiler refuses it, and prints the reason to standard error. Deletes older dumps first.
        """
        for path in dumps.glob("**/*"):
            if path.is_file():
                path.unlink()
        read_from = log.stat().st_size
        there = NamedSharding(mesh, PartitionSpec())
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), candidate.arguments)
        try:
            with jax.set_mesh(mesh):
                traced = jax.jit(candidate.function).trace(*arguments)
                traced.lower(lowering_platforms=(target.backend,)).compile()
        except Exception as error:  # a compiler's refusal; its classes are jaxlib's own
            print(f"{candidate.sizes}: {error}", file=sys.stderr)
            return {}
        found = inspect.mosaic_gpu(log.read_bytes()[read_from:].decode(errors="replace"))
        counts = [_BUNDLES.search(path.read_text()) for path in dumps.glob(_KERNEL)]
        return {**found, "bundles": sum(int(match[1]) for match in counts if match is not None)}

    for problem in request["problems"]:
        replies.write(json.dumps(_best(Problem(*problem), target, estimated)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
