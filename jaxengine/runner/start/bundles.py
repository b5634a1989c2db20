"""Facts for which a bundle of executables is built (versions, devices, options, model), and the config of an engine
that uses one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jaxlib.version

from jaxengine.checkpoint.custom_models import has_custom_class
from jaxengine.checkpoint.model_source import ModelSource
from jaxengine.config.engine_config import ConfigError, ResolvedConfig
from jaxengine.config.execution.bundle import compiled_options
from jaxengine.config.features.logits_processors import processor_classes, source_file
from jaxengine.config.kv.kv_cache import is_coded
from jaxengine.models.cache import native_code
from jaxengine.runner.executables.bundle import AMONG, AT_LEAST, About, Bundle
from jaxengine.runner.executables.cache import Place, compiler_flags
from jaxengine.runner.start.kv_scales import known_scales

_LONG = 200  # characters of a model's field, beyond which a manifest has its digest
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}
_CUDA_COMPILERS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
# Instructions that XLA:CPU may use, among the flags of /proc/cpuinfo.
_X86 = re.compile(r"(s?sse|avx|fma|f16c|bmi|amx|v?aes|v?pclmul|sha|gfni|adx)\w*|abm|movbe|popcnt|cx16|pni")


def executables_of(config: ResolvedConfig) -> Place:
    """Return where an engine's executables are stored: the opened Bundle that config.bundle names, else
    config.compile_cache_dir, the folder of executables, which may be None.

    Raises ConfigError if the bundle is missing, damaged, of another format or not trusted.
    """
    directory = config.compile_cache_dir
    return directory if config.bundle is None else Bundle(config.bundle, config.bundle_key_file, directory)


def with_bundle(source: ModelSource, config: ResolvedConfig, devices: Sequence[Any]) -> ResolvedConfig:
    """Return the config with num_gpu_blocks_override set to the number of KV pages for which its bundle was built.

    config: config with a bundle. devices: devices of all stages. Raises ConfigError if there is no such bundle, if it
    was built for other options, versions, devices or another model (the message names the difference), if the model or
    a logits processor is code of the user that `refuse_unknown_code` refuses, or if scales of coded keys and values
    would have to be measured.
    """
    assert config.bundle is not None
    refuse_unknown_code(source, config)
    if is_coded(config.kv_cache_dtype) and known_scales(source, config) is None:
        problem = "kv_cache_scales are not in the checkpoint, and programs that measure them are in no bundle"
        raise ConfigError.because("kv_cache_scales", problem, "give a file that `jaxengine calibrate` wrote, or unit")
    bundle = Bundle(config.bundle, config.bundle_key_file)
    bundle.check(about(source, config, devices, built=False))
    return dataclasses.replace(config, num_gpu_blocks_override=bundle.num_pages)


def refuse_unknown_code(source: ModelSource, config: ResolvedConfig) -> None:
    """Raise ConfigError if the model's class is the user's own, or if the source of a logits processor is in no file.

    A bundle could not detect that such code has changed.
    """
    if has_custom_class(source.config):
        problem = f"the class of {source.config.architecture} is your own, and bundles have jaxengine's only"
        raise ConfigError.because("bundle", problem, "leave bundle out")
    for each in processor_classes(config.logits_processors):
        if source_file(each) is None:
            problem = f"the source of {each.__name__} is in no file"
            raise ConfigError.because("logits_processors", problem, "put it into a module, or leave bundle out")


def about(source: ModelSource, config: ResolvedConfig, devices: Sequence[Any], *, built: bool) -> About:
    """Return the facts that programs of an engine are compiled for: versions and devices, options, and the fields of
    the model's config as text.

    devices: devices of all stages. built: whether a bundle is being built for these devices, which need not exist on
    this machine.
    """
    model = {field.name: getattr(source.config, field.name) for field in dataclasses.fields(source.config)}
    facts = _facts(devices, built)
    if facts["platform"] == "cpu":
        # Its functions are compiled where they run; the width of vectors decides which products call them.
        facts["machine code"] = native_code().rpartition(", ")[2] or "none"
    return About(facts, compiled_options(config), {name: _short(each) for name, each in model.items()})


def _facts(devices: Sequence[Any], built: bool) -> dict[str, Any]:
    """Return versions, compiler flags and devices as JSON values by name.

    devices: devices of all stages. built: whether a bundle is being built for them; then the CUDA version of a GPU is
    that of the installed compiler, else that of the driver. A compiler package that is not installed is left out.
    """
    first = devices[0]
    kind = "gpu" if first.platform in ("gpu", "cuda") else first.platform
    found: dict[str, Any] = {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, "platform": kind}
    found |= {"device kind": first.device_kind, "devices": len(devices), "compiler flags": list(compiler_flags())}
    for name in _COMPILERS.get(kind, ()):
        if (installed := _version(name)) is not None:
            found[name] = installed
    if kind == "cpu":
        found |= {"processor": platform.machine(), f"processor's instructions{AMONG}": _instructions()}
    if kind == "tpu":  # its last line says which build of libtpu this is
        found["libtpu's build"] = str(first.client.platform_version).rpartition("\n")[2]
        found["topology"] = [list(device.coords) for device in devices]
    if kind == "gpu":
        found[f"CUDA that the driver supports{AT_LEAST}"] = _cuda_of_compiler() if built else _cuda_of_driver()
    return found


def _instructions() -> list[str]:
    """Return the instruction set extensions of this processor, sorted, from /proc/cpuinfo. On x86, only those that
    compiled code may use.
    """
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), ":").partition(":")[2].split()
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return sorted({flag for flag in flags if not is_x86 or _X86.fullmatch(flag)})


def _cuda_of_compiler() -> int:
    """Return the major version of CUDA that the installed compiler makes code for, which a driver must support; 0
    without a compiler.
    """
    found = next((each for name in _CUDA_COMPILERS if (each := _version(name)) is not None), "0")
    return int(found.partition(".")[0])


def _cuda_of_driver() -> int:
    """Return the major version of CUDA that the installed driver supports; 0 without a driver."""
    found = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return found.value // 1000


def _version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _short(value: Any) -> str:
    """Return a value's repr, or "sha256 " and 16 hex digits of its digest if it is longer than _LONG characters."""
    text = repr(value)
    return text if len(text) <= _LONG else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
