"""CPU time of parsing the largest JSON bodies that a server accepts, compared with Python's own parser.

The time is the thread's CPU time, the least of a few runs; a body is read as an endpoint reads it, with its limits.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable

from benchmarks.harness import Option
from benchmarks.recorder import Recorder
from jaxengine.server.http.request.limits import MAX_CONTAINERS, MAX_NAMES, MAX_TEXTS, read_json

OPTIONS = {"repeats": Option(3, "runs of each, of which the fastest counts")}


def run(args: Namespace, recorder: Recorder) -> None:
    """Measure the parsing of each body by the server's reader and by json.loads, and add a row for it to the
    recorder. Milliseconds are rounded.
    """
    for name, body in bodies().items():
        ours, theirs = (_seconds(read, body, args.repeats) for read in (read_json, json.loads))
        row = {"bytes": len(body), "ms": round(1000 * ours, 1), "json_ms": round(1000 * theirs, 1)}
        recorder.add({"body": name, **row}, ("body",))


def bodies() -> dict[str, bytes]:
    """Return JSON bodies near each limit of the reader, by a name that says what they consist of."""
    num_texts, num_names, num_lists = MAX_TEXTS - 1000, MAX_NAMES - 1000, MAX_CONTAINERS - 1000
    return {
        "token ids": json.dumps([token_id % 150_000 for token_id in range(2**20)]).encode(),
        "names": json.dumps(dict.fromkeys(map(str, range(num_names)), 1)).encode(),
        "texts": json.dumps([f"t{index}" for index in range(num_texts)]).encode(),
        "lists": json.dumps([[] for _ in range(num_lists)]).encode(),
        "objects": json.dumps([{"a": 1} for _ in range(num_lists)]).encode(),
        "escapes": json.dumps(['"' * 2_000_000]).encode(),
    }


def _seconds(read: Callable[[bytes], object], body: bytes, repeats: int) -> float:
    """Return the CPU seconds of this thread in the fastest of `repeats` calls of `read` with `body`."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        read(body)
        times.append(time.thread_time() - start)
    return min(times)
