"""Images through a real server: nothing compiles, hostile files disturb nobody, and a known image is not encoded again.

A model of Qwen3-VL's shape with random weights, large enough that a step takes some ten milliseconds on a processor, is
served as a user starts it.

sizes: 200 prompts of images and videos of odd sizes, alone and several at once, mixed with prompts of text.
hostile: files that are damaged, too large, bombs or not images, and addresses that must not be fetched or never answer,
    one after the other while four streams of text run. The times between tokens are compared with those of the same
    streams alone, alternately, because a shared processor is not equally fast all the time; and with those beside as
    many requests without an image that are refused for one number, which any request costs if client and server share
    the processor.
again: images that are asked about twice; how much the second request computed, and tokens per second with images and
    without.
gaps: the longest time between two tokens of four streams of text, alone and while one new image arrives, of half of
    the largest side (--side, pixels) and of the whole: the time of a call of the vision tower, for which decodes wait.

The exit status is 1 if a program was compiled, a prompt failed that should not or the reverse, or the second request
had something encoded. The slowdown of the streams is reported, not judged.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.engines import ask, engine_options, serving
from benchmarks.harness import Option, shared
from benchmarks.recorder import Recorder
from jaxengine.bench.serve_client import Connections, Sample, Server, stream
from jaxengine.results import percentile
from tests.fixtures.picture_checkpoints import whole_checkpoint
from tests.jaxengine.media.pictures import animation, data_url, saved
from tests.jaxengine.media.test_images import HOSTILE
from tests.jaxengine.media.web_server import WebServer, web_server
from tests.jaxengine.server.server_process import ServerProcess

NUM_PROMPTS, NUM_STREAMS, NUM_AGAIN = 200, 4, 12
TEXT = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TEXT |= {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
TEXT |= {"rope_parameters": {"mrope_interleaved": True, "mrope_section": [12, 10, 10], "rope_theta": 1e6}}
TOWER = {"hidden_size": 256, "intermediate_size": 512, "depth": 6, "num_heads": 4, "out_hidden_size": 768}
PATCH = 16
TOWER |= {"patch_size": PATCH, "num_position_embeddings": 1024, "deepstack_visual_indexes": [1, 3]}
ENGINE = engine_options(
    (4, 8),
    (64, 256),
    load_format="dummy",
    dtype="float32",
    max_model_len=2048,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    kv_cache_memory_bytes=1 << 30,
    allowed_media_domains=["127.0.0.1", "localhost"],
    media_fetch_timeout=1.0,
    max_request_bytes=64 << 20,
)
PARTS = ("sizes", "hostile", "again", "gaps")
OPTIONS = {
    "only": Option(PARTS[:3], choices=PARTS),
    "tokens": Option(256, "of each stream beside hostile files"),
    "pace": Option(0.25, "seconds between an answer and the next hostile file"),
    "side": Option(512, "pixels of the largest image's side, a multiple of 32"),
    **shared(rounds=3),
}
COUNTERS = (
    "jaxengine:compilations_since_ready",
    "jaxengine:encoder_calls",
    "jaxengine:encoder_cache_hits",
    "vllm:mm_cache_hits",
    "vllm:prefix_cache_hits",
)
# Of the server that answers as it should not (tests/jaxengine/media/web_server.py).
BAD_ANSWERS = ("elsewhere", "here", "missing", "large", "endless", "short", "packed", "dripping", "dripping-body")
BAD_ANSWERS += ("silent", "nonsense")
PRIVATE = (
    "http://169.254.169.254/latest/meta-data/",
    "http://localhost:1/a.png",
    "http://[::1]/a.png",
    "http://10.0.0.1/a.png",
    "https://example.com/a.png",
    "http://2130706433/",
    "file:///etc/passwd",
    "ftp://127.0.0.1/a.png",
    "gopher://127.0.0.1/",
    "data:image/png;base64,@@@@",
)


def write_model(folder: Path, side: int) -> Path:
    """Write the config and tokenizer files of a vision model with the sizes TEXT and TOWER, without weights; return
    `folder`.

    side: side of the largest image, in pixels.
    """
    whole_checkpoint("qwen3_vl_vision", folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= TEXT
    config["vision_config"] |= TOWER
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "processor_config.json").read_text())
    for part in settings.values():
        part |= {"patch_size": PATCH, "size": {"shortest_edge": 32 * 32, "longest_edge": side * side}}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def question(parts: Sequence[dict[str, Any]], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat request with these content parts and a question; it streams, greedily and up to
    max_tokens.

    fields: further fields of the body, which may replace these defaults.
    """
    content = [*parts, {"type": "text", "text": "What is this, and what is beside it?"}]
    fields = {"temperature": 0.0, "ignore_eos": True, "stream": True, **fields}
    if fields["stream"]:
        fields["stream_options"] = {"include_usage": True}
    return {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens, **fields}


def picture(rng: random.Random, width: int, height: int, form: str = "JPEG") -> dict[str, Any]:
    """Return an image_url part of a message: an image of random coloured squares, width x height pixels. form: file
    format.
    """
    small = Image.frombytes("RGB", (9, 7), rng.randbytes(9 * 7 * 3))
    url = data_url(saved(small.resize((width, height), Image.Resampling.NEAREST), form))
    return {"type": "image_url", "image_url": {"url": url}}


def video(rng: random.Random) -> dict[str, Any]:
    """Return a video_url part of a message: a GIF of 2 to 9 frames, whose sides are random lengths of 20 to 90
    pixels.
    """
    size = rng.randint(20, 90), rng.randint(20, 90)
    return {"type": "video_url", "video_url": {"url": data_url(animation("GIF", rng.randint(2, 9), size))}}


class Client:
    """HTTP client for the chat requests to one server."""

    def __init__(self, server: ServerProcess):
        self.url = server.base_url
        self._connections = Connections(Server.at(server.base_url))

    async def ask(self, body: dict[str, Any], timeout: float = 300.0) -> Sample:
        """Send one chat request and return its sample; errors are in the sample. timeout: seconds."""
        return await stream(self._connections, "/v1/chat/completions", body, timeout)

    async def ask_all(self, bodies: Sequence[dict[str, Any]], at_once: int) -> list[Sample]:
        """Send all bodies, at most `at_once` at the same time; return their samples in the order of `bodies`."""
        free = asyncio.Semaphore(at_once)

        async def one(body: dict[str, Any]) -> Sample:
            async with free:
                return await self.ask(body)

        return await asyncio.gather(*map(one, bodies))

    def counters(self) -> dict[str, float]:
        """Return the values of the metrics in COUNTERS from the server's /metrics, by name; 0 for a metric that is
        missing.
        """
        (_, text), found = ask(self.url, "/metrics"), {}
        for name in COUNTERS:
            values = re.findall(rf"^{name}(?:_total)?(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
            found[name] = sum(map(float, values))
        return found


async def sizes(client: Client) -> tuple[dict[str, Any], bool]:
    """Run the part `sizes`: send NUM_PROMPTS prompts, eight at once, with 0 to 3 images of random sizes and formats
    and, every tenth, a video. Return (row of counts, whether no prompt failed and nothing was compiled).
    """
    rng, bodies = random.Random(1), []
    for number in range(NUM_PROMPTS):
        forms = ("JPEG", "PNG", "WEBP")
        parts = [
            picture(rng, rng.randint(3, 700), rng.randint(3, 700), rng.choice(forms))
            for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))
        ]
        bodies.append(question([*parts, *([video(rng)] if number % 10 == 0 else [])], rng.randint(1, 6)))
    before = client.counters()
    samples = await client.ask_all(bodies, 8)
    compiled = client.counters()[COUNTERS[0]] - before[COUNTERS[0]]
    failed = [sample.message[:200] for sample in samples if sample.error]
    row = {
        "prompts": len(samples),
        "pictures": sum(len(body["messages"][0]["content"]) - 1 for body in bodies),
        "prompt_lengths": len({sample.prompt_tokens for sample in samples}),
        "failed": len(failed),
        "compilations": compiled,
    }
    return {**row, "failures": failed[:5]}, not failed and not compiled


def hostile_bodies(web: WebServer) -> dict[str, bytes]:
    """Return JSON request bodies with one hostile image each, by name. web: the server with the paths BAD_ANSWERS."""
    named = {name: data_url(data) for name, (data, _) in HOSTILE.items()}
    named |= {f"server: {name}": f"{web.url}/{name}" for name in BAD_ANSWERS}
    named |= {f"address: {url}": url for url in PRIVATE}
    return {
        name: json.dumps(question([{"type": "image_url", "image_url": {"url": url}}], 4, stream=False)).encode()
        for name, url in named.items()
    }


class Attack:
    """Context in which a thread sends hostile requests, one after the other in a cycle, until the context ends.

    Attributes:
      answers: the first answer by request name: HTTP status, body, seconds.
      num_sent: number of requests sent so far.
      interval: mean seconds from one request to the next; 0 until the context has ended.
    """

    def __init__(self, url: str, bodies: dict[str, bytes], pace: float):
        """Store the attack; nothing is sent. url: of the server. bodies: JSON requests by name, at least one. pace:
        seconds from an answer to the next request.
        """
        self._url, self._pace, self._bodies = url, pace, bodies
        self.answers: dict[str, tuple[int, str, float]] = {}
        self.num_sent, self.interval, self._begin = 0, 0.0, 0.0
        self._over = threading.Event()
        self._all_sent = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Attack:
        self._begin = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        """Wait until each request was sent once, then end the thread and set `interval`."""
        self._all_sent.wait()
        self._over.set()
        self._thread.join()
        self.interval = (time.monotonic() - self._begin) / self.num_sent

    def _run(self) -> None:
        """Send the requests in a cycle, `pace` seconds after the previous answer, until the context ends."""
        while not self._over.is_set():
            for name, body in self._bodies.items():
                if self._over.wait(self._pace):
                    return
                start = time.monotonic()
                status, said = ask(self._url, "/v1/chat/completions", body)
                self.answers.setdefault(name, (status, said, time.monotonic() - start))
                self.num_sent += 1
            self._all_sent.set()


def is_clear(status: int, said: str) -> bool:
    """Return whether an answer reports a client error (4xx) with a message of one line and no traceback.

    said: body of the answer, JSON.
    """
    if not 400 <= status < 500:
        return False
    error = json.loads(said)["error"]
    return bool(error["message"]) and "\n" not in error["message"] and "Traceback" not in said


async def hostile(client: Client, num_tokens: int, num_rounds: int, pace: float) -> tuple[dict[str, Any], bool]:
    """Run the part `hostile`: time the gaps of NUM_STREAMS streams "alone", next to hostile images ("attacked") and
    next to as frequent requests without an image that are refused ("refused"). Return (row, whether every such request
    was refused clearly and no stream failed).

    num_tokens: of each stream. num_rounds: rounds of all three modes. pace: seconds from an answer to the next hostile
    request. Numbers are rounded.
    """

    def streams() -> list[dict[str, Any]]:
        return [question([], num_tokens) for _ in range(NUM_STREAMS)]

    await client.ask_all(streams(), NUM_STREAMS)
    gaps: dict[str, list[list[float]]] = {"alone": [], "attacked": [], "refused": []}
    answers: dict[str, tuple[int, str, float]] = {}
    failed, num_sent, interval = 0, dict.fromkeys(gaps, 0), pace
    with web_server() as web:
        bodies = {"attacked": hostile_bodies(web)}
        bodies["refused"] = {"a number": json.dumps(question([], 4, stream=False, top_p=2.0)).encode()}
        for _ in range(num_rounds):
            for mode, own in gaps.items():
                attack = Attack(client.url, bodies.get(mode, {}), interval if mode == "refused" else pace)
                if mode != "alone":
                    attack.__enter__()
                samples = await client.ask_all(streams(), NUM_STREAMS)
                if mode != "alone":
                    await asyncio.to_thread(attack.__exit__)
                    answers |= attack.answers
                    num_sent[mode] += attack.num_sent
                    interval = attack.interval
                failed += sum(bool(sample.error) for sample in samples)
                own.append([1e3 * gap for sample in samples for gap in sample.gaps])
    unclear = {name: answer[:2] for name, answer in answers.items() if not is_clear(*answer[:2])}
    row: dict[str, Any] = {
        "files": len(bodies["attacked"]),
        "pace_s": pace,
        "sent": num_sent,
        "unclear": len(unclear),
        "failed_streams": failed,
    }
    for share, name in ((0.5, "median_ms"), (0.99, "p99_ms")):
        each = {mode: [percentile(one, share) for one in own] for mode, own in gaps.items()}
        pooled = {mode: percentile([gap for one in own for gap in one], share) for mode, own in gaps.items()}
        row |= {f"{name}_{mode}": round(value, 2) for mode, value in pooled.items()}
        for mode in ("attacked", "refused"):
            row[f"{name}_more_{mode}"] = f"{100 * (pooled[mode] / pooled['alone'] - 1):+.0f} %"
        row[f"{name}_rounds"] = {mode: [round(value, 2) for value in values] for mode, values in each.items()}
    slowest = max(answers, key=lambda name: answers[name][2])
    row |= {"slowest_answer": slowest, "slowest_answer_s": round(answers[slowest][2], 2)}
    row["answers"] = {name: [status, said[:160]] for name, (status, said, _) in sorted(answers.items())}
    return {**row, "unclear_answers": unclear}, not unclear and not failed


async def again(client: Client) -> tuple[dict[str, Any], bool]:
    """Run the part `again`: ask about NUM_AGAIN images twice, one after the other, then measure tokens a second of
    prompts of text, of new images and of images seen before. Return (row, whether the second requests encoded no image
    and found over 0.8 of their tokens in the prefix cache, and nothing was compiled). Raises AssertionError for a
    request that fails. Times and rates are rounded.
    """
    rng = random.Random(2)
    bodies = [question([picture(rng, 640, 480)], 16) for _ in range(NUM_AGAIN)]
    row: dict[str, Any] = {"prompts": len(bodies)}
    seen: list[dict[str, float]] = []
    for name in ("first", "second"):
        before = client.counters()
        samples = [await client.ask(body) for body in bodies]
        assert not any(sample.error for sample in samples), samples
        seen.append({key: value - before[key] for key, value in client.counters().items()})
        row[f"{name}_ttft_ms"] = round(1e3 * percentile([each.first_token_seconds for each in samples], 0.5), 1)
        row |= {f"{name} {key.partition(':')[2]}": value for key, value in seen[-1].items()}
        row["prompt_tokens"] = sum(sample.prompt_tokens for sample in samples)
    texts = [question([{"type": "text", "text": "word " * 55}], 64) for _ in range(NUM_AGAIN)]
    news = [question([picture(rng, 640, 480)], 64) for _ in range(NUM_AGAIN)]
    for name, asked in (("text", texts), ("new pictures", news), ("pictures seen before", news)):
        start = time.perf_counter()
        samples = await client.ask_all(asked, 8)
        seconds = time.perf_counter() - start
        row[f"tokens_s, {name}"] = round(sum(sample.output_tokens for sample in samples) / seconds, 1)
    right = seen[0][COUNTERS[1]] > 0 == seen[1][COUNTERS[1]] and seen[1][COUNTERS[4]] > 0.8 * row["prompt_tokens"]
    return row, right and not any(each[COUNTERS[0]] for each in seen)


async def gaps(client: Client, side: int, num_tokens: int, num_rounds: int) -> tuple[dict[str, Any], bool]:
    """Run the part `gaps`; return (row, whether no request failed). The row has, by round, the longest gap in a stream
    in milliseconds next to a request without an image ("longest_ms_alone"), with one of half the side, and of the
    whole.

    side: pixels of the largest image's side. num_tokens: of each stream. Gaps are rounded.
    """
    rng, longest = random.Random(3), {name: list[float]() for name in ("alone", "half", "whole")}
    failed = 0
    for _ in range(num_rounds):
        for name, pixels in (("alone", 0), ("half", side // 2), ("whole", side)):
            shown = [picture(rng, pixels, pixels)] if pixels else []
            streams = asyncio.create_task(
                client.ask_all([question([], num_tokens) for _ in range(NUM_STREAMS)], NUM_STREAMS)
            )
            # The streams are running by now. Without an image the question has the same text.
            await asyncio.sleep(1.0)
            samples = [await client.ask(question(shown, 1)), *await streams]
            failed += sum(bool(sample.error) for sample in samples)
            longest[name].append(1e3 * max(gap for sample in samples[1:] for gap in sample.gaps))
    row = {f"longest_ms_{name}": [round(each, 1) for each in found] for name, found in longest.items()}
    return {"patches_whole": (side // PATCH) ** 2, "failed": failed, **row}, not failed


async def measure(client: Client, args: Namespace, recorder: Recorder) -> None:
    """Run the parts in `args.only`, in that order, and add a row for each."""
    runs = {
        "sizes": lambda: sizes(client),
        "hostile": lambda: hostile(client, args.tokens, args.rounds, args.pace),
        "again": lambda: again(client),
        "gaps": lambda: gaps(client, args.side, args.tokens, args.rounds),
    }
    for name in args.only:
        row, kept = await runs[name]()
        recorder.add({"name": name, "kept": kept, **row})


def run(args: Namespace, recorder: Recorder) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", args.side)
        with serving({"model": str(model), **ENGINE}) as server:
            asyncio.run(measure(Client(server), args, recorder))
