"""A storm of clients: many requests over real sockets; some of them leave in the middle, some before the first byte.

What each asks for follows from a seed, so that the same requests can be run alone afterwards and compared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import h11
import numpy as np

from jaxengine.bench.serve_client import Connection, Server
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams

STAY, ABORT, LEAVE = "stay", "abort", "leave"
# Pieces of words: random text runs into one of them soon.
STOPS = (" a", "e", "s", "in", "ing", " the", "o", "r ")
CHOICES = ("yes, certainly", "no, never", "perhaps tomorrow")


@dataclass
class Visit:
    """One client's request, and what it does.

    Attributes:
      fate: to stay until the end, to abort after `chunks` pieces, or to leave after `seconds` without reading.
      outputs: by index, what came: text, token ids, reason.
    """

    body: dict[str, Any]
    fate: str
    chunks: int = 0
    seconds: float = 0.0
    outputs: dict[int, Output] = field(default_factory=dict)
    status: int | None = None
    error: str | None = None
    ended: bool = False

    @property
    def end(self) -> str:
        if self.error or self.status not in (200, None):
            return "failed"
        return "ended" if self.ended else "left"

    @property
    def results(self) -> list[Output]:
        return [self.outputs[index] for index in sorted(self.outputs)]


@dataclass
class Output:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def visits(count: int, model: str, *, seed: int, priorities: bool = False, structured: float = 0.0) -> list[Visit]:
    """Requests of all kinds: greedy and seeded, n, stops, streams and whole answers, shared prefixes; a fifth of them
    abort and a fifth leave. structured: share of them that must answer with one of CHOICES."""
    generator = np.random.default_rng(seed)
    prefixes = generator.integers(1000, 40_000, (4, 24)).tolist()
    made = []
    for number in range(count):
        # Answers outgrow prompts: what is known of a request has its pages before it is admitted.
        length = int(generator.integers(4, 40))
        prompt = generator.integers(1000, 40_000, length).tolist()
        if generator.random() < 0.3:
            prompt = prefixes[number % 4] + prompt
        greedy = generator.random() < 0.4
        body: dict[str, Any] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": int(generator.integers(1, 150)),
            "temperature": 0.0 if greedy else float(generator.choice([0.3, 0.8, 1.0])),
            "return_token_ids": True,
        }
        if not greedy:
            body |= {"seed": int(generator.integers(1 << 31)), "n": int(generator.choice([1, 1, 1, 2, 3]))}
            body |= generator.choice(
                [{"top_k": 5}, {"top_k": 20}, {"top_k": 20, "top_p": 0.9}, {}], p=[0.3, 0.3, 0.3, 0.1]
            )
        if generator.random() < structured:
            body |= {"structured_outputs": {"choice": list(CHOICES)}, "max_tokens": 24}
        elif generator.random() < 0.3:
            body["stop"] = generator.choice(STOPS, 2, replace=False).tolist()
        else:
            body["ignore_eos"] = True
        if priorities:
            body["priority"] = int(generator.integers(0, 3))
        fate = (STAY, STAY, STAY, ABORT, LEAVE)[number % 5]
        body["stream"] = fate == ABORT or generator.random() < 0.7
        made.append(Visit(body, fate, int(generator.integers(1, 8)), float(generator.uniform(0.0, 0.1))))
    return made


async def storm(server: Server, planned: list[Visit], at_once: int) -> Counter[str]:
    """Runs all visits, each on a socket of its own, `at_once` of them at a time; what became of them, counted."""
    places = asyncio.Semaphore(at_once)

    async def one(visit: Visit) -> None:
        async with places:
            connection = await Connection.open(server)
            try:
                async with asyncio.timeout(120):
                    await _pay(visit, connection)
            except (OSError, h11.RemoteProtocolError) as error:
                visit.error = repr(error)
            finally:
                connection.close()

    await asyncio.gather(*map(one, planned))
    return Counter(f"{visit.fate} {visit.end}" for visit in planned)


async def _pay(visit: Visit, connection: Connection) -> None:
    payload = json.dumps(visit.body).encode()
    if visit.fate == LEAVE:
        connection.post("POST", "/completions", payload)
        await asyncio.sleep(visit.seconds)
        return
    response = await connection.send("POST", "/completions", payload)
    visit.status = response.status_code
    text, count = b"", 0
    async for piece in connection.body():
        text += piece
        count += 1
        if visit.fate == ABORT and count >= visit.chunks:
            return
    if visit.status != 200:
        visit.error = text.decode(errors="replace")
    elif visit.body["stream"]:
        _read_events(visit, text.decode())
    else:
        for choice in json.loads(text)["choices"]:
            visit.outputs[choice["index"]] = Output(choice["text"], choice["token_ids"], choice["finish_reason"])
        visit.ended = True


def _read_events(visit: Visit, text: str) -> None:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    visit.ended = events[-1:] == ["[DONE]"]
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            visit.error = json.dumps(event["error"])
        for choice in event.get("choices", ()):
            output = visit.outputs.setdefault(choice["index"], Output())
            output.text += choice["text"]
            output.token_ids += choice.get("token_ids") or []
            output.finish_reason = choice["finish_reason"] or output.finish_reason


_PARAMS = {field.name for field in dataclasses.fields(SamplingParams)}


async def solo(engine: Any, visit: Visit) -> list[Output]:
    """What the visit's request gives from an engine whose pool has room for everybody."""
    fields = {name: value for name, value in visit.body.items() if name in _PARAMS}
    params = SamplingParams(**fields, output_kind=RequestOutputKind.FINAL_ONLY)
    async for final in engine.generate({"prompt_token_ids": visit.body["prompt"]}, params):
        found = [Output(each.text, list(each.token_ids), each.finish_reason) for each in final.outputs]
    return found


async def differences(engine: Any, planned: list[Visit], at_once: int = 64) -> list[str]:
    """Visits that stayed and got anything else than their request alone gives, a line each."""
    places = asyncio.Semaphore(at_once)

    async def one(number: int, visit: Visit) -> str | None:
        async with places:
            expected = await solo(engine, visit)
        if visit.results == expected:
            return None
        return f"{number}: {visit.body | {'prompt': len(visit.body['prompt'])}}: {visit.results} and not {expected}"

    stayed = [(number, visit) for number, visit in enumerate(planned) if visit.fate == STAY]
    lines = await asyncio.gather(*(one(*each) for each in stayed))
    return [line for line in lines if line]
