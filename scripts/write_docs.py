"""Write the pages of docs/ that follow from the code: options, sampling parameters, models, parsers, packages.

    python -m scripts.write_docs

Names, defaults and meanings come from the dataclasses and their docstrings, allowed values from the errors that an
invalid value raises, so that nothing is written twice. The table in coming_from_vllm.md is what the rows of
scripts/first_hour.py gave when they were run. tests/docs fails when a file differs from what this writes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxengine.api.llm import LLM
from jaxengine.checkpoint.custom_models import is_custom
from jaxengine.commands.cli import OUTPUT_OPTIONS, SAMPLING_OPTIONS
from jaxengine.config.command_line import class_texts
from jaxengine.config.engine_config import CompilationConfig, EngineConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import READ_AS
from jaxengine.models.config.readers.hf import hf_architecture, with_usual_fields
from jaxengine.models.families import declared
from jaxengine.models.model_classes import MODELS
from jaxengine.models.registry import model_for_hf, read_hf
from jaxengine.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, ReasoningRow, ToolFormat
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import _RULES, SamplingParams
from jaxengine.requests.structured.params import StructuredOutputsParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.responses.protocol import ResponsesRequest
from jaxengine.server.ray.options import RayConfig
from scripts import first_hour, kernel_tables
from scripts.hub_ids import HUB_IDS
from scripts.model_names import read_names

# In the order of the import arrows, the user's side first.
TOP_PACKAGES = ("jaxengine", "scheduler", "models", "sharding", "pallas_kernels")
DOCS = Path(__file__).resolve().parents[1] / "docs"
_MEASURED = DOCS.parent / "benchmarks" / "results" / "families.json"
_RECORDED = DOCS.parent / "tests" / "fixtures" / "models"
_FIELDS = dataclasses.fields(SamplingParams)

_OPTIONS = """# Options
<!-- Written by scripts/write_docs.py from the code; change that. -->

## Engine

Engine options are keyword arguments of `LLM` and `AsyncLLM`, fields of `EngineConfig` and `EngineArgs` (vLLM's
name), and flags of `jaxengine generate`, `chat`, `demo` and `serve`. The most common ones are `model` (a Hugging Face
id, a checkpoint folder or a GGUF file), `dtype`, `max_model_len`, `max_num_seqs`, `gpu_memory_utilization` or
`kv_cache_memory_bytes`, `tensor_parallel_size` and `compile_cache_dir`.

- `None` means that the model and the device decide.
- `--no-` in front of a flag's name switches it off.
- Sizes may be written `4k` (4,000), `4K` (4,096) or `4G`.
- `-tp`, `-pp`, `-dp`, `-ep`, `-n` and `-cc` are short forms. The model may be given without `--model`.
- `--config FILE` reads options from YAML (`max-model-len: 4096`). The command line overrides the file.

An option that is unknown, invalid or not built yet raises a `ConfigError` that names it. Options of vLLM that cannot
change an answer are accepted, and the log says what applies instead.

{engine}

### compilation_config

A `CompilationConfig`, a dict of its fields, or JSON on the command line.

{compilation}

## Server

Flags of `jaxengine serve` in addition to the engine's, and fields of `ServerConfig`.

{server}

## Ray Serve

Arguments of `jaxengine.server.ray_serve:app` in addition to those of the engine and of the server
([Ray Serve](serving.md#ray-serve)).

{ray}
"""

_SAMPLING_PARAMS = """# Sampling parameters
<!-- Written by scripts/write_docs.py from the code; change that. -->

These are the fields of `SamplingParams`. Names and defaults are vLLM's. An invalid value raises a `RequestError` that
names the field, the value and what is allowed, before anything changes. A model's `generation_config.json` may set
other defaults for requests that leave a field out: `temperature`, `top_p`, `top_k`, `min_p`, the three penalties,
`max_new_tokens` (here `max_tokens`) and `skip_special_tokens`. `generation_config="vllm"` ignores these. In any case
its `eos_token_id` ends answers, and its `suppress_tokens` are never generated, which raw log-probabilities do not show.
Its other fields, which belong to decoding in transformers (`do_sample`, `num_beams`, `typical_p` and so on), are not
read, as in vLLM.

The column "where" says which interfaces have the field: **P** Python, **C** `/v1/completions`,
**H** `/v1/chat/completions`, **R** `/v1/responses`, **L** flags of `jaxengine generate`. gRPC uses its own names, see
`jaxengine/server/grpc/inference.proto`.

| field | default | allowed | where | meaning |
|---|---|---|---|---|
{fields}

Not supported yet, and refused when set: {refused}.

## Logits processors

A parameter of your own is a class with declared columns and a function of the logits, traced by JAX:

```python
class MaxRepeats(LogitsProcessor):
    columns = {{"max_repeats": Column(0, "times that a token may occur; 0 for no limit", low=0, high=1000)}}
    uses_counts = True

    @staticmethod
    def process(logits, columns, vocab):
        limit = columns["max_repeats"]
        return jnp.where((limit > 0) & (vocab.output_counts >= limit), -jnp.inf, logits)


llm = LLM(model, logits_processors=[MaxRepeats])
llm.generate(prompt, SamplingParams(extra_args={{"max_repeats": 2}}))
```

`jaxengine serve --logits-processors module:Class` imports the class in every process of the server, so the module must
be on `PYTHONPATH`; a request has the parameters in `vllm_xargs`, over gRPC in `decoding.extra_args`. Unlike vLLM's,
`process` is compiled into the samplers at start and takes arrays of JAX:

- `logits` f32[S, C], a row for each token to choose, after masks and `logit_bias`, before penalties and temperature.
  With tensor parallelism each device has C = V / n tokens of the vocabulary.
- `columns`: the parameters of the rows, [S, 1] each; float, int and bool defaults make f32, i32 and bool.
- `vocab.token_ids` i32[C]: the ids of these tokens. `vocab.output_counts` i32[S, C] and `vocab.in_prompt` bool[S, C]:
  what the output and the prompt have of them, if the class sets `uses_counts`.

A row whose request does not name one of the class's parameters keeps its logits, and forbidden tokens stay forbidden.
A step without such a row skips the processor. The result must depend on these arguments alone: then draws are
reproducible by their seed, and drafts change no token. The file of a class, and files of its folder that it imports,
are part of the key of compiled programs; the programs of a class that is made inside a function are not kept on disk.
`examples/logits_processor.py` runs one.

## Sequences that are not repeated

A request to any engine may have `extra_args={{"ngram_size": 30, "window_size": 90, "whitelist_token_ids": [...]}}`, in
`vllm_xargs` over HTTP: no token completes a sequence of `ngram_size` tokens that is among the last `window_size` tokens
of the output (100 if it is not given) already, unless the token is in the list. These are the parameters of vLLM's
`NGramPerReqLogitsProcessor`, with which it serves DeepSeek-OCR; its name in `logits_processors` is taken and changes
nothing. Such a request has no drafts, and its next step waits for its last token.

## structured_outputs

A `StructuredOutputsParams` or a dict of its fields. Give exactly one of `json`, `regex`, `choice`, `grammar` and
`json_object`.

{structured}

## Request options

Keyword arguments of `AsyncLLM.generate`. `LLM.generate` takes `priority` and `client`, one value per prompt. Over HTTP,
`priority` and `timeout` are fields of the request, and the client is the holder of the API key.

{options}
"""

_MODEL_NAMES = """# Models by name
<!-- Written by scripts/write_docs.py from scripts/model_names.json; change that. -->

{count} models under the names that they have on the hub, with the class that reads each. For every one the fields of
its config.json that decide its shape are kept in `scripts/model_names.json`. `tests/models/config/test_model_names.py`
reads them, and counts the parameters of the model that comes of it against the number that the model is known by. The
fields were written down by hand, not downloaded. Weights of this size were not run for this table: what is computed is
compared by family, on small checkpoints ([Supported models](models.md)). Other sizes and fine-tunes of a class work as
well. Some older repositories hold pickles alone, which are not read: save those as safetensors first.

| models | class | parameters | input |
|---|---|---:|---|
{models}
"""

_SUPPORTED_MODELS = """# Supported models
<!-- Written by scripts/write_docs.py from the code; change that. -->

A checkpoint is served if its `config.json` names one of these architectures, or if it is a GGUF file of an architecture
in the second column. Others are refused with this list. [Models by name](model_names.md) lists models under the names
that they have on the hub.

Each family is compared with Hugging Face transformers in float32, on tiny checkpoints of odd shapes recorded by
`python -m tests.fixtures.record models`. The comparison covers the logits of whole prompts, of chunks and of single
tokens. "Error" is the largest difference divided by the largest logit; tests allow 1e-4
(`tests/models/families/test_golden.py`). `python -m tests.models.families.matrix --json
benchmarks/results/families.json` measures it and also serves checkpoints from whole engines, with images and sounds in
prompts where a model takes them: alone, in batches, in chunks, preempted, with prefix hits, on two devices, rounded to
int8 and e4m3. The answers of encoders and pooling models are compared alike, by their largest difference of the largest
value. The file says for which checkpoints and in which of these ways that was done; of architectures without an error
here, it measured no logits. Tests compare all of them, and whole engines with images in
`tests/jaxengine/engine/test_pictures.py`, with sounds in `test_sounds.py` and `test_prompt_sounds.py` there.
"Checkpoints" counts the recorded ones.

The repositories are examples that publish a configuration and weights in bfloat16, float16 or float32 safetensors
(gpt-oss: MXFP4). Fine-tunes of them work as well. They were not downloaded for this table: the comparison is of the
family, on the recorded checkpoints. Quantised checkpoints are supported too: [Quantised weights](quantization.md).

| architecture | GGUF | repositories | checkpoints | error | description |
|---|---|---|---:|---:|---|
{models}

**Weights** are read from safetensors (one or several files; MXFP4 in gpt-oss), from GGUF (one or several files, [all
types](quantization.md#gguf-files) that weights are stored in; dequantised at load, or kept as stored with
`quantization="gguf"`), or from the output of `jaxengine convert`. Models run in float32 or bfloat16, also with
[quantised weights](quantization.md) and [adapters](lora.md). A family with a vision tower takes [images and
videos](media.md#processing), unless its row says that it is served as text or that its text part alone is read.
[Sounds](audio.md) says which models transcribe and which take sounds in prompts.

**Text models under a tower.** LLaVA, LLaVA-NeXT, LLaVA-OneVision, InternVL, Idefics 2 and 3, Ovis 2, Aya Vision,
GOT-OCR, Janus, VideoLLaMA 3, LightOnOCR, Qwen2-Audio, Voxtral, Audio Flamingo, Granite Speech and others whose class in
transformers takes any text model take any decoder of this table, by `model_type` in `text_config`. The class is then
shown with that of the text, as `LlavaForConditionalGeneration[GemmaForCausalLM]`. Logits are scaled and capped as
without the tower, as by transformers 4 and vLLM; transformers 5 leaves that out, and so does Aya Vision here.

**Sparse attention** of DeepSeek-V3.2 and GLM-5 ([How it works](architecture.md#the-kv-pool-and-attention)) reads the
keys that its indexer selects, and MiniMax M3's the blocks of keys, in [kernels](kernels.md) on TPUs and on NVIDIA cards
of compute capability 8.0 to 10.3 and 12; on others and on CPUs as plain XLA. What a kernel does not take runs as plain
XLA, too, and the log says so: on all, indexers with pooled keys; on TPUs, pages whose size is no multiple of 8, blocks
that share no such multiple with the pages, several KV heads whose rows do not begin at multiples of 128 elements,
indexers with a number of heads that is no multiple of 8; on GPUs, float32, caches with scales of tokens, widths that
are no multiple of 8, indexers with more than 128 heads.

**ALiBi** (BLOOM, MPT, Baichuan-13B, Jais, Falcon's `rw` models; Press et al. 2021, arXiv:2108.12409) takes the distance
of a key, times a slope of the head, off each logit. Attention then runs as plain XLA on all platforms. Slopes are
float32: transformers rounds Falcon's to bfloat16, and its "eager" attention, with which it is not compared, adds them
twice.
MPT with `multiquery_attention`, `qk_ln` or `alibi` false is refused, and so is Baichuan 2. Slopes
follow `alibi_bias_max` (16 in MPT-7B-StoryWriter), which transformers leaves at 8.
Baichuan, which transformers lacks, is compared with its Llama, to which ALiBi is given as a mask
(`tests/fixtures/recorders/baichuan.py`).

**Rnj-1.5** attends in chunks, most of its layers to the chunk before a token's, too: as plain XLA on all platforms.

**Inkling** adds numbers by distance to the logits of attention, as plain XLA on all platforms. In a step each token has
one for every head and distance: 1 GiB for a layer in bfloat16 with 8,192 tokens, 64 heads and 1,024 distances, which a
smaller `max_num_batched_tokens` lowers. Its repository has no chat template: name one with `chat_template`.

**DeepSeek-V4** stores a key for each block of tokens in pages, and a state of each sequence for its latest tokens ([How
it works](architecture.md#the-kv-pool-and-attention)). In V4-Flash the state takes 12 MB for each of `max_num_seqs`
and `num_state_snapshots`. Pages are smallest with `block_size=128`. The model runs as plain XLA on CPUs and GPUs. TPUs,
drafts, `kv_cache_dtype` fp8 and int8, and GGUF files are refused.

**Tokenizers** are read from `tokenizer.json`, from vocabularies of SentencePiece, tiktoken and BERT, and from GGUF
files; see [Tokenizers](tokenizers.md).

**From the hub**, the configuration, the tokenizer and the weights listed in `model.safetensors.index.json` are
downloaded once; `original/`, pickles and, unless they are the only weights, `consolidated.safetensors` are not. Name a
GGUF file as `org/name/FILE.gguf`, or by its quantisation as `org/name:Q4_K_M`. GGUF files of Mistral,
InternLM 3 and Mixtral call their architecture `llama`, those of the text of GLM-4.1V and GLM-OCR `glm4`, those of
Youtu-LLM, GLM-4.7-Flash and Kimi K2 `deepseek2`, those of GLM-4-9B as first published `chatglm`. Of files of Qwen2-VL,
Qwen2.5-VL and Qwen3-VL (`qwen2vl`, `qwen3vl`, `qwen3vlmoe`), HunYuan VL (`hunyuan_vl`) and PaddleOCR-VL (`paddleocr`)
the text is served, and of those of MiniMax M3 (`minimax-m3`), Muse Glimmer (`muse-glimmer`) and DeepSeek-OCR
(`deepseek2-ocr`). Files of models that pool are `bert` (BERT, RoBERTa, XLM-R, DistilBERT), `nomic-bert`,
`modern-bert`, `jina-bert-v2`, `jina-bert-v3` (without its adapters), `eurobert` and `gemma-embedding`;
[Pooling models](pooling_models.md#gguf-files) has their heads. Those of MiniCPM 3 lack its multipliers.

**Your own family:** register it with `jaxengine.register_model`, as
[examples/custom_model.py](../examples/custom_model.py) does. Every command takes such a file, or a module on
`PYTHONPATH`, as a plugin, and loads it in each of its processes; on several hosts the name must be there on each:

```
jaxengine serve FOLDER --plugin examples/custom_model.py   # may be repeated; in Python LLM(FOLDER, plugins=[...])
```

A package that is installed needs no flag. One line in its pyproject.toml names each model's class, or a function that
registers several:

```
[project.entry-points."jaxengine.models"]
OwnForCausalLM = "own_models:OwnForCausalLM"
```

A plugin is code with all of the engine's rights: name only what you would run. No request can name one. Steps of such
models are compiled at every start. To add a family for everybody, see [Contributing](../CONTRIBUTING.md).
"""

_PARSERS = """# Tool calls and reasoning
<!-- Written by scripts/write_docs.py from the code; change that. -->

Each model writes tool calls and reasoning in its own format. `jaxengine serve --enable-auto-tool-choice
--tool-call-parser NAME` extracts tool calls from answers, and `--reasoning-parser NAME` extracts reasoning. The names
are vLLM's. Both are off by default; the answer is then the text as the model wrote it.

`auto` takes the parser whose words (last column) all occur in the model's chat template, and among several the one with
the most words. The log says which. If none matches, the log says so and the parser stays off.

**Tool calls** stream as they are generated. Text that only resembles a call is content, and nothing that the model
writes is lost except the format's own markup. Where arguments are plain text (XML), the parameter's schema decides the
type: a string stays a string whatever it looks like. A forced call (`tool_choice` "required", or a function's name)
follows a JSON schema in every format; gpt-oss, Beam, Muse and Inkling write it in their own format. gpt-oss may also
address one of the request's tools without the prefix `functions.`.

**Reasoning and structured output.** With a reasoning parser, structured output and forced calls begin where the
reasoning ends. Until then the model is unconstrained, and its tokens are the same as without structured output. A model
that may skip reasoning either opens its reasoning or follows the structure at once. If the prompt has already closed
the reasoning, as templates do when thinking is switched off, the structure applies from the first token. An output that
ends during reasoning has no content, but some models call a tool without closing their reasoning: the beginning of a
call of one of the request's tools ends it, as in vLLM, and the call streams. Reasoning that only mentions the words of
a call, without the name of such a tool, goes on. Without a server, the engine option `structured_outputs_config` with
`{{"reasoning_parser": NAME}}` does the same, and so do `reasoning_end` and `reasoning_begin` of one request's
[structured_outputs](sampling_params.md#structured_outputs).

**Reasoning and stop strings.** With a reasoning parser, `stop` (`stop_sequences` in /v1/messages) is looked for only in
the answer, which begins at the first character that is not white space after the reasoning; a stop string may begin in
that white space, but not in the reasoning. `"stop_in_reasoning": true` in a request of /v1/chat/completions,
/v1/responses or /v1/messages looks for it everywhere, for example to stop at `</think>`. An output without reasoning is
an answer from its beginning. Of gpt-oss the answer is the message of the channel final, of Inkling with tools the one
of the kind text. Stop token ids and the end of sequence end an output anywhere. /v1/completions, gRPC and Python have
no parser and look for `stop` everywhere, unless `stop_after` of Python's [SamplingParams](sampling_params.md) names the
words around the reasoning.

**A limit of the reasoning.** `thinking_token_budget` of /v1/chat/completions, /v1/responses and /v1/messages, and
`thinking.budget_tokens` of /v1/messages, limit the reasoning of a server with a reasoning parser: after so many tokens
the format's closing words are written, whatever the model would write, and the answer begins. 0 closes the reasoning at
once, -1 stands for no limit. Until then the tokens are the same as without a limit. Reasoning that the model ends
itself, and outputs without reasoning, are left alone. Of gpt-oss, a first message of the channel analysis is limited.
In Python, `thinking_words` of [SamplingParams](sampling_params.md) names the words. Drafts are not used for such a
request.

## --tool-call-parser

| name | models | words of the chat template, for `auto` |
|---|---|---|
{tools}

## --reasoning-parser

| name | models | words of the chat template, for `auto` |
|---|---|---|
{reasoning}
"""

_PACKAGES = """# Map of the packages
<!-- Written by scripts/write_docs.py from the docstrings of the packages; change those. -->

Every package with the first sentence of its docstring. `tests/test_rooms.py` says which package may import which, and
[How it works](architecture.md) how they work together. `tests/` has the same packages.

| package | contents |
|---|---|
{packages}
"""


def documents() -> dict[str, str]:
    """Return the content of each generated file, by its name in docs/."""
    return {
        "options.md": _OPTIONS.format(
            engine=_table(EngineConfig),
            compilation=_table(CompilationConfig, flags=False),
            server=_table(ServerConfig),
            ray=_table(RayConfig, flags=False),
        ),
        "parsers.md": _PARSERS.format(
            tools="\n".join(_parsers(TOOL_PARSERS)), reasoning="\n".join(_parsers(REASONING_PARSERS))
        ),
        "sampling_params.md": _SAMPLING_PARAMS.format(
            fields="\n".join(_sampling_fields()),
            refused=", ".join(f"`{field.name}`" for field in _FIELDS if field.name not in _RULES),
            structured=_table(StructuredOutputsParams, flags=False),
            options=_table(RequestOptions, flags=False, without=("arrival", "owner")),
        ),
        "models.md": _SUPPORTED_MODELS.format(models="\n".join(_models())),
        "model_names.md": _model_names(),
        "kernels.md": kernel_tables.page(),
        "packages.md": _PACKAGES.format(packages="\n".join(package_rows(DOCS.parent))),
    }


def package_rows(root: Path) -> Iterator[str]:
    """Yield a table row for each package under `root`: its folder and the first sentence of its docstring.

    Raises ValueError for a package without a docstring.
    """
    for top in TOP_PACKAGES:
        for path in sorted((root / top).rglob("__init__.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            folder = path.parent.relative_to(root)
            if not docstring:
                raise ValueError(f"{folder}/__init__.py has no docstring, which is its line in docs/packages.md")
            sentence = re.split(r"(?<=\.)\s", docstring.partition("\n\n")[0], maxsplit=1)[0]
            yield f"| `{folder}/` | {_cell(sentence)} |"


def _parsers(rows: Mapping[str, ToolFormat] | Mapping[str, ReasoningRow]) -> Iterator[str]:
    """Yield a table row for each parser: its name, its models and the words of the chat template that select it."""
    for name, row in rows.items():
        words = " ".join(f"`` {_cell(word)} ``" if "`" in word else f"`{_cell(word)}`" for word in row.template)
        yield f"| `{name}` | {row.models} | {words} |"


def _sampling_fields() -> Iterator[str]:
    """Yield a table row for each field of SamplingParams that is supported."""
    texts = class_texts(SamplingParams)
    for field in _FIELDS:
        if field.name in _RULES:
            cells = (_allowed(field.name), _where(field.name), texts[field.name])
            yield f"| `{field.name}` | {_default(field)} | {' | '.join(map(_cell, cells))} |"


def _recorded() -> Counter[str]:
    """Return the number of recorded checkpoints of each class, by the class's name."""
    files = (config.read_text() for config in _RECORDED.glob("*/config.json"))
    fields = (ConfigFields(with_usual_fields(json.loads(file))) for file in files)
    return Counter(model_for_hf(hf_architecture(each)).__name__ for each in fields)


def _models() -> Iterator[str]:
    """Yield a table row for each architecture of MODELS, except those that a user registered."""
    errors, recorded = dict[str, list[float]](), _recorded()
    for row in json.loads(_MEASURED.read_text()).values():
        if "error" in row:
            errors.setdefault(row["architecture"].partition("[")[0], []).append(row["error"])
    for name, model in MODELS.items():
        if is_custom(model):
            continue
        gguf, found = model.gguf_architecture, errors.get(name, [])
        read = ", ".join(f"`{each}`" for each in (gguf, *(key for key in READ_AS if READ_AS[key] == gguf)) if each)
        module = inspect.getmodule(model)
        about = (inspect.getdoc(model if module is declared else module) or "").partition("\n\n")[0]
        measured = f"{recorded[name]} | {f'{max(found):.0e}' if found else ''}"
        repositories = "<br>".join(f"`{repository}`" for repository in HUB_IDS.get(name, ()))
        yield f"| `{name}` | {read} | {repositories} | {measured} | {_cell(about)} |"


def _model_names() -> str:
    """Return the content of model_names.md, the page of models by name."""
    rows, count = [], 0
    for names, parameters, config in read_names():
        model = read_hf(config)
        listed, reads = "<br>".join(f"`{name}`" for name in names), "text" if model.tower is None else "text, images"
        size = f"{parameters:.1f} B" if parameters >= 1 else f"{parameters * 1000:.0f} M"
        rows.append(f"| {listed} | `{config['architectures'][0]}` | {size} | {reads} |")
        count += len(names)
    return _MODEL_NAMES.format(count=count, models="\n".join(rows))


def _table(cls: type, *, flags: bool = True, without: Sequence[str] = ()) -> str:
    """Return a Markdown table with a row for each field of a dataclass, except those named in `without`.

    flags: whether to give each field's command-line flag, too.
    """
    texts, rows = class_texts(cls), ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(cls):
        if field.name in without:
            continue
        name = f"`{field.name}`" + (f"<br>`--{field.name.replace('_', '-')}`" if flags else "")
        rows.append(f"| {name} | {_default(field)} | {_cell(texts[field.name])} |")
    return "\n".join(rows)


def _default(field: dataclasses.Field[Any]) -> str:
    """Return a field's default as the text of a table cell; "" for an empty tuple, "its defaults" for a dataclass."""
    value = field.default
    if dataclasses.is_dataclass(value):
        return "its defaults"
    return "" if value == () else f"`{getattr(value, 'name', None) or repr(value)}`"


def _allowed(name: str) -> str:
    """Return what is allowed for a field of SamplingParams, in the words of its rule's error. Raises AssertionError for
    a rule that allows anything.
    """
    try:
        _RULES[name](name, object())
    except RequestError as error:
        return str(error).partition(" must be ")[2].partition(", got ")[0]
    raise AssertionError(f"{name} takes anything")


def _where(name: str) -> str:
    """Return the letters of the interfaces that have a field of SamplingParams, separated by spaces."""
    requests = {"C": CompletionRequest, "H": ChatRequest, "R": ResponsesRequest}
    letters = ["P", *(letter for letter, model in requests.items() if name in model.model_fields)]
    return " ".join([*letters, "L"] if name in (*SAMPLING_OPTIONS, *OUTPUT_OPTIONS) else letters)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write_first_hour() -> None:
    """Run the rows of scripts.first_hour and write their table into docs/coming_from_vllm.md."""
    llm = LLM(first_hour.CHECKPOINT, skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = first_hour.table(llm, Path(folder).resolve())
    document = DOCS / "coming_from_vllm.md"
    document.write_text(first_hour.placed(document.read_text(), rows))


if __name__ == "__main__":
    for file, content in documents().items():
        (DOCS / file).write_text(content)
    write_first_hour()
