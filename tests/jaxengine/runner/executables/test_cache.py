"""The cache of compiled programs: what it gives back, what it refuses, what it survives."""

from __future__ import annotations

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxengine import LLM, SamplingParams
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.qwen2 import Qwen2ForCausalLM
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.runner.base.program import Program
from jaxengine.runner.compile_watch import CompileWatch
from jaxengine.runner.executables import cache
from jaxengine.runner.executables.cache import ExecutableCache, compiling_ahead
from jaxengine.runner.programs.program_needs import estimate_needs
from jaxengine.runner.warm_up import num_compile_threads
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS

DEVICES = jax.devices()[:1]
ARGUMENTS = (jax.ShapeDtypeStruct((4,), np.float32),)


def double(x):
    return x * 2


def get(cache, function=double, arguments=ARGUMENTS, **changes):
    return cache.get("double", function, arguments, **{"results": ARGUMENTS[0], "donate": (), **changes})


def run(compiled):
    return np.asarray(compiled(jnp.arange(4.0))).tolist()


def test_second_time_loads(tmp_path):
    first, second = ExecutableCache(str(tmp_path), DEVICES), ExecutableCache(str(tmp_path), DEVICES)
    assert run(get(first)) == run(get(second)) == [0, 2, 4, 6]
    assert (first.num_compiled, first.num_loaded) == (1, 0)
    assert (second.num_compiled, second.num_loaded) == (0, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"donate": (0,)},
        {"description": "other"},
        {"arguments": (jax.ShapeDtypeStruct((5,), np.float32),)},
        {"results": jax.ShapeDtypeStruct((8,), np.float32)},
    ],
    ids=str,
)
def test_what_matters_is_in_the_key(tmp_path, changes):
    get(ExecutableCache(str(tmp_path), DEVICES))
    cache = ExecutableCache(str(tmp_path), DEVICES)
    get(cache, **changes)
    assert (cache.num_compiled, cache.num_loaded) == (1, 0)


OFFSET = 0.0


@jax.jit
def shifted(x):
    return x + OFFSET


def shift_again(x, _):
    return x + OFFSET, None


@pytest.mark.parametrize("function", [lambda x: shifted(x), lambda x: jax.lax.scan(shift_again, x, None, 1)[0]])
def test_another_engine_traces_anew_what_jits_and_scans_inside_a_program_hold(function, monkeypatch):
    """A user's own layer may read a value that has changed since another engine was started."""
    for offset in (1.0, 2.0):
        monkeypatch.setitem(globals(), "OFFSET", offset)
        assert run(get(ExecutableCache("", DEVICES), function)) == [offset, 1 + offset, 2 + offset, 3 + offset]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: jax.debug.print("{}", x) or x,
        lambda x: jax.debug.callback(lambda y: None, x) or x,
        lambda x: jax.pure_callback(lambda y: y, x, x),
        lambda x: io_callback(lambda y: y, x, x, ordered=False),
        lambda x: io_callback(lambda y: y, x, x, ordered=True),
    ],
    ids=["print", "callback", "pure_callback", "io_callback", "ordered io_callback"],
)
def test_a_program_that_calls_python_is_measured_and_not_stored(tmp_path, caplog, call):
    cache = ExecutableCache(str(tmp_path), DEVICES)
    program = Program("double", lambda x: call(x) * 2, ARGUMENTS, ARGUMENTS[0], ())
    assert estimate_needs(program, cache, "", "cpu").held > estimate_needs(program, cache, "", "cpu").workspace >= 0
    files = len(list(tmp_path.iterdir()))
    for description in ("one", "other"):
        assert run(get(cache, program.function, description=description)) == [0, 2, 4, 6]
    assert len(list(tmp_path.iterdir())) == files
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "double is not stored, and is compiled at every start"
    ]


def test_a_method_of_ours_that_a_user_replaced_is_in_the_key(tmp_path, monkeypatch):
    def num_compiled() -> int:
        cache = ExecutableCache(str(tmp_path), DEVICES, family=LlamaForCausalLM)
        get(cache)
        return cache.num_compiled

    assert (num_compiled(), num_compiled()) == (1, 0)
    monkeypatch.setattr(RMSNorm, "__call__", lambda self, x: x + OFFSET)
    assert (num_compiled(), num_compiled()) == (1, 0)
    monkeypatch.setitem(globals(), "OFFSET", 3.0)
    assert num_compiled() == 1
    monkeypatch.setitem(globals(), "OFFSET", iter("a"))  # a value that cannot be told
    assert (num_compiled(), num_compiled()) == (1, 1)


def test_what_the_user_says_to_compilers_is_in_the_key(tmp_path, monkeypatch):
    def num_compiled() -> int:
        cache = ExecutableCache(str(tmp_path), DEVICES)
        get(cache)
        return cache.num_compiled

    assert (num_compiled(), num_compiled()) == (1, 0)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert num_compiled() == 1
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not before)
    try:
        assert num_compiled() == 1
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert num_compiled() == 0


@pytest.mark.thorough("half a minute of compiling")
def test_engines_of_other_shapes_do_not_take_each_others_steps(tmp_path):
    """A bucket's rows of logits follow from the other buckets, and whether it scores prompts as well."""
    model = str(TINY_CHECKPOINT)
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
    small = {"max_num_seqs": 1, "compilation_config": {"cudagraph_capture_sizes": [1], "prefill_sizes": []}}
    found = []
    for changes in (
        {"compilation_config": {"cudagraph_capture_sizes": [1, 8], "prefill_sizes": [5]}},
        {**small, "max_num_batched_tokens": 8},
        {**small, "max_num_batched_tokens": 1},
    ):
        options = {**TINY_OPTIONS, "model": model, "max_model_len": 32, "max_num_batched_tokens": 8, **changes}
        llm = LLM(compile_cache_dir=str(tmp_path), **options)
        (output,) = llm.generate([{"prompt_token_ids": [3, 4, 5, 6]}], params, use_tqdm=False)
        found.append((output.outputs[0].token_ids, [sorted(each) for each in output.prompt_logprobs[1:]]))
    assert found == [found[0]] * 3


@pytest.fixture
def compilers(monkeypatch):
    """Names of the threads that compile, one for each program."""
    names, compile_program = [], cache.compile_program

    def recorded(lowered, backend):
        names.append(threading.current_thread().name)
        return compile_program(lowered, backend)

    monkeypatch.setattr(cache, "compile_program", recorded)
    return names


def begin(cache, function=double):
    cache.begin("double", function, ARGUMENTS, ARGUMENTS[0], donate=())


def test_what_is_begun_compiles_on_threads_and_is_traced_once(tmp_path, compilers):
    traced = []

    def function(x):
        traced.append(threading.current_thread())
        return x * 2

    first, second = ExecutableCache(str(tmp_path), DEVICES), ExecutableCache(str(tmp_path), DEVICES)
    begin(first, function)
    assert not traced  # only in the context
    with compiling_ahead([first, second], 1) as ahead:
        assert ahead > 1
        begin(first, function)
        assert traced == [threading.current_thread()]
        assert (first.num_compiled, first.num_loaded) == (0, 0)  # nothing is stored that nobody has asked for
        assert run(get(first, function)) == [0, 2, 4, 6]
        begin(second, function)
        assert run(get(second, function)) == [0, 2, 4, 6]
    assert len(traced) == len(compilers) == 1
    assert compilers[0].startswith("compile")
    assert (first.num_compiled, first.num_loaded, second.num_compiled, second.num_loaded) == (1, 0, 0, 1)
    get(first, lambda x: x * 2, description="another")
    assert compilers[1:] == [threading.current_thread().name]


def test_what_is_begun_and_not_asked_for_is_dropped():
    cache = ExecutableCache("", DEVICES)
    with compiling_ahead([cache], 1):
        begin(cache)
    assert run(get(cache)) == [0, 2, 4, 6]
    assert cache.num_compiled == 1


def test_errors_of_compilers_on_threads_are_the_callers(monkeypatch):
    def refuse(lowered, backend):
        raise MemoryError("of the compiler")

    cache_of = ExecutableCache("", DEVICES)
    monkeypatch.setattr(cache, "compile_program", refuse)
    with pytest.raises(MemoryError, match="of the compiler"), compiling_ahead([cache_of], 1):
        begin(cache_of)
        get(cache_of)
    monkeypatch.undo()
    assert run(get(cache_of)) == [0, 2, 4, 6]


def test_steps_of_a_start_compile_on_threads(make_llm, compilers):
    llm = make_llm(compile_cache_dir="", num_gpu_blocks_override=61)
    on_threads = [name for name in compilers if name.startswith("compile")]
    assert len(on_threads) >= len(llm.core.engine.runner.buckets)
    compilers.clear()
    eager = make_llm(compile_cache_dir="", num_gpu_blocks_override=61, enforce_eager=True)
    eager.generate({"prompt_token_ids": [1]}, SamplingParams(max_tokens=1))
    assert compilers
    assert not any(name.startswith("compile") for name in compilers)


@pytest.mark.parametrize(("cores", "threads"), [(1, (1, 1)), (2, (1, 1)), (16, (4, 8)), (180, (4, 16))])
def test_threads_for_cores(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores))
    assert (num_compile_threads("cpu"), num_compile_threads("tpu")) == threads
    assert num_compile_threads("gpu") == 0  # its compiler measures on the card


def test_nothing_is_kept_without_a_directory(tmp_path):
    cache = ExecutableCache("", DEVICES)
    assert run(get(cache)) == [0, 2, 4, 6]
    assert run(get(cache)) == [0, 2, 4, 6]
    assert cache.num_compiled == 2


@pytest.mark.parametrize("damage", [b"", b"x" * 10, None])
def test_a_damaged_file_is_compiled_again(tmp_path, damage):
    get(ExecutableCache(str(tmp_path), DEVICES))
    (file,) = tmp_path.glob("*.xla")
    content = file.read_bytes()
    file.write_bytes(content[:-5] if damage is None else damage)
    cache = ExecutableCache(str(tmp_path), DEVICES)
    assert run(get(cache)) == [0, 2, 4, 6]
    assert cache.num_compiled == 1
    assert file.read_bytes() == content or len(file.read_bytes()) > len(content) // 2


def test_numbers_are_remembered(tmp_path):
    calls = []
    for _ in range(2):
        cache = ExecutableCache(str(tmp_path), DEVICES)
        assert cache.get_number("n", ARGUMENTS, "", lambda: calls.append(1) or 42) == 42
    assert len(calls) == 1


def test_the_family_is_in_the_key(tmp_path):
    for family in (LlamaForCausalLM, Qwen2ForCausalLM):
        cache = ExecutableCache(str(tmp_path), DEVICES, family=family)
        get(cache)
        assert (cache.num_compiled, cache.num_loaded) == (1, 0)


def test_nothing_is_kept_of_a_family_without_a_file(tmp_path):
    typed_in = type("TypedIn", (LlamaForCausalLM,), {"__module__": "nowhere"})
    get(ExecutableCache(str(tmp_path), DEVICES, family=typed_in))
    assert not list(tmp_path.iterdir())


def test_a_warm_start_compiles_nothing_that_no_counter_sees(make_llm, tiny_options):
    """The pool, the slots' state and the order of weights in memory among it."""
    make_llm()
    watch = CompileWatch()
    with watch.watch(), LLM(**tiny_options) as llm:
        assert (watch.count, llm.core.runner.num_compiled) == (0, 0)


def test_an_option_that_the_compiler_does_not_know_is_left_out(monkeypatch, caplog):
    options = {"xla_gone_since": "false", "xla_cpu_enable_fast_math": False}
    monkeypatch.setitem(cache._COMPILER_OPTIONS, "cpu", options)
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    for _ in range(2):
        assert cache.compile_program(lowered, "cpu")(jnp.ones(3)).tolist() == [2.0] * 3
    assert options == {"xla_cpu_enable_fast_math": False}
    assert [record.args for record in caplog.records] == [("xla_gone_since",)]
    options["xla_cpu_enable_fast_math"] = "perhaps"
    with pytest.raises(jax.errors.JaxRuntimeError):
        cache.compile_program(lowered, "cpu")
    known = dict(cache._OPTIONS_OF_ONCE["cpu"])  # of which the compiler knows all
    assert cache.compile_program(lowered, "cpu", once=True)(jnp.ones(3)).tolist() == [2.0] * 3
    assert known == cache._OPTIONS_OF_ONCE["cpu"]
