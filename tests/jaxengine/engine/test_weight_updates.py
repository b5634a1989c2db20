"""Weights replaced under running requests: every token is that of an engine that was started with them, or nothing
changes."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxengine import LLM, AsyncLLM, RequestError, SamplingParams, ScannedLayers
from jaxengine.models.build import Build
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.requests.output.outputs import WeightSpan
from jaxengine.runner.weights.weight_update import WeightUpdateError
from tests.conftest import TINY_CHECKPOINT
from tests.models.quantization.test_gguf import LLAMA, blocks, shapes, write
from tests.sharding.update_cases import faulty
from tests.tables import each_row

NUM_TOKENS = 12
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41, 42, 43, 44], [77] * 20]
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
QKV = "model.layers.1.self_attn.k_proj.weight"


def stored() -> dict[str, np.ndarray]:
    source = SafetensorsCheckpoint(TINY_CHECKPOINT)
    tensors = {name: source.read(name) for name in source.names()}
    source.close()
    return tensors


def changed(seed: int) -> dict[str, np.ndarray]:
    """The stored tensors, each moved a little; those that were stored for seed 0."""
    rng = np.random.default_rng(seed)
    return {
        name: (array + (0.1 if seed else 0.0) * rng.standard_normal(array.shape)).astype(array.dtype)
        for name, array in stored().items()
    }


def greedy(count: int = NUM_TOKENS, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def tokens_of(llm: LLM, prompts: Any = PROMPTS) -> list[list[int]]:
    return [each.outputs[0].token_ids for each in llm.generate(prompts, greedy(), use_tqdm=False)]


@pytest.fixture(scope="module")
def llm(tiny_options):
    with LLM(**tiny_options) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm) -> list[list[list[int]]]:
    """The tokens with the weights of seeds 0 to 3. For seed 1 a test asks an engine that was started with them."""
    found = []
    for seed in range(4):
        llm.update_weights(changed(seed), kv="drop")
        found.append(tokens_of(llm))
    return found


def test_an_engine_started_with_them_says_the_same(llm, expected, tiny_options, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(tiny_options["model"]).glob("*.json"):
        if "safetensors" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(changed(1), folder / "model.safetensors")
    with LLM(**tiny_options | {"model": str(folder)}) as fresh:
        assert tokens_of(fresh) == expected[1] != expected[0]
    llm.update_weights(changed(0))
    update = llm.update_weights(folder, version="a folder")
    assert tokens_of(llm) == expected[1] and llm.weight_version == update.version == "a folder"
    assert update.leaves == len(llm.core.runner.stages[0].params) and update.num_bytes > 0


def test_pages_of_other_weights_are_not_found(llm, expected):
    """Prefixes are cached, and the same prompt comes again under other weights, and again under the first ones."""
    for seed in (1, 2, 1, 0):
        llm.update_weights(changed(seed))
        assert tokens_of(llm) == tokens_of(llm) == expected[seed]


@each_row(
    ("change", "at", "fault"),
    [
        ({NORM: None}, NORM, "missing"),
        ({"other.weight": np.zeros(3, np.float32)}, "other.weight", "no use"),
        ({EMBED: stored()[EMBED].T.copy()}, EMBED, "shape"),
        ({NORM: np.full(64, np.nan, np.float32)}, NORM, "finite"),
        ({NORM: np.full(64, 1e300)}, NORM, "finite"),  # infinite in float32
        ({NORM: np.ma.masked_all(64, np.float32)}, NORM, "mask"),
        ({QKV: np.full(stored()[QKV].shape, np.inf, np.float32)}, QKV, "finite"),
        ({NORM: stored()[NORM].astype(np.int32)}, NORM, "floating"),
        ({NORM: "a text"}, NORM, "array"),
        ({NORM: jax.ShapeDtypeStruct((64,), np.float32)}, NORM, "array"),
    ],
)
def test_all_or_none(llm, expected, change, at, fault):
    llm.update_weights(changed(0), version="before")
    sums = llm.weight_info(checksum=True)
    tensors = {name: each for name, each in (changed(1) | change).items() if each is not None}
    with pytest.raises(WeightUpdateError, match=fault) as error:
        llm.update_weights(tensors)
    assert at in [name for name, _ in error.value.faults]
    assert llm.weight_info(checksum=True) == sums and sums["weight_version"] == "before"
    assert not llm.is_paused() and tokens_of(llm) == expected[0]


def test_options_of_another_type_are_refused(llm):
    for name, value in (("strict", "no"), ("donate", None), ("chunk_bytes", 1.5)):
        with pytest.raises(RequestError, match=f"{name} is "):
            llm.update_weights(changed(1), **{name: value})
    with pytest.raises(RequestError, match="tags must be None or a list of tags, got 5"):
        llm.wake_up(5)


def test_every_fault_is_listed(llm):
    tensors = changed(1) | {"one": np.zeros(1), "two": np.zeros(1), EMBED: np.zeros((3, 3), np.float32)}
    del tensors[NORM]
    with pytest.raises(WeightUpdateError, match="one: .*; two: ") as error:
        llm.update_weights(tensors)
    assert {name for name, _ in error.value.faults} == {"one", "two", EMBED, NORM}
    # Of each kind as many, so that names of another form are seen beside what is missing instead; harmless to print.
    with pytest.raises(WeightUpdateError, match=r"missing; 'x\\x1b\[.*: the model has no use.*and 30 more") as error:
        llm.update_weights({f"x\x1b[{name}" + 9999 * "y": array for name, array in changed(1).items()})
    assert len(str(error.value)) < 2000
    with pytest.raises(RequestError, match="a text of at most 256 characters; it has 257"):
        llm.update_weights(changed(1), version="v" * 257)
    pairs = [*changed(1).items(), (NORM, stored()[NORM])]
    with pytest.raises(WeightUpdateError, match="twice"):
        llm.update_weights(iter(pairs))


@each_row(
    ("arguments", "field"),
    [
        ({"mode": "stop"}, "mode"),
        ({"kv": "forget"}, "kv"),
        ({"version": 1.5}, "version"),
        *(({"chunk_bytes": value}, "chunk_bytes") for value in (0, -1, True, 1.5, "1")),
    ],
)
def test_arguments_are_checked_before_anything_is_read(llm, arguments, field):
    with pytest.raises(RequestError) as error:
        llm.update_weights({}, **arguments)
    assert error.value.param == field


def test_some_of_the_weights(llm, expected):
    """A weight that joins tensors needs all of them; what no tensor is for stays."""
    llm.update_weights(changed(1))
    third = {name: each for name, each in changed(2).items() if ".layers.1." in name}
    with pytest.raises(WeightUpdateError, match="missing"):
        llm.update_weights(third)
    with pytest.raises(WeightUpdateError, match="missing"):
        llm.update_weights({QKV: third[QKV]}, strict=False)
    update = llm.update_weights(third, strict=False)
    assert 0 < update.leaves < len(llm.core.runner.stages[0].params)
    mixed = tokens_of(llm)
    llm.update_weights(changed(1) | third)
    assert tokens_of(llm) == mixed != expected[1]


def test_an_iterators_tensors_are_let_go(llm, expected):
    """With chunk_bytes, before the next one is asked for: a tensor's bytes are all that is alive of them."""
    alive: list[weakref.ref[np.ndarray]] = []

    def pairs() -> Iterator[tuple[str, np.ndarray]]:
        for name in sorted(tensors, key=lambda name: name.split(".")[3:]):  # kind by kind, joined tensors apart
            assert not any(each() is not None for each in alive), name
            array = tensors[name].copy()
            alive.append(weakref.ref(array))
            yield name, array
            del array

    tensors = changed(1)
    llm.update_weights(pairs(), chunk_bytes=1000)
    assert tokens_of(llm) == expected[1] and len(alive) == len(tensors)


def test_names_and_axes_of_a_trainer(llm, expected):
    tensors = changed(3)
    mapping: Any = {f"params/{name}": (name, (1, 0) if each.ndim == 2 else None) for name, each in tensors.items()}
    given = {f"params/{name}": jax.device_put(each.T.copy()) for name, each in tensors.items()}
    mapping["params/" + EMBED] = (EMBED, (1, 0), None)
    mapping["params/" + NORM] = (NORM, None, lambda array: array / 2)
    given["params/" + NORM] = given["params/" + NORM] * 2
    llm.update_weights(given.items(), mapping=mapping)
    assert tokens_of(llm) == expected[3]
    with pytest.raises(WeightUpdateError, match="elsewhere: is named by mapping"):
        llm.update_weights(tensors, mapping={"elsewhere": NORM})
    for wrong in (5, [NORM], {NORM: 5}, {NORM: (NORM,)}, {NORM: (NORM, 1)}, {NORM: (NORM, None, 1)}):
        with pytest.raises(RequestError, match="mapping (must be|has) .*a mapping from names to"):
            llm.update_weights(tensors, mapping=wrong)
    with pytest.raises(WeightUpdateError, match=r"mapping orders its axes \(1, 0\), and its shape is"):
        llm.update_weights(tensors, mapping={NORM: (NORM, (1, 0))})


def test_scanned_layers_of_a_trainer_that_gives_them_up(llm, expected):
    """Two layers in one array, on axis 1, as MaxText has them; every array is deleted, and its numbers are served."""
    tensors, mapping, given = changed(2), {}, {}
    for name in [each for each in tensors if ".layers.0." in each]:
        both = [tensors.pop(name.replace(".0.", f".{layer}.", 1)) for layer in (0, 1)]
        mapping[name] = ScannedLayers(name.replace(".0.", ".{layer}.", 1), axis=1 if both[0].ndim > 1 else 0)
        given[name] = jax.device_put(np.stack(both, mapping[name].axis))
    given |= {name: jax.device_put(each) for name, each in tensors.items()}
    llm.update_weights(given, mapping=mapping, chunk_bytes=1000)
    assert tokens_of(llm) == expected[2] and not any(each.is_deleted() for each in given.values())
    llm.update_weights(changed(1))
    llm.update_weights(given, mapping=mapping, donate=True)
    assert tokens_of(llm) == expected[2] and all(each.is_deleted() for each in given.values())
    with pytest.raises(WeightUpdateError, match="deleted"):
        llm.update_weights(given, mapping=mapping)
    with pytest.raises(WeightUpdateError, match="a folder has none"):
        llm.update_weights("folder", donate=True)
    assert tokens_of(llm) == expected[2]


def alive() -> int:
    """Bytes of all arrays on the devices that are not garbage: when that is collected is not what a test asks."""
    gc.collect()
    return sum(each.nbytes for each in jax.live_arrays())


def test_many_updates_under_running_requests(llm, expected, thorough):
    """Nothing compiles, nothing is left behind, and each request's newest tokens are those of the newest weights."""
    llm.update_weights(changed(0))
    core, scheduler, seeds = llm.core, llm.core.engine.scheduler, [changed(seed) for seed in range(4)]
    third = [{name: each for name, each in own.items() if ".layers.1." in name} for own in seeds]
    bytes_alive, finished = [], 0
    for number in range(1, 101 if thorough else 53):
        if len(scheduler.requests) < 4:
            core.add(core.inputs.prepare(PROMPTS[number % 3], greedy(20), request_id=f"request {number}"))
        for _ in range(3):
            finished += sum(each.finished for each in core.step())
        some = number % 5 == 4  # the next update brings all again
        tensors = third[number % 4] if some else seeds[number % 4]
        llm.update_weights(tensors, strict=not some, kv="drop" if number % 2 else "recompute", version=f"n{number}")
        assert {request.weight_versions[-1][0] for request in scheduler.requests} <= {f"n{number}"}
        if number % 10 == 0:
            bytes_alive.append(alive())
    assert finished > 3 and scheduler.requests and len({*bytes_alive}) == 1, bytes_alive
    known = {each.request_id: scheduler.output_token_ids(each).tolist() for each in scheduler.requests}
    prompts = {each.request_id: each.prompt_token_ids.tolist() for each in scheduler.requests}
    ended: dict[str, list[int]] = {}
    while core.has_unfinished:
        ended |= {each.request_id: list(each.outputs[0].token_ids) for each in core.step() if each.finished}
    assert core.runner.compiles.count == 0 and tokens_of(llm) == expected[0]
    for name, tokens in ended.items():
        so_far = known[name]
        again = llm.generate([prompts[name] + so_far], greedy(20 - len(so_far)), use_tqdm=False)
        assert tokens[: len(so_far)] == so_far and tokens[len(so_far) :] == list(again[0].outputs[0].token_ids)


def test_the_engines_own_tree_is_not_copied(llm, expected, tmp_path):
    model = build_model(read_folder(TINY_CHECKPOINT), Build("float32"))
    folder = tmp_path / "tensors"
    folder.mkdir()
    save_file(changed(2), folder / "model.safetensors")
    state = load_params(model, SafetensorsCheckpoint(folder), mesh=llm.core.runner.stages[0].programs.mesh)
    llm.update_weights(state)
    assert tokens_of(llm) == expected[2]
    held = {id(each) for each in llm.core.runner.stages[0].params}
    assert all(id(variable.get_value()) in held for _, variable in nnx.to_flat_state(state))
    path, variable = nnx.to_flat_state(state)[0]
    broken = nnx.from_flat_state(
        [(path, variable.replace(variable.get_value() * np.nan)), *nnx.to_flat_state(state)[1:]]
    )
    with pytest.raises(WeightUpdateError, match="finite"):
        llm.update_weights(broken)
    assert tokens_of(llm) == expected[2]


def test_matrices_that_were_rounded_are_rounded_again(tiny_options, tmp_path):
    """In the recipe of loading: int8 of the new weights, from bfloat16 too."""
    options = tiny_options | {"quantization": "int8"}
    with LLM(**options) as llm:
        before = llm.weight_info(checksum=True)["checksums"]
        llm.update_weights({name: each.astype(ml_dtypes.bfloat16) for name, each in changed(1).items()})
        changed_tokens = tokens_of(llm)
        llm.update_weights(changed(0))
        assert llm.weight_info(checksum=True)["checksums"] == before
        assert tokens_of(llm) != changed_tokens
        check_parts(llm)
        for fault, tensors in faulty(changed(1)):
            with pytest.raises((WeightUpdateError, ConnectionError), match=fault):
                llm.update_weights(tensors)
        assert llm.weight_info(checksum=True)["checksums"] == before
        assert llm.core.runner.compiles.count == 0


def test_matrices_that_are_kept_as_a_file_stores_them(tiny_options, tmp_path):
    """Come from another GGUF file of the same formats, all or none; other tensors may come by name."""
    config, shape, seed = LLAMA | {"num_hidden_layers": 1}, (256, 512), zlib.crc32(b"blk.0.ffn_down.weight")
    path, q4 = (write(tmp_path / f"{kind}.gguf", config, lambda _, kind=kind: kind) for kind in ("Q8_0", "Q4_0"))
    whole, own = Path(path).read_bytes(), blocks("Q8_0", shape, seed)
    files = {
        "other": whole.replace(own, blocks("Q8_0", shape, 1)),
        "not finite": whole.replace(own, b"\x00\x7e" + own[2:]),
        "ends": whole[:-1000],
    }
    for name, data in files.items():
        (tmp_path / f"{name}.gguf").write_bytes(data)
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes(config).items()}
    options = tiny_options | {"model": path, "quantization": "gguf", "max_model_len": 32}
    with LLM(**options) as llm:

        def state() -> tuple[dict[str, str], list[list[int]]]:
            return llm.weight_info(checksum=True)["checksums"], tokens_of(llm, [[5, 6, 7, 8], [40, 41]])

        before = state()
        llm.update_weights(tmp_path / "other.gguf", kv="keep")
        other = state()
        assert {name for name in before[0] if other[0][name] != before[0][name]} == {
            name for name in before[0] if "mlp.down" in name
        }
        llm.update_weights(path)
        assert state() == before != other
        for params, fault in (
            (tmp_path / "not finite.gguf", "not finite"),
            (tmp_path / "ends.gguf", "cut short"),
            (q4, "other formats"),
            (tensors, "missing"),
        ):
            with pytest.raises(WeightUpdateError, match=fault):
                llm.update_weights(params)
            assert state() == before and llm.weight_version == 2
        llm.update_weights({NORM: tensors[NORM]}, strict=False)
        assert state()[0] != before[0] and llm.core.runner.compiles.count == 0


def check_parts(llm: LLM) -> None:
    """Some of the weights of an engine whose matrices are rounded: one that is not, and one product of several."""
    whole, other = changed(0), changed(1)
    layer = "model.layers.0."
    norm = [f"{layer}input_layernorm.weight"]
    product = [f"{layer}self_attn.{name}_proj.weight" for name in "qkv"]
    known = llm.weight_info(checksum=True)["checksums"]
    llm.update_weights(other)
    expected = llm.weight_info(checksum=True)["checksums"]
    llm.update_weights(whole)
    for names in (norm, product):
        llm.update_weights({name: other[name] for name in names}, strict=False)
        found = llm.weight_info(checksum=True)["checksums"]
        differ = {path for path in known if found[path] != known[path]}
        assert differ and all(found[path] == expected[path] for path in differ)
        assert all(("norm" in path) == (names is norm) for path in differ)
        llm.update_weights({name: whole[name] for name in names}, strict=False)
        assert llm.weight_info(checksum=True)["checksums"] == known
    with pytest.raises(WeightUpdateError, match=r"k_proj.weight: a tensor of int8 .* is missing"):
        llm.update_weights({product[0]: other[product[0]]}, strict=False)
    assert llm.weight_info(checksum=True)["checksums"] == known


async def crowd(engine: AsyncLLM, updates: list[dict[str, Any]]) -> list[Any]:
    """Requests that come one after the other while the weights change."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 100, rng.integers(3, 20)).tolist() for _ in range(30)]

    async def one(index: int) -> tuple[list[int], Any]:
        await asyncio.sleep(0.01 * index)
        async for output in engine.generate(prompts[index], greedy(40), f"request {index}"):
            last = output
        return prompts[index], last.outputs[0]

    tasks = [asyncio.create_task(one(index)) for index in range(len(prompts))]
    for number, arguments in enumerate(updates, 1):
        await engine.update_weights(changed(number % 4), version=number, **arguments)
        await asyncio.sleep(0.02)
    return await asyncio.gather(*tasks)


def test_every_token_of_a_crowd_is_that_of_its_weights(tiny_options, llm):
    """Whatever runs, waits or is being prefilled when the weights change: spans say which ones made a token."""
    modes = [{"mode": mode, "kv": kv} for mode in ("keep", "wait", "keep") for kv in ("recompute", "drop")]
    engine = AsyncLLM(**tiny_options)
    try:
        found = asyncio.run(crowd(engine, modes))
        assert engine.core.runner.compiles.count == 0
        pool = engine.core.engine.scheduler
        assert pool.num_free_pages == pool.num_pages
    finally:
        engine.shutdown()
    assert any(len(output.weight_versions or ()) > 1 for _, output in found)
    pieces: dict[int, list[tuple[list[int], list[int]]]] = {}
    for prompt, output in found:
        spans = output.weight_versions or [WeightSpan(0, 0, 40)]
        assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
        assert (spans[0].start, spans[-1].end) == (0, 40)
        for span in spans:
            known = prompt + output.token_ids[: span.start]
            pieces.setdefault(int(span.version) % 4, []).append((known, output.token_ids[span.start : span.end]))
    for seed, own in pieces.items():
        llm.update_weights(changed(seed))
        outputs = llm.generate([known for known, _ in own], [greedy(len(piece)) for _, piece in own], use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == [piece for _, piece in own]


def test_keys_and_values_may_be_kept(llm, expected):
    """With kv="keep" a running request goes on with what it has; who comes later has nothing of it."""
    llm.update_weights(changed(0))
    core = llm.core
    core.add(core.inputs.prepare(PROMPTS[0], greedy(), request_id="kept"))
    while (
        not (running := [*core.engine.scheduler.requests])
        or len(core.engine.scheduler.output_token_ids(running[0])) < 4
    ):
        core.step()
    computed = core.engine.scheduler.ranks[0].slots.num_computed.max()
    llm.update_weights(changed(1), version="next", kv="keep")
    assert core.engine.scheduler.ranks[0].slots.num_computed.max() >= computed
    outputs = []
    while core.has_unfinished:
        outputs += core.step()
    (output,) = [each for each in outputs if each.finished]
    (_, first, _), (version, start, end) = output.outputs[0].weight_versions
    assert (version, end) == ("next", NUM_TOKENS) and 4 <= start < NUM_TOKENS and first == 0
    assert output.outputs[0].token_ids[:start] == expected[0][0][:start]
    assert tokens_of(llm) == expected[1]


def test_calls_of_other_threads_wait(llm, expected):
    llm.update_weights(changed(0))
    llm.pause_generation()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(tokens_of(llm)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not found
    llm.update_weights(changed(2))
    assert llm.is_paused()
    llm.resume_generation()
    thread.join()
    assert found == [expected[2]]


def test_ctrl_c_during_an_update_leaves_no_pause(llm, expected, monkeypatch):
    """It is raised when the lock is released; later requests run with the old weights or, once paused, with the new
    ones."""
    llm.update_weights(changed(0))
    weights = llm.core.engine.extensions.require("weights")
    for number, phase in enumerate(("check", "hold", "settle", "switch", "release")):
        method = getattr(weights, phase)

        def interrupted(*arguments: Any, method: Any = method) -> Any:
            signal.raise_signal(signal.SIGINT)
            return method(*arguments)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(weights, phase, interrupted)
            llm.update_weights(changed(1))
        assert not weights.is_held and tokens_of(llm) == expected[number > 1], phase


def test_an_update_does_not_wake_what_it_does_not_bring(tiny_options):
    """Weights that it leaves out, and adapters, are still in host memory: no step runs before `wake_up`."""
    with LLM(**tiny_options | {"enable_lora": True}) as llm:
        before = tokens_of(llm)
        llm.sleep(1)
        for tensors, strict in (({NORM: stored()[NORM]}, False), (changed(0), True)):
            llm.update_weights(tensors, strict=strict)
            assert llm.wake_up(["kv_cache"]) is llm.wake_up(["scheduling"]) is False
            assert llm.is_sleeping() and llm.is_paused()
        assert llm.wake_up(["weights"]) is True and not llm.is_paused() and tokens_of(llm) == before
