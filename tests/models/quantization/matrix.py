"""Every format of stored weights through whole engines, as tests.models.families.matrix serves families.

    python -m tests.models.quantization.matrix [NAME ...] [--experts] [--haste] [--json FILE]

A format's checkpoint of two layers is served alone, in crowds, preempted, with prefix hits, in chunks, and over two
devices. Alone, where activations are not rounded, two prompts must go on as an engine in float32 does with the weights
that an independent reading (tests/models/quantization/readings.py) makes of the files. Results are added to those that
the JSON file has (benchmarks/results/formats.json is kept); the exit status is 1 when a token differs. --experts: of a
model with experts.
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
from safetensors.numpy import save_file

from jaxengine import LLM
from models.weights.safetensors import SafetensorsCheckpoint
from tests.fixtures import quantized_models
from tests.haste import in_haste
from tests.models.families.matrix import EQUAL, FIRST, NEVER, Workload, options, serve
from tests.models.quantization import readings

LENGTH, LAYERS, COUNT = 64, 2, 16


def plain(folder: Path, target: Path) -> Path:
    """The checkpoint in float32, as an independent reading has it."""
    config, source = json.loads((folder / "config.json").read_text()), SafetensorsCheckpoint(folder)
    tensors = {name: np.asarray(source.read(name)) for name in source.names()}
    source.close()
    settings = config.pop("quantization_config")
    for module, shape in quantized_models.shapes_of(config).items():
        matrix = readings.matrix(tensors, module, settings, shape)
        tensors = {name: value for name, value in tensors.items() if not name.startswith(f"{module}.")}
        tensors[f"{module}.weight"] = matrix
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    return target


def rounds_activations(settings: dict[str, Any]) -> bool:
    """Whether a quantization_config has products of rounded activations."""
    groups = settings.get("config_groups", {})
    return "fp8" in settings["quant_method"] or any(group["input_activations"] for group in groups.values())


def examine(name: str, cache: str, *, experts: bool) -> dict[str, str]:
    """What came out in each mode: see tests.models.families.matrix."""
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory() as temporary:
        folder = quantized_models.write(Path(temporary), name, experts=experts, num_layers=LAYERS)
        vocab_size = quantized_models.CONFIG["vocab_size"]
        prompts = [rng.integers(0, vocab_size, count).tolist() for count in (29, 9)]
        greedy: list[list[int]] = [[], []]
        if not rounds_activations(quantized_models.FORMATS[name][0]):
            reference = LLM(
                str(plain(folder, Path(temporary) / "plain")), **options(LENGTH, [None]), compile_cache_dir=cache
            )
            workload = Workload(prompts, [[0] * COUNT] * 2, LENGTH, vocab_size)
            greedy = workload.run(reference, alone=True)[:2]
            reference.shutdown()
        return serve(folder, Workload(prompts, greedy, LENGTH, vocab_size), LENGTH, cache, [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--executables", default=str(Path(".cache") / "executables"))
    parser.add_argument("--haste", action="store_true")
    args = parser.parse_args()
    bad = False
    with in_haste() if args.haste else contextlib.nullcontext():
        for name in args.names or quantized_models.FORMATS:
            rows = examine(name, args.executables, experts=args.experts)
            row = f"{name}, experts" if args.experts else name
            for mode, found in rows.items():
                # Inputs in an order of their own, or rounded by so many: docs/quantization.md.
                is_refused = found.startswith("not split") or (
                    mode[:3] in ("tp ", "ep ") and "cannot be split over" in found
                )
                bad |= found not in (EQUAL, NEVER, FIRST) and not is_refused
            print(row, *(f"{mode} {found}" for mode, found in rows.items()), sep=", ", flush=True)
            if args.json:
                known: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
                known[row] = rows
                args.json.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
