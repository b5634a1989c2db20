"""Mosaic GPU kernels on the CPU, as they are written for the card: what jax's own interpreter lacks.

    install()                                  # once per process
    kernel(..., interpret=interpret_params())  # a plgpu.kernel
    assert not problems()                      # races and hazards of every kernel since reset()

Adds to jax 0.10.2: accumulators carried through `pl.run_state`, transposed and register operands of wgmma, and wgmma
that is asynchronous: its operands count as read until it is awaited, so that a buffer handed back too early is a race.
Adds a lint for what the interpreter does not model at all: shared memory that is written and then read by wgmma, by a
TMA store or by another warpgroup without `commit_smem`; rewritten before `wait_smem_to_gmem`; loaded into while other
warps of the same warpgroup may read it; stores still in flight when the kernel ends.

A barrier error leaves the interpreter's other threads waiting for ever: give a process that runs one a time limit.
Everything here is private to jax, see `findings.FITTED_TO`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback, core, source_info_util
from jax._src.pallas.mosaic.interpret.race_detection_state import _ranges_overlap
from jax._src.pallas.mosaic.interpret.utils import to_range
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from jax._src.state import discharge, types
from jax._src.state import primitives as state

from tests.pallas_kernels import faster_interpreters, findings

_NO_TREE = jax.tree.structure(())


class _Warpgroup:
    """What one warpgroup of one block has in flight; places are (buffer key, range)."""

    def __init__(self) -> None:
        self.uncommitted: list = []  # shared memory written and not yet visible to wgmma, TMA and others
        self.stores: list[list] = [[]]  # groups of TMA stores that still read shared memory, the last one open
        self.products: list = []  # operands of wgmma operations not yet awaited
        self.reads: list = []  # shared memory that some of its four warps may still be reading


_WARPGROUPS: dict[tuple, _Warpgroup] = defaultdict(_Warpgroup)  # by block, device and thread


def _end_of_kernel() -> None:
    if any(group for warpgroup in _WARPGROUPS.values() for group in warpgroup.stores):
        findings.add("TMA stores still in flight when a kernel ends")
    _WARPGROUPS.clear()
    _clear_shared_memory()


_clear_shared_memory = gpu_callbacks._clear_shared_memory


def install() -> None:
    """Make jax's interpreter use the additions; RuntimeError on a jax release they were not fitted to."""
    findings.check_version()
    faster_interpreters.install()
    jaxpr_interpret.JaxprInterpreter = _Interpreter
    gpu_callbacks.RaceDetectionState = findings.RecordedRaces
    gpu_callbacks._clear_shared_memory = _end_of_kernel


def interpret_params() -> InterpretGPUParams:
    return InterpretGPUParams(detect_races=True)


def reset() -> None:
    """Forget findings, and what a kernel that raised has left behind."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    _WARPGROUPS.clear()
    findings.clear()


def problems() -> list[str]:
    """Races and hazards found since `reset`; call it after the results are ready."""
    return findings.found()


def _places(key, transforms) -> tuple:
    """(buffer, range) of a reference as the callbacks see it, the transposes at its end left out."""
    index = list(gpu_callbacks._remove_noop_transforms(transforms))
    while index and _permutation(index[-1]):
        index.pop()
    return gpu_callbacks.HostAllocationKey.from_array(key), to_range(jax.tree.map(int, tuple(index)))


def _permutation(transform) -> tuple[int, ...] | None:
    return getattr(transform, "permutation", None) or getattr(transform, "perm", None)


def _overlap(places, other) -> bool:
    return any(key == other[0] and _ranges_overlap(rnge, other[1]) for key, rnge in places)


def _read(place, where: _Where):
    """Contents of a place, read by this warpgroup now, races checked."""
    memory = gpu_callbacks._get_shared_memory()
    thread = memory.get_global_thread_id(where.device, where.thread)
    value, _, clock = memory.get_buffer_content(*place, thread)
    if memory.detect_races:
        gpu_callbacks.get_races().check_read(where.device, where.thread, clock, *place, source_info=where.source)
    return value


class _Where:
    """Which warpgroup, and which line of the kernel."""

    def __init__(self, device, coords, thread, source) -> None:
        self.device, self.thread, self.source = int(device), int(thread), source
        self.warpgroup = _WARPGROUPS[tuple(map(int, coords)), self.device, self.thread]

    def found(self, message: str) -> None:
        findings.add(f"{message} at {source_info_util.summarize(self.source)}")


UNCOMMITTED = "shared memory written, then read by {} without commit_smem"


def _on_write(where: _Where, key, transforms) -> None:
    place = _places(key, transforms)
    if any(_overlap(group, place) for group in where.warpgroup.stores):
        where.found("shared memory rewritten before wait_smem_to_gmem")
    where.warpgroup.uncommitted.append(place)


def _on_read(where: _Where, key, transforms) -> None:
    where.warpgroup.reads.append(_places(key, transforms))


def _on_load(where: _Where, key, transforms) -> None:
    if _overlap(where.warpgroup.reads, _places(key, transforms)):
        where.found("shared memory read, then overwritten by this warpgroup's own TMA load without a barrier")


def _on_commit(where: _Where) -> None:
    where.warpgroup.uncommitted.clear()
    where.warpgroup.reads.clear()


def _on_arrive(where: _Where) -> None:
    if where.warpgroup.uncommitted:
        where.found("shared memory written, then handed over by barrier_arrive without commit_smem")


def _on_store(where: _Where, key, transforms, *, closes: bool) -> None:
    place, stores = _places(key, transforms), where.warpgroup.stores
    if _overlap(where.warpgroup.uncommitted, place):
        where.found(UNCOMMITTED.format("TMA"))
    stores[-1].append(place)
    if closes:
        stores.append([])


def _on_close(where: _Where) -> None:
    where.warpgroup.stores.append([])


def _on_store_wait(where: _Where, allowed) -> None:
    where.warpgroup.reads.clear()  # a wait joins the four warps
    *closed, last = where.warpgroup.stores
    where.warpgroup.stores = [*(closed[len(closed) - int(allowed) :] if int(allowed) else []), last]


def _on_product(where: _Where, accumulator, a, a_transforms, b, b_transforms, *, dtype) -> None:
    operands = []
    places = []
    for key, transforms in ((a, a_transforms), (b, b_transforms)):
        if transforms is None:  # in registers
            operands.append(np.asarray(key, dtype))
            continue
        place = _places(key, transforms)
        if _overlap(where.warpgroup.uncommitted, place):
            where.found(UNCOMMITTED.format("wgmma"))
        value = np.asarray(_read(place, where)).astype(dtype)
        for permutation in filter(None, map(_permutation, transforms)):
            value = value.transpose(permutation)
        operands.append(value)
        places.append(place)
    memory = gpu_callbacks._get_shared_memory()
    thread = memory.get_global_thread_id(where.device, where.thread)
    key = gpu_callbacks.HostAllocationKey.from_array(accumulator)
    total, _, _ = memory.get_buffer_content(key, (), thread)
    memory.store_buffer_content(key, (), total + operands[0] @ operands[1], thread)
    where.warpgroup.products.append(places)


def _on_product_wait(where: _Where, allowed) -> None:
    """The products that end here have read their operands up to now."""
    products = where.warpgroup.products
    while len(products) > int(allowed):
        for place in products.pop(0):
            _read(place, where)


class _Interpreter(jaxpr_interpret.JaxprInterpreter):
    """One warpgroup: equations the base class cannot do are done here, the others watched and handed on."""

    def interpret(self, jaxpr, token, *args):
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def read(variable):
            return variable.val if isinstance(variable, core.Literal) else env[variable]

        for eqn in jaxpr.eqns:
            values = [read(variable) for variable in eqn.invars]
            token = self._watch(eqn, token, values)
            if eqn.primitive is gpu.wgmma_ref_p:
                token, out = self._product(eqn, token, values), []
            elif eqn.primitive is discharge.run_state_p:
                token, out = self._run_state(eqn, token, values)
            elif eqn.primitive in (gpu_core.layout_cast_p, lax.optimization_barrier_p):
                out = values[: len(eqn.outvars)]
            else:
                inputs = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))
                outputs = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
                debug_info = jaxpr.debug_info.with_unknown_names()
                single = core.Jaxpr([], inputs, outputs, [eqn], core.no_effects, debug_info)
                token, out = super().interpret(single, token, *map(read, inputs))
                env.update(zip(outputs, out, strict=True))
                continue
            env.update(zip(eqn.outvars, out, strict=True))
        return token, [read(variable) for variable in jaxpr.outvars]

    def _call(self, event, eqn, token, *args, **static):
        """Run event(where, *args) on the host, in this warpgroup's order."""

        def host(token, device, coords, thread, args):
            event(_Where(device, coords, thread, eqn.source_info), *args, **static)
            return token

        place = (jnp.int32(self.device_info.device_id), self.grid_point_coords, self.thread_id)
        return callback.io_callback(host, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, *place, args)

    def _watch(self, eqn, token, values):
        primitive, params = eqn.primitive, eqn.params
        call = functools.partial(self._call, eqn=eqn, token=token)
        if primitive is state.swap_p and eqn.invars[0].aval.memory_space == gpu_core.MemorySpace.SMEM:
            return self._call(_on_write, eqn, token, values[0], jax.tree.unflatten(params["tree"], values[2:]))
        if primitive is state.get_p and eqn.invars[0].aval.memory_space == gpu_core.MemorySpace.SMEM:
            return self._call(_on_read, eqn, token, values[0], jax.tree.unflatten(params["tree"], values[1:]))
        if primitive is gpu.copy_gmem_to_smem_p:
            source, target = params["src_transforms_treedef"], params["dst_transforms_treedef"]
            leaves = values[3 + source.num_leaves : 3 + source.num_leaves + target.num_leaves]
            return self._call(_on_load, eqn, token, values[1], jax.tree.unflatten(target, leaves))
        if primitive is gpu.commit_smem_p:
            return call(_on_commit)
        if primitive is gpu.barrier_arrive_p:
            return call(_on_arrive)
        if primitive is gpu.copy_smem_to_gmem_p:
            tree = params["src_transforms_treedef"]
            transforms = jax.tree.unflatten(tree, values[2 : 2 + tree.num_leaves])
            return self._call(_on_store, eqn, token, values[0], transforms, closes=params["commit_group"])
        if primitive is gpu.commit_group_p:
            return call(_on_close)
        if primitive is gpu.wait_smem_to_gmem_p:
            return self._call(_on_store_wait, eqn, token, values[0])
        if primitive is gpu.wgmma_wait_p:
            return self._call(_on_product_wait, eqn, token, values[0])
        if primitive is gpu.wgmma_accumulator_deref_p and params["wait_n"] is not None:
            return self._call(_on_product_wait, eqn, token, params["wait_n"])
        return token

    def _product(self, eqn, token, values):
        trees = [eqn.params[f"{name}_transforms_tree"] or _NO_TREE for name in ("acc", "a", "b")]
        accumulator, a, b, *leaves = values
        if trees[0].num_leaves:
            raise NotImplementedError("wgmma into a slice of an accumulator")
        a_transforms, b_transforms = (
            jax.tree.unflatten(tree, part) if isinstance(variable.aval, types.AbstractRef) else None
            for variable, tree, part in zip(
                eqn.invars[1:3], trees[1:], (leaves[: trees[1].num_leaves], leaves[trees[1].num_leaves :]), strict=True
            )
        )
        dtype = np.dtype(eqn.invars[0].aval.dtype)
        return self._call(_on_product, eqn, token, accumulator, a, a_transforms, b, b_transforms, dtype=dtype)

    def _run_state(self, eqn, token, values):
        """Refs the body closes over stay themselves; every other operand becomes an accumulator of its own."""
        given = iter(zip(eqn.invars, values, strict=True))
        where: dict[str, Any] = {
            "device_id": jnp.int32(self.device_info.device_id),
            "grid_point_coords": self.grid_point_coords,
            "thread_id": self.thread_id,
            "source_info": eqn.source_info,
        }
        keys, shapes = [], []
        for variable, is_given in zip(eqn.params["jaxpr"].invars, eqn.params["is_initialized"], strict=True):
            inner = variable.aval.inner_aval
            outer, value = next(given) if is_given else (None, jnp.zeros(inner.shape, inner.dtype))
            if outer is not None and isinstance(getattr(outer, "aval", None), types.AbstractRef):
                keys.append(value)
                shapes.append(None)
                continue
            token, request = gpu_callbacks.call_make_allocation_request_array(
                token=token,
                memory_space_id=gpu_callbacks.get_memory_space_idx(gpu_core.MemorySpace.REGS),
                device_id=where["device_id"],
                thread_id=self.thread_id,
            )
            token, key = gpu_callbacks.call_allocate_buffer(
                token=token, allocation_request_as_array=request, value=value, **where
            )
            keys.append(key)
            shapes.append(jax.ShapeDtypeStruct(inner.shape, inner.dtype))
        token, _ = self.interpret(eqn.params["jaxpr"], token, *keys)
        token = self._call(_on_product_wait, eqn, token, 0)
        out = []
        for key, shape in zip(keys, shapes, strict=True):
            value = key
            if shape is not None:
                token, value = gpu_callbacks.call_get(
                    token=token, result_shape_and_dtype=shape, allocation_key_as_array=key, transforms=(), **where
                )
                token = gpu_callbacks.call_deallocate_buffer(token=token, allocation_key_as_array=key, **where)
            out.append(value)
        return token, out
