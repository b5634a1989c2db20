"""`bench serve` against a server that answers by a script: what it sends, when, and what it makes of the answers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import ssl
import threading
import xml.etree.ElementTree

import numpy as np
import pytest

from jaxengine.bench.serve import add_arguments
from jaxengine.bench.serve_address import settle
from jaxengine.bench.serve_client import BadUrlError, Connections, Sample, Server, stream
from jaxengine.bench.serve_load import Load, LoadResult, arrivals, plan
from jaxengine.bench.serve_report import meets, picture, series, summary
from jaxengine.bench.serve_vllm import ready
from jaxengine.commands.cli import main


class ScriptedServer:
    """Speaks HTTP/1.1 on a thread of its own. `behave(body, number)` says how the number-th completion goes."""

    def __init__(self, behave):
        self.behave, self.bodies, self.headers, self.connections = behave, [], [], 0
        self.open = self.most_open = 0

    async def _serve(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if head[0].startswith("GET"):
                    listed = {"data": [{"id": "scripted", "max_model_len": 512}]}
                    await self._answer(writer, 200, json.dumps(listed).encode())
                    continue
                self.bodies.append(json.loads(body))
                self.headers.append(headers)
                self.open += 1
                self.most_open = max(self.most_open, self.open)
                try:
                    await self.behave(self, writer, self.bodies[-1], len(self.bodies) - 1)
                finally:
                    self.open -= 1
        writer.close()

    async def _answer(self, writer, status, body):
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    async def refuse(self, writer, status, text="no"):
        await self._answer(writer, status, json.dumps({"error": {"message": text}}).encode())

    async def events(self, writer, events, *, gap=0.0, first=0.0, end=True):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, event in enumerate(events):
            await asyncio.sleep(first if number == 0 else gap)
            data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        if end:
            writer.write(b"0\r\n\r\n")
        else:
            writer.transport.abort()

    def __enter__(self):
        ready, self._loop = threading.Event(), asyncio.new_event_loop()

        async def start():
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
            ready.set()

        def run():
            self._loop.create_task(start())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert ready.wait(60)
        return self

    def __exit__(self, *_):
        async def stop():
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


def completion(body, *, usage=True):
    """The events of a sound answer: a token an event, the reason, usage, the end."""
    chat = "messages" in body
    pieces = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}] if chat else []
    for number in range(body["max_tokens"]):
        text = {"delta": {"content": f"w{number}"}} if chat else {"text": f"w{number}"}
        pieces.append({"choices": [{"index": 0, "finish_reason": None, **text}]})
    last = {"delta": {}} if chat else {"text": ""}
    pieces.append({"choices": [{"index": 0, "finish_reason": "length", **last}]})
    if usage:
        prompt = body.get("prompt") or body["messages"][0]["content"]
        count = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        pieces.append({"choices": [], "usage": {"prompt_tokens": count, "completion_tokens": body["max_tokens"]}})
    return [*pieces, b"[DONE]"]


async def answer(server, writer, body, number):
    await server.events(writer, completion(body))


def bench(server, tmp_path, *arguments):
    """Runs the command; (exit status, its JSON)."""
    file = tmp_path / "result.json"
    status = main(["bench", "serve", "--url", server.url, "--json", str(file), *arguments])
    return status, json.loads(file.read_text()) if file.exists() else None


def test_figures_are_those_of_the_server(tmp_path, capsys):
    async def paced(server, writer, body, number):
        await server.events(writer, completion(body), first=0.05, gap=0.01)

    with ScriptedServer(paced) as server:
        status, found = bench(server, tmp_path, "--num-prompts", "8", "--input-len", "20", "--output-len", "5")
    result = found["results"][0]
    assert status == 0 and found["model"] == "scripted" and result["request_rate"] == "inf"
    assert (result["successful_requests"], result["failed_requests"]) == (8, 0)
    assert (result["total_input_tokens"], result["total_generated_tokens"]) == (160, 40)
    latency = result["latency_ms"]
    # The server waits at least so long for the first piece, and altogether. A client on a busy machine reads pieces
    # late, and the pauses between them are shorter then.
    assert latency["ttft"]["median"] >= 50 and latency["tpot"]["median"] > 0 and latency["itl"]["median"] > 0
    assert latency["e2el"]["median"] >= 50 + 7 * 10
    assert latency["ttft"]["median"] < latency["e2el"]["median"]
    # The first request of all asked whether token ids are taken.
    assert len(server.bodies) == 9 and all(len(body["prompt"]) == 20 for body in server.bodies)
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 for body in server.bodies)
    assert result["output_throughput"] == pytest.approx(40 / result["benchmark_duration_s"], rel=0.02)
    shown = capsys.readouterr().out
    assert "TTFT" in shown and "p99" in shown and "output_throughput" in shown


def test_chat_and_a_server_without_token_ids_get_text(tmp_path):
    async def only_text(server, writer, body, number):
        if isinstance(body.get("prompt"), list):
            await server.refuse(writer, 400)
        else:
            await answer(server, writer, body, number)

    with ScriptedServer(only_text) as server:
        _, found = bench(server, tmp_path, "--num-prompts", "3", "--input-len", "9", "--output-len", "4")
        assert found["load"]["text"] and found["results"][0]["total_input_tokens"] == 27
        options = ["--route", "chat/completions", "--num-prompts", "2", "--input-len", "9", "--output-len", "4"]
        _, found = bench(server, tmp_path, *options)
        result = found["results"][0]
        assert server.bodies[-1]["messages"][0]["role"] == "user"
        assert result["total_generated_tokens"] == 8 and result["successful_requests"] == 2
        file = tmp_path / "vllm.json"
        address = ["--host", "127.0.0.1", "--port", server.url.rpartition(":")[2].removesuffix("/v1")]
        lengths = ["--random-input-len", "9", "--random-output-len", "4", "--num-prompts", "2"]
        more = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--dataset-name", "random"]
        assert main(["bench", "serve", *address, *lengths, *more, "--json", str(file)]) == 0
        again = json.loads(file.read_text())
    assert {**again["load"], "seed": 0} == {**found["load"], "seed": 0} and again["url"] == found["url"]


def test_flags_of_vllms_command():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for words, expected in (
        ("", {"url": "http://127.0.0.1:8000/v1", "route": "completions"}),
        ("--url http://a/v2 --backend openai-chat", {"url": "http://a/v2", "route": "chat/completions"}),
        ("--url http://a:1/", {"url": "http://a:1/v1"}),
        ("--url http://a:1/b", {"url": "http://a:1/b"}),
        ("--base-url https://a:1/ --insecure", {"url": "https://a:1/v1", "insecure": True}),
        ("--port 9 --endpoint /x/v1/chat/completions", {"url": "http://127.0.0.1:9/x/v1", "route": "chat/completions"}),
        ("--host ::1", {"url": "http://[::1]:8000/v1"}),
        ("--random-range-ratio 0.25", {"lengths": "uniform", "range_ratio": 0.25}),
        ("--random-range-ratio 0 --random-prefix-len 5", {"lengths": "fixed", "num_prefixes": 1, "prefix_len": 5}),
    ):
        args = parser.parse_args(words.split())
        settle(args)
        assert expected.items() <= vars(args).items(), words
    for words, said in (
        ("--url http://a/v1 --port 9", "--url and --port are both given"),
        ("--base-url http://a --host b", "--base-url and --host or --port are both given"),
        ("--endpoint /v1/embeddings", "--endpoint is '/v1/embeddings'; allowed: a path that ends with /completions"),
        ("--route completions --backend openai-chat", "--route and --backend name different routes"),
        ("--random-prefix-len -1", "--random-prefix-len is -1; allowed: whole numbers from 0"),
        ("--random-prefix-len 4 --prefix-len 9", "--random-prefix-len and --prefix-len are both given"),
        ("--random-range-ratio 0 --lengths lognormal", "--random-range-ratio and --lengths are both given"),
    ):
        with pytest.raises(ValueError, match=said):
            settle(parser.parse_args(words.split()))
    context = Server.at("https://a/v1", insecure=True).tls
    assert context is not None and context.verify_mode is ssl.CERT_NONE and not context.check_hostname


def test_results_and_requests_by_the_flags_of_vllms_command(tmp_path, capsys):
    with ScriptedServer(answer) as server:
        fields = "--top-p 0.9 --top-k 5 --logprobs 2 --served-model-name served --model org/name --tokenizer org/name"
        headers = "--header x-team=a x-run=7=8 --num-warmups 2 --ready-check-timeout-sec 5 --disable-tqdm"
        result = "--save-result --result-dir out --label try --metadata tp=2 --metric-percentiles 25,99.5"
        more = "--percentile-metrics ttft,e2el --num-prompts 4 --input-len 3 --output-len 2 --request-rate 1000"
        words = f"{fields} {headers} {result} {more}".replace(
            "--result-dir out", f"--result-dir {tmp_path}/out"
        ).split()
        status, found = bench(server, tmp_path, *words)
        chat = (
            "--backend openai-chat --num-prompts 1 --output-len 2 --logprobs 2 --result-filename b/a.json --save-result"
        )
        kwargs = '--chat-template-kwargs={"enable_thinking":false}'
        assert bench(server, tmp_path, *chat.split(), "--result-dir", str(tmp_path), kwargs)[0] == 0
    assert status == 0 and len(server.bodies) == 1 + 2 + 4 + 1 + 1
    sent = {"model": "served", "top_p": 0.9, "top_k": 5, "logprobs": 2}
    assert all(sent.items() <= body.items() for body in server.bodies[:7])
    assert all((each["x-team"], each["x-run"]) == ("a", "7=8") for each in server.headers[:7])
    last = server.bodies[-1]
    assert (last["logprobs"], last["top_logprobs"], last["chat_template_kwargs"]) == (
        True,
        2,
        {"enable_thinking": False},
    )
    assert "p99.5" in found["results"][0]["latency_ms"]["ttft"] and "x-team" not in server.headers[-1]
    shown = capsys.readouterr().out
    assert "E2EL" in shown and "p99.5" in shown and "ITL" not in shown.partition("\n\n\n")[0].split("request_rate")[1]
    (path,) = (tmp_path / "out").glob("try-1000.0qps-served-*.json")
    saved = json.loads(path.read_text())
    assert (saved["completed"], saved["total_output_tokens"], saved["tp"], saved["label"]) == (4, 8, "2", "try")
    figures = {
        f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p25", "p99.5") for metric in ("ttft", "e2el")
    }
    assert figures == {name for name in saved if name.endswith("_ms")} and saved["mean_e2el_ms"] > 0
    assert "p99_tpot_ms" in json.loads((tmp_path / "b" / "a.json").read_text())
    headers = ("--header a", "--header =b", "--header x=ü", "--header x=a\nb", "--header Content-Length=0")
    for wrong in ("--metric-percentiles 101", "--percentile-metrics ttft,x", "--num-warmups -1", *headers):
        with pytest.raises(SystemExit):
            main(["bench", "serve", *wrong.split(" ")])
    assert main(["bench", "serve", "--save-result", "--sweep", "1", "2"]) != 0


async def test_a_header_replaces_the_clients_own_and_the_wait_for_a_server_ends():
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    own = Server.at("http://127.0.0.1:1/v1", "key")
    given = await ready(own, 0, [("authorization", "mine"), ("x-a", "1")])
    assert [value for name, value in given.headers if name.lower() == "authorization"] == ["mine"]
    assert ("x-a", "1") in given.headers and ("Host", "127.0.0.1:1") in given.headers
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(30):
            await ready(Server.at(f"http://127.0.0.1:{port}/v1"), 0.05, [])


def test_errors_are_told_apart(tmp_path, capsys):
    async def fail(server, writer, body, number):
        good = completion(body)
        match number:
            case 1:
                await server.refuse(writer, 429, "queue is full")
            case 2:
                await server.events(writer, good[:2], end=False)
            case 3:
                await server.events(writer, [*good[:2], {"error": {"message": "engine"}}, b"[DONE]"])
            case 4:
                await server.events(writer, [b"{not json"])
            case 5:
                await server.events(writer, good[:-1])
            case 6:
                await server.events(writer, [b"[DONE]"])
            case 7:
                await asyncio.sleep(30)
            case 8:
                await server.events(writer, [b"[1]"])
            case 9:
                await server.events(writer, [b"[" * 200_000])
            case _:
                await server.events(writer, good)

    with ScriptedServer(fail) as server:
        options = ["--num-prompts", "10", "--output-len", "3", "--max-concurrency", "1", "--timeout", "0.5"]
        status, found = bench(server, tmp_path, *options)
    result = found["results"][0]
    kinds = ("http 429", "stream error", "cut", "empty", "timeout")
    assert {kind: result["errors"].get(kind) for kind in kinds} == dict.fromkeys(kinds, 1)
    assert result["errors"]["protocol"] == 4  # half a stream, no JSON, JSON that is no event, JSON nested too deeply
    assert (status, result["successful_requests"], result["failed_requests"]) == (0, 1, 9)
    assert "queue is full" in result["first_error"] and "http 429: 1" in capsys.readouterr().out


def test_nobody_there_and_nothing_that_works_is_one_clear_line(tmp_path, capsys):
    async def broken(server, writer, body, number):
        await server.refuse(writer, 503, "engine is dead")

    with ScriptedServer(broken) as server:
        assert bench(server, tmp_path) == (2, None)
        url = server.url
    assert "http 503" in (line := capsys.readouterr().err) and "engine is dead" in line and line.count("\n") == 1
    assert main(["bench", "serve", "--url", url]) == 2
    assert "no server answers at" in (line := capsys.readouterr().err) and "start one with `jaxengine serve`" in line
    assert main(["bench", "serve", "--url", "ftp://x/y"]) == 2
    assert "http://HOST" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", url, "--num-prefixes", "2"]) == 2
    assert "both or neither" in capsys.readouterr().err
    long = ["--model", "x", "--max-model-len", "101", "--num-prefixes", "1", "--prefix-len", "51"]
    assert main(["bench", "serve", "--url", url, *long]) == 2
    assert "--prefix-len is 51; allowed: less than 51, half of 101" in capsys.readouterr().err


def test_requests_leave_at_their_time_and_not_when_others_end(tmp_path):
    async def slow(server, writer, body, number):
        await server.events(writer, completion(body), first=0.4 if number else 0.0)

    options = ["--num-prompts", "20", "--output-len", "1", "--request-rate", "100"]
    with ScriptedServer(slow) as server:
        _, found = bench(server, tmp_path, *options)
        # 0.2 s of arrivals, each open for 0.4 s: a closed loop would have one at a time.
        assert server.most_open == found["results"][0]["peak_concurrent_requests"] == 20
        server.most_open = 0
        bench(server, tmp_path, *options, "--num-prompts", "8", "--max-concurrency", "4")
        assert server.most_open == 4


def test_connections_are_used_again_and_a_closed_one_costs_nothing(tmp_path):
    async def close_every_third(server, writer, body, number):
        await answer(server, writer, body, number)
        if number % 3 == 2:
            await writer.drain()
            writer.transport.abort()

    with ScriptedServer(close_every_third) as server:
        _, found = bench(server, tmp_path, "--num-prompts", "9", "--output-len", "2", "--max-concurrency", "1")
        result = found["results"][0]
        assert (result["successful_requests"], result["errors"]) == (9, {})
        # One for the list of models, one for the first request, and about every third of the nine.
        assert server.connections <= 2 + 5


def test_the_key_is_presented(tmp_path):
    (tmp_path / "key").write_text("sesame\n")
    with ScriptedServer(answer) as server:
        bench(server, tmp_path, "--num-prompts", "1", "--output-len", "2", "--api-key-file", str(tmp_path / "key"))
        assert {headers["authorization"] for headers in server.headers} == {"bearer sesame"}


def test_sweep_draws_and_tells_each_rate(tmp_path, capsys):
    svg = tmp_path / "picture.svg"
    options = ["--num-prompts", "6", "--output-len", "3", "--svg", str(svg), "--goodput", "ttft:5000", "tpot:5000"]
    with ScriptedServer(answer) as server:
        _, found = bench(server, tmp_path, "--sweep", "100", "200", *options)
        assert [result["request_rate"] for result in found["results"]] == [100, 200]
        assert all(result["request_goodput"] == result["request_throughput"] for result in found["results"])
        tree = xml.etree.ElementTree.fromstring(svg.read_text())
        assert "offered" in "".join(tree.itertext()) and len(tree.findall(".//{*}polyline")) == 7
        assert "out tok/s" in capsys.readouterr().out
        prompts = {tuple(body["prompt"]) for body in server.bodies}
        assert len(prompts) == 13  # no rate is answered from what another left in a cache
        bench(server, tmp_path, *options)
    tree = xml.etree.ElementTree.fromstring(svg.read_text())
    assert len(tree.findall(".//{*}polyline")) == 4


def test_arrivals_have_the_rate_and_the_burstiness_asked_for():
    for burstiness, spread in ((1.0, 1.0), (0.25, 2.0), (4.0, 0.5)):
        times = arrivals(20_000, 50.0, burstiness)
        assert times[-1] == pytest.approx(400.0) and times == sorted(times)
        gaps = np.diff(times)
        assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.05)
    assert arrivals(3, math.inf) == [0.0, 0.0, 0.0]
    assert arrivals(5, 1.0, seed=1) == arrivals(5, 1.0, seed=1) != arrivals(5, 1.0, seed=2)


def test_plans_follow_the_seed_and_stay_inside_their_limits():
    load = Load(400, 100, 50, "uniform", range_ratio=0.2, num_prefixes=3, prefix_len=16, vocab_size=512)
    planned = plan(load)
    assert planned == plan(load) != plan(Load(**{**load.__dict__, "seed": 1}))
    assert len({tuple(request.prompt[:16]) for request in planned}) == 3
    inputs, outputs = [len(request.prompt) - 16 for request in planned], [request.max_tokens for request in planned]
    assert (min(inputs), max(inputs), min(outputs), max(outputs)) == (80, 120, 40, 60)
    assert max(max(request.prompt) for request in planned) < 512

    ragged = plan(Load(2000, 96, 64, "lognormal", max_model_len=512))
    lengths = [len(request.prompt) for request in ragged]
    assert np.median(lengths) == pytest.approx(96, rel=0.1) and max(lengths) > 300
    assert all(len(request.prompt) + request.max_tokens <= 512 for request in ragged)

    words = plan(Load(2, 7, 5, text=True))
    assert [len(request.prompt.split()) for request in words] == [7, 7]


def sample(*chunks, sent=0.0, tokens=None, error=None):
    ended, count = chunks[-1] if chunks else sent, tokens or len(chunks)
    return Sample(sent, ended, list(chunks), 3, count, counted=True, error=error)


def test_metrics_are_those_of_their_definitions():
    # One token after 1 s and three more in two pieces; another of one token; one that failed.
    samples = [sample(1.0, 1.5, 2.5, tokens=4), sample(2.25, sent=2.0), sample(9.0, sent=3.0, error="cut")]
    assert series(samples) == {
        "ttft": [1000.0, 250.0],
        "tpot": [500.0],
        "itl": [500.0, 1000.0],
        "e2el": [2500.0, 250.0],
    }
    done = summary(LoadResult(10.0, samples, [0.0, 0.001, 0.002], 1.0), {"ttft": 300.0})
    assert (done["request_throughput"], done["request_goodput"], done["output_throughput"]) == (0.2, 0.1, 0.5)
    assert (done["errors"], done["peak_concurrent_requests"]) == ({"cut": 1}, 2)
    assert done["latency_ms"]["e2el"] == {"mean": 1375.0, "median": 250.0, "p90": 2500.0, "p99": 2500.0}
    assert meets(samples[0], {"tpot": 500.0, "e2el": 2500.0}) and not meets(samples[0], {"tpot": 499.0})
    assert not meets(samples[2], {})


def test_without_an_answer_there_are_no_figures_and_the_picture_is_whole():
    done = summary(LoadResult(1.0, [sample(error="timeout")], [0.0], 0.1))
    assert done["latency_ms"]["ttft"] == {"mean": None, "median": None, "p90": None, "p99": None}
    empty = picture("<nothing> & more", [{"request_rate": math.inf, **done}], series([]))
    assert "<nothing> & more" in "".join(xml.etree.ElementTree.fromstring(empty).itertext())


async def test_tokens_are_pieces_where_the_server_does_not_count():
    async def uncounted(server, writer, body, number):
        await server.events(writer, completion(body, usage=False))

    with ScriptedServer(uncounted) as server:
        connections = Connections(Server.at(server.url))
        found = await stream(connections, "/completions", {"prompt": [1], "max_tokens": 4}, 5.0)
        connections.close()
    assert (found.output_tokens, found.counted, found.error) == (4, False, None)


@pytest.mark.parametrize("url", ["", "localhost:8000", "http://", "http://x:99999/v1", "http://x/v1?a=b"])
def test_urls_that_name_no_server_are_refused(url):
    with pytest.raises(BadUrlError, match="url is"):
        Server.at(url)
