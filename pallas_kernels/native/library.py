"""Machine code of the handlers for this processor: compiled by llvmlite or read from storage, tested, and registered
with XLA.

A program that calls a handler can only be loaded after `load`, also if it comes from a cache.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import platform
import re
import threading
from pathlib import Path
from typing import Any, Protocol

import jax

logger = logging.getLogger(__name__)
_LOCK = threading.Lock()
_loaded: dict[tuple[str, ...], str] = {}  # results of `load`
_made: dict[tuple[str, ...], tuple[str, Any]] = {}  # those of `made`

# Structures of XLA's FFI as handlers.py reads and writes them: the names of their fields, in order.
_STRUCTURES = {
    "XLA_FFI_CallFrame": "struct_size extension_start api ctx stage args rets attrs future",
    "XLA_FFI_Args": "struct_size extension_start size types args",
    "XLA_FFI_Rets": "struct_size extension_start size types rets",
    "XLA_FFI_Buffer": "struct_size extension_start dtype data rank dims",
    "XLA_FFI_Extension_Base": "struct_size type next",
    "XLA_FFI_Metadata_Extension": "extension_base metadata",
    "XLA_FFI_Metadata": "struct_size api_version traits state_type_id",
    "XLA_FFI_Api_Version": "struct_size extension_start major_version minor_version",
    "XLA_FFI_ThreadPool_Schedule_Args": "struct_size extension_start ctx task data",
    "XLA_FFI_ThreadPool_NumThreads_Args": "struct_size extension_start ctx num_threads",
    "XLA_FFI_Error_Destroy_Args": "struct_size extension_start error",
}
_CONSTANTS = {"XLA_FFI_ExecutionStage_EXECUTE": 3, "XLA_FFI_DataType_BF16": 16, "XLA_FFI_Extension_Metadata": 1}
_FUNCTIONS = "XLA_FFI_ThreadPool_Schedule", "XLA_FFI_ThreadPool_NumThreads", "XLA_FFI_Error_Destroy"
_BEFORE_FUNCTIONS = 48  # bytes of XLA_FFI_Api: two words, the version's three, and one more
_OLDEST = [0, 46]  # version of llvmlite; other packages may have brought an older one
_NEEDED = "avx2", "fma", "f16c"  # every processor with AVX2 has F16C


class UnfitError(RuntimeError):
    """Error for a machine on which handlers cannot be built; the message gives the reason."""


class CodeStore(Protocol):
    """Storage of machine code between processes, whose keys also name the sources of the code's modules."""

    def read(self, facts: tuple[str, ...]) -> bytes | None:
        """Return what was written for the same facts and sources; None if nothing was, or if it cannot be trusted."""
        ...

    def write(self, facts: tuple[str, ...], code: bytes) -> None:
        """Store machine code if possible. Never raises."""
        ...


def target_name(handler: str) -> str:
    """Return "jaxengine_HANDLER", the name under which a handler is registered with XLA."""
    return f"jaxengine_{handler}"


def load(rooms: tuple[str, ...], store: CodeStore | None = None) -> str:
    """Make, test and register the handlers of `rooms`, once per process. Return a description of the compiler and the
    processor, or "" if handlers cannot be built, with the reason in the log (INFO). rooms, store: as in `made`.
    Thread-safe; later calls for the same rooms return the first result, a failure too.
    """
    with _LOCK:  # engines may be started by several threads
        if rooms not in _loaded:
            _loaded[rooms] = _load(rooms, store)
        return _loaded[rooms]


def _load(rooms: tuple[str, ...], store: CodeStore | None = None) -> str:
    """Return the description that `load` returns; if there is no code, log why and return "". Must be called under
    _LOCK.
    """
    try:
        return made(rooms, store)[0]
    # llvmlite raises RuntimeError for what LLVM refuses, and OSError if its own library cannot be loaded.
    except (ImportError, OSError, RuntimeError) as error:
        logger.info("this CPU runs plain XLA, and no machine code of llvmlite: %s", error)
        return ""


def made(rooms: tuple[str, ...], store: CodeStore | None = None) -> tuple[str, Any]:
    """Make, test and register handlers, once per process. Return a description of the compiler and the processor, and
    llvmlite's engine, which owns the code and must live as long as the process.

    rooms: packages, each with a module `code`, which has the names HANDLERS and a function `build`, and a module
    `check`, whose function `check` gets the addresses of functions by name and raises UnfitError if one is wrong.
    store: where the code of earlier processes is, and that of this one is added; None for nowhere. Raises what
    `compiled` raises, and UnfitError for a processor other than x86_64 and if the code of any of them computes
    something wrong: then none is used.
    """
    if rooms not in _made:
        _made[rooms] = _make(rooms, store)
    return _made[rooms]


def _make(rooms: tuple[str, ...], store: CodeStore | None) -> tuple[str, Any]:
    """Do what `made` does, whether or not it has been done before."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise UnfitError(f"the processor is {platform.machine()}, allowed: x86_64")
    import llvmlite.binding as llvm  # pyright: ignore[reportMissingImports]

    about, engine = compiled(rooms, llvm.get_host_cpu_name(), host_features(), store)
    for room in rooms:
        importlib.import_module(f"{room}.check").check(engine.get_function_address)
    for room in rooms:
        for handler in importlib.import_module(f"{room}.code").HANDLERS:
            capsule = _capsule(engine.get_function_address(handler))
            jax.ffi.register_ffi_target(target_name(handler), capsule, platform="cpu")
    return about, engine


def compiled(rooms: tuple[str, ...], cpu: str, features: Any, store: CodeStore | None = None) -> tuple[str, Any]:
    """Return a description of the compiler and the processor, and llvmlite's engine with the handlers of `rooms` for a
    processor, compiled unless `store` has them.

    rooms, store: as in `made`. cpu: the processor's name in LLVM. features: llvmlite's FeatureMap. Raises UnfitError
    without AVX2, FMA and F16C, for an llvmlite before version 0.46 or an FFI header that `ffi_abi` refuses, ImportError
    without llvmlite, OSError if it cannot load its library, RuntimeError for what LLVM refuses.
    """
    import llvmlite  # pyright: ignore[reportMissingImports]
    import llvmlite.binding as llvm  # pyright: ignore[reportMissingImports]

    version = llvmlite.__version__
    if [int(number) for number in re.findall(r"\d+", version)[:2]] < _OLDEST:
        raise UnfitError(f"llvmlite has version {version}, allowed: 0.46 and later")
    if missing := [name for name in _NEEDED if not features.get(name)]:
        raise UnfitError(f"the processor has no {missing[0]}")
    abi = ffi_abi(Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    bits = 512 if features.get("avx512f") else 256
    host = {"cpu": cpu, "features": features.flatten(), "opt": 3, "jit": True}
    machine = llvm.Target.from_default_triple().create_target_machine(**host)
    about = f"llvmlite {version}, FFI {abi['major']}.{abi['minor']}, {cpu}, vectors of {bits} bits"
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    for room in rooms:
        facts = room, about, str(llvm.llvm_version_info), llvm.get_process_triple(), str(abi), host["features"]
        code = None if store is None else store.read(facts)
        if code is None:
            code = _object_code(room, machine, abi, features, bits)
            if store is not None:
                store.write(facts, code)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return about, engine


def _object_code(room: str, machine: Any, abi: dict[str, int], features: Any, bits: int) -> bytes:
    """Return the object file with a room's handlers. machine: llvmlite's TargetMachine. abi: the result of `ffi_abi`.
    bits: width of vectors. Raises RuntimeError for what LLVM refuses.
    """
    import llvmlite.binding as llvm  # pyright: ignore[reportMissingImports]

    options = llvm.create_pipeline_tuning_options(speed_level=1)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    code = importlib.import_module(f"{room}.code").build(llvm.get_process_triple(), abi, features)
    module = llvm.parse_assembly(with_vector_width(str(code), bits))
    module.verify()
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


@functools.cache
def has_feature(name: str) -> bool:
    """Return whether the processor has the feature `name`, as LLVM calls it, such as "avx512f". Raises ImportError
    without llvmlite.
    """
    return bool(host_features().get(name))


def host_features() -> Any:
    """Return the features of this processor, llvmlite's FeatureMap, without AVX-512's extensions if it lacks AVX-512
    itself, as a virtual machine may report: LLVM would end the process. Raises ImportError without llvmlite.
    """
    import llvmlite.binding as llvm  # pyright: ignore[reportMissingImports]

    features = llvm.get_host_cpu_features()
    for name in () if features.get("avx512f") else features:
        features[name] = features[name] and not name.startswith("avx512")
    return features


def with_vector_width(text: str, bits: int) -> str:
    """Return LLVM IR `text` with an attribute on every function definition that makes it use vector registers of `bits`
    bits. By default LLVM uses 256 of 512 on some processors.
    """
    return re.sub(r"^(define .*?\))( .*)?$", rf'\1\2 "prefer-vector-width"="{bits}"', text, flags=re.MULTILINE)


def ffi_abi(header: Path) -> dict[str, int]:
    """Return the FFI's version ("major", "minor") and the offsets of its functions by name, which Handlers need, from
    jaxlib's header.

    Raises UnfitError if the header cannot be read, has a major version other than 0, lacks a function that handlers.py
    calls, or has a structure or constant that is not what it assumes.
    """
    try:
        text = re.sub(r"//.*", "", header.read_text())
    except OSError as error:
        raise UnfitError(f"jaxlib's FFI header cannot be read: {error}") from None
    text = text.replace("XLA_FFI_InternalExtension", "XLA_FFI_Extension_Base")  # its name from version 0.5 on
    for name, wanted in _STRUCTURES.items():
        body = re.search(rf"struct {name} {{(.*?)}}", text, re.DOTALL)
        found = re.findall(r"(\w+);", body[1]) if body else None
        if found != wanted.split():
            raise UnfitError(f"{name} of jaxlib's FFI has other fields: {found}")
    for name, value in _CONSTANTS.items():
        if not re.search(rf"\b{name} = {value},", text):
            raise UnfitError(f"{name} of jaxlib's FFI is not {value}")
    versions = {part: re.search(rf"#define XLA_FFI_API_{part.upper()} (\d+)", text) for part in ("major", "minor")}
    found = {part: int(match[1]) for part, match in versions.items() if match}
    if found.get("major") != 0 or "minor" not in found:
        raise UnfitError(f"jaxlib's FFI has version {found}, allowed: 0")
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\);", text)
    if missing := [name for name in _FUNCTIONS if name not in functions]:
        raise UnfitError(f"jaxlib's FFI has no {missing[0]}")
    return found | {name: _BEFORE_FUNCTIONS + 8 * functions.index(name) for name in _FUNCTIONS}


def _capsule(address: int) -> Any:
    """Return a PyCapsule that holds a function's address."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, None, None)
