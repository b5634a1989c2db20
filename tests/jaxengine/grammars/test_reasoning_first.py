"""A grammar that waits for the end of reasoning: free until then, and by the same tokens as without any grammar."""

from __future__ import annotations

import re

import pytest

from jaxengine.engine.extensions import structured as structured_module
from jaxengine.grammars.reasoning_watch import ReasoningWatch
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from tests.conftest import use_scheduler
from tests.jaxengine.grammars.test_constraints import generate, nothing_is_left, tokens_of
from tests.jaxengine.grammars.test_every_step import run

__all__ = ["nothing_is_left"]

DIGITS = {"regex": "[0-9]{5}"}
# How words end reasoning: as one special token, as text of one token, as text of several, one behind the other.
ENDS = [["<file_sep>"], [" over"], ["</done>"], [" first", "<file_sep>"]]


@pytest.fixture(scope="module")
def likely(chat_llm):
    """likely(words): a logit_bias by which each word comes after some ten tokens."""
    tokenizer = chat_llm.core.inputs.require_tokenizer()

    def bias(words, strength=None):
        ids = [tokenizer.encode(word, add_special_tokens=False) for word in words]
        strength = strength or (9.0 if all(len(each) == 1 for each in ids) else 11.0)
        return {token_id: strength for each in ids for token_id in each}

    return bias


def thinking(seed: int, end, *, begin=None, constraint=DIGITS, **fields):
    structure = {**constraint, "reasoning_end": end, "reasoning_begin": begin}
    fields = {"max_tokens": 150, "seed": seed, "skip_special_tokens": False, **fields}
    return SamplingParams(**fields, structured_outputs=structure)


def without(params: SamplingParams) -> SamplingParams:
    return params.clone_with(structured_outputs=None)


def parts(text: str, words) -> tuple[str, str]:
    """What is in front of the end of the words, the words included, and what is behind them."""
    at = 0
    for word in words:
        at = text.index(word, at) + len(word)
    return text[:at], text[at:]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=pytest.mark.thorough("as a special token") if words == [" over"] else ())
        for words in ENDS
    ],
    ids=str,
)
def test_free_until_the_words_and_never_after(chat_llm, likely, words):
    many = [thinking(seed, [words, "never"], logit_bias=likely(words)) for seed in range(6)]
    found = generate(chat_llm, *many)
    plain = generate(chat_llm, *map(without, many))
    ended = [(each, alike) for each, alike in zip(found, plain, strict=True) if each.finish_reason == "stop"]
    assert len(ended) >= 3
    for each, alike in ended:
        thoughts, answer = parts(each.text, words)
        assert alike.text.startswith(thoughts) and re.fullmatch(r"\s*[0-9]{5}", answer), each.text
    assert tokens_of(generate(chat_llm, many[0])) == tokens_of(found[:1])


def test_an_output_need_not_reason(chat_llm, likely):
    """The opening word or the grammar's own text, and nothing else."""
    begin, end = "<repo_name>", "<file_sep>"
    for begins in (begin, "</done>"):
        bias = {**likely([end]), **likely([begins], 3.5)}
        many = [thinking(seed, end, begin=begins, logit_bias=bias) for seed in range(12)]
        found = [each for each in generate(chat_llm, *many) if each.finish_reason == "stop"]
        kinds = {each.text.startswith(begins) for each in found}
        assert kinds == {True, False}
        for each in found:
            answer = parts(each.text, [begins, end])[1] if each.text.startswith(begins) else each.text
            assert re.fullmatch("[0-9]{5}", answer), each.text


def test_alone_in_a_crowd_preempted_and_in_step(chat_llm, likely, step_by_step, monkeypatch):
    """The same tokens; the pool is too small for all of them. Also with no step ahead and without cached prefixes."""
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 5.0)
    bias = likely(["<file_sep>"], 6.5)
    long = {"regex": "[a-z ]{700,}"}
    same_in_any_company(
        chat_llm,
        step_by_step,
        [thinking(seed, "<file_sep>", constraint=long, max_tokens=50, logit_bias=bias) for seed in range(8)],
    )


def same_in_any_company(chat_llm, step_by_step, many):
    """The requests have the same tokens alone, together in a pool that is too small for them, and step by step."""
    scheduler, prompt = use_scheduler(chat_llm, num_pages=36), "word " * 40
    alone = tokens_of([generate(chat_llm, each, prompt=prompt)[0] for each in many[:2]])
    before = scheduler.num_preemptions
    together = tokens_of(generate(chat_llm, *many, prompt=prompt))
    assert together[:2] == alone and scheduler.num_preemptions > before
    use_scheduler(step_by_step, num_pages=36, enable_prefix_caching=False)
    assert tokens_of(generate(step_by_step, *many, prompt=prompt)) == together
    use_scheduler(step_by_step)
    use_scheduler(chat_llm)


def test_each_of_n_and_a_step_a_token(chat_llm, likely, monkeypatch):
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 5.0)
    params = thinking(3, "<file_sep>", n=4, logit_bias=likely(["<file_sep>"]))
    (output,) = chat_llm.generate(["Names:"], params, use_tqdm=False)
    lengths = {each.text.index("<file_sep>") for each in output.outputs if "<file_sep>" in each.text}
    assert len(lengths) > 1
    tokens, steps = run(chat_llm, {"a": params.clone_with(n=1), "b": without(params).clone_with(n=1, seed=1)})
    assert steps["a"] <= 1.1 and len(tokens["a"]) > 6


def test_the_end_of_an_output_inside_reasoning(chat_llm):
    """By its length, by the model's own end, by a stop string, by its caller."""
    eos = chat_llm.core.inputs.require_tokenizer().eos_token_id
    (cut,) = generate(chat_llm, thinking(1, "<file_sep>", max_tokens=7))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 7)
    (ended,) = generate(chat_llm, thinking(1, "<file_sep>", logit_bias={eos: 100.0}))
    assert (ended.finish_reason, ended.token_ids) == ("stop", [eos])
    (stopped,) = generate(chat_llm, thinking(1, "<file_sep>", stop=["a"]))
    assert stopped.stop_reason == "a"
    core = chat_llm.core
    params = thinking(1, "<file_sep>", output_kind=RequestOutputKind.CUMULATIVE)
    core.add(core.inputs.prepare({"prompt": "x"}, params, request_id="aborted"))
    while not any(output.outputs[0].token_ids for output in core.step()):
        pass
    (aborted,) = core.abort("aborted")
    assert aborted.outputs[0].finish_reason == "abort"
    masks = core.engine.extensions.require("structured").masks
    assert not (masks._watches or masks._first_masks or masks._begun)


def test_a_grammar_of_nothing_ends_with_the_reasoning(chat_llm, likely):
    empty = {"grammar": 'start: ""'}
    many = [thinking(seed, "<file_sep>", constraint=empty, logit_bias=likely(["<file_sep>"])) for seed in range(4)]
    found = generate(chat_llm, *many)
    assert any(each.finish_reason == "stop" for each in found)
    assert all(each.text.endswith("<file_sep>") for each in found if each.finish_reason == "stop")


def test_a_process_that_ends_while_the_model_reasons(chat_llm, likely):
    core, bias = chat_llm.core, likely(["<file_sep>"], 7.5)
    many = [thinking(seed, "<file_sep>", logit_bias=bias) for seed in range(4)]
    alone = tokens_of(generate(chat_llm, *many))
    for seed, params in enumerate(many):
        core.add(core.inputs.prepare({"prompt": "Once upon a time"}, params, request_id=f"r{seed}"))
    found, killed = {}, False
    while core.has_unfinished:
        found |= {output.request_id: output.outputs[0].token_ids for output in core.step()}
        if not killed and core.engine.extensions.require("structured").masks._first_masks:
            core.engine.extensions.require("structured").masks.worker._process.process.kill()
            killed = True
    assert killed and [found[f"r{seed}"] for seed in range(4)] == alone


class Letters:
    """A vocabulary of pieces; what it writes is a token a character, but for the words it was given."""

    def __init__(self, *words: str):
        self._words = dict(enumerate(words, 1000))

    def encode(self, text, add_special_tokens=True):
        known = {word: number for number, word in self._words.items()}
        return [known[text]] if text in known else [ord(char) for char in text]

    def text_bytes(self, token_id):
        return self._words.get(token_id, chr(token_id) if token_id < 1000 else "").encode()


@pytest.mark.parametrize(
    ("end", "tokens", "begun"),
    [
        ("</t>", ["a", "</", "t>"], ""),
        ("</t>", ["<", "/", "t", "></"], "</"),
        ("</t>", ["</</t>\n "], ""),
        ("</t>", ["x</t>\n{"], "{"),
        ("</t>", ["</t", "x", "</t"], None),
        ([["a", "b"]], ["b", "ab"], ""),
        ([["a", "b"]], ["b", "b", "a", "c"], None),
        (["a", "b"], ["c", "ba"], "a"),
        (["b", ["a", "c"]], ["a", "xc"], ""),
        ("aab", ["aa", "ab"], ""),
        ("é", ["xé1"], "1"),
    ],
    ids=str,
)
def test_words_over_the_borders_of_tokens(end, tokens, begun):
    """begun: what the grammar begins with; None: it has not begun."""
    words = Letters(*tokens)
    params = SamplingParams(structured_outputs={"regex": "a", "reasoning_end": end})
    watch = ReasoningWatch(params.token_params().grammar, words)
    found = None
    for token in tokens:
        assert found is None
        found = watch.read(words.encode(token)[0])
    written = None if found is None else b"".join(map(words.text_bytes, found)).decode()
    assert written == begun
