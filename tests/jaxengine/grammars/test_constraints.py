"""Structured outputs through the engine: every kind, together with other parameters, and requests beside them."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from jaxengine import LLM
from jaxengine.engine.extensions.structured import Structured
from jaxengine.engine.slot_rows import SlotRows
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from tests.conftest import use_scheduler

WORDS = "[a-z]{3,6}( [a-z]{3,6}){0,3}"
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": "</a>"}


def params_of(constraint, /, **fields):
    return SamplingParams(**{"max_tokens": 60, "seed": 5, **fields}, structured_outputs=constraint)


def generate(llm, *params, prompt="Once upon a time"):
    outputs = llm.generate([prompt] * len(params), list(params), use_tqdm=False)
    return [completion for output in outputs for completion in output.outputs]


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(autouse=True)
def nothing_is_left(chat_llm):
    yield
    engine = chat_llm.core.engine
    assert engine.scheduler.num_free_pages == engine.scheduler.num_pages and not engine.scheduler.num_unfinished
    assert (
        not engine.extensions.require("structured").masks._keys
        and not engine.extensions.require("structured").masks._known
        and not engine.extensions.require("structured").masks._trials.awaits
    )
    assert (
        not engine.extensions.require("structured").masks.worker._sequences
        and not engine.extensions.require("structured").masks._slow._sequences
        and not engine.extensions.require("structured").masks._workers
    )
    assert engine.runner.compiles.count == 0


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": r"[a-z]{2,4}-[0-9]{3}"}, r"[a-z]{2,4}-[0-9]{3}"),
        ({"choice": ["yes", "no", "a.b|c", 'say "é"\n']}, r'yes|no|a\.b\|c|say "é"\n'),
        ({"grammar": 'start: "(" start ")" | DIGIT\nDIGIT: /[0-9]{1,3}/'}, r"\(*\d{1,3}\)*"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, r"x\dy"),
        ({"structural_tag": {"type": "structural_tag", "format": TAG}}, r"<a>\d{3}</a>"),
    ],
    ids=["regex", "choice", "lark", "gbnf", "tag"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_kind(chat_llm, constraint, pattern, temperature):
    for each in generate(chat_llm, *[params_of(constraint, temperature=temperature, seed=seed) for seed in range(4)]):
        assert (each.finish_reason, each.stop_reason) == ("stop", None)
        assert re.fullmatch(pattern, each.text), each.text


def test_json_object(chat_llm):
    constraint = {"json_object": True, "disable_any_whitespace": True}
    found = generate(chat_llm, *[params_of(constraint, seed=seed, max_tokens=12) for seed in range(40)])
    ended = [each.text for each in found if each.finish_reason == "stop"]
    assert ended and all(isinstance(json.loads(text), dict) for text in ended)
    assert all(each.text.startswith("{") for each in found)


def test_each_of_n_has_its_own(chat_llm):
    (output,) = chat_llm.generate(["Names:"], params_of({"regex": WORDS}, n=6), use_tqdm=False)
    texts = [each.text for each in output.outputs]
    assert all(re.fullmatch(WORDS, text) for text in texts) and len(set(texts)) > 1


def test_stop_token_only_where_the_grammar_may_end(chat_llm):
    """min_tokens keeps the end away where more may follow, and has no effect where nothing may."""
    eos = chat_llm.core.inputs.require_tokenizer().eos_token_id
    eager = {"logit_bias": {eos: 100.0}}
    (short,) = generate(chat_llm, params_of({"regex": "[a-z]{4}([a-z]*)"}, **eager))
    assert re.fullmatch("[a-z]{4,}", short.text) and short.finish_reason == "stop" and short.stop_reason is None
    (longer,) = generate(chat_llm, params_of({"regex": "[a-z]{4}([a-z]*)"}, min_tokens=20, **eager))
    assert len(longer.token_ids) == 21 and longer.token_ids[-1] == eos
    (ended,) = generate(chat_llm, params_of({"choice": ["yes"]}, min_tokens=9))
    assert (ended.text, ended.finish_reason, ended.stop_reason) == ("yes", "stop", None)
    assert len(ended.token_ids) < 9


def test_ignore_eos_ends_with_the_grammar(chat_llm):
    eos = chat_llm.core.inputs.require_tokenizer().eos_token_id
    (each,) = generate(chat_llm, params_of({"regex": "[a-z]+"}, ignore_eos=True, logit_bias={eos: 100.0}))
    assert each.finish_reason == "stop" and each.token_ids[-1] == eos and len(each.token_ids) == 2


def test_other_parameters_cut_further(chat_llm):
    tokenizer = chat_llm.core.inputs.require_tokenizer()
    cat, dog, ten = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("cat", "dog", "10"))
    (allowed,) = generate(chat_llm, params_of({"regex": "[a-z]{3,9}"}, allowed_token_ids=[cat, dog, ten], max_tokens=3))
    assert set(allowed.token_ids) <= {cat, dog} and re.fullmatch("(cat|dog){1,3}", allowed.text)
    (bad,) = generate(chat_llm, params_of({"choice": ["cat", "dog"]}, bad_words=["cat", "c"], logit_bias={cat: 90.0}))
    assert bad.text == "dog"
    (stopped,) = generate(chat_llm, params_of({"regex": "[a-z]{50}"}, stop=["a", "e"]))
    assert stopped.finish_reason == "stop" and stopped.stop_reason in "ae"
    (nothing,) = generate(chat_llm, params_of({"regex": "[a-z]+"}, allowed_token_ids=[ten]))
    assert nothing.finish_reason == "error" and "no token is allowed by structured_outputs" in nothing.stop_reason


@pytest.mark.parametrize(("suppressed", "left"), [((), True), ((1,), True), ((1, 3, 5), False)])
def test_what_the_model_suppresses_is_not_left(suppressed, left):
    runner = SimpleNamespace(vocab_size=8, suppressed_tokens=suppressed)
    words, request = np.array([0b1010], np.int32), SimpleNamespace(output_token_ids=[-1])
    own: Any = Structured(cast(Any, SimpleNamespace(row=lambda request, number: words)))
    own.loop = SimpleNamespace(runner=runner, rows=SlotRows(cast(Any, runner), cast(Any, None)))
    assert own._allowed_any(request) is left


@pytest.mark.thorough("the same of an engine of its own")
def test_a_grammar_of_suppressed_tokens_says_so(chat_llm, chat_options, tmp_path):
    decode = chat_llm.core.inputs.require_tokenizer().decode
    suppressed = [token for token in range(chat_llm.core.engine.runner.vocab_size) if decode([token]).startswith("c")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    with LLM(**chat_options | {"generation_config": str(tmp_path)}) as llm:
        both = generate(llm, params_of({"choice": ["cat"]}), params_of({"choice": ["cat", "dog"]}))
        assert llm.core.engine.request_stats.num_corrupted == 0
    assert both[0].finish_reason == "error" and "suppress_tokens" in both[0].stop_reason and both[1].text == "dog"


def test_logprobs_are_raw(chat_llm):
    (each,) = generate(chat_llm, params_of({"regex": "[a-z]{12}"}, logprobs=3))
    assert len(each.logprobs) == len(each.token_ids)
    (first,) = generate(chat_llm, SamplingParams(max_tokens=1, logprobs=3, temperature=0.0))
    best = {token: entry.logprob for token, entry in first.logprobs[0].items()}
    assert best.items() <= {token: entry.logprob for token, entry in each.logprobs[0].items()}.items()


def test_neighbours_are_not_touched(chat_llm):
    """Nor are those that take a masked request's slot later."""
    free = [SamplingParams(max_tokens=30, seed=seed, ignore_eos=True) for seed in range(8)]
    alone = tokens_of(generate(chat_llm, *free))
    masked = [params_of({"regex": WORDS}, seed=seed) for seed in range(8)]
    masked_alone = tokens_of(generate(chat_llm, *masked))
    mixed = tokens_of(generate(chat_llm, *[one for pair in zip(masked, free, strict=True) for one in pair]))
    assert mixed[1::2] == alone and mixed[::2] == masked_alone


def test_a_mask_does_not_outlast_its_request(chat_llm):
    """A request takes the slot of one with a grammar when that one has ended, and runs beside the next one."""
    core, plain = chat_llm.core, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    digits = SamplingParams(temperature=0, max_tokens=8, structured_outputs={"regex": "[0-9]{8}"})
    (expected,) = chat_llm.generate("Neighbours", plain, use_tqdm=False)
    chat_llm.generate("Number", digits, use_tqdm=False)
    found = {}
    for name, params, count in (("Neighbours", plain, 3), ("Number", digits, 10_000)):
        core.add(core.inputs.prepare(name, params, request_id=name))
        while core.has_unfinished and count:
            count -= 1
            found |= {each.request_id: each.outputs[0] for each in core.step() if each.finished}
    assert found["Number"].text.isdigit() and found["Neighbours"].token_ids == expected.outputs[0].token_ids
    # Where masks come slowly the number ends last, and the next step clears its mask.
    chat_llm.generate("Neighbours", plain, use_tqdm=False)
    assert not core.runner.extension("structured").masked()


def test_preemption_and_cached_prefixes_change_nothing(chat_llm, step_by_step):
    """Eight long requests do not fit into the pool; also with no step ahead."""
    params = [params_of({"regex": "[a-z ]{700,}"}, seed=seed, max_tokens=50) for seed in range(8)]
    scheduler, prompt = use_scheduler(chat_llm, num_pages=36), "word " * 40
    alone = tokens_of(generate(chat_llm, *params[:2], prompt=prompt))
    before = scheduler.num_preemptions, scheduler.num_prefix_hits
    together = tokens_of(generate(chat_llm, *params, prompt=prompt))
    assert together[:2] == alone
    assert scheduler.num_preemptions > before[0] and scheduler.num_prefix_hits > before[1]
    tight = use_scheduler(step_by_step, num_pages=36, enable_prefix_caching=False)
    assert tokens_of(generate(step_by_step, *params, prompt=prompt)) == together
    assert tight.num_preemptions > 0
    use_scheduler(step_by_step)
    use_scheduler(chat_llm)


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"grammar": "start: nothing"},
        {"json": {"type": "string", "pattern": "("}},
        {"json": {"type": "nonsense"}},
        {"json": '{"$ref": "#/nowhere"}'},
        {"json": '{"$ref": "#"}'},
    ],
    ids=str,
)
def test_a_bad_grammar_is_refused_and_the_next_request_runs(chat_llm, constraint):
    good = params_of({"choice": ["yes", "no"]}, n=2)
    with pytest.raises(RequestError, match="structured_outputs cannot be used") as caught:
        generate(chat_llm, good, params_of(constraint, n=3), SamplingParams(max_tokens=50, ignore_eos=True))
    assert caught.value.param == "structured_outputs" and "<non-verbose" not in str(caught.value)
    assert {each.text for each in generate(chat_llm, good)} <= {"yes", "no"}


def test_a_request_that_asks_for_what_cannot_be_is_not_corrupted(chat_llm):
    """vllm:corrupted_requests is an alarm for a broken model; nobody's request may ring it."""
    ten = chat_llm.core.inputs.require_tokenizer().encode("10", add_special_tokens=False)[0]

    def count(name, **labels):
        return sum(each.value for each in chat_llm.get_metrics() if each.name == name and each.labels == labels)

    errors = count("vllm:request_success", finished_reason="error")
    generate(chat_llm, params_of({"regex": "[a-z]+"}, allowed_token_ids=[ten]))
    with pytest.raises(RequestError, match="structured_outputs"):
        generate(chat_llm, params_of({"regex": "("}))
    assert count("vllm:request_success", finished_reason="error") == errors + 2
    assert count("vllm:corrupted_requests") == 0


def test_abort_and_deadline_while_the_grammar_compiles(chat_llm):
    core, slow = chat_llm.core, {"regex": "((((a{100}){100}){100}){100})"}
    prompts = {"prompt": "x"}
    core.add(core.inputs.prepare(prompts, params_of(slow, n=2), request_id="aborted"))
    core.add(core.inputs.prepare(prompts, params_of(slow), request_id="late", options=RequestOptions(timeout=0.05)))
    core.add(core.inputs.prepare(prompts, params_of({"regex": "a{2}"}), request_id="good"))
    assert core.engine.scheduler.num_waiting == 4 and core.step() == []
    outputs = {output.request_id: output for output in core.abort("aborted")}
    end = time.monotonic() + 60
    while core.has_unfinished:
        assert time.monotonic() < end
        outputs |= {output.request_id: output for output in core.step()}
    reasons = {name: output.outputs[0].finish_reason for name, output in outputs.items()}
    assert reasons == {"aborted": "abort", "late": "abort", "good": "stop"}
    assert outputs["good"].outputs[0].text == "aa"
    assert core.pop_rejected() == []


def test_grammars_that_compile_slowly_are_served_apart_and_alike(chat_llm, monkeypatch):
    params = [params_of({"regex": "[b-x]{8,12}"}, seed=seed) for seed in range(3)]
    monkeypatch.setattr("jaxengine.grammars.request_masks._SLOW_SECONDS", 600.0)  # however busy the machine is
    masks = chat_llm.core.engine.extensions.require("structured").masks
    before = masks._slow.process  # another test's, if that was slow
    quick = tokens_of(generate(chat_llm, *params))
    assert masks._slow.process is before
    monkeypatch.setattr("jaxengine.grammars.request_masks._SLOW_SECONDS", 0.0)
    assert tokens_of(generate(chat_llm, *params)) == quick
    slow = masks._slow.process
    assert slow is not None and slow.process.poll() is None


def test_a_request_that_ends_the_process_fails_alone(chat_llm):
    """The process is replaced in the middle of everybody's outputs."""
    core = chat_llm.core
    alone = tokens_of(generate(chat_llm, *[params_of({"regex": "[a-z]{60}"}, seed=seed) for seed in range(4)]))
    for seed in range(4):
        prepared = core.inputs.prepare(
            {"prompt": "Once upon a time"}, params_of({"regex": "[a-z]{60}"}, seed=seed), request_id=f"r{seed}"
        )
        core.add(prepared)
    found, killed = {}, False
    while core.has_unfinished:
        for output in core.step():
            found[output.request_id] = output.outputs[0].token_ids
            if not killed and len(output.outputs[0].token_ids) > 3:
                core.engine.extensions.require("structured").masks.worker._process.process.kill()
                killed = True
    assert killed and [found[f"r{seed}"] for seed in range(4)] == alone
