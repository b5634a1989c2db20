"""What the Inference service answers, over a real channel, beside what the engine itself says."""

from __future__ import annotations

import asyncio
import logging
import random
import threading

import grpc
import pytest

from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.server.grpc import answers
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.grpc.client import Client, bad_fields
from jaxengine.server.grpc.inference_pb2_grpc import InferenceStub
from tests.jaxengine.server.grpc.grpc_rig import connected, idle, refusal, request, serving

GREEDY = {"temperature": 0.0}


async def final(engine, prompt, **params):
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **params)
    return [output async for output in engine.generate(prompt, params)][-1]


async def test_generate_says_what_the_engine_says(chat_engine):
    expected = await final(chat_engine, "Hello there", max_tokens=6, temperature=0.0, logprobs=2, prompt_logprobs=1)
    asked = request(
        **GREEDY,
        model="tiny",
        stopping={"max_new_tokens": 6},
        response={
            "prompt_token_ids": True,
            "prompt_logprobs": True,
            "prompt_candidates": {"top_n": 1},
            "output_token_ids": True,
            "output_logprobs": True,
            "output_candidates": {"top_n": 2},
        },
    )
    async with connected(chat_engine, served_model_name=("tiny", "other")) as (_, stub):
        answer = await stub.Generate(asked)
    (sequence,), (completion,) = answer.outputs, expected.outputs
    assert answer.model == "tiny" and answer.request_id.startswith("grpc-")
    assert sequence.text == completion.text and list(sequence.token_ids) == completion.token_ids
    assert (sequence.index, sequence.num_tokens) == (0, 6)
    for positions, scored in ((completion.logprobs, sequence), (expected.prompt_logprobs[1:], answer.prompt_info)):
        first = len(scored.logprobs) - len(positions)
        for at, position in enumerate(positions, first):
            (chosen, score), *others = position.items()
            assert chosen == scored.token_ids[at]
            assert (pytest.approx(score.logprob), score.rank) == (scored.logprobs[at], scored.ranks[at])
            tokens = [
                (token.id, pytest.approx(token.logprob), token.rank) for token in scored.candidate_tokens[at].tokens
            ]
            assert tokens == [(token_id, other.logprob, other.rank) for token_id, other in others]
    info = answer.prompt_info
    assert list(info.token_ids) == expected.prompt_token_ids and info.num_prompt_tokens == 2
    assert (info.logprobs[0], info.ranks[0], len(info.candidate_tokens[0].tokens)) == (0, 0, 0)
    assert sequence.finish_info == pb.FinishInfo(num_output_tokens=6, finish_reason=pb.FinishInfo.LENGTH)
    assert (answer.usage.num_prompt_tokens, answer.usage.num_output_tokens) == (2, 6)


def joined(chunks: list[pb.GenerateChunk]) -> pb.GenerateResponse:
    """All chunks put together, as the proto says they may be."""
    answer = pb.GenerateResponse(request_id=chunks[0].request_id, model=chunks[0].model)
    sequences: dict[int, pb.SequenceOutput] = {}
    for position, chunk in enumerate(chunks, 1):
        assert chunk.HasField("usage") == (position == len(chunks))
        if chunk.HasField("prompt_info"):
            assert not answer.HasField("prompt_info")
            answer.prompt_info.CopyFrom(chunk.prompt_info)
        known = sequences.setdefault(chunk.outputs.index, pb.SequenceOutput(index=chunk.outputs.index))
        assert not known.HasField("finish_info"), "a chunk after a sequence's last"
        text, count = known.text + chunk.outputs.text, known.num_tokens + chunk.outputs.num_tokens
        known.MergeFrom(chunk.outputs)
        known.text, known.num_tokens = text, count
    answer.outputs.extend(sequences[index] for index in sorted(sequences))
    answer.usage.CopyFrom(chunks[-1].usage)
    return answer


def take_scores(answer: pb.GenerateResponse) -> list[float]:
    """The log-probabilities of an answer, which keeps zeros in their place."""
    taken = []
    for part in (answer.prompt_info, *answer.outputs):
        taken += part.logprobs
        part.logprobs[:] = [0.0] * len(part.logprobs)
        for token in (token for candidates in part.candidate_tokens for token in candidates.tokens):
            taken.append(token.logprob)
            token.logprob = 0.0
    return taken


def any_request(seed: int) -> pb.GenerateRequest:
    draw = random.Random(seed)
    asked = pb.GenerateRequest(
        request_id=f"property-{seed}",
        text=draw.choice(["Hello there", "The capital of France is", "a"]) + " again" * draw.randrange(30),
        temperature=draw.choice([0.3, 1.0, 2.0]),
        # Among all 49,152 tokens, of which none is likely, the last digits of the sums would decide now and then.
        sampling={"num_sequences": draw.randint(1, 3), "seed": seed, "top_k": draw.choice([2, 5, 40])},
        stopping={
            "max_new_tokens": draw.randint(1, 12),
            "stop_strings": draw.choice([[], ["e"], ["in", "an"]]),
            "stop_token_ids": draw.sample(range(49152), draw.choice([0, 4000])),
            "include_stop_strings": draw.random() < 0.5,
        },
        # What the cache holds is another in the second run, and so are its figures.
        kv={"bypass_prefix_cache": True},
        response={
            name: draw.random() < 0.5
            for name in ("prompt_token_ids", "prompt_logprobs", "output_text", "output_token_ids", "output_logprobs")
        },
    )
    for name in ("prompt_candidates", "output_candidates"):
        if draw.random() < 0.5:
            getattr(asked.response, name).top_n = draw.randint(0, 5)
    return asked


async def test_the_chunks_of_a_stream_are_the_whole_answer(chat_engine):
    async with connected(chat_engine) as (_, stub):

        async def both(asked):
            whole = await stub.Generate(asked)
            return whole, joined([chunk async for chunk in stub.GenerateStream(asked)])

        pairs = await asyncio.gather(*(both(any_request(seed)) for seed in range(24)))
    for whole, pieces in pairs:
        # The last digits of a score depend on who else is in the step.
        assert take_scores(pieces) == pytest.approx(take_scores(whole), abs=1e-4)
        assert pieces == whole
    reasons = {part.finish_info.WhichOneof("stop_reason") for whole, _ in pairs for part in whole.outputs}
    assert {None, "stop_string", "stop_token_id"} <= reasons


async def test_why_a_request_ended(chat_engine):
    first = (await final(chat_engine, "Hello there", max_tokens=1, temperature=0.0)).outputs[0]
    ends = {**GREEDY, "stopping": {"stop_token_ids": first.token_ids}}
    bias = {**GREEDY, "decoding": {"logit_bias": {chat_engine.inputs.tokenizer.eos_token_id: 100.0}}}
    spelt = {**GREEDY, "stopping": {"stop_strings": [first.text.strip()], "max_new_tokens": 5}}
    async with connected(chat_engine) as (_, stub):
        answers = [await stub.Generate(request(**each)) for each in (ends, bias, spelt)]
    by_token, by_end, by_text = answers
    stop = pb.FinishInfo.STOP
    assert by_token.outputs[0].finish_info.stop_token_id == first.token_ids[0]
    assert by_end.outputs[0].finish_info.eos_token_id == chat_engine.inputs.tokenizer.eos_token_id
    assert by_text.outputs[0].finish_info.stop_string == first.text.strip()
    assert all(each.outputs[0].finish_info.finish_reason == stop for each in answers)


async def test_the_text_is_of_the_shape_that_was_asked_for(chat_engine):
    shapes = {"choice": {"choices": ["yes", "no"]}, "regex": "(yes|no)", "json": '{"enum": ["yes", "no"]}'}
    async with connected(chat_engine) as (_, stub):
        for name, shape in shapes.items():
            answer = await stub.Generate(request(decoding={name: shape}, stopping={"max_new_tokens": 40}))
            assert answer.outputs[0].text.strip('" \n') in ("yes", "no"), name
            assert answer.outputs[0].finish_info.finish_reason == pb.FinishInfo.STOP
        hostile = await refusal(stub.Generate(request(decoding={"grammar": "start: nothing"})))
        assert hostile[0] is grpc.StatusCode.INVALID_ARGUMENT and hostile[2] == ["decoding.grammar"]


def test_the_client_class(chat_engine):
    """It blocks, so the server runs in a loop of its own."""
    tokenizer = chat_engine.inputs.tokenizer
    messages = [{"role": "user", "content": "Hi"}]
    prompt = chat_engine.inputs.chat_prompt(messages)

    def use(port: int) -> None:
        with Client(f"127.0.0.1:{port}", key="secret") as client:
            ids = client.tokenize("Hello there")
            assert ids == tokenizer.encode("Hello there") and client.detokenize(ids) == "Hello there"
            assert client.tokenize(messages) == prompt["prompt_token_ids"]
            options = {"max_new_tokens": 4, "temperature": 0, "output_token_ids": True, "prompt_token_ids": True}
            by_text, by_ids = client.generate("Hello there", **options), client.generate(ids, **options)
            assert by_text.outputs == by_ids.outputs
            streamed = list(client.generate_stream("Hello there", timeout=60, **options))
            assert "".join(chunk.outputs.text for chunk in streamed) == by_text.outputs[0].text
            chat = client.generate(messages, **options)
            assert list(chat.prompt_info.token_ids) == prompt["prompt_token_ids"]
            scores = client.score("Hello there").prompt_info
            assert list(scores.token_ids) == ids and len(scores.logprobs) == 2 and scores.ranks[1] > 0
            with pytest.raises(TypeError, match="max_tokens"):
                client.generate("Hello", max_tokens=3)
            with pytest.raises(grpc.RpcError) as caught:
                client.generate("Hello", top_p=0)
            assert bad_fields(caught.value) == ["sampling.top_p"]

    async def run() -> None:
        async with serving(chat_engine, api_key="secret") as server:
            await asyncio.to_thread(use, server.port)

    asyncio.run(run())


async def test_score_is_the_prompts_logprobs(chat_engine, monkeypatch):
    threads, write = set(), answers._write_scores
    monkeypatch.setattr(answers, "_write_scores", lambda *a: threads.add(threading.current_thread()) or write(*a))
    monkeypatch.setattr("jaxengine.server.base.workers._MANY_POSITIONS", 10)
    text = "The capital of France is Paris. " * 6
    expected = (await final(chat_engine, text, max_tokens=1, prompt_logprobs=2)).prompt_logprobs[1:]
    async with connected(chat_engine) as (_, stub):
        answer = await stub.Score(pb.ScoreRequest(text=text, candidates={"top_n": 2}))
        plain = await stub.Score(pb.ScoreRequest(text=text))
        cut = await stub.Score(pb.ScoreRequest(text=text, truncate_prompt_tokens=3))
        # Of more characters than fit, which are not all read.
        long = await stub.Score(pb.ScoreRequest(text=text * 500, truncate_prompt_tokens=3))
        whole = await refusal(stub.Score(pb.ScoreRequest(text=text * 500, truncate_prompt_tokens=1000)))
    assert threads - {threading.current_thread()}  # other calls do not wait for many
    scored = [next(iter(position.values())) for position in expected]
    for info in (answer.prompt_info, plain.prompt_info):
        assert info.logprobs[1:] == pytest.approx([score.logprob for score in scored], abs=1e-4)
        assert info.ranks[1:] == [score.rank for score in scored]
        assert list(info.token_ids) == chat_engine.inputs.tokenizer.encode(text)
    best = [{token.id for token in candidates.tokens} for candidates in answer.prompt_info.candidate_tokens[1:]]
    assert best == [set(list(position)[1:]) for position in expected] and not plain.prompt_info.candidate_tokens
    assert long.prompt_info.token_ids == cut.prompt_info.token_ids and "characters" in whole[1]
    assert cut.prompt_info.token_ids == plain.prompt_info.token_ids[-3:] and cut.usage.num_prompt_tokens == 3


async def test_tokenize_and_detokenize(chat_engine):
    tokenizer = chat_engine.inputs.tokenizer
    async with connected(chat_engine) as (_, stub):
        answer = await stub.Tokenize(pb.TokenizeRequest(text="Hello there", return_token_strs=True))
        assert list(answer.token_ids) == tokenizer.encode("Hello there") and answer.count == 2
        assert list(answer.token_strs) == ["Hello", "Ġthere"] and answer.max_model_len == 256
        ids = [tokenizer.bos_token_id, *answer.token_ids]
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == tokenizer.decode(ids, False)
        shown = await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=True))
        assert shown.text == "Hello there"
        outside = await refusal(stub.Detokenize(pb.DetokenizeRequest(token_ids=[49152])))
        assert outside[0] is grpc.StatusCode.INVALID_ARGUMENT and outside[2] == ["token_ids"]


@pytest.mark.parametrize("how", ["cancel", "disconnect", "unary", "deadline"])
async def test_a_caller_who_leaves_frees_the_pages(chat_engine, how):
    asked = request(stopping={"max_new_tokens": 250, "ignore_eos": True}, sampling={"num_sequences": 4})
    async with connected(chat_engine) as (channel, stub):
        if how == "unary":
            waiting = asyncio.ensure_future(stub.Generate(asked))
            while not (await chat_engine.utility("status"))["num_running"]:
                await asyncio.sleep(0.001)
            waiting.cancel()
        elif how == "deadline":
            late = await refusal(stub.GenerateStream(asked, timeout=0.05))
            assert late[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            call = stub.GenerateStream(asked)
            assert (await call.read()).outputs.num_tokens
            if how == "cancel":
                call.cancel()
            else:
                await channel.close()
        before = (await chat_engine.utility("status"))["generation_tokens"]
        await idle(chat_engine)
        assert (await chat_engine.utility("status"))["generation_tokens"] - before < 4 * 200


async def test_callers_who_leave_at_once_are_no_fault_of_the_server(chat_engine, caplog):
    async with connected(chat_engine) as (channel, stub):
        empty = channel.unary_unary("/jaxengine.v1.Inference/Generate")
        for number in range(200):
            wait = (number % 20) / 10_000
            for call in (stub.GenerateStream(request(request_id="no/id"), timeout=wait), empty(b"", timeout=wait)):
                code = (await refusal(call))[0]
                assert code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INVALID_ARGUMENT)
    await idle(chat_engine)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_request_id_is_used_once_at_a_time(chat_engine):
    asked = request(request_id="mine", stopping={"max_new_tokens": 250, "ignore_eos": True})
    async with connected(chat_engine) as (_, stub):
        call = stub.GenerateStream(asked)
        assert (await call.read()).request_id == "mine"
        assert ("x-request-id", "mine") in tuple(await call.initial_metadata())
        assert (await refusal(stub.Generate(asked)))[0] is grpc.StatusCode.ALREADY_EXISTS
        assert (await refusal(stub.GenerateStream(asked)))[0] is grpc.StatusCode.ALREADY_EXISTS
        assert (await call.read()).outputs.num_tokens, "the first one goes on"
        call.cancel()
    await idle(chat_engine)


async def test_a_reader_who_does_not_read_is_ended(chat_engine):
    asked = request(
        sampling={"num_sequences": 8},
        stopping={"max_new_tokens": 250, "ignore_eos": True},
        response={"output_candidates": {"top_n": 20}},
    )
    async with (
        serving(chat_engine, stream_write_timeout=0.1) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        call = InferenceStub(channel).GenerateStream(asked)
        assert (await call.read()).outputs.num_tokens
        await idle(chat_engine)
        code, details, _ = await refusal(call)
    assert code is grpc.StatusCode.ABORTED and "unread" in details


async def test_the_server_has_a_deadline_of_its_own(chat_engine):
    asked = request(stopping={"max_new_tokens": 250, "ignore_eos": True})
    async with connected(chat_engine, request_timeout=0.05) as (_, stub):
        assert (await refusal(stub.Generate(asked)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await refusal(stub.GenerateStream(asked, timeout=30)))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    await idle(chat_engine)


async def test_the_prefix_cache_is_shared_by_salt_and_can_be_passed_by(chat_engine):
    text = "Whoever asks the same thing twice gets the same answer faster. " * 4

    async def cached(**kv) -> int:
        answer = await stub.Generate(request(text, kv=kv, stopping={"max_new_tokens": 1}))
        return answer.usage.num_cached_tokens

    async with connected(chat_engine) as (_, stub):
        assert await cached(cache_salt="a") == 0 and await cached(cache_salt="a") > 0
        assert await cached(cache_salt="b") == 0
        assert await cached(bypass_prefix_cache=True) == 0 and await cached(bypass_prefix_cache=True) == 0
