"""Adapters in an engine: rows give the tokens of merged weights, slots come and go, nothing else changes."""

from __future__ import annotations

from concurrent.futures import wait

import jax
import pytest

from jaxengine import LLM, BeamSearchParams, LLMEngine, LoRARequest, RequestError, SamplingParams
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.requests.params.lora import one_for_each
from jaxengine.requests.params.options import RequestOptions
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS, use_scheduler
from tests.fixtures.adapters import merged, write_adapter
from tests.jaxengine.engine.lora_parallel import over_devices

OPTIONS = TINY_OPTIONS | {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 64,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
}
LORA = OPTIONS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64, "max_cpu_loras": 3}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [5, 6, 7, 8, 9, 40]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PARALLEL = {
    "tp 2": {"tensor_parallel_size": 2},
    "tp 4, sequences split": {"tensor_parallel_size": 4},
    "tp 4, kv heads twice": {"tensor_parallel_size": 4, "replicate_kv_heads": True},
    "pp 2": {"pipeline_parallel_size": 2},
    "dp 2": {"data_parallel_size": 2},
    "tp 2, pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
ADAPTERS = {
    "rank 1": {"r": 1, "lora_alpha": 2},
    "rank 8": {},
    "rank 16": {"r": 16, "target_modules": ["q_proj", "v_proj"]},
    "rank 64": {"r": 64, "use_rslora": True, "target_modules": "all-linear"},
    "rslora": {"use_rslora": True, "target_modules": r".*\.(o_proj|down_proj)"},
    "patterns": {
        "rank_pattern": {"k_proj": 3, r"model.layers.1.mlp.up_proj": 12},
        "alpha_pattern": {"layers.0.mlp.down_proj": 40},
    },
    "one layer": {"target_modules": r"model\.layers\.1\..*_proj"},
    "gate alone": {"target_modules": ["gate_proj"], "lora_alpha": 64},
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: LoRARequest(name, number, write_adapter(folder / str(number), TINY_CHECKPOINT, seed=number, **changes))
        for number, (name, changes) in enumerate(ADAPTERS.items(), 1)
    }


@pytest.fixture(scope="module")
def llm():
    with LLM(str(TINY_CHECKPOINT), **LORA) as llm:
        yield llm


def tokens(llm, prompts, lora_request=None, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora_request)
    assert [output.lora_request for output in outputs] == one_for_each(len(prompts), lora_request)
    return [list(output.outputs[0].token_ids) for output in outputs]


class Weights:
    """Puts other weights under an engine's programs, those of a folder."""

    def __init__(self, llm):
        self.llm = llm
        self.own = [list(stage.params) for stage in llm.core.runner.stages]

    def load(self, folder):
        checkpoint = SafetensorsCheckpoint(folder)
        for stage in self.llm.core.runner.stages:
            pools = {pool.index for pool in stage.programs.extension("adapters").pools}
            state = load_params(stage.programs.model, checkpoint, mesh=stage.programs.mesh)
            loaded = iter(jax.tree.leaves(state))
            stage.params = [leaf if at in pools else next(loaded) for at, leaf in enumerate(stage.params)]
        checkpoint.close()
        self.llm.reset_prefix_cache()

    def restore(self):
        for stage, own in zip(self.llm.core.runner.stages, self.own, strict=True):
            pools = {pool.index for pool in stage.programs.extension("adapters").pools}
            stage.params = [leaf if at in pools else own[at] for at, leaf in enumerate(stage.params)]
        self.llm.reset_prefix_cache()


@pytest.fixture(scope="module")
def expected(llm, adapters, tmp_path_factory):
    """The tokens of merged weights by adapter, and of the model alone under None."""
    folder, weights = tmp_path_factory.mktemp("merged"), Weights(llm)
    found = {None: tokens(llm, PROMPTS)}
    for name, adapter in adapters.items():
        weights.load(merged(folder / str(adapter.lora_int_id), TINY_CHECKPOINT, adapter.lora_path))
        found[name] = tokens(llm, PROMPTS)
    weights.restore()
    return found


def test_that_adapters_change_tokens(expected):
    assert len({str(each) for each in expected.values()}) == len(expected)


def test_each_adapter_alone_and_then_none(llm, adapters, expected):
    for name, adapter in adapters.items():
        assert tokens(llm, PROMPTS, adapter) == expected[name], name
        assert tokens(llm, PROMPTS) == expected[None]


def test_beams_and_single_steps_use_the_adapter(llm, adapters, expected):
    adapter = adapters["rank 8"]
    one = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    for found, prompt, ids in zip(
        llm.beam_search(PROMPTS, one, lora_request=adapter), PROMPTS, expected["rank 8"], strict=True
    ):
        assert found.sequences[0].tokens == prompt + ids
    engine = LLMEngine(str(TINY_CHECKPOINT), **LORA)
    engine.add_request("own", {"prompt_token_ids": PROMPTS[0]}, GREEDY, lora_request=adapter)
    engine.add_request("none", {"prompt_token_ids": PROMPTS[0]}, GREEDY)
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert ended["own"].outputs[0].token_ids == expected["rank 8"][0]
    assert ended["own"].lora_request == adapter and ended["none"].lora_request is None
    engine.shutdown()


def test_all_adapters_and_rows_without_any_at_once(llm, adapters, expected):
    """Eight adapters through two slots, with rows of the model alone between them."""
    rows = [(name, index) for index in range(len(PROMPTS)) for name in (*adapters, None)]
    found = tokens(llm, [PROMPTS[index] for _, index in rows], [adapters.get(name) for name, _ in rows])
    assert found == [expected[name][index] for name, index in rows]
    assert llm.core.runner.compiles.count == 0
    assert llm.core.engine.extensions.adapter_store().num_kept == 3


def test_prefix_caches_are_each_adapters_own(llm, adapters, expected):
    llm.reset_prefix_cache()
    long = PROMPTS[0] * 3

    def cached(adapter):
        return llm.generate([long], GREEDY, use_tqdm=False, lora_request=adapter)[0].num_cached_tokens

    assert [cached(each) for each in (adapters["rank 1"], adapters["rank 8"], None)] == [0, 0, 0]
    assert [cached(each) for each in (adapters["rank 1"], adapters["rank 8"], None)] == [20, 20, 20]


def test_a_bad_adapter_is_one_error_and_changes_nothing(llm, adapters, expected, tmp_path):
    before = llm.core.utility("adapters")
    other = write_adapter(tmp_path / "wide", TINY_CHECKPOINT, seed=1, r=65)
    with pytest.raises(ValueError, match=r"rank is 65; allowed: at most 64 \(max_lora_rank\)"):
        tokens(llm, PROMPTS, LoRARequest("wide", 99, other))
    with pytest.raises(RequestError, match="is taken by the adapter 'rank 8', number 2"):
        tokens(llm, PROMPTS, LoRARequest("rank 8", 99, other))
    with pytest.raises(RequestError, match="lora_int_id 2 is taken"):
        tokens(llm, PROMPTS, LoRARequest("new", 2, other))
    with pytest.raises(ModelFileError, match="nobody.*cannot be resolved"):
        tokens(llm, PROMPTS, LoRARequest("home", 99, "~nobody of this name/adapter"))
    for path in (b"adapter", 5, None):
        with pytest.raises(RequestError, match="lora_path must be a path as text"):
            tokens(llm, PROMPTS, LoRARequest("bytes", 99, path))
    with pytest.raises(RequestError, match="lora_request must be one LoRARequest"):
        tokens(llm, PROMPTS, [adapters["rank 8"]])
    assert llm.core.utility("adapters") == before
    assert tokens(llm, PROMPTS, adapters["rank 8"]) == expected["rank 8"]


def test_preempted_requests_give_the_same(llm, adapters, expected):
    names = ["rank 8", "rank 64", None, "rank 1"]
    use_scheduler(llm, num_pages=6)
    try:
        found = tokens(llm, [PROMPTS[0]] * 4, [adapters.get(name) for name in names])
        assert found == [expected[name][0] for name in names]
        assert llm.core.engine.scheduler.num_preemptions > 0
    finally:
        use_scheduler(llm)


def test_a_step_brings_one_adapter_at_a_time(llm, adapters, expected, monkeypatch):
    """Running requests wait while one is written, so a crowd of them is spread over steps."""
    core, store, written = llm.core, llm.core.engine.extensions.adapter_store(), []
    pools = core.runner.extension("adapters")
    write = pools.write
    monkeypatch.setattr(pools, "write", lambda slot, values: (written.append(slot), write(slot, values)))
    names = ["one layer", "gate alone"]
    for name in names:
        tokens(llm, PROMPTS[:1], adapters[name])
    use_scheduler(llm)  # no adapter has a slot
    written.clear()
    for index, name in enumerate(names):
        options = RequestOptions(lora=name)
        core.add(core.inputs.prepare(PROMPTS[index], GREEDY, request_id=name, options=options))
    step = core.engine.scheduler.schedule()
    assert not step.num_rows and len(core.engine.scheduler.extension("adapters").slots.loads) == 2
    for _ in range(3):
        before = len(written)
        store.advance(core.engine.scheduler.extension("adapters").slots, set)
        assert len(written) <= before + 1
        wait([] if store._upload is None else [store._upload.job])
    assert len(written) == 2
    found = {}
    while core.has_unfinished:
        found |= {each.request_id: list(each.outputs[0].token_ids) for each in core.step() if each.finished}
    assert [found[name] for name in names] == [expected[name][index] for index, name in enumerate(names)]


def test_loads_and_unloads_leave_nothing(llm, adapters, expected, thorough):
    store, engine = llm.core.engine.extensions.adapter_store(), llm.core.engine
    one = SamplingParams(temperature=0, max_tokens=1)
    loaded, counts = len(store.adapters), []
    for number in range(1000 if thorough else 100):
        adapter = LoRARequest(f"new {number}", 1000 + number, adapters["rank 8"].lora_path)
        tokens(llm, [PROMPTS[1]], adapter, one)
        llm.core.utility("unload_adapter", adapter.lora_name)
        assert len(store._records) == loaded  # with no step after it
        tokens(llm, [PROMPTS[1]], None, one)
        counts.append(len(jax.live_arrays()))
    assert len(store.adapters) == len(store._records) == loaded and store.num_kept <= 3
    assert max(counts[2:]) <= counts[1] and store._upload is None and not store._loads
    assert not engine.scheduler.extension("adapters").slots.waiting and engine.runner.compiles.count == 0
    with pytest.raises(RequestError, match="does not exist"):
        llm.core.utility("unload_adapter", "new 0")
    assert tokens(llm, PROMPTS, adapters["rank 8"]) == expected["rank 8"]


def test_an_adapter_whose_files_have_changed_ends_its_own_requests(llm, adapters, expected, tmp_path):
    """Once it is neither on the devices nor in the host's memory."""
    folder = write_adapter(tmp_path / "changing", TINY_CHECKPOINT, seed=50)
    changing = LoRARequest("changing", 500, folder)
    tokens(llm, PROMPTS, changing)
    for name in ("rank 1", "rank 8", "rank 16"):
        tokens(llm, PROMPTS, adapters[name])
    write_adapter(folder, TINY_CHECKPOINT, seed=51)
    with pytest.raises(RequestError, match="'changing' cannot be used: .* is not what it was when"):
        tokens(llm, PROMPTS, changing)
    assert llm.core.engine.scheduler.num_unfinished == 0
    llm.core.utility("unload_adapter", "changing")
    assert tokens(llm, PROMPTS, adapters["rank 64"]) == expected["rank 64"]


def test_an_adapter_is_read_again_in_place(llm, adapters, expected, tmp_path, monkeypatch):
    """An adapter is read once for a call, however many prompts share it, and from another folder if its path is new."""
    store, read = llm.core.engine.extensions.adapter_store(), []
    monkeypatch.setattr(store, "read", lambda path, of=store.read: (read.append(path), of(path))[1])
    first = write_adapter(tmp_path / "first", TINY_CHECKPOINT, seed=50)
    before = tokens(llm, PROMPTS, LoRARequest("live", 500, first))
    new = adapters["rank 8"].lora_path
    for number, refused in ((501, "is taken by the adapter 'live', number 500"), (2, "is taken by the adapter")):
        with pytest.raises(RequestError, match=refused):
            tokens(llm, PROMPTS, LoRARequest("live", number, new, load_inplace=True))
    assert tokens(llm, PROMPTS, LoRARequest("live", 500, new, load_inplace=True)) == expected["rank 8"] != before
    assert tokens(llm, PROMPTS, LoRARequest("live", 500, new)) == expected["rank 8"]
    assert read == [str(first), str(new)]
    assert [each["number"] for each in llm.core.utility("adapters") if each["name"] == "live"] == [500]
    llm.core.utility("unload_adapter", "live")


def test_over_several_devices(adapters, expected, thorough, executables_dir):
    """One of the cases, or all: `--thorough`."""
    cases = {name: options for name, options in PARALLEL.items() if thorough or name == "tp 2"}
    rows = [(name, index) for index in range(2) for name in ("rank 64", "patterns", None, "rank 1", "rslora")]
    job = {
        "model": str(TINY_CHECKPOINT),
        "cases": {name: LORA | {"compile_cache_dir": executables_dir, **options} for name, options in cases.items()},
        "prompts": [PROMPTS[index] for _, index in rows],
        "adapters": [
            None if name is None else [name, adapters[name].lora_int_id, str(adapters[name].lora_path)]
            for name, _ in rows
        ],
    }
    found = {row["case"]: row for row in over_devices(job)}
    assert found.keys() == cases.keys()
    for name, row in found.items():
        assert row["tokens"] == [expected[adapter][index] for adapter, index in rows], name
        assert row["compilations"] == 0, name
