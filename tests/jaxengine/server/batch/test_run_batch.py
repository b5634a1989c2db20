"""`jaxengine run-batch`: lines are checked before anything starts, results are kept one by one, and a batch goes on."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxengine.api import async_llm
from jaxengine.api.engine_client import EngineDeadError
from jaxengine.commands.cli import main
from jaxengine.config.base.errors import ConfigError
from jaxengine.server.adapters.lora_routes import ROUTE_KEY, LoraRoutes
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.batch.lines import BatchLine, read_lines
from jaxengine.server.batch.results import Results
from jaxengine.server.batch.run import call, run_lines
from jaxengine.server.http.app import TrafficMiddleware, TrafficState
from tests.jaxengine.server.batch.killed_batch import killed_after
from tests.tables import each_row

CHAT = "/v1/chat/completions"
INPUT = __file__  # any other file than those of results


def request(custom_id: Any = "a", url: str = CHAT, method: str = "POST", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def written(folder: Path, *lines: str) -> str:
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "in.jsonl")


@each_row(
    ("second", "problem"),
    [
        ("{", "line 2: it is not valid JSON: it ends too early"),
        ("[" * 100_000, "line 2: it is nested deeper than 64"),
        (request("b", prompt=json.loads("[" * 70 + "]" * 70)), "line 2: it is nested deeper than 64"),
        (request("\ud800"), "line 2: it is not valid Unicode text"),
        (request("b", prompt="\ud800"), "line 2: it is not valid Unicode text"),
        (request("b", temperature=float("nan")), "line 2: it is not valid JSON: NaN is not a JSON number"),
        ("[]", "line 2: it is not a JSON object"),
        (request(""), "line 2: custom_id must be a string of 1 to 512 characters, got ''"),
        (request(7), "line 2: custom_id must be a string of 1 to 512 characters, got 7"),
        (request("a"), "line 2: custom_id 'a' is that of line 1 too"),
        (request("b", method="GET"), "line 2: method must be 'POST', got 'GET'"),
        (request("b", None), "line 2: url must be one of /v1/chat/completions"),
        ('{"custom_id": "b", "method": "POST", "url": "/v1/completions"}', "line 2: body must be a JSON object"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path, second, problem):
    with pytest.raises(ConfigError) as error:
        read_lines(written(tmp_path, request("a"), second))
    assert problem in str(error.value)


def test_a_line_that_is_not_answered_has_an_error_as_its_result(tmp_path):
    """As in vLLM: a url that no batch has, or a stream, spoils its own line alone."""
    app, url = FakeApp(), "/v1/completions"
    bad = request("b", "/v1/files", prompt="b"), request("c", url, prompt="c", stream=True)
    path = written(tmp_path, request("a", url, prompt="a"), *bad, request("d", url, prompt="d"))
    lines, _ = read_lines(path)
    with Results(str(tmp_path / "out"), "batch", INPUT) as results:
        run_some(app, lines, results)
        results.finish(lines)
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [row["response"]["status_code"] for row in rows] == [200, 400, 400, 200] and sorted(app.seen) == ["a", "d"]
    for row, problem in zip(rows[1:3], ("url must be one of /v1/chat", "body.stream must be false"), strict=True):
        assert row["error"]["message"].startswith(problem)
        with pytest.raises(ConfigError, match=problem):  # /v1/batches checks a file before any of it runs
            read_lines(written(tmp_path, *bad[rows.index(row) - 1 :]), url)


def test_a_file_without_requests_has_no_results(tmp_path):
    """No engine is started for one, as where a pipeline's share is empty."""
    out = tmp_path / "out"
    for lines in ((), ("", " ")):
        assert main(["run-batch", "gone", "-i", written(tmp_path, *lines), "-o", str(out)]) == 0
        assert out.read_bytes() == b""
        out.unlink()
    with pytest.raises(ConfigError, match="input_file is .* a file on this machine"):
        read_lines(str(tmp_path / "none"))


class FakeApp:
    """Answers with the request's own prompt; a prompt "wrong" is refused."""

    def __init__(self):
        self.seen: list[str] = []
        self.most = self.now = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        self.seen.append(body["prompt"])
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        failed = body["prompt"] == "wrong"
        answer = {"error": {"message": "no", "code": 400}} if failed else {"said": body["prompt"], "usage": {}}
        await send({"type": "http.response.start", "status": 400 if failed else 200, "headers": []})
        text = json.dumps(answer).encode()
        await send({"type": "http.response.body", "body": text[:3], "more_body": True})
        await send({"type": "http.response.body", "body": text[3:]})


PROMPTS = ["one more", "wrong", "one", "two more", "two", "one and one"]


def batch(tmp_path: Path) -> Any:
    ids = enumerate(PROMPTS)
    return read_lines(written(tmp_path, *(request(f"id {at}", "/v1/completions", prompt=each) for at, each in ids)))[0]


async def healthy() -> None: ...


def run_some(app: FakeApp, lines: Any, results: Results, limit: int = 99) -> None:
    """Answers lines until `limit` results are there, and then fails as a killed process would end."""

    def done(*_: Any) -> None:
        if len(results.known) == limit:
            raise OSError("the disk is full")

    left = [line for line in lines if line.custom_id not in results.known]
    asyncio.run(run_lines(partial(call, app), left, results, 2, healthy, done))


def test_a_line_that_runs_again_gets_the_same_adapter(tmp_path):
    """lora_routes choose by what the request is called, and a line is called after its custom_id."""
    routes = LoraRoutes.of(ServerConfig(lora_routes='{"ab": [["a", 1], ["b", 1]]}'))
    chosen = list[str]()

    async def app(scope, receive, send) -> None:
        chosen.append(routes.pick("ab", ROUTE_KEY.get()))
        await send({"type": "http.response.body", "body": b"{}"})

    lines = [BatchLine(number, f"é{number}", "/v1/completions", b"{}") for number in range(20)]
    for line in (*lines, *lines):
        asyncio.run(call(TrafficMiddleware(app, TrafficState(), ""), line))
    assert chosen[:20] == chosen[20:] and set(chosen) == {"a", "b"}


def test_results_are_in_order_and_say_what_failed(tmp_path):
    app, lines, output = FakeApp(), batch(tmp_path), tmp_path / "out.jsonl"
    with Results(str(output), "a batch", INPUT) as results:
        run_some(app, lines, results)
        assert not output.exists()
        results.finish(lines)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"id {at}" for at in range(6)]
    assert len({row["id"] for row in rows}) == len({row["response"]["request_id"] for row in rows}) == 6
    for row, prompt in zip(rows, PROMPTS, strict=True):
        failed = prompt == "wrong"
        assert row["response"]["status_code"] == (400 if failed else 200)
        assert row["error"] == ({"message": "no", "code": 400} if failed else None)
        assert failed or row["response"]["body"]["said"] == prompt
    # Those that begin alike follow each other.
    assert app.seen == ["one and one", "one more", "one", "two more", "two", "wrong"] and app.most == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("torn", [b"", b'{"custom_id": "id 0", "resp', b"garbage\n", b"[]\n", b'{"custom_id": 3}\n'])
def test_a_batch_that_was_ended_goes_on(tmp_path, torn):
    lines, output = batch(tmp_path), str(tmp_path / "out.jsonl")
    first, second = FakeApp(), FakeApp()
    # Killed while it wrote the first result.
    Path(f"{output}.partial").write_bytes(json.dumps({"batch": "a batch"}).encode() + b"\n" + torn)
    with Results(output, "a batch", INPUT) as results, pytest.raises(OSError, match="disk is full"):
        run_some(first, lines, results, limit=3)
    partial = Path(f"{output}.partial")
    partial.write_bytes(partial.read_bytes() + torn)
    with pytest.raises(ConfigError, match="results of another batch; name another output file"):
        Results(output, "another batch", INPUT)
    with Results(output, "a batch", INPUT) as results:
        num_known = len(results.known)
        assert num_known >= 3
        run_some(second, lines, results)
        results.finish(lines)
    assert len(second.seen) == 6 - num_known
    rows = [json.loads(line) for line in Path(output).read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"id {at}" for at in range(6)]


@pytest.mark.thorough("the test above ends a batch of six lines at each kind of place")
def test_five_thousand_lines_of_a_batch_that_is_killed_again_and_again(tmp_path):
    """Each custom_id is there once, in order, with its own answer."""
    prompts = [f"{number % 70} {number}" for number in range(5000)]
    written(tmp_path, *(request(f"id {at}", "/v1/completions", prompt=each) for at, each in enumerate(prompts)))
    num_killed = 0
    while killed_after(tmp_path, 150_000 + 7 * num_killed):
        num_killed += 1
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"id {at}" for at in range(5000)] and num_killed >= 4
    assert [row["response"]["body"]["said"] for row in rows] == prompts
    assert len({row["id"] for row in rows}) == 5000


def test_what_is_no_file_of_results_is_not_replaced(tmp_path):
    """Links stay: the file that they name is written."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (source := tmp_path / "in").write_text("requests")  # without a line break, as a header that was being written
    (tmp_path / "x.partial").symlink_to(source)
    (tmp_path / "y.whole").symlink_to(source)
    problems = dict.fromkeys(("folder", "pipe"), "is a folder, a device or a pipe")
    problems |= {"in": "the requests are in", "x": "the requests are in", "y": "the requests are in"}
    for name, problem in problems.items():
        with pytest.raises(ConfigError, match=problem):
            Results(str(tmp_path / name), "a batch", str(source))
    with pytest.raises(ConfigError, match="output_file is ''; allowed: the name of a file"):
        Results("", "a batch", str(source))
    (tmp_path / "other.partial").write_text("notes")
    with pytest.raises(ConfigError, match="has results of another batch"):
        Results(str(tmp_path / "other"), "a batch", str(source))
    assert source.read_text() == "requests" and (tmp_path / "other.partial").read_text() == "notes"
    (tmp_path / "link").symlink_to("target")
    with Results(str(tmp_path / "link"), "a batch", str(source)) as results:
        with pytest.raises(ConfigError, match="another process writes .*target.partial; wait for its end"):
            Results(str(tmp_path / "target"), "a batch", str(source))
        results.finish([])
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b""


def test_a_file_that_another_process_has_just_removed_is_not_written(tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr(fcntl, "flock", lambda *_: Path(f"{output}.partial").unlink())
    with pytest.raises(ConfigError, match="another process writes"):
        Results(str(output), "a batch", INPUT)


def test_a_batch_without_results_leaves_nothing(tmp_path):
    """Nor does one that was killed before its first result stand in the way of one with another model."""
    output = str(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError), Results(output, "a batch", INPUT):
        assert Path(f"{output}.partial").read_bytes() == b""
        raise ConfigError("model", "no", "a folder")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_what_is_complete(tmp_path, monkeypatch):
    lines, output = batch(tmp_path), str(tmp_path / "out.jsonl")
    with Results(output, "a batch", INPUT) as results:
        run_some(FakeApp(), lines, results)
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
        with pytest.raises(OSError, match="no space"):
            results.finish(lines)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl.partial"]
    monkeypatch.undo()
    with Results(output, "a batch", INPUT) as results:
        assert len(results.known) == 6
        results.finish(lines)


def test_an_empty_output_is_written_in_place(tmp_path, monkeypatch):
    """A program that made it reads the results by the file that it has open, as with vLLM."""
    lines, output = batch(tmp_path), tmp_path / "out.jsonl"
    output.touch()
    with open(output) as reader, Results(str(output), "a batch", INPUT) as results:
        run_some(FakeApp(), lines, results)
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
        with pytest.raises(OSError, match="no space"):
            results.finish(lines)
        assert output.read_bytes() == b"" and Path(f"{output}.partial").exists()
        monkeypatch.undo()
        results.finish(lines)
        assert len(reader.readlines()) == 6


def test_an_engine_that_fails_is_no_result(tmp_path):
    async def dead() -> None:
        raise EngineDeadError("the engine has failed")

    lines = batch(tmp_path)
    with Results(str(tmp_path / "out.jsonl"), "a batch", INPUT) as results, pytest.raises(EngineDeadError):
        asyncio.run(run_lines(partial(call, FakeApp()), lines, results, 2, dead, lambda *_: None))
    assert not results.known


def test_the_command_answers_as_a_server_does(chat_engine, monkeypatch, tmp_path, capsys):
    """With the engine of other tests in place of one of its own."""
    monkeypatch.setattr(async_llm, "AsyncLLM", lambda **options: chat_engine)
    monkeypatch.setattr(chat_engine, "shutdown", lambda: None, raising=False)
    message = {"role": "user", "content": "hi"}
    path = written(
        tmp_path,
        request("chat", messages=[message], max_tokens=3, temperature=0),
        request("none", messages=[]),
        request("text", "/v1/completions", prompt="hi", max_tokens=2, temperature=0, stop="zzz"),
        request("embed", "/v1/embeddings", input="hi"),
    )
    output = str(tmp_path / "out.jsonl")
    assert main(["run-batch", "model", "-i", path, "-o", output]) == 0
    rows = {row["custom_id"]: row["response"] for row in map(json.loads, Path(output).read_text().splitlines())}
    assert list(rows) == ["chat", "none", "text", "embed"]
    assert rows["chat"]["status_code"] == 200 and rows["chat"]["body"]["usage"]["completion_tokens"] == 3
    assert rows["none"]["status_code"] == 400 and "messages" in rows["none"]["body"]["error"]["message"]
    assert rows["text"]["body"]["object"] == "text_completion"
    assert rows["embed"]["status_code"] in (400, 404)
    assert "4 results in" in capsys.readouterr().err
