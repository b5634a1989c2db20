"""Host 0 of an engine over several processes: test_several_processes runs it, and `jaxengine worker` beside it.

    python -m tests.sharding.cluster_host compare|serve FOLDER CACHE MODEL OPTIONS

compare: the answers to parallel_cases.requests as this engine and as an engine on one device gives them.
serve: answers without an end, until the process is killed or the engine fails.
OPTIONS (JSON) are the engine's. What happens is printed, a line of JSON each.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from jaxengine import LLM, EngineDeadError, SamplingParams
from jaxengine.cluster.channel import ClusterError
from jaxengine.config.engine_config import ConfigError
from tests.sharding.parallel_cases import OPTIONS, differences, run, write_tokenizer
from tests.sharding.parallel_models import MODELS


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


def compare(folder: str, cache: str, model: str, options: dict[str, Any]) -> None:
    found = run(folder, cache, model, options)
    counted = {name: found[name] for name in ("preemptions", "prefix_hits", "compilations")}
    say(**counted, wrong=differences(found, run(folder, cache, model, {})))


def serve(folder: str, cache: str, model: str, options: dict[str, Any]) -> None:
    path = Path(folder, model)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[model]))
    write_tokenizer(path)
    llm = LLM(str(path), compile_cache_dir=cache, **OPTIONS, **options)
    params = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False)
    while True:
        llm.generate([{"prompt_token_ids": [number]} for number in range(16)], params, use_tqdm=False)
        say(answered=16)


def main(mode: str, folder: str, cache: str, model: str, options: str) -> None:
    logging.basicConfig(level=logging.INFO, format="host 0: %(message)s")
    start = time.monotonic()
    try:
        {"compare": compare, "serve": serve}[mode](folder, cache, model, json.loads(options))
    except (ClusterError, ConfigError) as error:
        say(failed=str(error), seconds=time.monotonic() - start)
    except EngineDeadError as error:
        say(failed=str(error.__cause__), seconds=time.monotonic() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
