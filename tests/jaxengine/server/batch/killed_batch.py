"""A batch in a process that is killed; run as a module it answers what has no result yet.

    python -m tests.jaxengine.server.batch.killed_batch FOLDER

reads FOLDER/in.jsonl and writes FOLDER/out.jsonl, with answers that are the requests' prompts.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from jaxengine.server.batch.lines import read_lines
from jaxengine.server.batch.results import Results
from jaxengine.server.batch.run import call, run_lines


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """The application: the prompt of a request, once others have run."""
    body = json.loads((await receive())["body"])
    await asyncio.sleep(0)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps({"said": body["prompt"]}).encode()})


async def healthy() -> None: ...


def killed_after(folder: Path, num_bytes: int) -> bool:
    """Run the batch in a process, and kill it once its partial results have grown by `num_bytes`; whether it was."""
    results = folder / "out.jsonl.partial"
    before = results.stat().st_size if results.exists() else 0
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(folder)], env=os.environ | {"JAX_PLATFORMS": "cpu"}
    ) as it:
        while it.poll() is None:
            if results.exists() and results.stat().st_size > before + num_bytes:
                it.kill()
                return it.wait() != 0
            time.sleep(0.001)
        assert it.returncode == 0
    return False


def main() -> None:
    folder = Path(sys.argv[1])
    lines = read_lines(str(folder / "in.jsonl"))[0]
    with Results(str(folder / "out.jsonl"), "a batch", str(folder / "in.jsonl")) as results:
        left = [line for line in lines if line.custom_id not in results.known]
        asyncio.run(run_lines(partial(call, answer), left, results, 64, healthy, lambda *_: None))
        results.finish(lines)


if __name__ == "__main__":
    main()
