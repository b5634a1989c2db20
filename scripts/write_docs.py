"""Writes the tables of docs/ that follow from the code: options, sampling parameters, models, a first hour.

    python -m scripts.write_docs

Names, defaults and meanings are read from the dataclasses and their docstrings, what is allowed from the errors that a
wrong value gets, so that nothing is said twice; scripts/first_hour.py runs what its table tells of. tests/docs fails
when a file is not what this writes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxengine.api.custom_models import is_custom
from jaxengine.api.llm import LLM
from jaxengine.commands.cli import OUTPUT_OPTIONS, SAMPLING_OPTIONS
from jaxengine.config.command_line import class_texts, field_texts
from jaxengine.config.engine_config import CompilationConfig, EngineConfig
from jaxengine.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, ReasoningRow, ToolFormat
from jaxengine.requests.options import RequestOptions
from jaxengine.requests.sampling_params import _RULES, SamplingParams
from jaxengine.requests.structured_outputs import StructuredOutputsParams
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.responses.protocol import ResponsesRequest
from jaxengine.server.options import ServerConfig
from models.registry import MODELS
from scheduler.errors import RequestError
from scripts import first_hour
from scripts.hub_ids import HUB_IDS

DOCS = Path(__file__).resolve().parents[1] / "docs"
_MEASURED = DOCS.parent / "benchmarks" / "results" / "families.json"
_FIELDS = dataclasses.fields(SamplingParams)

_OPTIONS = """# Options
<!-- Written by scripts/write_docs.py from the code; change that. -->

## Engine

Keyword arguments of `LLM` and `AsyncLLM`, fields of `EngineConfig` (vLLM's name `EngineArgs` means the same), and flags
of `jaxengine generate`, `chat`, `demo` and `serve`; what is on is switched off with `--no-` before the name. None means
that model and device decide. One that is unknown, wrong or not built yet raises one `ConfigError` that names it. Of
vLLM's other options those that cannot change an answer are taken, and the log says what stands in their place.

Sizes may be written `4k` (4,000), `4K` (4,096) or `4G`; `-tp`, `-pp`, `-dp`, `-ep`, `-n` and `-cc` are short forms,
and the model may be given without `--model`. `--config FILE` reads options from YAML (`max-model-len: 4096`); those of
the command line go before it.

{engine}

### compilation_config

A `CompilationConfig`, a dict of its fields, or JSON on the command line.

{compilation}

## Server

Flags of `jaxengine serve` beside the engine's, and fields of `ServerConfig`.

{server}
"""

_SAMPLING_PARAMS = """# Sampling parameters
<!-- Written by scripts/write_docs.py from the code; change that. -->

Fields of `SamplingParams`, under vLLM's names and with its defaults. A wrong value is one `RequestError` that names the
field, the value and what is allowed, before anything has changed. `generation_config.json` of a model may suggest other
defaults (`generation_config="vllm"` ignores it); a request that says nothing takes those.

Where: **P** Python, **C** `/v1/completions`, **H** `/v1/chat/completions`, **R** `/v1/responses`, **L** flags of
`jaxengine generate`. gRPC has names of its own, see `jaxengine/server/grpc/inference.proto`.

| field | default | allowed | where | meaning |
|---|---|---|---|---|
{fields}

Not supported yet, and refused when they ask for something: {refused}.

## structured_outputs

A `StructuredOutputsParams` or a dict of its fields; exactly one of `json`, `regex`, `choice`, `grammar` and
`json_object`.

{structured}

## Beside them

Keyword arguments of `AsyncLLM.generate`; `LLM.generate` takes `priority` and `client`, one for each prompt. Over HTTP
`priority` and `timeout` are fields of the request, and a client is who has a key.

{options}
"""

_SUPPORTED_MODELS = """# Supported models
<!-- Written by scripts/write_docs.py from the code; change that. -->

A checkpoint is served if its `config.json` names one of these architectures, or if it is a GGUF file of one of the
kinds named here. Others are refused with this list. Each family is compared with Hugging Face transformers in float32,
on tiny checkpoints of odd shapes that `python -m tests.fixtures.record models` recorded: logits of whole prompts, of
chunks and of single tokens. The error is the largest difference, of the largest logit; tests allow 1e-4
(`tests/models/families/test_golden.py`). `python -m tests.models.families.matrix --json
benchmarks/results/families.json` measures it, and serves checkpoints from whole engines: alone, in crowds, in
chunks, preempted, with prefix hits, on two devices; the file says for which that was done.

Repositories named here publish a configuration and weights that are read, in bfloat16, float16 or float32 safetensors
(gpt-oss in MXFP4); they are examples, and a fine-tune of one is as good. They were not downloaded for this table:
what was compared is the family, on the recorded checkpoints. Quantised ones are read too, as compressed-tensors, fp8,
fbgemm_fp8, AWQ and GPTQ have them: [quantization.md](quantization.md).

| architecture | GGUF | repositories | checkpoints | error | what it is |
|---|---|---|---:|---:|---|
{models}

Weights: safetensors (one file or several; MXFP4 in gpt-oss), GGUF (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1,
Q4_K, Q5_K, Q6_K, MXFP4; dequantised at load, or kept as stored with `quantization="gguf"`), or what
`jaxengine convert` wrote. Computation is in float32 or bfloat16, of [quantised weights](quantization.md) and with
[adapters](lora.md) too; images are not built yet.

Of a hub repository the configuration, the tokenizer and the weights that `model.safetensors.index.json` lists are
downloaded, once: no `consolidated.safetensors`, no `original/`, no pickles. A GGUF file in one is named as
`org/name/FILE.gguf`, or by its quantisation as `org/name:Q4_K_M`. Files of Mistral, InternLM 3 and Mixtral call
their architecture `llama`.

A family of your own: `jaxengine.register_model`, see [examples/custom_model.py](../examples/custom_model.py). One for
everybody: [CONTRIBUTING.md](../CONTRIBUTING.md).
"""

_PARSERS = """# Tool calls and reasoning
<!-- Written by scripts/write_docs.py from the code; change that. -->

Models write tool calls and thoughts in ways of their own. `jaxengine serve --enable-auto-tool-choice --tool-call-parser
NAME` reads calls out of answers, `--reasoning-parser NAME` thoughts; names are vLLM's. Both are off by default: an
answer is the text that the model wrote then. `auto` takes the name whose words, all of those below, are in the model's
chat template, of several the one with most words; the log says which. Where no name's words are, the log says so in one
line, and the parser stays off.

Calls stream as they come. What only looks like a call is content, and nothing that a model writes is lost but the
format's own words. Where arguments are plain text (XML), a parameter's schema says what they are: a string stays one,
whatever it looks like. A call that is forced (`tool_choice` "required", or a function's name) keeps to a JSON schema
whatever the format; gpt-oss writes it in its own.

With a reasoning parser, structured output, forced calls among it, begins where the reasoning ends. Until then the model
is free, and its tokens are those that it would take without any structure. A model that need not reason either opens
its reasoning or keeps to the structure at once, and one whose prompt has ended the reasoning already, as templates do
where thinking is switched off, keeps to it from its first token. An output that ends before its reasoning does has no
content, but for `qwen3` where calls are read: those that it ends with are calls, for Qwen3.5 may call without ending
its thoughts; from the first `<tool_call>` in its thoughts on nothing is streamed before they end. Without a server
`reasoning_end` and `reasoning_begin` of
[structured_outputs](sampling_params.md#structured_outputs) say the same.

## --tool-call-parser

| name | models | words of the chat template, for `auto` |
|---|---|---|
{tools}

## --reasoning-parser

| name | models | words of the chat template, for `auto` |
|---|---|---|
{reasoning}
"""


def documents() -> dict[str, str]:
    """File name in docs/ -> its content."""
    return {
        "options.md": _OPTIONS.format(
            engine=_table(EngineConfig),
            compilation=_table(CompilationConfig, flags=False),
            server=_table(ServerConfig),
        ),
        "parsers.md": _PARSERS.format(
            tools="\n".join(_parsers(TOOL_PARSERS)), reasoning="\n".join(_parsers(REASONING_PARSERS))
        ),
        "sampling_params.md": _SAMPLING_PARAMS.format(
            fields="\n".join(_sampling_fields()),
            refused=", ".join(f"`{field.name}`" for field in _FIELDS if field.name not in _RULES),
            structured=_table(StructuredOutputsParams, flags=False),
            options=_table(RequestOptions, flags=False, without=("arrival",)),
        ),
        "models.md": _SUPPORTED_MODELS.format(models="\n".join(_models())),
    }


def _parsers(rows: Mapping[str, ToolFormat] | Mapping[str, ReasoningRow]) -> Iterator[str]:
    for name, row in rows.items():
        words = " ".join(f"`` {_cell(word)} ``" if "`" in word else f"`{_cell(word)}`" for word in row.template)
        yield f"| `{name}` | {row.models} | {words} |"


def _sampling_fields() -> Iterator[str]:
    texts = field_texts(SamplingParams.__doc__ or "")
    for field in _FIELDS:
        if field.name in _RULES:
            cells = (_allowed(field.name), _where(field.name), texts[field.name])
            yield f"| `{field.name}` | {_default(field)} | {' | '.join(map(_cell, cells))} |"


def _models() -> Iterator[str]:
    errors: dict[str, list[float]] = {}
    for row in json.loads(_MEASURED.read_text()).values():
        errors.setdefault(row["architecture"], []).append(row["error"])
    for name, model in MODELS.items():
        if is_custom(model):
            continue
        gguf, found = model.gguf_architecture, errors.get(name, [])
        about = (inspect.getdoc(inspect.getmodule(model)) or "").partition("\n\n")[0]
        measured = f"{len(found)} | {max(found):.0e}" if found else "0 | "
        repositories = "<br>".join(f"`{repository}`" for repository in HUB_IDS.get(name, ()))
        yield f"| `{name}` | {f'`{gguf}`' if gguf else ''} | {repositories} | {measured} | {_cell(about)} |"


def _table(cls: type, *, flags: bool = True, without: Sequence[str] = ()) -> str:
    """A row for each field of a dataclass but those that users do not give."""
    texts, rows = class_texts(cls), ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(cls):
        if field.name in without:
            continue
        name = f"`{field.name}`" + (f"<br>`--{field.name.replace('_', '-')}`" if flags else "")
        rows.append(f"| {name} | {_default(field)} | {_cell(texts[field.name])} |")
    return "\n".join(rows)


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if dataclasses.is_dataclass(value):
        return "its defaults"
    return "" if value == () else f"`{getattr(value, 'name', None) or repr(value)}`"


def _allowed(name: str) -> str:
    """What the field's own error says is allowed."""
    try:
        _RULES[name](name, object())
    except RequestError as error:
        return str(error).partition(" must be ")[2].partition(", got ")[0]
    raise AssertionError(f"{name} takes anything")


def _where(name: str) -> str:
    requests = {"C": CompletionRequest, "H": ChatRequest, "R": ResponsesRequest}
    letters = ["P", *(letter for letter, model in requests.items() if name in model.model_fields)]
    return " ".join([*letters, "L"] if name in (*SAMPLING_OPTIONS, *OUTPUT_OPTIONS) else letters)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write_first_hour() -> None:
    """Runs the rows of scripts.first_hour and puts their table into its document."""
    llm = LLM(first_hour.CHECKPOINT, skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = first_hour.table(llm, Path(folder).resolve())
    document = DOCS / "coming_from_vllm.md"
    document.write_text(first_hour.placed(document.read_text(), rows))


if __name__ == "__main__":
    for file, content in documents().items():
        (DOCS / file).write_text(content)
    write_first_hour()
