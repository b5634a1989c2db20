"""Every format of stored weights through whole engines, as tests.models.families.matrix serves families.

    python -m tests.models.quantization.matrix [NAME ...] [--experts] [--fast-compile] [--json FILE]

A format's checkpoint of two layers is served alone, in crowds, preempted, with prefix hits, in chunks, and over two
devices. Alone, two prompts must go on as NumPy does with the weights that an independent reading makes of the files
and, where the format says so, with rows rounded as its publication says (readings.py and emulation.py here); prompts
are drawn whose tokens do not hang on a value that is, but for float32's rounding, in the middle between two codes.
Results are added to those that the JSON file has (benchmarks/results/formats.json is kept); the exit status is 1 when a
token differs. --experts: of a model with experts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import numpy as np

from tests.fast_compile import fast_compile
from tests.fixtures import quantized_models
from tests.fixtures.recorded_prompts import Recorded
from tests.models.families.matrix import Workload, serve
from tests.models.families.modes import MODES, SCHEDULED, is_as_it_should_be
from tests.models.quantization.emulation import decoder_of, settled

LENGTH, LAYERS, COUNT = 64, 2, 16


def examine(name: str, cache: str, *, experts: bool) -> dict[str, str]:
    """What came out in each mode: see tests.models.families.matrix."""
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory() as temporary:
        folder = quantized_models.write(Path(temporary), name, experts=experts, num_layers=LAYERS)
        reference, vocab_size = decoder_of(folder), quantized_models.CONFIG["vocab_size"]
        known = [settled(reference, rng, length, COUNT) for length in (29, 9)]
        recorded = [Recorded({"prompt_token_ids": prompt}, prompt, greedy) for prompt, greedy in known]
        workload = Workload.of_tokens(recorded, LENGTH, vocab_size)
        more = {"compile_cache_dir": cache, "skip_tokenizer_init": True}
        return serve(folder, workload, LENGTH, more, ["preempted", *SCHEDULED, *MODES])  # and not rounded once more


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--executables", default=str(Path(".cache") / "executables"))
    parser.add_argument("--fast-compile", action="store_true")
    args = parser.parse_args()
    bad = False
    with fast_compile() if args.fast_compile else contextlib.nullcontext():
        for name in args.names or quantized_models.FORMATS:
            rows = examine(name, args.executables, experts=args.experts)
            row = f"{name}, experts" if args.experts else name
            for mode, found in rows.items():
                # Inputs that are rounded by so many: docs/quantization.md.
                is_refused = mode[:3] in ("tp ", "ep ") and "cannot be split over" in found
                bad |= not is_as_it_should_be(found) and not is_refused
            print(row, *(f"{mode} {found}" for mode, found in rows.items()), sep=", ", flush=True)
            if args.json:
                known: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
                known[row] = rows
                args.json.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
