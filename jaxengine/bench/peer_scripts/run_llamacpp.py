"""Runs llama.cpp through the PyPI wheel xllamacpp: an in-process server with one slot per request.

Variant q4_1 is the file as it is; float32 and bfloat16 are written from its dequantised weights by the package gguf.
The wheel, as pip installs it, is built without AVX-512.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import xllamacpp
from peer import Measured, Workload, serve

KINDS = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}


def convert(source: str, target: Path, variant: str) -> None:
    """Write the GGUF file `target` from `source`, with every matrix dequantised to `variant`.

    Vectors such as norms are dequantised to float32, as in llama.cpp's own files. The metadata is copied, but for the
    type of the file. variant: key of KINDS.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(target), reader.get_field(gguf.Keys.General.ARCHITECTURE).contents())
    written_otherwise = (gguf.Keys.General.ARCHITECTURE, gguf.Keys.General.FILE_TYPE)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in written_otherwise:
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=element)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, KINDS[variant]), raw_dtype=KINDS[variant])
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(job):
    """Return (llama.cpp's version, function that runs one workload).

    Variant q4_1 uses the job's GGUF file; other variants are written to the job's folder first, unless they are there.
    A workload starts a server for its number of prompts and their length unless the current server has both. Servers
    decode greedily on job["threads"] threads, without a prompt cache, and ignore the end of sequence.
    """
    path = Path(job["gguf"])
    if job["variant"] != "q4_1":
        path = Path(job["folder"]) / f"{path.stem}.{job['variant']}.gguf"
        if not path.exists():
            partial = path.with_suffix(".partial")
            convert(job["gguf"], partial, job["variant"])
            os.replace(partial, path)
    servers = {}

    def server(num_requests: int, context: int) -> xllamacpp.Server:
        """Return a server with `num_requests` slots of `context` tokens: the current one, or a new one in its place."""
        key = (num_requests, context)
        if key not in servers:
            servers.clear()
            params = xllamacpp.CommonParams()
            params.model.path = str(path)
            params.n_parallel = num_requests
            params.n_ctx = num_requests * context
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
            params.verbosity = 0
            servers[key] = xllamacpp.Server(params)
        return servers[key]

    def run(workload: Workload) -> Measured:
        """Run a workload with one thread for each prompt; return seconds, output tokens and the mean time to first
        token.

        Returns {"skipped": reason} for a workload whose prefix may be shared. Raises RuntimeError if a prompt's
        completion fails.
        """
        prompts, max_tokens = workload["prompts"], workload["max_tokens"]
        if workload["prefix"] and workload["share_prefix"]:
            return {"skipped": "slots that run at once do not share a prefix"}
        llama = server(len(prompts), -(-(max(map(len, prompts)) + max_tokens + 1) // 64) * 64)

        def complete(prompt: list[int]) -> tuple[float, int]:
            """Complete one prompt greedily; return (seconds, number of output tokens).

            The seconds run from the workload's start to the prompt's first chunk. Raises RuntimeError for a chunk with
            an error, and if no chunk has its usage.
            """
            chunks: list[tuple[float, dict[str, Any]]] = []
            llama.handle_completions(
                {
                    "prompt": prompt,
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "cache_prompt": False,
                    "stream": True,
                },
                lambda chunk: chunks.append((time.perf_counter(), chunk)),
            )
            errors = [chunk["error"] for _, chunk in chunks if "error" in chunk]
            usage = [chunk["usage"] for _, chunk in chunks if chunk.get("usage")]
            if errors or not usage:
                raise RuntimeError(f"llama.cpp: {errors[0] if errors else 'the answer has no usage'}")
            return chunks[0][0] - start, usage[-1]["completion_tokens"]

        with ThreadPoolExecutor(len(prompts)) as threads:
            start = time.perf_counter()
            found = list(threads.map(complete, prompts))
            seconds = time.perf_counter() - start
        first, tokens = zip(*found, strict=True)
        return {"seconds": seconds, "output_tokens": sum(tokens), "first_token_seconds": sum(first) / len(first)}

    return xllamacpp.__version__, run


serve(load)
