"""Options and fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis.internal import constants_ast
from hypothesis.internal.conjecture import providers

from tests import tiers
from tests.durations import NUM_SHOWN, RECORD, Durations, growth, recorded
from tests.fast_compile import fast_compile, share_contexts, share_programs
from tests.jaxengine.server.server_process import ServerProcess, start_server
from tests.kept import Kept, file_ended

TINY_CHECKPOINT = Path(__file__).parent / "fixtures" / "models" / "llama"

# Few shapes, small pool: engines of the tests compile in seconds, once, and load in milliseconds after that.
TINY_OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "disable_log_stats": True,
}

# The default model in two shapes, a decode and a mixed step: each takes ten seconds to compile and one to load.
SMOLLM_OPTIONS = {
    "dtype": "float32",
    "max_model_len": 1536,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "kv_cache_memory_bytes": 1 << 30,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "disable_log_stats": True,
}

FIGURE = "figure"
MAPS = Path("/proc/self/maps")
RESIDENT = Path("/proc/self/statm")
# A machine with room keeps more, for it takes time to look for ended engines.
_WITH_ROOM = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >= 16e9
MAX_RESIDENT_BYTES = 3 << 30 if _WITH_ROOM else 2 << 30
# Bytes by which a process grows before its programs are forgotten once more, while it has less than MOST_BYTES: engines
# that are in use stay, so that forgetting at the end of every file frees nothing, and what later files share is
# compiled again.
GROWN_BYTES, MOST_BYTES = 1 << 30, 5 << 30 if _WITH_ROOM else 4 << 30
# Bytes by which a process grows before ended engines are looked for: that takes a second or two, for it visits all that
# earlier files have left. What is left when programs have been forgotten, however much, is no reason to do it again.
ENDED_BYTES = 1536 << 20 if _WITH_ROOM else 768 << 20
# The same of mappings.
MAX_MAPS, GROWN_MAPS, MOST_MAPS = 20_000, 8_000, 40_000
LONG = 40.0  # seconds
WITHOUT_LLVMLITE = Path(__file__).with_name("without_llvmlite")  # for processes that tests start
_num_tests = 0
_bytes_left = _maps_left = 0  # resident, and mappings, when programs were last forgotten
_bytes_collected = 0  # resident after the last collection of everything
_has_ended = False  # whether an engine has ended since
_patches_code = False  # whether the test that runs may replace what functions of programs read
_durations = Durations()

# They share the engine of the default model, whose steps take a minute to compile: one process runs them all, at first,
# so that no process is left with them at the end.
DEFAULT_MODEL_FILES = (
    "tests/test_workloads.py",
    "tests/jaxengine/requests/test_text.py",
    "tests/jaxengine/server/test_default_model.py",
    "tests/examples/test_examples.py",
)

# Files whose programs are compiled as in production, for they tell what the optimiser makes; all others compile fast.
OPTIMISED = (
    *DEFAULT_MODEL_FILES,
    "tests/benchmarks/",
    "tests/jaxengine/check/",
    "tests/pallas_kernels/matmul/test_dense.py",
    "tests/scheduler/",
    "tests/sharding/test_collectives.py",
    "tests/sharding/test_towers.py",
)


def pytest_addoption(parser):
    parser.addoption("--tier", choices=tiers.TIERS, help="only this tier of tests/tiers.py")
    parser.addoption(
        "--pool-operations",
        type=int,
        default=20_000,
        help="operations of the page pool's random walk (nightly: 1000000)",
    )
    parser.addoption("--thorough", action="store_true", help="every case, not one of each kind (make nightly)")
    parser.addoption("--optimised", action="store_true", help="every program is compiled as in production, none fast")
    parser.addoption(
        "--executables", default=None, help="where compiled steps are kept between test runs (default: .cache)"
    )
    parser.addoption("--record-durations", action="store_true", help="write the seconds of each file to tests/")


def pytest_configure(config):
    # Recorded tokens are plain XLA's. Tests of machine code ask for it (tests/pallas_kernels/conftest.py).
    sys.modules["llvmlite"] = None  # type: ignore[assignment]
    # Tests send these, and their processes inherit what is ignored: `nohup` and the `&` of a script ignore some.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    starts_workers = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not starts_workers:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(WITHOUT_LLVMLITE), os.environ.get("PYTHONPATH"))))
    if not config.getoption("--thorough"):
        hypothesis.settings.register_profile("few", hypothesis.settings(max_examples=30))
        hypothesis.settings.load_profile("few")
        # It would parse all of our modules for constants to draw, which takes as long as importing all tests.
        if hasattr(providers, "_get_local_constants"):
            providers._get_local_constants = constants_ast.Constants


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import all tests without collecting garbage, of which there is none: it takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path, config):
    tier = config.getoption("--tier")
    if tier is None or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return True if not tiers.may_hold(path, tier) else None


def pytest_collection_modifyitems(config, items):
    chosen, thorough = config.getoption("--tier"), config.getoption("--thorough")

    def is_selected(item) -> bool:
        return chosen in (None, _tier(item)) and (thorough or not _is_thorough(item))

    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
    items[:] = filter(is_selected, items)
    # Long files first, so that no process is left alone with one; interpreted kernels, which take both cores, last.
    # The others by folder, whose files share engines and servers.
    seconds = recorded()

    def place(item) -> tuple[bool, bool, float, str]:
        file = item.nodeid.partition("::")[0]
        is_interpreted = "outcomes" in getattr(item, "fixturenames", ())
        long = seconds.get(file, 0.0)
        return is_interpreted, not file.startswith(DEFAULT_MODEL_FILES), -long if long >= LONG else 0.0, file

    items.sort(key=place)


def _is_thorough(item) -> bool:
    """Whether a test is of the marker `thorough`, and none of its parameters is one that always runs."""
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    always = [mark.kwargs.get("but", ()) for mark in item.iter_markers("thorough")]
    return any(not any(param in names for param in params) for names in always)


def pytest_collection_finish(session):
    """Leave what is imported out of garbage collections, and collect seldom.

    Every start of an engine collects, and each collection looks at all objects that are not frozen: in a process of
    tests these are modules and traces of many files. Traces make objects by the hundred thousand that live until they
    are compiled, so collections of young objects find next to nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


def _tier(item) -> str:
    return tiers.tier_of(item.nodeid, getattr(item, "fixturenames", ()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class FilesOfOneEngine(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return DEFAULT_MODEL_FILES[0] if file in DEFAULT_MODEL_FILES else file

    return FilesOfOneEngine(config, log)


@pytest.hookimpl(trylast=True)  # when the file's own fixtures have ended
def pytest_runtest_teardown(item, nextitem):
    """Between files, or at worst within one, forgets compiled programs before there are too many of them.

    Each is a few dozen mappings of memory, of which Linux lets a process have 65,530; the compiler dies of one more.
    All together they are several GiB after some hundred files, and a machine runs more than one process of tests.
    """
    global _num_tests, _bytes_left, _maps_left, _has_ended
    _num_tests += 1
    ends_file = nextitem is None or nextitem.path != item.path
    if ends_file:
        _has_ended |= file_ended()
    jax = sys.modules.get("jax")
    if jax is not None and (ends_file or _num_tests % 50 == 0) and MAPS.exists():
        most = max(MAX_RESIDENT_BYTES, min(_bytes_left + GROWN_BYTES, MOST_BYTES), _bytes_left + ENDED_BYTES)
        most_maps = max(MAX_MAPS, min(_maps_left + GROWN_MAPS, MOST_MAPS)) if ends_file else MOST_MAPS
        if ends_file and _has_ended and _resident_bytes() > min(_bytes_collected + ENDED_BYTES, most):
            _collect()
        if _num_maps() > most_maps or (ends_file and _resident_bytes() > most):
            jax.clear_caches()
            _collect()
            _bytes_left, _maps_left = _bytes_collected, _num_maps()
    if ends_file:
        gc.freeze()  # see pytest_collection_finish


def _collect() -> None:
    """Collect what earlier files have left, frozen objects too."""
    global _bytes_collected, _has_ended
    gc.unfreeze()
    gc.collect()
    _has_ended, _bytes_collected = False, _resident_bytes()


def _num_maps() -> int:
    with MAPS.open("rb") as maps:
        return sum(1 for _ in maps)


def _resident_bytes() -> int:
    return int(RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture(scope="module", autouse=True)
def compile_mode(request):
    """Compile fast, but in the files of OPTIMISED and with --optimised."""
    as_in_production = request.config.getoption("--optimised") or request.node.nodeid.startswith(OPTIMISED)
    with contextlib.nullcontext() if as_in_production else fast_compile():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    global _patches_code
    _patches_code = "monkeypatch" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module", autouse=True)
def quick_starts():
    """Leave garbage to the collections between files: an engine's start would collect twice, before it measures memory,
    which takes a process that has run some files half a second each. Let engines share traces and programs, but in
    tests that may change what a function reads.
    """
    with pytest.MonkeyPatch.context() as patch:
        if runner := sys.modules.get("jaxengine.runner.model_runner"):
            patch.setattr(runner, "return_free_memory", sys.modules["jaxengine.runner.base.memory"].trim_heap)
        share_programs(patch, lambda: not _patches_code)
        share_contexts(patch)
        yield


@pytest.fixture(autouse=True)
def few_programs(request):
    """A unit test compiles next to nothing: what compiles a model belongs to another tier."""
    if _tier(request.node) != "unit" or "jax" not in sys.modules:
        yield
        return
    before = compiled_programs()
    yield
    count = compiled_programs() - before
    if count > tiers.MAX_UNIT_PROGRAMS:
        pytest.fail(
            f"compiled {count} programs; a unit test may compile {tiers.MAX_UNIT_PROGRAMS}: tests/tiers.py names tiers"
        )


@functools.cache
def _counted_programs() -> list[str]:
    import jax

    names: list[str] = []

    def note(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    return names


def compiled_programs() -> int:
    """Programs that this process has compiled since the first call."""
    return len(_counted_programs())


def use_scheduler(llm, **changes):
    """Gives an engine a fresh scheduler, with an empty prefix cache and other limits than the engine's if asked for.

    What differs between cases by the scheduler alone needs no engine, and no compiling, of its own.
    """
    engine = llm.core.engine
    while engine.has_unfinished:  # the step that was in flight when the last request ended
        engine.step()
    runner = engine.runner
    config = runner.config.scheduler_config(runner.plan.num_pages, runner.num_ranks, runner.windows)
    config = engine.extensions.configure(config)
    engine.scheduler.__init__(dataclasses.replace(config, **changes))  # the engine's parts know it
    engine.extensions.attach(engine.extensions._loop)
    return engine.scheduler


@pytest.fixture(scope="session")
def thorough(pytestconfig) -> bool:
    return pytestconfig.getoption("--thorough")


@pytest.fixture
def report(record_property):
    """report(line): a figure the run shows at its end, whichever process ran the test."""
    return functools.partial(record_property, FIGURE)


def pytest_runtest_logreport(report):
    _durations.add(report.nodeid, report.duration)


def pytest_terminal_summary(terminalreporter, config):
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    lines = [text for each in reports if each.when == "call" for name, text in each.user_properties if name == FIGURE]
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)
    if not _durations.seconds:
        return
    _durations.write(config.rootpath / ".cache" / "durations.json")
    if config.getoption("--record-durations"):
        _durations.write(RECORD)
    grown = growth(_durations.seconds, recorded())
    if grown and len(_durations.seconds) > NUM_SHOWN:
        terminalreporter.section(f"files that take longer than tests/{RECORD.name} says")
        for more, name in grown[:NUM_SHOWN]:
            terminalreporter.write_line(f"{more:+7.1f} s  {name}")


@pytest.fixture(scope="session")
def executables_dir(pytestconfig) -> str:
    """Compiled steps, shared by all engines of all runs; a changed source makes new ones."""
    return pytestconfig.getoption("--executables") or str(pytestconfig.rootpath / ".cache" / "executables")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """The recorded tiny llama with a longer context: rope has no trained limit."""
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    shutil.copytree(TINY_CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    return str(folder)


@pytest.fixture(scope="session")
def tiny_options(tiny_model, executables_dir) -> dict:
    return {**TINY_OPTIONS, "model": tiny_model, "compile_cache_dir": executables_dir}


@pytest.fixture(scope="session")
def make_llm(tiny_options):
    """Engines of the tiny model by options, made once each."""
    from jaxengine import LLM

    made = Kept(LLM.shutdown)

    def make(**changes):
        return made.get(repr(sorted(changes.items())), lambda: LLM(**{**tiny_options, **changes}))

    yield make
    made.end_all()


@pytest.fixture(scope="session")
def _smollms():
    from jaxengine import LLM

    made = Kept(LLM.shutdown)
    yield made
    made.end_all()


@pytest.fixture(scope="module")
def smollm(_smollms, executables_dir):
    """The default model with its real weights, float32: one engine for all files that follow each other."""
    from jaxengine import LLM

    return _smollms.get("smollm", lambda: LLM(**SMOLLM_OPTIONS, compile_cache_dir=executables_dir))


@pytest.fixture(scope="session")
def _smollm_servers():
    made = Kept(ServerProcess.remove)
    yield made
    made.end_all()


@pytest.fixture(scope="module")
def make_smollm_server(smollm, _smollm_servers, executables_dir):
    """`jaxengine serve` of the default model by its options, started once each.

    smollm is asked for first, so that the compiled steps are there.
    """
    from jaxengine.checkpoint.default_model import default_model_path

    options = {**SMOLLM_OPTIONS, "model": str(default_model_path()), "compile_cache_dir": executables_dir}
    options |= {"served_model_name": ["smollm"], "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}

    def make(**changes):
        key = repr(sorted(changes.items()))
        return _smollm_servers.get(key, lambda: start_server({**options, "grpc_port": 0}, **changes))

    return make


@pytest.fixture(scope="session")
def pooling_folder(tmp_path_factory):
    """Folders of tests/fixtures/pooling_models.py by name, made once each."""
    from tests.fixtures.pooling_models import make_model

    parent = tmp_path_factory.mktemp("pooling")
    return functools.cache(lambda name: str(make_model(parent / name, name)))


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory):
    """Folders of tests/fixtures/encoder_models.py by name, made once each."""
    from tests.fixtures.encoder_models import make_encoder

    parent = tmp_path_factory.mktemp("encoders")
    return functools.cache(lambda name: str(make_encoder(parent / name, name)))


@pytest.fixture(scope="session")
def pooling_options(executables_dir) -> dict:
    """Of engines of these models: a step of one shape, a pool of few requests."""
    few = {"skip_tokenizer_init": False, "num_gpu_blocks_override": 60, "compilation_config": {"prefill_sizes": [32]}}
    return {**TINY_OPTIONS, **few, "compile_cache_dir": executables_dir}


@pytest.fixture(scope="session")
def make_pooling_llm(pooling_folder, pooling_options):
    """Engines of these models by name and options, made once each."""
    from jaxengine import LLM

    made = Kept(LLM.shutdown)

    def make(name, *changes):
        options = {**pooling_options, **dict(changes)}
        return made.get((name, changes), lambda: LLM(pooling_folder(name), **options))

    yield make
    made.end_all()
