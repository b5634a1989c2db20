"""vLLM's LLMEngine: requests are added, steps are run by the caller; and engines made of EngineArgs."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace

import pytest

from jaxengine import LLM, AsyncLLM, ConfigError, EngineArgs, LLMEngine, RequestError, RequestOutputKind, SamplingParams
from jaxengine.api.fair_lock import FairLock

PROMPTS = [[5, 6, 7], [8] * 20, [9, 10]]


def run(engine: LLMEngine) -> tuple[dict[str, list], list[RequestError]]:
    """All outputs by request, and the errors, of steps until nothing is left."""
    outputs, errors = {}, []
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        except RequestError as error:
            errors.append(error)
    return outputs, errors


@pytest.fixture(scope="module")
def engine(tiny_options):
    made = LLMEngine.from_engine_args(EngineArgs(**tiny_options, swap_space=4))
    yield made
    made.shutdown()


def test_requests_are_added_and_stepped(engine, tiny_options):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        assert engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, params, time.time()) == f"r{number}"
    longest = engine.core.inputs.config.max_model_len
    engine.add_request("whole", {"prompt_token_ids": [5]}, params.clone_with(max_tokens=longest + 1))
    engine.add_request("cut", [5, 6, 7], params, tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert engine.get_num_unfinished_requests() == 5
    outputs, errors = run(engine)
    assert outputs.pop("cut")[-1].prompt_token_ids == [6, 7]
    assert len(outputs.pop("whole")[-1].outputs[0].token_ids) == longest - 1
    with LLM.from_engine_args(EngineArgs(**tiny_options)) as llm:
        wanted = llm.generate(PROMPTS, params, False)  # use_tqdm by position, as in vLLM
        with pytest.raises(RequestError, match="lora"):
            llm.generate(PROMPTS, params, False, "adapter")
    assert not errors and engine.get_num_unfinished_requests() == 0
    for number, each in enumerate(wanted):
        own = outputs[f"r{number}"]
        assert len(own) == 6 and own[-1].finished
        assert own[-1].outputs[0].token_ids == each.outputs[0].token_ids


def test_running_requests_are_computed_again(engine, tiny_options, monkeypatch):
    """As vLLM's `reset_prefix_cache(reset_running_requests=True)`; the tokens stay the same."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM.from_engine_args(EngineArgs(**tiny_options)) as llm:
        wanted = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params, use_tqdm=False)]
        with pytest.raises(RequestError, match="reset_connector is true; allowed: false"):
            llm.reset_prefix_cache(reset_connector=True)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, params)
    for _ in range(5):
        engine.step()
    scheduler, preempted = engine.core.engine.scheduler, []
    preempt_all = scheduler.preempt_all
    monkeypatch.setattr(scheduler, "preempt_all", lambda: (preempted.append(scheduler.num_running), preempt_all()))
    assert engine.reset_prefix_cache(reset_running_requests=True)
    found, errors = run(engine)
    assert not errors and not scheduler.paused and preempted == [len(PROMPTS)]
    assert [found[f"r{number}"][-1].outputs[0].token_ids for number in range(3)] == wanted


def test_a_wrong_request_ends_alone_and_no_output_is_lost():
    output = SimpleNamespace(request_id="three", finished=True)

    class Core:
        has_unfinished = True

        def step(self):
            self.has_unfinished = False
            return [output]

        def pop_rejected(self):
            return [("one", RequestError("first")), ("two", RequestError("second"))]

    engine = object.__new__(LLMEngine)
    engine._core, engine._outputs, engine._errors, engine._lock = Core(), [], [], FairLock()
    engine._adapters = {}
    for said in ("first", "second"):
        with pytest.raises(RequestError, match=said):
            engine.step()
        assert engine.has_unfinished_requests()
    assert engine.step() == [output] and not engine.has_unfinished_requests()


def test_ctrl_c_waits_for_the_end_of_a_step(engine, monkeypatch):
    """It comes once the step's results are kept, and the next steps return them."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("alone", {"prompt_token_ids": PROMPTS[0]}, params)
    alone = run(engine)[0]["alone"][-1].outputs[0].token_ids
    engine.add_request("interrupted", {"prompt_token_ids": PROMPTS[0]}, params)
    execute = engine.core.runner.execute

    def interrupted(step):
        signal.raise_signal(signal.SIGINT)
        return execute(step)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(engine.core.runner, "execute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
    finally:
        signal.signal(signal.SIGINT, before)
    outputs, errors = run(engine)
    assert not errors and outputs["interrupted"][-1].outputs[0].token_ids == alone


def test_an_id_is_used_once(engine):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("good", {"prompt_token_ids": PROMPTS[0]}, params)
    with pytest.raises(RequestError, match="request_id 'good' is in use"):
        engine.add_request("good", {"prompt_token_ids": PROMPTS[0]}, params)
    outputs, errors = run(engine)
    assert not errors and sum(len(each.outputs[0].token_ids) for each in outputs["good"]) == 12


def test_requests_are_aborted(engine):
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    for name in ("a", "b", "c"):
        engine.add_request(name, {"prompt_token_ids": PROMPTS[0]}, params)
    engine.abort_request("a")
    engine.abort_request(request_ids=["b", "unknown"])
    outputs, _ = run(engine)
    assert list(outputs) == ["c"]


def test_pauses_and_sleep_between_steps(engine):
    """By vLLM's defaults a pause aborts what runs, and drops cached prefixes; the next steps return the rest."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("kept", {"prompt_token_ids": PROMPTS[1]}, params)
    for _ in range(4):
        engine.step()
    engine.pause_generation("keep", clear_cache=False)
    engine.resume_generation()
    (*_, kept) = run(engine)[0]["kept"]
    assert len(kept.outputs[0].token_ids) == 6
    for clear_cache, cached in ((False, True), (True, False)):
        engine.add_request("gone", {"prompt_token_ids": PROMPTS[1]}, params)
        engine.step()
        engine.pause_generation(clear_cache=clear_cache)
        assert engine.is_paused()
        engine.resume_generation()
        assert run(engine)[0]["gone"][-1].outputs[0].finish_reason == "abort"
        engine.add_request("next", {"prompt_token_ids": PROMPTS[1]}, params)
        last = run(engine)[0]["next"][-1]
        assert bool(last.num_cached_tokens) == cached and last.outputs[0].token_ids == kept.outputs[0].token_ids
    engine.sleep(1)
    assert engine.is_sleeping()
    engine.wake_up()
    engine.add_request("woken", {"prompt_token_ids": PROMPTS[1]}, params)
    assert run(engine)[0]["woken"][-1].outputs[0].token_ids == kept.outputs[0].token_ids
    with pytest.raises(RequestError, match="profiler_config"):
        engine.start_profile()


def test_async_engines_take_engine_args():
    for options, said in (({"stat_loggers": []}, "stat_loggers"), ({"start_engine_loop": False}, "start_engine_loop")):
        with pytest.raises(ConfigError, match=said):
            AsyncLLM.from_engine_args(EngineArgs("m"), **options)
