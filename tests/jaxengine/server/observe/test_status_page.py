"""The page at /: what it is told, and what a real browser makes of it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import shutil
import subprocess
import threading
import time
from html.parser import HTMLParser

import httpx
import jax
import numpy as np
import pytest
import uvicorn
from starlette.responses import HTMLResponse

from jaxengine.commands.cli import main
from jaxengine.engine.status import MAX_CELLS, MAX_REQUESTS, page_map
from jaxengine.runner.start.memory_bar import LEFT, parts_of, text_bar
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.request import FinishReason, Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.scheduler import Scheduler
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.version import __version__
from tests.jaxengine.server.asgi_client import http_client, idle

CHROMIUM = shutil.which("chromium")
KEY = "page-key"
# Where the page that sets the key leads to: what stands behind its "?".
TARGET = "'/' + decodeURIComponent(location.search.slice(1))"
MODEL = '<img src=x onerror="document.title=1"> & "model"'


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name=(MODEL,), api_key=(KEY,)))


async def test_the_page_is_open_and_what_it_reads_is_not(app):
    async with http_client(app) as client:
        page = await client.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        for path in ("/status.json", "/trace", "/metrics"):
            assert (await client.get(path)).status_code == 401, path
    async with http_client(app, KEY) as client:
        status = (await client.get("/status.json")).json()
    assert status["model"] == MODEL


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_the_page_has_nothing_from_elsewhere(app, path):
    async with http_client(app) as client:
        page = await client.get(path)
    text, policy = page.text, page.headers["content-security-policy"]
    assert "//" not in re.sub(r"http://www\.w3\.org/2000/svg|  // .*", "", text), "an address"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bon\w+=|\sstyle=", text)
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';") and "connect-src 'self'" in policy and "unsafe" not in policy


async def test_what_the_page_is_told(app, chat_engine):
    await idle(chat_engine)
    async with http_client(app, KEY) as client:
        long = {"prompt": [[31 + i] * 40 for i in range(3)], "max_tokens": 60, "ignore_eos": True}
        request = asyncio.create_task(client.post("/v1/completions", json=long))
        status = {}
        while not status.get("requests") or not all(each["num_output"] for each in status["requests"]):
            status = (await client.get("/status.json")).json()
        assert (await request).status_code == 200
        await idle(chat_engine)
        after = (await client.get("/status.json")).json()
    assert status["num_running"] == len(status["requests"]) and 0 < status["kv_usage"] <= 1
    for each in status["requests"]:
        assert each["num_prompt"] == 40 and each["max_tokens"] == 60 and each["age"] > 0
        # The token sampled last has no keys yet, and one more step may be under way.
        assert 0 <= each["num_computed"] - each["num_output"] - 39 <= 2
    pages = status["pages"]
    assert len(pages["cells"]) == pages["num_pages"] == 160 == sum(pages["counts"]) and pages["pages_per_cell"] == 1
    used = dict(zip(pages["states"], pages["counts"], strict=True))
    assert used["active"] + used["shared"] == round(160 * status["kv_usage"]) > 0
    assert pages["cells"].count("2") == used["active"]
    assert after["requests"] == [] and after["kv_usage"] == 0 and "2" not in after["pages"]["cells"]
    assert after["generation_tokens"] - status["generation_tokens"] >= 0 and after["time"] > status["time"]
    assert after["time_to_first_token"]["p50"] <= after["time_to_first_token"]["p99"]
    assert 0 < after["inter_token_latency"]["p50"] <= after["inter_token_latency"]["p99"] < after["time"]
    assert after["compilations_since_ready"] == 0 and after["steps"]["count"] > status["steps"]["count"] - 1
    plan = chat_engine.core.runner.plan
    assert after["memory"]["weights"] == plan.weights and after["memory"]["kv_pages"] == plan.kv_bytes
    drawn = dict(re.findall(r'data-bytes="(-?\d+)"><title>([^:]+):', after["memory"]["svg"]))
    sizes = {purpose: int(size) for size, purpose in drawn.items()}
    stage = chat_engine.core.runner.stages[0]
    assert sizes["weights"] == sum(leaf.nbytes for leaf in stage.params)
    assert sizes["kv_pages"] == sum(leaf.nbytes for leaf in jax.tree.leaves(stage.pages))
    assert sizes.pop(LEFT) == plan.budget - sum(sizes.values())
    bar, meant = text_bar(parts_of(plan), plan.total).splitlines()
    assert len(bar.strip(" []")) <= 72 + len(sizes) and all(purpose in meant for purpose in sizes)
    assert after["memory"]["in_use"] > plan.weights and after["memory"]["counts"] == "process"
    assert sum(each["steps"] for each in after["buckets"]) == after["steps"]["count"]


@pytest.mark.parametrize(("num_pages", "num_ranks"), [(100, 1), (5000, 1), (1999, 3)])
def test_the_map_is_bounded_and_counts_every_page(num_pages, num_ranks):
    scheduler = Scheduler(SchedulerConfig(num_pages, 4, 8, 64, 4000, num_ranks=num_ranks))
    for number in range(3):
        tokens = np.full(40, 7, np.int32)
        scheduler.add_request(Request(str(number), tokens, TokenParams(), 4))
    step = scheduler.schedule()
    told = page_map(scheduler)
    whole, per_cell = num_pages * num_ranks, told["pages_per_cell"]
    assert sum(told["counts"]) == told["num_pages"] == whole and len(told["cells"]) == -(-whole // per_cell)
    assert len(told["cells"]) <= MAX_CELLS and per_cell == -(-whole // MAX_CELLS)
    states = np.concatenate([rank.pool.page_states() for rank in scheduler.ranks])
    assert np.count_nonzero(states >= 2) == whole - scheduler.num_free_pages > 0
    # One prefix, and pages shared by its three requests where they run on one rank.
    assert bool(told["counts"][3]) == any(len(batch.admitted) > 1 for batch in step.batches)
    for cell, digit in enumerate(told["cells"]):
        counts = np.bincount(states[cell * per_cell : (cell + 1) * per_cell], minlength=4)
        assert counts[int(digit)] == counts.max()
    for number, request in enumerate(list(scheduler.requests)):
        scheduler.finish(request, FinishReason.ABORT)
        assert len(scheduler.requests) == 2 - number
    assert page_map(scheduler)["counts"][2:] == [0, 0]
    assert MAX_REQUESTS < 1000


class Server:
    """The application on a socket, with requests under way, and a page that hands a browser the key."""

    def __init__(self, app):
        async def seeded(scope, receive, send):
            if scope["type"] == "http" and scope["path"] == "/seed":
                seed = f"<script>sessionStorage.setItem('jaxengine-key', {KEY!r}); location.replace({TARGET})</script>"
                await HTMLResponse(seed)(scope, receive, send)
            else:
                await app(scope, receive, send)

        self._server = uvicorn.Server(uvicorn.Config(seeded, port=0, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run)
        self._busy = threading.Thread(target=self._load)
        self._ending = threading.Event()

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self._busy.start()
        return self

    def __exit__(self, *_):
        self._ending.set()
        self._busy.join()
        self._server.should_exit = True
        self._thread.join()

    def _load(self):
        with httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as client:
            while not self._ending.is_set():
                fields = {"prompt": [[31 + i] * 20 for i in range(6)], "max_tokens": 80, "ignore_eos": True}
                client.post("/v1/completions", json=fields).raise_for_status()


@pytest.fixture(scope="module")
def address(app):
    with Server(app) as running:
        yield running.url


class Elements(HTMLParser):
    """(tag, attributes, text of its own) of every element, in order."""

    def __init__(self, document: str):
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(document)

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs), []))
        if tag not in ("meta", "link", "input", "img"):
            self._open.append(len(self.all) - 1)

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        if self._open:
            self.all[self._open[-1]][2].append(data)

    def by_id(self, name: str) -> tuple[str, dict[str, str | None], str]:
        ((tag, attributes, text),) = [each for each in self.all if each[1].get("id") == name]
        return tag, attributes, "".join(text)


def browse(url: str, folder) -> Elements:
    """What a browser shows after some seconds of its own time."""
    assert CHROMIUM is not None
    options = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
        *("--enable-logging=stderr", f"--user-data-dir={folder}", "--virtual-time-budget=5000", "--dump-dom"),
    )
    done = subprocess.run([CHROMIUM, *options, url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "401" not in line]
    assert not console, console
    return Elements(done.stdout)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")
def test_a_browser_shows_the_page(address, tmp_path):
    page = browse(f"{address}/seed", tmp_path)
    assert page.by_id("state")[1]["class"] == "live"
    # Markup in a value is text.
    (plan,) = [attributes for tag, attributes, _ in page.all if tag == "img"]
    assert page.by_id("model")[2] == MODEL and plan["id"] == "plan"
    assert plan["src"].startswith("data:image/svg+xml,%3Csvg") and "weights: " in plan["alt"]
    texts = ["".join(text) for _, _, text in page.all]
    tiles = {title: texts[index + 1] for index, title in enumerate(texts) if page.all[index][0] == "h2"}
    assert re.fullmatch(r"[\d,]+ tok/s", tiles["Output"]) and tiles["Output"] != "0 tok/s"
    assert re.fullmatch(r"[\d.]+ (µs|ms|s)", tiles["TTFT p50"]) and re.fullmatch(r"[\d.]+ (µs|ms|s)", tiles["ITL p50"])
    assert tiles["Compilations"] == "0" and tiles["Running"].isdigit() and tiles["KV in use"].endswith(" %")
    labels = {each[1]["aria-label"] for each in page.all if each[1].get("role") == "img"}
    assert any(label.startswith("160 pages: free ") for label in labels)
    assert any(label.startswith("in use ") for label in labels)
    assert any(re.fullmatch(r"[\d,]+ tokens, [\d,]+ padding", label) for label in labels)
    assert any(label.startswith("tokens a second over ") for label in labels)
    assert {"decode S=8", "mixed T=64 S=8", "device idle"} <= set(texts)
    assert any(text.startswith("cmpl-") for text in texts) or "none" in texts
    assert "hidden" in page.by_id("ask")[1] and "hidden" not in page.by_id("page")[1]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")
def test_a_browser_without_the_key_is_asked_for_it(address, tmp_path):
    page = browse(address, tmp_path)
    assert "hidden" not in page.by_id("ask")[1] and "hidden" in page.by_id("page")[1]
    assert page.by_id("state")[2] == "a key is needed" and page.by_id("key")[1]["type"] == "password"
    assert page.by_id("model")[2] == ""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")
def test_a_browser_shows_the_routes(address, tmp_path):
    page = browse(f"{address}/seed?docs%23post/v1/completions", tmp_path)
    texts = ["".join(text) for _, _, text in page.all]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/metrics"):
        assert path in texts, path
    assert "hidden" in page.by_id("ask")[1] and page.by_id("version")[2] == __version__
    # What belongs to a route is made when it is opened, as a link to it does.
    assert "open" in page.by_id("post/v1/completions")[1] and "open" not in page.by_id("get/v1/models")[1]
    assert {"max_tokens", "Body: CompletionRequest", "Send"} <= set(texts) and texts.count("Send") == 1


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on PATH")
def test_the_routes_are_shown_to_who_has_the_key(address, tmp_path):
    page = browse(f"{address}/docs", tmp_path)
    assert page.by_id("state")[2] == "a key is needed" and "hidden" not in page.by_id("ask")[1]
    assert not any(tag == "details" for tag, _, _ in page.all)


def test_the_trace_command_has_the_key(address, tmp_path, capsys):
    file, key = tmp_path / "trace.json", tmp_path / "key"
    assert main(["trace", str(file), "--url", address]) == 1
    assert "answered 401: a valid key is needed" in capsys.readouterr().err
    key.write_text(KEY + "\n")
    assert main(["trace", str(file), "--url", address, "--api-key-file", str(key)]) == 0
    assert json.loads(file.read_text())["otherData"]["model"] == MODEL
