"""Cycles of a TPU kernel without a TPU: libtpu compiles it in a child process and estimates what its schedule costs.

This module has the child process and reads what the compiler leaves behind. Knows nothing of any kernel. Needs libtpu.

libtpu's `estimated_cycles` walks the final instruction bundles, with the trip counts it can see. It knows no HBM
bandwidth, gives up on copies that are waited for in another pass of a loop, and counts a loop whose trip count is data
as about one pass. So a kernel is profiled bare, without copies and with fixed trip counts, and bytes / bandwidth is
reported with it. Functions here that change a kernel's module change it for good: they are meant for the child.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.processes import command
from jaxengine.check.devices import chips

AOT_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may compile too
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}

_KERNEL = "profiled_kernel"  # the compiler names its dumps after the function


class Profile(NamedTuple):
    """Figures that libtpu reports about a compiled kernel."""

    cycles: int | None  # estimated; None where libtpu cannot profile the kernel
    facts: dict[str, Any]  # returned by the builder
    bundles: int  # instruction words of the kernel, each counted once
    dump: str  # libtpu's text of the bundles


class ProfileError(RuntimeError):
    """Error of a kernel that does not compile for the chip; the message says why."""


def profile(
    build: str,
    topology: str,
    *,
    timeout: float = 240,
    timed: bool = True,
    python: str = sys.executable,
    **arguments: Any,
) -> Profile:
    """Compile the bare kernel that a function returns in a child process, and return its profile.

    build: "module:function", called in the child as function(**arguments); it returns the pair of `bare_kernel` and a
    dict for `facts`. topology: e.g. "v6e:1x1". timeout: seconds of one compilation. timed: whether to request cycles;
    where libtpu aborts on that, it is compiled again without. python: interpreter of the child, with jax and libtpu.
    arguments: values that JSON can represent. Raises ProfileError when the compiler refuses, TimeoutExpired after the
    timeout.
    """
    with tempfile.TemporaryDirectory() as folder:
        # There are about a hundred passes; only the last one's dump is needed.
        only = "--xla_jf_dump_llo_pass_label_regex=final_bundles"
        dump = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {only}"
        cycles = f" --xla_jf_dump_static_llo_profile_to={folder}/prof" if timed else ""
        ran = _child(python, build, topology, arguments, dump + cycles, timeout)
        if (
            timed and ran.returncode and "Static LLO profiling" in ran.stderr
        ):  # libtpu aborts on a copy that its cost model lacks
            ran = _child(python, build, topology, arguments, dump, timeout)
        if ran.returncode:
            errors = re.findall(r"^.*(?:Error|INTERNAL|UNIMPLEMENTED|RESOURCE_EXHAUSTED).*$", ran.stderr, re.M)
            raise ProfileError(
                f"{build} on {topology}: {(errors or ran.stderr.splitlines() or ['no output'])[-1][:300]}"
            )
        dumps = sorted(Path(folder, "prof").glob(f"*{_KERNEL}*"))
        found = "".join(path.read_text(errors="replace") for path in dumps)
        estimate = re.search(r"estimated_cycles: (\d+)", found)
        bundles = next(Path(folder).glob(f"*{_KERNEL}*[0-9]-final_bundles.txt")).read_text(errors="replace")
        return Profile(
            int(estimate[1]) if estimate else None,
            json.loads(ran.stdout.splitlines()[-1]),
            len(re.findall(r"^ *0x", bundles, re.M)),
            bundles,
        )


def fix_trips(module: Any, trips: Callable[[Callable], int]) -> None:
    """Replace `lax.while_loop` in `module` by loops of fixed length, for the rest of the process.

    trips: returns the number of passes of a loop from its condition function. Loops traced from then on are affected.
    """

    def while_loop(cond: Callable, body: Callable, init: Any) -> Any:
        return lax.fori_loop(0, trips(cond), lambda _, carry: body(carry), init)

    lax = module.lax
    module.lax = _namespace_with(lax, while_loop=while_loop)


def bare_kernel(fn: Callable, args: Sequence[Any], kernel: str) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """Trace fn(*args); return (function that runs only its pallas_call named `kernel`, shapes of that call's operands).

    The first call whose name contains `kernel` is taken. Raises ValueError if there is none.
    """
    call = next(_pallas_calls(jax.make_jaxpr(fn)(*args).jaxpr, kernel), None)
    if call is None:
        raise ValueError(f"there is no pallas_call named {kernel!r} in {fn}")
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in call.invars]

    def profiled_kernel(*operands):
        return call.primitive.bind(*operands, **call.params)

    return profiled_kernel, shapes


def _pallas_calls(jaxpr: Any, kernel: str) -> Iterator[Any]:
    """Yield the equations of a jaxpr, inner ones included, that are a pallas_call whose name contains `kernel`."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            if kernel in str(equation.params["name"]):
                yield equation
            continue
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _pallas_calls(inner, kernel)


def _namespace_with(module: Any, **replaced: Any) -> SimpleNamespace:
    """Return a namespace with the attributes of a module, except for `replaced`."""
    names = {name: getattr(module, name) for name in dir(module) if not name.startswith("__")}
    return SimpleNamespace(**names | replaced)


def _child(
    python: str, build: str, topology: str, arguments: dict, flags: str, timeout: float
) -> subprocess.CompletedProcess:
    """Run `compile_bare` in a child process with these flags of libtpu; return the completed process, whatever its
    status.
    """
    here = [python, *command(compile_bare, build=build, topology=topology, arguments=arguments)[1:]]
    environment = dict(os.environ, LIBTPU_INIT_ARGS=flags, **AOT_ENVIRONMENT)
    return subprocess.run(here, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def compile_bare(build: str, topology: str, arguments: dict) -> None:
    """Trace, lower and compile a kernel for the first chip of a topology, and print the builder's facts as JSON.

    build: "module:function". topology: e.g. "v6e:1x1". arguments: keyword arguments of the function.
    """
    device = chips(topology)[0]
    mesh = Mesh(np.array([device]), ("chip",))
    module, function = build.split(":")
    here = NamedSharding(mesh, PartitionSpec())
    with jax.set_mesh(mesh):  # so that kernels see the target's memory sizes
        fn, args, facts = getattr(importlib.import_module(module), function)(**arguments)
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), args)
        jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).compile()
    print(json.dumps(facts))
