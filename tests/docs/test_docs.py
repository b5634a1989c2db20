"""What the documents name exists: files, links, commands, options, names of Python, and the sentences of errors."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxengine
from benchmarks.harness import BENCHMARKS, parser_of
from jaxengine.api.not_built import NOT_BUILT as METHODS_OF_VLLM
from jaxengine.commands.cli import build_parser
from jaxengine.config.engine_config import CompilationConfig, EngineConfig
from jaxengine.config.engine_flags import with_hyphens
from jaxengine.config.features.pooler_config import POOLING_FIELDS, PoolerConfig
from jaxengine.config.vllm_options import NAMES as OPTIONS_OF_VLLM
from jaxengine.pallas_kernels.registry import is_kernel, product_platform_of
from jaxengine.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from jaxengine.requests.beam_search import BeamSearchParams
from jaxengine.requests.output.outputs import RequestMetrics
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.requests.structured.params import StructuredOutputsParams
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import PromptTokensDetails, Usage
from jaxengine.server.http.chat.protocol import ChatRequest
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.server.http.generate import GenerateRequest
from jaxengine.server.http.pooling.protocol import (
    CohereEmbedRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from scripts import kernel_tables, write_docs
from scripts.site_links import with_repository_links
from tests.tables import each_row

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jaxengine", "models", "scheduler", "sharding", "pallas_kernels")
REPOSITORY = "https://github.com/jaxengine/jaxengine"
FOLDERS = (*PACKAGES, "tests", "docs", "benchmarks", "scripts", "examples")
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md")
)
# The changelog tells of names as they were.
PRESENT = [name for name in DOCUMENTS if name != "CHANGELOG.md"]
# Options of other programs: pip's, pytest's (tests/conftest.py), those of our scripts and benchmarks.
OTHER_OPTIONS = {
    *("--no-deps", "--thorough", "--pool-operations", "--xla-force-host-platform-device-count"),
    *("--build-arg", "--rm"),
    *("--budget-s", "--platform", "--tiny", "--out"),
    *("--branch", "--depth", "--run", "--only", "--data-binary"),
    # Of Dynamo's workers, which jaxengine.server.dynamo takes.
    *("--namespace", "--component", "--endpoint", "--endpoint-types", "--discovery-backend", "--request-plane"),
    *("--event-plane", "--router-mode"),
}
# Modules that need packages which no environment of the project has, and their files.
NEEDS_OTHERS = {f"jaxengine.rl.{name}": f"jaxengine/rl/{name}.py" for name in ("tunix", "marin")}
# Words of vLLM that coming_from_vllm.md explains and that are not ours.
OF_VLLM = {
    "from_engine_args",
    "add_cli_args",
    "from_cli_args",
    "register_model",
    "check_health",
    "model_class",
    "token_embed",
    "token_classify",
}
# Fields of config.json and their values.
OF_CONFIGS = {
    "do_lower_case",
    "model_max_length",
    "modality_config",
    "query_prefix",
    "document_prefix",
    "colbert_linear",
    "lora_adaptations",
    "sparse_linear",
    "pool_tokens",
    "classifier_pooling",
    "use_bidirectional_attention",
    *POOLING_FIELDS,
    "is_causal",
    "multi_label_classification",
}


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def code_spans(text: str) -> list[str]:
    """What stands in single backticks, over line ends too."""
    without_blocks = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", without_blocks)]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


@functools.cache
def known_options() -> set[str]:
    return {word for each in parsers(parser()) for action in each._actions for word in action.option_strings}


def commands(text: str) -> Iterator[list[str]]:
    """Words of every `jaxengine ...` command line, in blocks and in spans."""
    lines = [line for block in blocks(text, "") for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *code_spans(text)]:
        words = line.partition("  #")[0].partition(" | ")
        line = words[2] if words[2].startswith("jaxengine") else words[0]
        found = re.match(r"(?:(?:[A-Z_]+=\S+ )*|\S*/)jaxengine( .+)", line.strip())
        if found:
            yield [word for word in shlex.split(found[1]) if word != "..."]


@functools.cache
def parser() -> argparse.ArgumentParser:
    return build_parser()


def test_written_tables_are_what_the_code_says():
    old = [name for name, text in write_docs.documents().items() if text_of(f"docs/{name}") != text]
    assert not old, f"run python -m scripts.write_docs: {', '.join(old)}"


def test_the_table_of_kernels_has_blackwells_products():
    head, _, *rows = ([cell.strip(" `") for cell in row.split("|")] for row in kernel_tables.operation_rows())
    runs = {row[1]: row[head.index("Blackwell")] for row in rows}
    card = SimpleNamespace(platform="gpu", compute_capability="10.0")
    for op in ("quantized_matmul", "quantized_gated_matmul", "grouped_matmul"):
        assert runs[op] == "kernel" and is_kernel(op, product_platform_of(card)), op


def test_a_package_without_a_docstring_is_named(tmp_path):
    for top in write_docs.TOP_PACKAGES:
        (tmp_path / top).mkdir()
        (tmp_path / top / "__init__.py").write_text('"""What it has. Then more."""\n')
    rows = list(write_docs.package_rows(tmp_path))
    assert rows == [f"| `{top}/` | What it has. |" for top in write_docs.TOP_PACKAGES]
    (tmp_path / "scheduler" / "pages").mkdir()
    (tmp_path / "scheduler" / "pages" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match="scheduler/pages/__init__.py has no docstring"):
        list(write_docs.package_rows(tmp_path))


@each_row("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    text = text_of(name)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, flags=re.MULTILINE)
    local = [link.partition("#")[0] for link in links if not link.startswith(("http:", "https:", "#"))]
    assert not [link for link in local if not ((ROOT / name).parent / link).exists()]
    ours = [link.removeprefix(f"{REPOSITORY}/") for link in links if link.startswith(f"{REPOSITORY}/")]
    assert not [link for link in ours if not is_there(link)]


def is_there(link: str) -> bool:
    """Whether `blob/main/FILE` or `tree/main/FOLDER` of the repository exists."""
    kind, _, rest = link.partition("/main/")
    path = ROOT / rest.partition("#")[0]
    return path.is_file() if kind == "blob" else kind == "tree" and path.is_dir()


def test_the_page_on_pypi_has_no_relative_links():
    links = re.findall(r"\]\(([^)\s]+)\)", text_of("README.md"))
    assert not [link for link in links if not link.startswith("https://")]
    used = set(re.findall(r"\]\[([^\]]+)\]", text_of("README.md")))
    assert used == set(re.findall(r"^\[([^\]]+)\]: \S+$", text_of("README.md"), flags=re.MULTILINE))


def test_the_site_links_to_the_repository():
    text = "[a](../CONTRIBUTING.md#b) [c](../examples) [d](kubernetes) [e](models.md) [f](https://x/../y)"
    assert with_repository_links(text, REPOSITORY) == (
        f"[a]({REPOSITORY}/blob/main/CONTRIBUTING.md#b) [c]({REPOSITORY}/tree/main/examples) "
        f"[d]({REPOSITORY}/tree/main/docs/kubernetes) [e](models.md) [f](https://x/../y)"
    )
    assert f"repo_url: {REPOSITORY}\n" in text_of("mkdocs.yml")


def test_the_site_has_every_page():
    pages = set(re.findall(r"^ +- ([\w.]+\.md)$", text_of("mkdocs.yml"), flags=re.MULTILINE))
    assert pages == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_changelog_has_this_version():
    headings = re.findall(r"^## (.+)$", text_of("CHANGELOG.md"), flags=re.MULTILINE)
    assert headings[0] == "Unreleased" and re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", headings[1])
    assert headings[1].partition(" ")[0] == jaxengine.__version__


@each_row("name", PRESENT)
def test_files_that_are_named_are_there(name):
    named = [span for span in code_spans(text_of(name)) if re.fullmatch(r"[\w.*/-]+", span) and "/" in span]
    named = [span.rstrip("/") for span in named if span.partition("/")[0] in FOLDERS]
    missing = [span for span in named if not list(ROOT.glob(span))]
    assert not missing, missing


@each_row("name", PRESENT)
def test_commands_can_be_given(name):
    wrong = []
    for words in commands(text_of(name)):
        try:
            parser().parse_args(with_hyphens(words))
        except SystemExit as end:
            # A command's bare name stands for the command.
            if end.code and any(word.startswith("-") for word in words):
                wrong.append(words)
    assert not wrong


def test_the_reader_of_commands_finds_them():
    block = "```\nA=b jaxengine chat   # talk\ncat x | jaxengine generate --json\nls\n```\n"
    text = f"`jaxengine serve M`\n{block}`jaxengine`"
    assert list(commands(text)) == [["chat"], ["generate", "--json"], ["serve", "M"]]


@each_row("name", PRESENT)
def test_options_that_are_named_exist(name):
    lines = with_hyphens(re.findall(r"(?<![\w-])--[a-z][\w-]*\w\b(?!-)", text_of(name)))
    assert not set(lines) - known_options() - OTHER_OPTIONS - options_of_benchmarks()


@functools.cache
def options_of_benchmarks() -> set[str]:
    """What `python -m benchmarks NAME` takes, and tests' own commands, which are read from their sources."""
    files = (*(ROOT / "tests").glob("*.py"), *(ROOT / "tests").rglob("matrix.py"))
    sources = "".join(path.read_text() for path in files)
    parsers = map(parser_of, BENCHMARKS)
    found = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    return found | set(re.findall(r'"(--[a-z][\w-]+)"', sources))


@each_row("name", PRESENT)
def test_python_in_blocks_fits(name):
    for block in blocks(text_of(name), "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
                for alias in node.names:
                    assert found(f"{node.module}.{alias.name}"), alias.name
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("LLM", "AsyncLLM"):
                given = {keyword.arg for keyword in node.keywords}
                assert given <= {field.name for field in dataclasses.fields(EngineConfig)} | {
                    "devices",
                    "mesh",
                    "mesh_axes",
                }


@each_row("name", PRESENT)
def test_dotted_names_resolve(name):
    spans = [span for span in code_spans(text_of(name)) if re.fullmatch(r"\w+(\.\w+)+(\(\))?", span)]
    dotted = [span.removesuffix("()") for span in spans if span.partition(".")[0] in (*PACKAGES, "tests", "benchmarks")]
    files = (".py", ".md", ".json", ".proto", ".yaml", ".npz")
    names = [span for span in dotted if not span.endswith(files) and not span.startswith("jaxengine.v1")]
    assert not [name for name in names if not found(name)]


def found(dotted: str) -> bool:
    """Whether a module, or an attribute of one, has this name."""
    module, _, rest = dotted.rpartition(".")
    if module in NEEDS_OTHERS:
        return any(
            getattr(each, "name", None) == rest for each in ast.parse((ROOT / NEEDS_OTHERS[module]).read_text()).body
        )
    try:
        importlib.import_module(dotted)
        return True
    except ImportError:
        pass
    try:
        return hasattr(importlib.import_module(module), rest)
    except ImportError:
        holder, _, name = module.rpartition(".")
        return hasattr(getattr(importlib.import_module(holder), name, None), rest)


@each_row(
    "name",
    [
        "coming_from_vllm.md",
        "pooling_models.md",
        "quickstart_gpu.md",
        "quickstart_tpu.md",
        "troubleshooting.md",
        "README.md",
    ],
)
def test_words_of_options_and_requests_exist(name):
    classes = (EngineConfig, ServerConfig, CompilationConfig, SamplingParams, RequestOptions, StructuredOutputsParams)
    classes += PoolingParams, PoolerConfig, BeamSearchParams
    known = (
        {field.name for cls in classes for field in dataclasses.fields(cls)}
        | OPTIONS_OF_VLLM
        | OF_VLLM
        | OF_CONFIGS
        | {*METHODS_OF_VLLM}
    )
    models = CompletionRequest, ChatRequest, EmbeddingRequest, CohereEmbedRequest, ScoreRequest, RerankRequest
    for model in (*models, GenerateRequest):
        known |= set(model.known_fields())
    known |= {
        *TOOL_PARSERS,
        *REASONING_PARSERS,
        *jaxengine.__all__,
        *EngineConfig().__dict__,
        *Usage.model_fields,
        *PromptTokensDetails.model_fields,
        *dir(RequestMetrics),
        *inspect.signature(jaxengine.LLM.generate).parameters,
        "bytes_only",
        "finish_reason",
        "stop_reason",
    }
    words = [span for span in code_spans(text_of(f"docs/{name}")) if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", span)]
    folders = {path.name for package in FOLDERS for path in (ROOT / package).glob("*")} | set(FOLDERS)
    assert not set(words) - known - folders


def messages() -> str:
    """Every string of the sources, one a line, with "..." where a value goes."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[sd]", "...", node.value))
                elif isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                    found.append("".join(map(str, parts)))
    return "\n".join(found)


def test_sentences_of_errors_are_those_of_the_code():
    quoted = re.findall(r"^> `(.+)`$", text_of("docs/troubleshooting.md"), flags=re.MULTILINE)
    said = messages()
    lines = [re.sub(r"^\w+Error: ", "", line) for line in quoted]
    pieces = [piece for line in lines for piece in re.split(r"\.\.\.|; allowed: |; ", line)]
    pieces = [piece.strip(" :)") for piece in pieces if len(piece.strip()) >= 10]
    assert len(quoted) >= 15 and len(pieces) >= 20
    assert not [piece for piece in pieces if piece not in said and not re.fullmatch(r"\w+ is", piece)]
