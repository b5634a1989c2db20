"""Mosaic GPU kernels on the CPU, as they are written for the card: what jax's own interpreter lacks.

    install()                                  # once per process
    kernel(..., interpret=interpret_params())  # a plgpu.kernel
    assert not problems()                      # races and hazards of every kernel since reset()

Adds to jax's interpreter: accumulators carried through `pl.run_state`, wgmma with transposed and register operands,
stores into transposed references, and the hazards of mosaic_gpu_hazards. A barrier error can leave the interpreter's
other threads waiting for ever: give a process that runs one a time limit. Everything here is private to jax, see
`findings.FITTED_TO`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback, core
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import discharge, types
from jax._src.state import primitives as state

from jaxengine.pallas_kernels import mosaic_gpu
from tests.pallas_kernels import faster_interpreters, findings
from tests.pallas_kernels import mosaic_gpu_hazards as hazards
from tests.pallas_kernels import mosaic_gpu_memory as memory

_NO_TREE = jax.tree.structure(())
_clear_shared_memory = gpu_callbacks._clear_shared_memory
_deallocate_barrier = shared_memory.Barrier.deallocate


def install() -> None:
    """Make jax's interpreter use the additions; RuntimeError on a jax release they were not fitted to."""
    findings.check_version()
    faster_interpreters.install()
    memory.install()
    jaxpr_interpret.JaxprInterpreter = _Interpreter
    findings.record_races(gpu_callbacks)
    gpu_callbacks._clear_shared_memory = _end_of_kernel
    shared_memory.Barrier.deallocate = _end_of_barrier


def interpret_params() -> Any:
    return mosaic_gpu.interpreter(detect_races=True, **findings.go_on_after_races())


def reset() -> None:
    """Forget findings, and what a kernel that raised has left behind."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    hazards.clear()
    findings.clear()


def problems() -> list[str]:
    """Races and hazards found since `reset`; call it after the results are ready."""
    return findings.found()


def _end_of_kernel() -> None:
    hazards.end_of_kernel()
    _clear_shared_memory()


def _end_of_barrier(barrier: Any) -> None:
    """One of the warpgroups of a block has ended. jax's interpreter looks only at those that have waited at all."""
    _deallocate_barrier(barrier)
    if barrier.has_zero_ref_count():
        hazards.end_of_barrier(_is_observed(barrier))


def _is_observed(barrier: Any) -> bool:
    """Whether somebody has waited for the last completion of a barrier; jax 0.10 alone keeps that."""
    return getattr(barrier, "phase_change_observed", True)


def _turned_back(eqn, values: list) -> tuple[Any, list] | None:
    """A store into a transposed reference as one of the transposed value, None for any other."""
    *others, last = jax.tree.unflatten(eqn.params["tree"], values[2:]) or (None,)
    order = getattr(last, "permutation", None) or getattr(last, "perm", None)
    if order is None:
        return None
    value = jnp.transpose(values[1], np.argsort(order))
    leaves, tree = jax.tree.flatten(tuple(others))
    assert len(leaves) == len(values) - 2
    shape = core.ShapedArray(value.shape, value.dtype)
    invars = [eqn.invars[0], core.Var(shape), *eqn.invars[2:]]
    eqn = eqn.replace(invars=invars, outvars=[core.DropVar(shape)], params={**eqn.params, "tree": tree})
    return eqn, [values[0], value, *values[2:]]


def _barrier(eqn, values: list, name: str = "transforms_treedef") -> Any:
    """The barrier that one waits for or arrives at."""
    tree = eqn.params[name] or _NO_TREE
    return jaxpr_interpret._get_barrier_allocation_key_from_inval(values[0], tree, values[1 : 1 + tree.num_leaves])


class _Interpreter(jaxpr_interpret.JaxprInterpreter):
    """One warpgroup: equations the base class cannot do are done here, the others watched and handed on."""

    def interpret(self, jaxpr, token, *args):
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def read(variable):
            return variable.val if isinstance(variable, core.Literal) else env[variable]

        for eqn in jaxpr.eqns:
            values = [read(variable) for variable in eqn.invars]
            if eqn.primitive is state.swap_p and (turned := _turned_back(eqn, values)) is not None:
                eqn, values = turned
                env[eqn.invars[1]] = values[1]
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
                if eqn.primitive is gpu.barrier_wait_p:
                    token = self._call(hazards.on_barrier_wait, eqn, token, _barrier(eqn, values))
                continue
            env.update(zip(eqn.outvars, out, strict=True))
        return token, [read(variable) for variable in jaxpr.outvars]

    def _call(self, event: Callable, eqn, token, *args, **static):
        """Run event(where, *args) on the host, in this warpgroup's order."""

        def host(token, position, args):
            event(memory.Where(position, eqn.source_info), *args, **static)
            return token

        return callback.io_callback(host, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, memory.position_of(self), args)

    def _watch(self, eqn, token, values):
        primitive, params = eqn.primitive, eqn.params
        call = functools.partial(self._call, eqn=eqn, token=token)
        if primitive is state.swap_p and eqn.invars[0].aval.memory_space == gpu_core.MemorySpace.SMEM:
            return self._call(hazards.on_write, eqn, token, values[0], jax.tree.unflatten(params["tree"], values[2:]))
        if primitive is state.get_p and eqn.invars[0].aval.memory_space == gpu_core.MemorySpace.SMEM:
            return self._call(hazards.on_read, eqn, token, values[0], jax.tree.unflatten(params["tree"], values[1:]))
        if primitive is gpu.copy_gmem_to_smem_p:
            source, target = params["src_transforms_treedef"], params["dst_transforms_treedef"]
            begin = 3 + source.num_leaves
            end = begin + target.num_leaves
            transforms, tree = jax.tree.unflatten(target, values[begin:end]), params["barrier_transforms_treedef"]
            barrier = jaxpr_interpret._get_barrier_allocation_key_from_inval(
                values[2], tree, values[end : end + tree.num_leaves]
            )
            shape = eqn.invars[1].aval.shape
            return self._call(hazards.on_load, eqn, token, values[1], transforms, barrier, shape=shape)
        if primitive is gpu.commit_smem_p:
            return call(hazards.on_commit)
        if primitive is gpu.barrier_arrive_p:
            return self._call(hazards.on_arrive, eqn, token, _barrier(eqn, values))
        if primitive is gpu.tcgen05_mma_p:
            return self._watch_tensor_product(eqn, token, values)
        if primitive is gpu.async_load_tmem_p:
            transforms = jax.tree.unflatten(params["tree"], values[1:])
            return self._call(hazards.on_tensor_load, eqn, token, values[0], transforms)
        if primitive is gpu.wait_load_tmem_p:
            return call(hazards.on_tensor_load_wait)
        if primitive is gpu.tcgen05_commit_arrive_p:
            return self._call(hazards.on_tensor_arrive, eqn, token, _barrier(eqn, values, "barrier_transforms_tree"))
        if primitive is gpu.copy_smem_to_gmem_p:
            tree = params["src_transforms_treedef"]
            transforms = jax.tree.unflatten(tree, values[2 : 2 + tree.num_leaves])
            return self._call(hazards.on_store, eqn, token, values[0], transforms, closes=params["commit_group"])
        if primitive is gpu.commit_group_p:
            return call(hazards.on_close)
        if primitive is gpu.wait_smem_to_gmem_p:
            return self._call(hazards.on_store_wait, eqn, token, memory.allowed_in_flight(eqn, values))
        if primitive is gpu.wgmma_wait_p:
            return self._call(hazards.on_product_wait, eqn, token, memory.allowed_in_flight(eqn, values))
        if primitive is gpu.wgmma_accumulator_deref_p and params["wait_n"] is not None:
            return self._call(hazards.on_product_wait, eqn, token, params["wait_n"])
        return token

    def _watch_tensor_product(self, eqn, token, values):
        params, rest = eqn.params, values[4:]
        key = rest.pop(0) if params["arrive"] else None
        trees = [params[f"{name}_transforms_tree"] or _NO_TREE for name in ("acc", "a", "b", "barrier")]
        parts = []
        for tree in trees:
            parts.append(rest[: tree.num_leaves])
            del rest[: tree.num_leaves]
        of_sums, *of_operands, of_barrier = parts
        sums = values[0], jax.tree.unflatten(trees[0], of_sums)
        operands = [
            (value, jax.tree.unflatten(tree, leaves))
            for value, tree, leaves, variable in zip(values[1:3], trees[1:3], of_operands, eqn.invars[1:3], strict=True)
            if variable.aval.memory_space == gpu_core.MemorySpace.SMEM
        ]
        find = jaxpr_interpret._get_barrier_allocation_key_from_inval
        barrier = None if key is None else find(key, trees[3], of_barrier)
        return self._call(hazards.on_tensor_product, eqn, token, sums, operands, barrier)

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
        return self._call(hazards.on_product, eqn, token, accumulator, a, a_transforms, b, b_transforms, dtype=dtype)

    def _run_state(self, eqn, token, values):
        """Refs the body closes over stay themselves; every other operand becomes an accumulator of its own."""
        given = iter(zip(eqn.invars, values, strict=True))
        keys, shapes = [], []
        for variable, is_given in zip(eqn.params["jaxpr"].invars, eqn.params["is_initialized"], strict=True):
            inner = variable.aval.inner_aval
            outer, value = next(given) if is_given else (None, jnp.zeros(inner.shape, inner.dtype))
            if outer is not None and isinstance(getattr(outer, "aval", None), types.AbstractRef):
                keys.append(value)
                shapes.append(None)
                continue
            token, key = memory.new_accumulator(self, token, value, eqn.source_info)
            keys.append(key)
            shapes.append(jax.ShapeDtypeStruct(inner.shape, inner.dtype))
        token, _ = self.interpret(eqn.params["jaxpr"], token, *keys)
        token = self._call(hazards.on_product_wait, eqn, token, 0)
        out = []
        for key, shape in zip(keys, shapes, strict=True):
            value = key
            if shape is not None:
                token, value = memory.take_accumulator(self, token, key, shape, eqn.source_info)
            out.append(value)
        return token, out
