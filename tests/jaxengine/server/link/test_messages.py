"""A step's tokens on their way from the engine's process to those that speak with clients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxengine.engine.output import EngineOutput, Found
from jaxengine.scheduler.base.request import FinishReason, Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.batches.batch import TokenRows, TokenScores
from jaxengine.server.link import messages
from jaxengine.server.link.messages import Update
from jaxengine.server.processes.engine_process import EngineServer


def _emitted(rows, scored):
    """rows: (client, handle, token id); scored: indexes of those with a logprob, minus a hundredth of the token id."""
    tags = np.array([client << 32 | handle for client, handle, _ in rows], np.int64)
    token_ids = np.array([token for *_, token in rows], np.int32)
    scores = None
    if scored:
        logprobs = (-token_ids[scored] / 100).astype(np.float32)
        ones = np.ones(len(scored), np.int32)
        given = logprobs[:, None] - np.arange(3, dtype=np.float32)
        scores = TokenScores(logprobs, ones, token_ids[scored][:, None], logprobs[:, None], given)
    return TokenRows(tags, token_ids, np.array(scored, np.int64), scores)


def _seen(update):
    """(handle, token id, logprob or None) of an update that went over the wire."""
    read = messages.decode_from_engine(messages.encode(update))
    assert isinstance(read, Update)
    found = []
    for each in messages.output_of(read, lambda handle: pytest.fail("tokens need no request")).emitted:
        logprobs = {} if each.scores is None else dict(zip(each.scored.tolist(), each.scores.logprobs, strict=True))
        if each.scores is not None:
            given = each.scores.logprobs[:, None] - np.arange(3, dtype=np.float32)
            np.testing.assert_array_equal(each.scores.given_logprobs, given)
        pairs = zip(each.tags.tolist(), each.token_ids.tolist(), strict=True)
        found += [(*pair, logprobs.get(index)) for index, pair in enumerate(pairs)]
    return found


_LAST = (1 << 31) - 1


@pytest.mark.parametrize("parts", [1, 2, 3], ids="ranks={}".format)
def test_tokens_and_scores_reach_their_process(parts):
    """Of one rank and of several, with scores in some of them, the greatest handle among them."""
    rows = [(1, 7, 10), (2, 7, 11), (1, _LAST, 12), (2, 1, 13), (1, 3, 14), (2, _LAST, 15)]
    scored = {2, 3, 5}
    bounds = np.linspace(0, len(rows), parts + 1).astype(int).tolist()
    emitted = [
        _emitted(rows[first:last], [index - first for index in sorted(scored) if first <= index < last])
        for first, last in zip(bounds, bounds[1:], strict=False)
    ]
    updates = messages.updates_of(EngineOutput(emitted=emitted), [1, 2])
    for client in (1, 2):
        expected = [
            (handle, token, pytest.approx(-token / 100) if index in scored else None)
            for index, (owner, handle, token) in enumerate(rows)
            if owner == client
        ]
        assert _seen(updates[client]) == expected


def test_the_only_process_gets_all():
    rows = [(4, 2, 20), (4, 9, 21), (4, 5, 22)]
    updates = messages.updates_of(EngineOutput(emitted=[_emitted(rows[:2], []), _emitted(rows[2:], [0])]), [4])
    assert list(updates) == [4]
    assert _seen(updates[4]) == [(2, 20, None), (9, 21, None), (5, 22, pytest.approx(-0.22))]


@pytest.mark.parametrize("parts", [1, 2], ids="ranks={}".format)
def test_vectors_reach_their_process(parts):
    """What pooling made, of one rank and of several."""
    rows = [(1, 7, 0), (2, 7, 0), (1, _LAST, -1), (2, 1, 0)]
    vectors = np.arange(12, dtype=np.float32).reshape(4, 3)
    bounds = np.linspace(0, len(rows), parts + 1).astype(int).tolist()
    emitted = [
        _emitted(rows[first:last], [])._replace(vectors=vectors[first:last])
        for first, last in zip(bounds, bounds[1:], strict=False)
    ]
    for clients in ([1, 2], [1]):
        own_rows = [index for index, (owner, *_) in enumerate(rows) if owner == 1 or len(clients) == 1]
        update = messages.updates_of(EngineOutput(emitted=emitted), clients)[1]
        read = messages.decode_from_engine(messages.encode(update))
        assert isinstance(read, Update)
        (found,) = messages.output_of(read, lambda handle: pytest.fail("vectors need no request")).emitted
        assert found.vectors is not None
        np.testing.assert_array_equal(found.vectors, vectors[own_rows])
        assert found.token_ids.tolist() == [rows[index][2] for index in own_rows]


def test_rows_of_capabilities_reach_their_process():
    """Plain ones, and those with fields, whose dtypes may be no numpy's own."""
    plain = np.arange(6, dtype=np.float32).reshape(2, 3)
    named = np.empty(2, [("a:1", ml_dtypes.bfloat16, (3,)), ("b", np.float32, (1,))])
    named["a:1"], named["b"] = plain, plain[:, :1]
    tags = 2 << 32 | 7, 1 << 32 | 3
    requests = [Request(str(tag), np.array([1], np.int32), TokenParams(), 1, tag=tag) for tag in tags]
    found = [Found(requests[0], "hidden_states", plain), Found(requests[1], "captured", named)]
    updates = messages.updates_of(EngineOutput(found=found), [1, 2])
    for client, handle, wanted in ((2, 7, found[0]), (1, 3, found[1])):
        read = messages.decode_from_engine(messages.encode(updates[client]))
        assert isinstance(read, Update)
        (own,) = messages.output_of(read, {handle: wanted.request}.__getitem__).found
        assert own.request is wanted.request and own.name == wanted.name and own.rows.dtype == wanted.rows.dtype
        assert own.rows.tobytes() == wanted.rows.tobytes()


def test_the_end_of_a_request_says_who_has_its_pages():
    request, known = (Request("1", np.array([1], np.int32), TokenParams(), 1, tag=1 << 32 | 7) for _ in range(2))
    request.finish_reason, request.kv_transfer_params = FinishReason.LENGTH, {"remote_block_ids": [[0, 1]]}
    read = messages.decode_from_engine(messages.encode(messages.updates_of(EngineOutput(finished=[request]), [1])[1]))
    assert isinstance(read, Update)
    messages.output_of(read, {7: known}.__getitem__)
    assert known.kv_transfer_params == request.kv_transfer_params


def test_a_result_that_no_message_can_have_fails_its_call_alone():
    """Others are sent as they are."""
    results = {"fits": [1, {"a": None}], "too large": 2**70, "no value": object(), "half": "\ud800"}
    core = SimpleNamespace(utility=results.get)
    server: Any = SimpleNamespace(core=core, _reset_mm_cache=None, _mm_cache=None)
    for name, result in results.items():
        reply = EngineServer._call(server, messages.Call(3, name, ()))
        update = messages.decode_from_engine(messages.encode(messages.Update(1, 1, messages.Load(), replies=[reply])))
        (got,) = update.replies
        if name == "fits":
            assert got.failure is None and got.result == result
        else:
            assert got.failure and got.failure.kind == "internal" and got.failure.message.startswith(f"{name} failed")
