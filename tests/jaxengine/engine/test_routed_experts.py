"""Routed experts: those that the model's own forward pass picks, however a sequence was computed."""

from __future__ import annotations

from types import SimpleNamespace as Stand
from typing import Any

import numpy as np
import pytest

from jaxengine import LLM, ConfigError, RequestError, SamplingParams
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.engine.extensions.build import _MAKERS
from jaxengine.models.registry import read_folder
from jaxengine.requests.params.sampling_params import RequestOutputKind
from tests.conftest import TINY_OPTIONS, use_scheduler
from tests.fixtures.drawn_weights import FOLDER, checkpoint
from tests.jaxengine.rl.test_routing_replay import picked, transformers_experts
from tests.models.conftest import load_recorded
from tests.tables import each_row

OPTIONS: dict[str, Any] = TINY_OPTIONS | {"max_model_len": 64, "enable_return_routed_experts": True}
OWN = pytest.mark.thorough("an engine of its own")


@pytest.fixture(scope="module")
def make(executables_dir):
    def make(name: str, **options: Any) -> LLM:
        return LLM(**OPTIONS | {"model": str(checkpoint(name)), "compile_cache_dir": executables_dir} | options)

    return make


@pytest.fixture(scope="module")
def llm(make):
    return make("qwen3_moe")


def params(max_tokens=8, **fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens} | fields)


def generate(llm, prompts, asked):
    prompts = [{"prompt_token_ids": list(map(int, prompt))} for prompt in prompts]
    return llm.generate(prompts, asked, use_tqdm=False)


def some_prompts(count=12):
    rng = np.random.default_rng(3)
    shared = rng.integers(3, 120, 13).tolist()
    return [shared * (index % 2) + rng.integers(3, 120, int(rng.integers(1, 22))).tolist() for index in range(count)]


def assert_picked(outputs, name="qwen3_moe", start=0) -> None:
    """Every output has the experts that a pass over its whole sequence picks, of all its tokens but the last."""
    fed = [[*each.prompt_token_ids, *one.token_ids[:-1]] for each in outputs for one in each.outputs]
    wanted = np.split(picked(load_recorded(name).model, *fed), np.cumsum([len(each) for each in fed])[:-1])
    found = [one.routed_experts for each in outputs for one in each.outputs]
    for own, other in zip(found, wanted, strict=True):
        assert own.dtype == np.uint8
        np.testing.assert_array_equal(own, other[start:])


@pytest.mark.parametrize("name", ["qwen3_moe", *(pytest.param(name, marks=OWN) for name in ("gpt_oss", "mixtral"))])
def test_greedy_outputs_have_the_experts_that_transformers_picks(name, make, llm):
    """gpt_oss has layers with windows, whose pages go; of mixtral's layers all have one."""
    engine = llm if name == "qwen3_moe" else make(name)
    with np.load(FOLDER / name / "golden.npz") as golden:
        prompts = [golden["token_ids_0"], golden["token_ids_1"]]
        wanted = [golden["greedy_0"].tolist(), golden["greedy_1"].tolist()]
    asked = [params(len(tokens)) for tokens in wanted]
    for _ in range(2):  # the second time most comes from the prefix cache, but where all layers have windows
        outputs = generate(engine, prompts, asked)
        assert [each.outputs[0].token_ids for each in outputs] == wanted
        for output, (_, experts) in zip(outputs, transformers_experts(name), strict=True):
            np.testing.assert_array_equal(np.sort(output.outputs[0].routed_experts, axis=-1), experts)
    assert (outputs[0].num_cached_tokens or 0) >= 8 * (name != "mixtral")


def test_a_crowd_in_chunks_and_with_cached_prefixes(llm):
    use_scheduler(llm)
    prompts, asked = some_prompts(), [params(index % 7 + 1) for index in range(12)]
    for _ in range(2):
        outputs = generate(llm, prompts, asked)
        assert_picked(outputs)
    # An answer's pages are found, too, and n outputs share those of their prompt.
    longer = [[*each.prompt_token_ids, *each.outputs[0].token_ids, 5, 6, 7] for each in outputs]
    found = generate(llm, longer, params(3, n=2, temperature=1.0, seed=1))
    assert sum(each.num_cached_tokens for each in found) > sum(map(len, prompts)) // 2
    assert_picked(found)
    metrics = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    assert metrics["jaxengine:compilations_since_ready"] == 0


def test_preempted_requests_have_each_position_once(llm):
    scheduler = use_scheduler(llm, num_pages=40)
    outputs = generate(llm, some_prompts(8), params(30))
    assert scheduler.num_preemptions > 2
    assert_picked(outputs)
    use_scheduler(llm)


def test_the_first_tokens_of_a_prompt_can_be_left_out(llm):
    use_scheduler(llm)
    prompts = [prompt for prompt in some_prompts() if len(prompt) > 9]
    for _ in range(2):
        assert_picked(generate(llm, prompts, params(routed_experts_prompt_start=9)), start=9)


def test_pieces_of_a_stream_and_an_aborted_request(llm):
    use_scheduler(llm)
    core, prompt = llm.core, some_prompts(2)[1]
    (whole,) = generate(llm, [prompt], params())
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        asked = params(output_kind=kind)
        core.add(core.inputs.prepare({"prompt_token_ids": prompt}, asked, request_id="piece"))
        pieces = []
        while core.has_unfinished:
            pieces += [output.outputs[0] for output in core.step()]
        joined = pieces[0]
        for each in pieces[1:]:
            if kind is RequestOutputKind.DELTA:
                joined._append(each)
            else:
                joined = each
        np.testing.assert_array_equal(joined.routed_experts, whole.outputs[0].routed_experts)
    asked = params(output_kind=RequestOutputKind.FINAL_ONLY)
    core.add(core.inputs.prepare({"prompt_token_ids": prompt}, asked, request_id="partial"))
    for _ in range(4):
        assert not core.step()
    (last,) = core.abort("partial")
    assert last.outputs[0].finish_reason == "abort" and len(last.outputs[0].token_ids) > 0
    assert_picked([last])


@OWN
def test_wrong_drafts_leave_no_experts(make):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    llm = make("qwen3_moe", speculative_config=drafts)
    repeated = [[*range(20, 24)] * 5, [*range(30, 33)] * 6, some_prompts(2)[1]]
    for _ in range(2):
        outputs = generate(llm, repeated, params(24))
        assert_picked(outputs)
    metrics = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    assert 0 < metrics["vllm:spec_decode_num_accepted_tokens"] < metrics["vllm:spec_decode_num_draft_tokens"]
    scheduler = use_scheduler(llm, num_pages=30)
    outputs = generate(llm, [*repeated, *some_prompts(5)], params(24))
    assert scheduler.num_preemptions > 0
    assert_picked(outputs)


@each_row(
    ("model", "options", "said"),
    [
        ("llama", {}, "enable_return_routed_experts is True; .*False: LlamaForCausalLM has no experts"),
        ("nemotron_h_puzzle", {}, "layers of NemotronHForCausalLM pick different numbers of experts"),
        ("mixtral", {"rl_exact": True}, "enable_return_routed_experts is given, but rl_exact is given"),
    ],
)
def test_engines_that_cannot_return_them_are_refused(model, options, said):
    config = EngineConfig.from_options(enable_return_routed_experts=True, **options)
    with pytest.raises(ConfigError, match=said):
        config.resolved(read_folder(FOLDER / model), PLATFORMS["cpu"])


def test_a_start_that_does_not_fit_is_refused(llm):
    for engine, start, said in (
        (llm, -1, "routed_experts_prompt_start must be an int >= 0, got -1"),
        (llm, 3, "routed_experts_prompt_start must be at most 2, the prompt's last token, got 3"),
    ):
        with pytest.raises(RequestError, match=said) as refused:
            generate(engine, [[5, 6, 7]], params(routed_experts_prompt_start=start))
        assert refused.value.param == "routed_experts_prompt_start"
    with pytest.raises(
        RequestError, match="routed_experts_prompt_start: the engine was started without enable_return_routed"
    ):
        lacking: Any = Stand(_runner=Stand(extensions={}))
        _MAKERS["routed_experts"](lacking)
