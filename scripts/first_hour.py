"""Table of what a user of vLLM types in the first hour and what happens, written from rows that are run.

Each row is code or a command line. A command is read and settled as the command does it; `LLM(...)` goes as far as an
engine does before it loads weights: options, model folder, tokenizer, sizes. `llm` is an engine that runs. Nothing in
the second column is written by hand; tests/docs/test_first_hour.py runs the rows again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers.models import WordLevel

from jaxengine.api.llm import LLM
from jaxengine.checkpoint.model_source import open_model
from jaxengine.commands.cli import build_parser
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.command_line import given_options
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.engine_flags import with_config_file
from jaxengine.config.execution.compilation_config import CompilationConfig, CompilationLevel
from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.structured.params import StructuredOutputsParams
from jaxengine.server.base.options import ServerConfig

CHECKPOINT = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "models" / "llama"
BEGIN, END = "<!-- first hour: written by scripts/write_docs.py from what scripts/first_hour.py ran -->", "<!-- end -->"

ROWS = """
LLM(Path("model"))
LLM("model", dtype="half")
LLM("model", dtype=jnp.bfloat16)
LLM("model", dtype=np.float32)
LLM("model", dtype="int8")
LLM("model", kv_cache_dtype="fp8")
LLM("model", max_model_len=np.int64(32))
LLM("model", max_model_len="1M")
LLM("model", kv_cache_memory_bytes="4G")
LLM("model", max_num_batched_tokens="2k")
LLM("model", gpu_memory_utilization=0.9)
LLM("model", gpu_memory_utilization=90)
LLM("model", compilation_config=3)
LLM("model", compilation_config=0)
LLM("model", compilation_config={"cudagraph_capture_sizes": [1, 2]})
LLM("model", cudagraph_capture_sizes=[1, 2])
LLM("model", compilation_config=CompilationConfig(level=CompilationLevel.PIECEWISE))
LLM("model", structured_outputs_config={"backend": "xgrammar"})
LLM("model", compilation_config={"cudagraph_mode": "FULL"})
LLM("model", enable_prefix_caching=None)
LLM("model", trust_remote_code=True)
LLM("model", distributed_executor_backend="mp")
LLM("model", disable_custom_all_reduce=True)
LLM("model", served_model_name="tiny")
LLM("model", task="generate")
LLM("model", task="embed")
LLM("model", swap_space=4)
LLM("model", cpu_offload_gb=8)
LLM("model", tokenizer_revision="main")
LLM("model", override_generation_config={"temperature": 0.5})
LLM("model", override_generation_config={"top": 1})
LLM("model", quantization="awq")
LLM("model", quantization="fp8")
LLM("model", speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3})
LLM("model", speculative_model="[ngram]", num_speculative_tokens=5)
LLM("model", speculative_config={"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3})
LLM("model", enable_lora=True)
LLM("model", attention_backend="FLASH_ATTN")
LLM("model", max_num_queued_reqs=100)
LLM("model", max_num_seq=8)
LLM("no-such-model")
LLM("model/model.safetensors")
LLM("folder")
LLM("xverse")
LLM("without-tokenizer")
params.max_tokens = 5; params.max_tokens
params.temperature = 3
params.max_token = 5
params.clone() == params
SamplingParams(temperature=0, n=2)
SamplingParams(top_k=-1, stop="end").stop
SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"])).structured_outputs.choice
SamplingParams(logits_processors=[len])
llm.generate([[5, 6, 7]], params)[0].prompt_token_ids
llm.generate(np.array([5, 6, 7]), params)[0].prompt_token_ids
llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0].finish_reason
llm.generate([[5], [6]], params, priority=1)
jaxengine serve model -tp 2 --max-model-len 4k
jaxengine serve --model model --max_num_seqs 8
jaxengine serve model --served-model-name tiny --port 8001
jaxengine serve model --kv-cache-memory-bytes 4G --no-enable-prefix-caching
jaxengine serve model --dtype half
jaxengine serve model -O3
jaxengine serve model -cc 3 --swap-space 4
jaxengine serve model -cc.mode 3 --speculative-config.method ngram --speculative-config.num_speculative_tokens 4
jaxengine serve model --quantization fp8
jaxengine serve model --enable-lora
jaxengine serve model --trust-remote-code
jaxengine serve model --enable-auto-tool-choice
jaxengine serve --config options.yaml -tp 4
jaxengine chat model --temperature 0.5
jaxengine bench throughput model --num-prompts 8
jaxengine bench latency --model model --batch-size 4
""".strip().splitlines()


def table(llm: LLM, folder: Path) -> str:
    """Return the table in Markdown, after running every row. llm: an engine of the small model. folder: an empty
    folder, into which the files that rows name are written.
    """
    lines = ["| what you type | what happens |", "|---|---|"]
    _write_files(folder)
    with contextlib.chdir(folder):
        for row in ROWS:
            lines.append(f"| {_code(row)} | {_happens(row, llm)} |")
    return "\n".join(lines)


def placed(text: str, rows: str) -> str:
    """Return the document `text` with what is between its marks, BEGIN and END, replaced by the table `rows`."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{rows}\n{END}{rest.partition(END)[2]}"


def _write_files(folder: Path) -> None:
    """Write the models and the options file that the rows name into `folder`."""
    words = WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>")
    for name in ("model", "without-tokenizer", "xverse"):
        shutil.copytree(CHECKPOINT, folder / name)
        if name != "without-tokenizer":
            tokenizers.Tokenizer(words).save(str(folder / name / "tokenizer.json"))
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (folder / "xverse" / "config.json").write_text(json.dumps({**config, "architectures": ["XverseForCausalLM"]}))
    (folder / "folder").mkdir()
    (folder / "options.yaml").write_text("model: model\ntensor-parallel-size: 2\nmax-num-seqs: 8\n")


def _happens(row: str, llm: LLM) -> str:
    """Run a row, and return its result or error, and what was logged, as the text of a table cell."""
    with _said() as said:
        try:
            result = _command(row) if row.startswith("jaxengine ") else _python(row, llm)
        except (ValueError, AttributeError) as error:
            return f"`{type(error).__name__}`: {_text(str(error))}"
    return "; ".join([result, *map(_text, said)])


class _Quiet:
    """Wrapper of an engine whose `generate` shows no progress bars."""

    def __init__(self, llm: LLM):
        self._llm = llm

    def generate(self, *args: Any, **options: Any) -> list[RequestOutput]:
        return self._llm.generate(*args, use_tqdm=False, **options)


def _python(row: str, llm: LLM) -> str:
    """Run the statements of a row, and return the outcome of the last one: "works" for an assignment, the options for
    `LLM(...)`, else the repr of the value as code.
    """
    params = SamplingParams(temperature=0, max_tokens=2)
    names: dict[str, Any] = {"Path": Path, "np": np, "jnp": jnp, "LLM": _settled, "llm": _Quiet(llm)}
    names |= {"SamplingParams": SamplingParams, "StructuredOutputsParams": StructuredOutputsParams, "params": params}
    names |= {"CompilationConfig": CompilationConfig, "CompilationLevel": CompilationLevel}
    *statements, last = row.split("; ")
    for statement in statements:
        exec(statement, names)  # noqa: S102 - the rows above
    if " = " in last and not last.startswith(("LLM(", "llm.")):
        exec(last, names)  # noqa: S102
        return "works"
    value = eval(last, names)  # noqa: S307
    return value if last.startswith("LLM(") else _code(repr(value))


def _settled(model: Any, **options: Any) -> str:
    """Do what `LLM(model, **options)` does before it loads weights, and return the options that differ from the
    defaults.
    """
    config = EngineConfig.from_options(model=model, **options)
    source = open_model(config)
    try:
        source.load_tokenizer(config)
        config.resolved(source.config, PLATFORMS["cpu"])
    finally:
        source.close()
    return _differences(config, EngineConfig(model=str(model)))


def _command(row: str) -> str:
    """Parse a command line without running it, and return the engine options (except the model) and server options that
    differ from the defaults; "works" if none do. Errors of the parser and of the options are passed on.
    """
    parser = build_parser()
    args = parser.parse_args(with_config_file(shlex.split(row)[1:], parser))
    engine = EngineConfig.from_options(**given_options(args, EngineConfig))
    found = [_differences(engine, EngineConfig(model=engine.model))]
    if server := given_options(args, ServerConfig):
        found.append(_differences(ServerConfig(**server), ServerConfig()))
    changed = [each for each in found if each != "works"]
    return "; ".join(changed) or "works"


def _differences(config: Any, usual: Any, prefix: str = "") -> str:
    """Return the fields of a dataclass, nested ones included, that differ from `usual`, as text; "works" if none do."""
    changed = []
    for field in dataclasses.fields(config):
        value, before = getattr(config, field.name), getattr(usual, field.name)
        if dataclasses.is_dataclass(value) and before is not None and value != before:
            changed.append(_differences(value, before, f"{field.name}."))
        elif value != before:
            changed.append(_code(f"{prefix}{field.name}={value!r}"))
    return ", ".join(changed) or "works"


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """Return a context manager that yields a list, to which the messages of the package's loggers (INFO and above) are
    appended in the meantime.
    """
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("jaxengine"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _code(text: str) -> str:
    return f"`{_text(text)}`"


def _text(text: str) -> str:
    """Return a text that fits into a table cell: on one line, with | escaped, without the working directory and without
    the number of families, since a process may have more than others.
    """
    text = re.sub(r"lists the \d+", "lists the ...", text.replace(os.getcwd() + os.sep, ""))
    return " ".join(text.split()).replace("|", "\\|")
