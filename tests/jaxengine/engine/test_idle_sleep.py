"""An engine that sleeps while nobody uses it: the next request finds it awake, and what others have asked for stays."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from jaxengine import LLM, AsyncLLM, ConfigError
from jaxengine.api.llm_engine import LLMEngine
from jaxengine.config.engine_config import EngineConfig
from jaxengine.runner.weights import sleep
from jaxengine.scheduler.base.errors import OverloadedError
from tests.conftest import TINY_CHECKPOINT
from tests.jaxengine.engine.test_weight_updates import PROMPTS, changed, greedy
from tests.tables import each_row

IDLE = 0.05


@each_row(
    ("options", "allowed"),
    [
        ({"sleep_idle_seconds": 0}, "0.01 to"),
        ({"sleep_idle_seconds": -1.0}, "0.01 to"),
        ({"sleep_idle_seconds": float("nan")}, "0.01 to"),
        ({"sleep_idle_seconds": float("inf")}, "0.01 to"),
        ({"sleep_idle_seconds": "soon"}, "a number or None"),
        ({"sleep_idle_seconds": True}, "a number or None"),
        ({"sleep_idle_seconds": 60, "nnodes": 2}, "nnodes"),
    ],
)
def test_what_the_option_takes(options, allowed):
    with pytest.raises(ConfigError, match=f"sleep_idle_seconds.*{allowed}"):
        EngineConfig(**options)


def test_an_engine_that_its_caller_steps_refuses_it():
    for kind in (LLM, LLMEngine):
        with pytest.raises(ConfigError, match="AsyncLLM"):
            kind(str(TINY_CHECKPOINT), sleep_idle_seconds=60)


class Rig:
    """An engine that falls asleep soon."""

    def __init__(self, options: dict[str, Any]):
        self.engine = AsyncLLM(**options, sleep_idle_seconds=IDLE)
        self.runner = self.engine.core.runner

    async def tokens(self) -> list[int]:
        async for output in self.engine.generate(PROMPTS[0], greedy()):
            last = output
        return list(last.outputs[0].token_ids)

    async def until_asleep(self) -> None:
        async with asyncio.timeout(60):
            while not await self.engine.is_sleeping():
                await asyncio.sleep(0.01)
        assert not sleep.are_present(self.runner) and not await self.engine.is_paused()

    async def metrics(self) -> dict[str, float]:
        found = await self.engine.utility("metrics")
        return {
            f"{each['name']} {' '.join(each['labels'].values())}".strip(): each.get("value", each.get("count"))
            for each in found
        }

    async def waits(self) -> asyncio.Task[list[int]]:
        """A request that nothing wakes the engine for."""
        task = asyncio.create_task(self.tokens())
        await asyncio.sleep(4 * IDLE)
        assert not task.done()
        return task


async def sleeps_and_wakes(rig: Rig) -> list[int]:
    first, count = await rig.tokens(), 0.0
    for _ in range(3):
        await rig.until_asleep()
        found = await rig.metrics()
        assert found["vllm:engine_sleep_state weights_offloaded"] == 1 and found["jaxengine:idle_sleeps"] > count
        count = found["jaxengine:idle_sleeps"]
        assert await asyncio.gather(*(rig.tokens() for _ in range(3))) == [first] * 3
    # A busy machine may let it fall asleep between two requests of this test, too.
    operations = [found[f"vllm:sleep_mode_operation_duration_seconds {name}"] for name in ("sleep", "wake")]
    assert found["jaxengine:idle_wake_seconds"] > 0 and operations == [count, count - 1]
    assert count >= 3 and rig.runner.compiles.count == 0
    return first


async def what_others_ask_for_stays(rig: Rig, first: list[int]) -> None:
    """A sleep and a pause of somebody's, begun awake or asleep, are ended by nobody else."""
    engine = rig.engine
    for asleep in (False, True):
        if asleep:
            await rig.until_asleep()
        await engine.sleep(1)
        task = await rig.waits()
        assert await engine.is_sleeping() and await engine.is_paused()
        await engine.wake_up()
        assert await task == first
        if asleep:
            await rig.until_asleep()
        await engine.pause_generation("keep")
        task = await rig.waits()
        assert await engine.is_paused() and not await engine.is_sleeping()
        await engine.resume_generation()
        assert await task == first


async def weights_change_while_it_sleeps(rig: Rig, first: list[int]) -> None:
    engine = rig.engine
    await rig.until_asleep()
    await engine.resume_generation()  # nobody has paused it
    sums = await engine.weight_info(checksum=True)
    await rig.until_asleep()
    await engine.update_weights(changed(1), version="other")
    other = await rig.tokens()
    await rig.until_asleep()
    assert await rig.tokens() == other != first
    await rig.until_asleep()
    await engine.update_weights(changed(0))
    assert await rig.tokens() == first and rig.runner.compiles.count == 0
    assert (await engine.weight_info(checksum=True))["checksums"] == sums["checksums"]


async def memory_is_not_to_be_had(rig: Rig, first: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is refused and may come again; others are not affected."""
    await rig.until_asleep()

    def fail(_: Any) -> bool:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patched:
        patched.setattr(sleep, "restore_weights", fail)
        with pytest.raises(OverloadedError, match="cannot have its memory back"):
            await rig.tokens()
        assert await rig.engine.is_sleeping()
    assert await rig.tokens() == first


async def a_long_request_is_use(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps take longer, all together, than the engine may be idle."""
    start, core = time.monotonic(), rig.engine.core
    advance = core.advance

    def slowly() -> Any:
        time.sleep(IDLE / 10)
        return advance()

    with monkeypatch.context() as patched:
        patched.setattr(core, "advance", slowly)
        async for _ in rig.engine.generate(PROMPTS[0], greedy(60)):
            assert sleep.are_present(rig.runner)
    assert time.monotonic() - start > IDLE


def test_an_idle_engine(tiny_options, monkeypatch):
    async def run() -> None:
        rig = Rig(tiny_options)
        try:
            first = await sleeps_and_wakes(rig)
            await what_others_ask_for_stays(rig, first)
            await weights_change_while_it_sleeps(rig, first)
            await memory_is_not_to_be_had(rig, first, monkeypatch)
            await a_long_request_is_use(rig, monkeypatch)
        finally:
            rig.engine.shutdown()

    asyncio.run(run())
