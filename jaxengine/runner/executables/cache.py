"""Cache of compiled programs on disk.

A file's name is a digest of everything that decides the machine code: the sources that the program was traced from,
jax, the device, the compiler's flags and the program's own description. Loading a file runs code from it;
jaxengine.runner.executables.executable_files decides which files may be loaded.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import jaxlib.version
from jax.sharding import Mesh, NamedSharding

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.user_code import UnknownCodeError, changed_code, code_digest
from jaxengine.models.cache import kernel_modules, native_code, platform_of
from jaxengine.models.kernel_rows import without_rows
from jaxengine.runner.executables.bundle import Bundle, NewBundle
from jaxengine.runner.executables.executable_files import ExecutableFiles, file_name
from jaxengine.runner.executables.kept import KeptCode, KeptPrograms
from jaxengine.runner.executables.layer_chain import Executable, NotStorableError, load, lower_parts, serialize
from jaxengine.runner.executables.program_sources import (
    known_sources,
    learn_sources,
    num_known_sources,
    source_digest,
)

logger = logging.getLogger(__name__)

# Where compiled programs are stored: a folder, as in ExecutableFiles, or a bundle.
Place = str | None | Bundle | NewBundle

# Scatters and gathers of a few rows, which XLA:TPU would hand to the SparseCore and wait for.
_COMPILER_OPTIONS: dict[str, dict[str, bool | str]] = {
    "tpu": {
        "xla_tpu_enable_offloading_scatter_to_sparsecore": "false",
        "xla_tpu_offload_gather_to_sparsecore": "false",
        # Sums and gathers of layers, which nothing runs beside: on tpu7x each would keep buffers of its own there
        # (benchmarks/README.md).
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "false",
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": "false",
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "false",
        # Else tpu7x converts the tiling of an LM head of a gigabyte in every step, for the loop over prompt logprobs.
        "xla_tpu_control_large_2nd_minor_layout_for_x16": "false",
    }
}
# Of programs that run once or twice, which do not pay for being optimised: on CPUs, neither XLA's passes that optimise
# and its fusion emitters, whose code LLVM is slow to compile, nor a split into parts for many cores.
_OPTIONS_OF_ONCE: dict[str, dict[str, bool | int | str]] = {
    "cpu": {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
    }
}

# A part of the key of every trace that jax remembers, of functions within programs as well. A user's own layer or
# sampler may jit or scan a function that reads a value, and another engine finds another value there.
_ENGINE = jax.make_user_context(None)

# Programs that are traced beside those that threads compile, so that no thread waits for the next one.
_TRACED_AHEAD = 2

_ROOT = Path(__file__).parents[3]  # the folder that holds jaxengine
_UNKNOWN_OPTION = re.compile(r"No such compile option: '(\w+)'")


def compile_program(lowered: jax.stages.Lowered, backend: str, *, once: bool = False) -> jax.stages.Compiled:
    """Compile a lowered program with the engine's compiler options for a backend; return the executable.

    backend: name of the platform, as `jax.default_backend` returns it. once: whether the program runs only once or
    twice. An option that this compiler release does not have is dropped for the rest of the process, with a warning.
    Raises jax's JaxRuntimeError for other errors of the compiler.
    """
    wanted: dict[str, Any] = _COMPILER_OPTIONS.get(backend, {})
    if once:
        wanted = _OPTIONS_OF_ONCE.get(backend, wanted)
    while True:
        options = dict(wanted)
        try:
            return lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            unknown = _UNKNOWN_OPTION.search(str(error))
            if unknown is None or unknown[1] not in options:
                raise
            if wanted.pop(unknown[1], None) is not None:
                logger.warning("this compiler has no option %s: steps may take longer or more memory", unknown[1])


class ExecutableCache:
    """Cache that compiles programs, or loads them if they were compiled before.

    Attributes:
      num_compiled, num_loaded: number of programs that `get` has compiled and loaded.
      on_compile: callback before a program is compiled, which may take a long time.
      unused: rows of kernels, (operation, kind), that programs are compiled without. Part of the key.
    """

    def __init__(self, place: Place, devices: Sequence[Any], *, family: type | None = None):
        """Open the cache folder.

        place: a folder, as in ExecutableFiles, with its ConfigError; or a bundle, from which every program is then
        loaded, or to which it is added. devices: those that the programs run on. family: the model's class; None for
        programs without a model, which call no machine code of ours. Nothing is stored, and a warning is logged, if the
        source of the class is unknown, or if code without a known source has changed jaxengine's own; with a bundle
        that is a ConfigError, and so are other sources than the bundle's.
        """
        bundle = self._bundle = place if isinstance(place, Bundle | NewBundle) else None
        directory = place.cache_dir if isinstance(place, Bundle | NewBundle) else place
        self.num_compiled = 0
        self.num_loaded = 0
        self.on_compile: Callable[[], None] = lambda: None
        self.unused: frozenset[tuple[str, str]] = frozenset()
        self._devices = devices
        self._traces, self._said_why = object(), False
        self._threads: Executor | None = None  # those of `compiling_ahead`
        self._begun: dict[str, Callable[[], Executable]] = {}  # results of `_begin`, by file
        self._family = None if family is None else _source_file(family)
        unknown, self._changed = "", ""
        if family is not None and self._family is None:
            unknown = f"compiled steps of {family.__name__} are not kept: its source is not in a file"
        try:
            self._changed = code_digest(changed_code())
        except UnknownCodeError as error:
            unknown = f"compiled steps are not kept: of jaxengine's changed code, {error}"
        if unknown and bundle is not None:
            raise ConfigError.because("bundle", unknown, "leave bundle out")
        if unknown:
            logger.warning("%s", unknown)
            directory = ""
        self._files = ExecutableFiles(directory)
        self._kept = bundle or KeptPrograms(self._files)
        self._has_native = family is not None
        self._know_sources()
        if bundle is not None:
            digest = f"{self._environment()[0]} {self._changed}"
            bundle.check_sources("programs" if family is None else family.__name__, digest)

    def get(
        self,
        name: str,
        function: Callable,
        arguments: Sequence[Any],
        results: Any,
        *,
        donate: tuple[int, ...],
        description: str = "",
        made: Executable | None = None,
    ) -> Executable:
        """Return the executable of a function: loaded if it is stored, else compiled and stored; counted in num_loaded
        or num_compiled. `on_compile` is called before it is compiled.

        On one CPU device it may be a chain of parts (jaxengine.runner.executables.layer_chain). For a new bundle, the
        executable of a function without arguments returns the shapes `results` and allocates nothing. Raises the errors
        of `compile_program`, ConfigError for a bundle that lacks the program or cannot store it, and OSError if a new
        bundle cannot be written.

        Args:
          name: name of the program, for messages; part of the key.
          function: the function to compile.
          arguments: its arguments as ShapeDtypeStructs.
          results: a pytree of ShapeDtypeStructs with the structure of the result. They are part of the key, and must be
            right where they do not follow from the arguments.
          donate: indices of arguments whose memory the results may take.
          description: static facts, beyond our sources and the arguments, that decide the program; part of the key.
          made: what `compile` has returned for this function and these arguments, if it has been called already.
        """
        file = self._file_name(name, arguments, results, donate, description)
        begun = self._begun.pop(file, None)
        return (begun or self._begin(name, file, function, arguments, results, donate, made))()

    def begin(
        self,
        name: str,
        function: Callable,
        arguments: Sequence[Any],
        results: Any,
        *,
        donate: tuple[int, ...],
        description: str = "",
    ) -> None:
        """Begin what the next `get` with these arguments does: load the program, or trace it and let the threads of
        `compiling_ahead` compile it. Does nothing outside of that context. Raises the errors of `get`, but those of the
        compiler.
        """
        if self._threads is not None:
            file = self._file_name(name, arguments, results, donate, description)
            self._begun[file] = self._begin(name, file, function, arguments, results, donate)

    def _begin(
        self,
        name: str,
        file: str,
        function: Callable,
        arguments: Sequence[Any],
        results: Any,
        donate: tuple[int, ...],
        made: Executable | None = None,
    ) -> Callable[[], Executable]:
        """Load a program, or else trace it and begin to compile it unless it is `made`. Return the function that
        returns the executable, after the compiler's end, and stores what was not loaded. file: the name of its file.
        The other arguments are those of `get`, which counts and raises the same.
        """
        trees = jax.tree.structure((tuple(arguments), {})), jax.tree.structure(results)
        loaded = self._load(name, file, *trees)
        if loaded is not None:
            self.num_loaded += 1
            return lambda: loaded
        self.on_compile()
        # Shardings of results follow from arguments, unless there are none.
        shardings = None if jax.tree.leaves(arguments) else jax.tree.map(lambda leaf: leaf.sharding, results)
        finish = None if made else self._begin_compiling(function, arguments, donate, shardings)

        def stored() -> Executable:
            compiled = made if finish is None else finish()
            assert compiled is not None
            self.num_compiled += 1
            self._store(name, file, compiled)
            if isinstance(self._bundle, NewBundle) and shardings is not None:
                return cast(Executable, lambda: results)  # what will be allocated where the bundle is read
            return compiled

        return stored

    def compile(
        self, function: Callable, arguments: Sequence[Any], *, donate: tuple[int, ...], shardings: Any = None
    ) -> Executable:
        """Compile a function without loading or storing it, with the compiler options and context of `get`.

        On a single CPU device the result may be a chain of parts, as in `get`. Raises the errors of `compile_program`.
        shardings: a pytree of the results' shardings; None if they follow from the arguments.
        """
        return self._begin_compiling(function, arguments, donate, shardings)()

    def _begin_compiling(
        self, function: Callable, arguments: Sequence[Any], donate: tuple[int, ...], shardings: Any
    ) -> Callable[[], Executable]:
        """Trace and lower a function, and hand it to the threads of `compiling_ahead`, if there are any. Return the
        function that returns the executable, compiled there or by the call. The arguments are those of `compile`.
        """
        backend, in_parts = self._devices[0].platform, None
        with _ENGINE(self._traces), without_rows(self.unused), self._mesh_of((arguments, shardings)):
            traced = jax.jit(function, donate_argnums=donate, out_shardings=shardings).trace(*arguments)
            if backend == "cpu" and len(self._devices) == 1:
                in_parts = lower_parts(traced, arguments, donate, self._devices[0])
            lowered, whole = in_parts or ([traced.lower()], lambda programs: programs[0])

        def compiled(each: jax.stages.Lowered) -> jax.stages.Compiled:
            with _ENGINE(self._traces):  # contexts of jax are those of a thread
                return compile_program(each, backend)

        if self._threads is None:
            return lambda: whole(list(map(compiled, lowered)))
        compiling = [self._threads.submit(compiled, each) for each in lowered]
        return lambda: whole([each.result() for each in compiling])

    def _mesh_of(self, shapes: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a program is traced. For a new bundle on other devices than CPUs it sets the
        program's mesh, from which kernels learn the device, as the devices need not be present; otherwise it does
        nothing.

        shapes: a pytree of shapes or shardings, of which at least one has the mesh.
        """
        shardings = (getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(shapes))
        if not isinstance(self._bundle, NewBundle) or self._devices[0].platform == "cpu":
            return contextlib.nullcontext()
        meshes = (each.mesh for each in shardings if isinstance(each, NamedSharding))
        return jax.set_mesh(next(mesh for mesh in meshes if isinstance(mesh, Mesh)))

    @property
    def environment(self) -> tuple[str, ...]:
        """Facts that the machine code of every program depends on: sources, versions, devices, flags."""
        return *self._environment(), *compiler_flags(), self._changed

    def stored_bytes(
        self, name: str, arguments: Sequence[Any], results: Any, *, donate: tuple[int, ...], description: str = ""
    ) -> int:
        """Return the size in bytes of a program's file, 0 if it is not stored. The arguments are those of `get`."""
        return self._kept.program_bytes(self._file_name(name, arguments, results, donate, description))

    def get_number(self, name: str, arguments: Sequence[Any], description: str, compute: Callable[[], int]) -> int:
        """Return a number that follows from compiling a program: from its file if it is stored, else computed, after
        `on_compile`, and stored.

        name: name of the number. arguments, description: those of the program, as in `get`. compute: returns the
        number, an int from 0 to 2**64 - 1; if it raises, nothing is stored. Raises ConfigError for a bundle that lacks
        the number.
        """
        file = self._file_name(name, arguments, (), (), description)
        if (number := self._kept.number(name, file)) is None:
            self.on_compile()
            number = compute()
            self._kept.add_number(file, number)
        return number

    def _file_name(
        self, name: str, arguments: Sequence[Any], results: Any, donate: tuple[int, ...], description: str
    ) -> str:
        """Return the name of a program's file, or its key in a bundle: a digest of everything that determines its
        machine code. The arguments are those of `get`.
        """
        leaves, structure = jax.tree.flatten((arguments, results))
        if self._bundle is None:
            devices: Any = [device.id for device in self._devices]
            environment = *self.environment, sorted(self.unused)
            forms = [str(leaf.format) for leaf in leaves]
        else:  # the bundle's facts are its environment; devices that are not there have no layouts
            devices, environment = len(self._devices), sorted(self.unused)
            forms = [str(getattr(leaf.sharding, "spec", None)) for leaf in leaves]
        shapes = [(leaf.shape, str(leaf.dtype), form) for leaf, form in zip(leaves, forms, strict=True)]
        return file_name(repr((environment, devices, name, donate, shapes, str(structure), description)))

    def _environment(self) -> tuple[str, ...]:
        """Return the facts that the machine code depends on for the cache's first device and model class."""
        return _environment(self._devices[0], self._family, self._has_native)

    def _know_sources(self) -> None:
        """Compute the digest of our sources, with the parsed imports that an earlier process of the same Python has
        stored in the cache folder, and store them again if more sources were parsed. Before that, on a CPU, make
        machine code of ours or load it from that folder.
        """
        file = file_name(f"sources {sys.version}")  # an AST is written otherwise by another Python
        if not num_known_sources():
            learn_sources(self._files.read(file) or b"")
        count = num_known_sources()
        if self._has_native and self._devices[0].platform == "cpu":
            native_code(KeptCode(self._files, self._changed))
        self._environment()
        if num_known_sources() > count:
            self._files.write(file, known_sources())

    def _load(self, name: str, file: str, in_tree: Any, out_tree: Any) -> Executable | None:
        """Return a stored program; None if it must be compiled. A file that cannot be loaded is logged as a warning.
        in_tree, out_tree: see `layer_chain.load`.

        Raises ConfigError for a bundle that lacks the program, whose program cannot be loaded, or whose kernels failed
        their proof here.
        """
        if isinstance(self._bundle, Bundle) and self.unused:
            failed = ", ".join(sorted(f"{op} ({kind})" for op, kind in self.unused))
            raise self._bundle.refused(f"its programs use kernels that failed their proof here: {failed}")
        payload = self._kept.program(name, file)
        if payload is None:
            return None
        devices = tuple(self._devices)
        try:
            return load(payload, in_tree, out_tree, devices)
        except Exception as error:  # a runtime may raise anything for a file; compiling again helps in any case
            if isinstance(self._bundle, Bundle):
                raise self._bundle.refused(f"the runtime does not load its program {name!r}: {error}") from error
            logger.warning("the executable %s (%s) cannot be used and is compiled again: %s", name, file, error)
            return None

    def _store(self, name: str, file: str, compiled: Executable) -> None:
        """Store a compiled program, or log once why that is impossible; for a new bundle the latter raises ConfigError,
        and a failed write OSError. Nothing happens if the folder stores nothing.
        """
        if self._bundle is None and not self._files.can_keep():
            return
        try:
            payload = serialize(compiled)
        except NotStorableError as error:
            if self._bundle is not None:
                raise ConfigError.because("bundle", f"{name} cannot be stored: {error}", "build none") from None
            if not self._said_why:
                logger.warning("%s is not stored, and is compiled at every start: %s", name, error)
            self._said_why = True
            return
        self._kept.add_program(name, file, payload)


@contextlib.contextmanager
def compiling_ahead(caches: Sequence[ExecutableCache], num_threads: int) -> Iterator[int]:
    """Context in which `begin` of these caches compiles, on num_threads threads in all; with 0 it does nothing. Tracing
    remains with the callers' thread. Returns how many programs may be begun before the first of them is waited for. At
    the end, what has begun and nobody has asked for is dropped; after an error the compilers that run are not waited
    for.
    """
    if not num_threads:
        yield 0
        return
    threads = ThreadPoolExecutor(num_threads, "compile")
    try:
        for cache in caches:
            cache._threads = threads
        yield num_threads + _TRACED_AHEAD
    finally:
        for cache in caches:
            cache._threads = None
            cache._begun.clear()
        threads.shutdown(wait=False, cancel_futures=True)


def _source_file(family: type) -> Path | None:
    """Return the file of a class's module, None if it has none."""
    file = getattr(sys.modules.get(family.__module__), "__file__", None)
    return None if file is None else Path(file)


@functools.cache
def _environment(device: Any, family: Path | None, has_native: bool) -> tuple[str, ...]:
    """Return the facts that every program's machine code depends on: sources, versions, kind and number of devices,
    host. Computed once for equal arguments.

    family: the file of the model's class; None for programs without a model. has_native: whether programs
    may call machine code of ours (registry.NATIVE) on a CPU.
    """
    native = (
        native_code() if has_native and device.platform == "cpu" else ""
    )  # first, as it decides which modules these are
    return (
        source_digest(_ROOT, kernel_modules(platform_of(device)), family),
        jax.__version__,
        jaxlib.version.__version__,
        device.platform,
        device.device_kind,
        str(device.client.platform_version),
        str(jax.device_count()),
        platform.machine(),
        _cpu_flags(),
        native,
    )


def compiler_flags() -> tuple[str, ...]:
    """Return the user's compiler flags, on which the code depends: XLA_FLAGS, LIBTPU_INIT_ARGS, and jax's optimisation
    switch.
    """
    unoptimised = jax.config.read("jax_disable_most_optimizations")
    return os.environ.get("XLA_FLAGS", ""), os.environ.get("LIBTPU_INIT_ARGS", ""), f"unoptimised {unoptimised}"


def _cpu_flags() -> str:
    """Return the host processor's features and number of cores as text, on which machine code for CPUs depends; on a
    system without /proc/cpuinfo, only the processor's name.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{flags} x{os.cpu_count()}"
