"""Pages of conversations: they stay while others come and go, and are gone when they are dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxengine import LLM
from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.base.errors import RequestError
from tests.jaxengine.engine.offload_cases import params_of, prompts_of
from tests.jaxengine.engine.test_offload import SMALL, plainly


def ask(llm: LLM, prompt: list[int], session: str | None = None, owner: str = "") -> list[int]:
    """Tokens of a request, whose seed and temperature are those of the first prompt of `plainly`."""
    core, found = llm.core, []
    options = RequestOptions(session=session, owner=owner)
    core.add(core.inputs.prepare({"prompt_token_ids": prompt}, params_of(0), request_id="one", options=options))
    while core.has_unfinished:
        output: Any
        for output in core.step():
            found = list(output.outputs[0].token_ids)
    assert core.engine.extensions.by_name["offload"].flush()
    for rank in core.engine.scheduler.ranks:
        rank.pool.check()
    return found


def extension(llm: LLM, name: str = "sessions") -> Any:
    return llm.core.engine.extensions.by_name[name]


@pytest.fixture(scope="module")
def llm(tiny_options, tmp_path_factory):
    """An engine with host memory for 40 pages, and a folder."""
    folder = str(tmp_path_factory.mktemp("kv"))
    with LLM(**tiny_options | SMALL | {"kv_offloading_path": folder}) as llm:
        host = extension(llm, "offload").tiers.host
        host.capacity = 40 * extension(llm, "offload").mover.page_bytes
        extension(llm)._most = 20
        yield llm


def find(llm: LLM, keys: list[bytes]) -> dict[str, int]:
    """How many of some pages each place has."""
    tiers, pool = extension(llm, "offload").tiers, llm.core.engine.scheduler.ranks[0].pool
    files = {each.name for each in tiers.disk.folder.rglob("*") if each.is_file()}
    return {
        "pool": sum(pool.find(key) is not None for key in keys),
        "host": sum(key in tiers.host for key in keys),
        "disk": sum(key in tiers.disk or key.hex() in files for key in keys),
    }


def test_a_conversation_stays_and_is_dropped(llm, make_llm):
    first, *others = prompts_of(12)
    (expected,) = plainly(make_llm, [first])
    assert ask(llm, first, "talk", "a") == expected
    keys = extension(llm).kept["a/talk"]
    assert len(keys) == (len(first) + len(expected) - 1) // 4 == 11
    assert find(llm, keys) == {"pool": 11, "host": 11, "disk": 11}
    for each in others:
        ask(llm, each)
    assert find(llm, keys)["host"] == 11 and find(llm, keys)["pool"] < 11
    scheduler = llm.core.engine.scheduler
    hits = scheduler.extension("offload").num_hits + scheduler.num_prefix_hits
    turn = [*first, *expected, *others[0][:5]]
    (answer,) = plainly(make_llm, [turn])
    assert ask(llm, turn, "talk", "a") == answer
    assert scheduler.extension("offload").num_hits + scheduler.num_prefix_hits - hits >= 44
    assert list(extension(llm).kept) == ["a/talk"] and llm.core.runner.compiles.count == 0

    keys = extension(llm).kept["a/talk"]
    shared = ask(llm, [*first[:12], *others[1][:9]], "other", "b")  # three pages are those of the conversation
    utility = llm.core.utility
    assert not utility("drop_session", "b/talk") and not utility("drop_session", "/talk")
    assert find(llm, keys)["host"] == len(keys) > 11
    assert utility("drop_session", "a/talk") and not utility("drop_session", "a/talk")
    assert find(llm, keys) == {"pool": 3, "host": 3, "disk": 3}
    llm.core.engine.scheduler.ranks[0].pool.check()
    assert ask(llm, turn, "talk", "a") == answer and ask(llm, [*first[:12], *others[1][:9]], "other", "b") == shared
    for each in ("a/talk", "b/other"):
        assert utility("drop_session", each)
    assert find(llm, keys) == {"pool": 0, "host": 0, "disk": 0}
    assert not len(extension(llm)._keys) and not extension(llm, "offload").tiers.host._pins


def test_sleep_keeps_pages_if_asked(llm, make_llm):
    """Pages leave the pool for host memory and come back from there; a sleep without keep_kv empties both."""
    prompt = prompts_of(13)[12]
    (expected,) = plainly(make_llm, [prompt])
    assert ask(llm, prompt) == expected
    tiers, pool = extension(llm, "offload").tiers, llm.core.engine.scheduler.ranks[0].pool
    keys = list(pool.digests)
    tiers.host.clear()
    for arguments in ({"level": 2}, {"level": 0}, {"tags": ["weights"]}, {"keep_kv": 1}):
        with pytest.raises(RequestError, match="keep_kv is"):
            llm.sleep(**{"keep_kv": True} | arguments)
        assert not llm.is_paused() and len(pool.digests) == len(keys)
    llm.sleep(keep_kv=True)
    assert not pool.digests and sum(key in tiers.host for key in keys) == min(len(keys), 40)
    llm.wake_up()
    hits = llm.core.engine.scheduler.extension("offload").num_hits
    assert ask(llm, prompt) == expected and llm.core.runner.compiles.count == 0
    assert llm.core.engine.scheduler.extension("offload").num_hits - hits == (len(prompt) - 1) // 4 * 4
    llm.sleep()
    assert extension(llm, "offload").rest() == float("inf") and not len(tiers.host)
    llm.wake_up()
    with pytest.raises(RequestError, match="keep_kv is True"):
        make_llm().sleep(keep_kv=True)


def test_sessions_are_bounded(llm):
    sessions, rng = extension(llm), np.random.default_rng(3)
    for index in range(6):
        ask(llm, rng.integers(0, 128, 30).tolist(), f"s{index}")
        assert len(sessions._keys) <= 20
    assert list(sessions.kept) == ["/s4", "/s5"]
    ask(llm, rng.integers(0, 128, 55).tolist(), "s4")
    assert "/s4" in sessions.kept and len(sessions.kept["/s4"]) <= 20
    for each in list(sessions.kept):
        assert sessions.drop(each)
    assert not extension(llm, "offload").tiers.host._pins


def test_refused_names(llm):
    for name in ("", "a/b", "x" * 129, "é", 7):
        with pytest.raises(RequestError, match="session_id is"):
            ask(llm, [1, 2], name)  # pyright: ignore[reportArgumentType]
