"""Devices that a check compiles for: settings of their compilers, and figures for a roofline.

Figures are the vendors' published ones for dense bfloat16, HBM as the compiler reports it free. Imports no jax, because
the process that does not compile reads this file too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from jaxengine.config.engine_config import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """GPU in the terms of XLA's GpuTargetConfigProto (openxla/xla, backends/gpu/target_config/specs).

    Attributes:
      description: name of the card.
      capability: compute capability, (major, minor).
      accelerated: whether its kernels use instructions that only its generation has (sm_90a, sm_100a).
      cores: streaming multiprocessors.
      fpus: float32 units of each multiprocessor.
      clock_ghz: clock rate.
      l2_bytes: size of the L2 cache.
      shared_per_core, shared_per_block: bytes of shared memory, in total and the maximum of a block.
    """

    description: str
    capability: tuple[int, int]
    accelerated: bool
    cores: int
    fpus: int
    clock_ghz: float
    l2_bytes: int
    shared_per_core: int
    shared_per_block: int


@dataclass(frozen=True)
class Target:
    """Kind of device, or several of them that share a model.

    Attributes:
      name: as the user writes it, such as v6e or v6e-4.
      backend: "tpu", "cuda" or "cpu", jax's lowering platform.
      topology: libtpu's name of the smallest topology with `num_devices` devices; "" for other backends.
      hbm_bytes: memory of one device that a program may use.
      hbm_bandwidth: bytes per second of one device.
      flops: dense bfloat16 operations per second of one device.
      fast_bytes: bytes of VMEM of a TPU core, or of shared memory of a GPU's block.
      num_devices: devices that share the model.
      gpu: figures for XLA's compiler; None for a target that is not a GPU.
      plain_attention: reason why attention is plain XLA there; "" if it must be a kernel.
      no_profile: reason why blocks of TPU kernels cannot be profiled; "" if they can.
    """

    name: str
    backend: str
    topology: str
    hbm_bytes: int
    hbm_bandwidth: float
    flops: float
    fast_bytes: int
    num_devices: int = 1
    gpu: Gpu | None = None
    plain_attention: str = ""
    no_profile: str = ""


_H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), True, 132, 128, 1.98, 52428800, 233472, 232448)
_H200 = replace(_H100, description="NVIDIA H200 141GB HBM3e")
_B200 = Gpu("NVIDIA B200", (10, 0), True, 148, 128, 1.965, 132644864, 233472, 232448)
_B300 = replace(_B200, description="NVIDIA B300", capability=(10, 3))
_A100 = Gpu("NVIDIA A100-SXM4-80GB", (8, 0), False, 108, 64, 1.41, 41943040, 167936, 166912)
# An A10G. By name, jax 0.12 compiles for an A10, which is of the same compute capability.
_A10G = Gpu("NVIDIA A10", (8, 6), False, 80, 128, 1.71, 6291456, 102400, 101376)
_L4 = Gpu("NVIDIA L4", (8, 9), False, 58, 128, 2.04, 50331648, 102400, 101376)
_RTX_PRO = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
_RTX_PRO_6000 = Gpu(_RTX_PRO, (12, 0), False, 188, 128, 2.617, 134217728, 102400, 101376)

# Clocks as libtpu 0.0.52 states them.
# Cycles a second of all cores of a device (TPU) or of a multiprocessor, for tuning.
CLOCKS = {"v5e": 1.5e9, "v5p": 3.5e9, "v6e": 1.75e9, "tpu7x": 2.2e9, "sm_90": 1.755e9}
_NO_COPIES = "libtpu's profile of it ends at copies within the chip"
_NO_ROOM = "what a block's profile holds does not fit into its VMEM"

# A v5p device is a chip of two cores that act as one, a tpu7x device one of the two cores of its chip.
TARGETS = {
    target.name: target
    for target in (
        Target("cpu", "cpu", "", 0, 0.0, 0.0, 0, plain_attention="CPUs have no kernels"),
        Target("v5e", "tpu", "v5e:1x1", int(15.75 * GIB), 819e9, 197e12, 128 << 20, no_profile=_NO_COPIES),
        Target("v6e", "tpu", "v6e:1x1", int(31.24 * GIB), 1640e9, 918e12, 128 << 20),
        Target("v5p", "tpu", "v5p:2x2x1", int(95.73 * GIB), 2765e9, 459e12, 64 << 20, no_profile=_NO_COPIES),
        Target("tpu7x", "tpu", "tpu7x:2x2x1", int(94.74 * GIB), 3690e9, 1153e12, 64 << 20, no_profile=_NO_ROOM),
        Target("sm_80", "cuda", "", 85100068864, 2039e9, 312e12, _A100.shared_per_block, gpu=_A100),
        Target("sm_86", "cuda", "", int(22.06 * GIB), 600e9, 70e12, _A10G.shared_per_block, gpu=_A10G),
        Target("sm_89", "cuda", "", int(22.03 * GIB), 300e9, 121e12, _L4.shared_per_block, gpu=_L4),
        Target("sm_90", "cuda", "", 84942979072, 3352e9, 989e12, _H100.shared_per_block, gpu=_H100),
        Target("h200", "cuda", "", 151397597184, 4800e9, 989e12, _H200.shared_per_block, gpu=_H200),
        Target("sm_100", "cuda", "", 191514411008, 7672e9, 2250e12, _B200.shared_per_block, gpu=_B200),
        # NVIDIA's data sheet: 96 GB of GDDR7, of which a program may use what it may of other cards of that size.
        Target(
            "sm_120", "cuda", "", int(94.9 * GIB), 1792e9, 503e12, _RTX_PRO_6000.shared_per_block, gpu=_RTX_PRO_6000
        ),
        # NVIDIA's data sheets of HGX B300: 270 GB that a program may use of 288, 8 TB/s.
        Target("sm_103", "cuda", "", 270_000_000_000, 8000e9, 2250e12, _B300.shared_per_block, gpu=_B300),
    )
}

# Devices -> topology. A host has 4 of them (v5p, a tpu7x chip counting twice) or 8 (v5e, v6e); beyond, several hosts.
_SLICES = {
    "v5e": {4: "2x2", 8: "2x4", 16: "4x4"},
    "v6e": {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16"},
    "v5p": {2: "2x2x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4"},
    "tpu7x": {2: "2x2x1", 4: "2x2x1", 8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4"},
}
_GPU_SLICES = _CPU_SLICES = (2, 4, 8)


def find_target(name: str) -> Target:
    """Return the target called `name`: a name from TARGETS, or one followed by `-N` for N devices, a number that
    exists.

    Raises ConfigError, which lists all targets, for any other name.
    """
    kind, _, count = name.partition("-")
    target = TARGETS.get(kind)
    if target is not None and not count:
        return target
    if target is not None and count.isdigit() and int(count) in _sizes(target):
        return _several(target, int(count))
    several = [f"{kind}-{size}" for kind, target in TARGETS.items() for size in _sizes(target)]
    raise ConfigError("targets", name, ", ".join([*TARGETS, *several]))


def _sizes(target: Target) -> Iterable[int]:
    """Return the numbers of devices above one in which a target exists."""
    return _SLICES.get(target.name, _CPU_SLICES if target.backend == "cpu" else _GPU_SLICES)


def _several(target: Target, devices: int) -> Target:
    """Return a target of `devices` devices, one of `_sizes`, with its name (NAME-N) and its topology."""
    name, slices = f"{target.name}-{devices}", _SLICES.get(target.name)
    topology = target.topology if slices is None else f"{target.name}:{slices[devices]}"
    return replace(target, name=name, topology=topology, num_devices=devices)


def split_targets(target: Target, options: Mapping[str, Any]) -> list[tuple[Target, dict[str, Any]]]:
    """Return the targets on which a model may be checked, each with its engine options, fewest devices first.

    A target with a number of devices is used as it is; one without may grow to more devices of its kind. All devices
    are used: if not given, tensor_parallel_size is the number of devices divided by the other parallel sizes. options:
    engine options of the check. Raises ConfigError if the parallel sizes in it do not multiply to a number of devices
    or, without tensor_parallel_size, divide none.
    """
    names = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size")
    given = {name: options[name] for name in names if name in options}
    product = math.prod(given.values())
    candidates = [target]
    if target.name in TARGETS:
        candidates += [_several(target, size) for size in _sizes(target)]
    if "tensor_parallel_size" in given:
        fitting = [place for place in candidates if place.num_devices == product]
    else:
        fitting = [place for place in candidates if place.num_devices % product == 0]
    if not fitting:
        sizes = ", ".join(str(place.num_devices) for place in candidates)
        name = max(given, key=lambda name: given[name])
        wanted = f"parallel sizes whose product is the number of devices of {target.name}, {sizes}; it is {product}"
        raise ConfigError(name, given[name], wanted)
    rest = {place.name: place.num_devices // product for place in fitting}
    return [(place, {"tensor_parallel_size": rest[place.name], **options}) for place in fitting]


def require_compiler(target: Target) -> None:
    """Raise ConfigError if the target's compiler is not installed, with the command that installs it."""
    needed = {"tpu": ("libtpu",), "cuda": ("jax_plugins.xla_cuda13", "jax_cuda13_plugin", "nvidia"), "cpu": ()}
    missing = [name for name in needed[target.backend] if not _installed(name)]
    if missing:
        extra = "tpu-check" if target.backend == "tpu" else "cuda-check"
        problem = f"the compiler for {target.name} is not installed ({missing[0]} is missing)"
        advice = f"`make check-deps` or `pip install 'jaxengine[{extra}]'` installs it"
        raise ConfigError.because("targets", problem, advice)


def _installed(module: str) -> bool:
    """Return whether a module, which may be in a package, is installed. Does not import it, but may import its parent
    packages.
    """
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


def gpu_target_config(target: Target) -> str:
    """Return the GpuTargetConfigProto of a CUDA target, in text form. Raises AssertionError for a target that is not a
    GPU.
    """
    gpu = target.gpu
    assert gpu is not None, target
    major, minor = gpu.capability
    feature = "ACCELERATED_FEATURES" if gpu.accelerated else "NONE"
    suffix = "a" if gpu.accelerated else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_per_core}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(target.hbm_bandwidth)}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {target.hbm_bytes}
  shared_memory_per_block_optin: {gpu.shared_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {major}.{minor}{suffix}"
  device_address_bits: 64
  pcie_bandwidth: 34359738368
  ecc_enabled: true
  name: "{gpu.description}"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.description}"
"""
