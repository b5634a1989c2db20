"""Reads damaged tokenizer folders in a process of limited memory and time, and prints what became of them.

Run by test_tokenizer_fuzz: `python -m tests.jaxengine.tokens.fuzz_tokenizer FOLDER SEED COUNT`. The library is Rust:
only the system can tell it to stop, and only a process of its own can be told without harm.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from jaxengine.models.params.errors import ModelFileError
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.models.damage import damaged_bytes, damaged_value

MAX_MEMORY_BYTES = 2 << 30
MAX_SECONDS_EACH = 2.0
TEXTS = ["", "The quick brown fox, 123 times.\n", "\u4e00\ud7ff \U0001f600 e\u0301", "a" * 500]


def use(folder: Path) -> str:
    """What a server does with a tokenizer: it reads, encodes and decodes."""
    try:
        tokenizer = Tokenizer.from_hf_folder(folder)
    except ModelFileError as error:
        assert len(str(error)) < 2000 and str(error).isprintable(), str(error)
        return "refused"
    try:
        for ids in tokenizer.encode_batch(TEXTS):
            tokenizer.decode(ids)
        json.dumps(tokenizer.describe())
    except RequestError:
        return "no text"
    return "read"


def main(folder: Path, seed: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    found: Counter[str] = Counter()
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        name = rng.choice(sorted(whole))
        if name.endswith(".json") and rng.random() < 0.8:
            damaged = json.dumps(damaged_value(json.loads(whole[name]), rng)).encode()
        else:
            damaged = damaged_bytes(whole[name], rng)
        (folder / name).write_bytes(damaged)
        start = time.process_time()
        try:
            found[use(folder)] += 1
        except BaseException as error:
            sys.exit(f"case {seed}/{number}, {name}: {type(error).__name__}: {error}"[:2000])
        if time.process_time() - start > MAX_SECONDS_EACH:
            sys.exit(f"case {seed}/{number}, {name}: took {time.process_time() - start:.1f} s")
        (folder / name).write_bytes(whole[name])
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
