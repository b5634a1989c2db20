"""Write the pages of docs/ that follow from the code: options, sampling parameters, models, parsers, packages.

    python -m scripts.write_docs

Names, defaults and meanings come from the dataclasses and their docstrings, allowed values from the errors that an
invalid value raises, so that nothing is written twice; the rest of each page is in scripts/pages. The table in
coming_from_vllm.md is what the rows of scripts/first_hour.py gave when they were run. tests/docs fails when a file
differs from what this writes.
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
_PAGES = Path(__file__).parent / "pages"


def documents() -> dict[str, str]:
    """Return the content of each generated file, by its name in docs/."""
    return {
        "options.md": _page(
            "options.md",
            engine=_table(EngineConfig),
            compilation=_table(CompilationConfig, flags=False),
            server=_table(ServerConfig),
            ray=_table(RayConfig, flags=False),
        ),
        "parsers.md": _page(
            "parsers.md", tools="\n".join(_parsers(TOOL_PARSERS)), reasoning="\n".join(_parsers(REASONING_PARSERS))
        ),
        "sampling_params.md": _page(
            "sampling_params.md",
            fields="\n".join(_sampling_fields()),
            refused=", ".join(f"`{field.name}`" for field in _FIELDS if field.name not in _RULES),
            structured=_table(StructuredOutputsParams, flags=False),
            options=_table(RequestOptions, flags=False, without=("arrival", "owner")),
        ),
        "models.md": _page("models.md", models="\n".join(_models())),
        "model_names.md": _model_names(),
        "kernels.md": kernel_tables.page(),
        "packages.md": _page("packages.md", packages="\n".join(package_rows(DOCS.parent))),
    }


def _page(name: str, **parts: Any) -> str:
    """Return the page `name` of scripts/pages with each part in place of its name in braces, `{name}`."""
    names = "|".join(parts)
    return re.sub(rf"\{{({names})\}}", lambda match: str(parts[match[1]]), (_PAGES / name).read_text())


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
    return _page("model_names.md", count=count, models="\n".join(rows))


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
