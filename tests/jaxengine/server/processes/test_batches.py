"""A batch of a server that is killed again and again."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time

import httpx2
import openai
import pytest

from tests.jaxengine.server.server_process import start_server

NUM_LINES, NUM_KILLS = 5000, 3


def line(number: int) -> bytes:
    body = {"prompt": f"{number}", "max_tokens": 2, "temperature": 0}
    fields = {"custom_id": f"id {number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(fields).encode() + b"\n"


def asked(client: openai.OpenAI, model: str, count: int) -> float:
    """Returns the median time of a short request, in seconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        client.completions.create(model=model, prompt="Hi", max_tokens=1)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.thorough("the server is started four times, for thousands of requests")
def test_a_batch_outlives_its_server(chat_options, tmp_path):
    """Two API processes, one of which runs it; at the end each custom_id is there once."""
    options = {**chat_options, "enable_batch_api": True, "batch_storage_dir": str(tmp_path), "api_server_count": 2}
    batch_id, done, alone, beside = "", 0, 0.0, 0.0
    for turn in range(NUM_KILLS + 1):
        server = start_server(options)
        client = openai.OpenAI(api_key="k", base_url=f"{server.base_url}/v1", http_client=httpx2.Client(timeout=600))
        model = client.models.list().data[0].id
        if not batch_id:
            alone = asked(client, model, 40)
            file = client.files.create(file=("in.jsonl", b"".join(map(line, range(NUM_LINES)))), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            batch_id = batch.id
        wanted = NUM_LINES * (turn + 1) // (NUM_KILLS + 2) if turn < NUM_KILLS else NUM_LINES
        deadline = time.monotonic() + 3600
        while done < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.2)
            done = client.batches.retrieve(batch_id).request_counts.completed
            if turn == 0 and done and not beside:
                beside = asked(client, model, 40)
                print(f"a short request: {alone * 1e3:.1f} ms alone, {beside * 1e3:.1f} ms beside")
        if turn < NUM_KILLS:
            for pid in (server.api_pids[turn % 2], server.pid):
                os.kill(pid, signal.SIGKILL)
            server.process.wait()
            server.remove()
    while (batch := client.batches.retrieve(batch_id)).status != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    rows = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
    assert [row["custom_id"] for row in rows] == [f"id {number}" for number in range(NUM_LINES)]
    assert batch.error_file_id is None and {row["response"]["status_code"] for row in rows} == {200}
    server.remove()
