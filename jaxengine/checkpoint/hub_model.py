"""Selects the files of a hub repository that a model needs: configuration and tokenizer first, then the weights they
name.

Duplicate weights (`consolidated.safetensors` of a model that also has transformers' files, `original/`, pickles) are
not downloaded. A GGUF file of a repository is named as org/name/FILE.gguf, or by its quantisation as org/name:Q4_K_M.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from jaxengine.checkpoint.hub import download, list_files
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.config.readers.hf import config_file
from jaxengine.models.params.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MISTRAL, read_object
from jaxengine.models.weights.formats.safetensors import CONSOLIDATED, PICKLE_SUFFIXES, USUAL, files_of
from jaxengine.models.weights.gguf.split import PART

OTHER_FILES = (
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "tokenizer.model.v*",
    "*.tiktoken",
    "tiktoken.model",
    "vocab.txt",
    "merges.txt",
    "sentencepiece.bpe.model",
)
# Weights of a pooling model's modules, which sentence-transformers writes into separate folders.
_MODULES = "[0-9]_*/model.safetensors"
# Adapters of a pooling model's tasks (Jina embeddings v5).
_TASKS = (f"adapters/*/{ADAPTER_CONFIG}", f"adapters/*/{ADAPTER_WEIGHTS}")
_QUANTISED = re.compile(r"([^/:]+/[^/:]+):([A-Za-z0-9_]{1,32})")
# Files of a split model.
_PARTS = f"-{'[0-9]' * 5}-of-{'[0-9]' * 5}.gguf"
_COMMIT = re.compile(r"[0-9a-f]{40}")


def download_model(name: str, config: EngineConfig) -> Path:
    """Download a hub model unless it is already there; return its folder, or its GGUF file if `name` names one.

    name: org/name, org/name/FILE.gguf or org/name:QUANTISATION. For a GGUF model in several files, the first is
    returned and all are downloaded. config: supplies revision, download_dir, hf_token, config_format and load_format.
    With load_format "dummy" no safetensors are downloaded.

    Raises:
      ConfigError: `name` is not a hub model, the hub refuses it, it has no configuration or no safetensors, or not
        exactly one GGUF model fits.
      ModelFileError: the index of its weights is invalid.
    """
    if quantised := _QUANTISED.fullmatch(name):
        repository, quantisation = quantised.groups()
        stem = f"*[-._]{quantisation}"
        return _gguf(repository, (f"{stem}.gguf", f"{stem}{_PARTS}"), name, config)
    parts = name.split("/")
    if len(parts) > 2 and name.endswith(".gguf") and all(parts) and ".." not in parts:
        file = "/".join(parts[2:])
        first = PART.fullmatch(file)
        pattern = glob.escape(first["stem"]) + _PARTS if first and int(first["number"]) == 1 else glob.escape(file)
        return _gguf("/".join(parts[:2]), (pattern,), name, config)
    folder = from_hub("model", name, OTHER_FILES, config.revision, config)
    if not (folder / (file := config_file(folder, config.config_format))).exists():
        problem = f"model {name!r} has no {file} on the hub"
        raise ConfigError.because("model", problem, f"name a GGUF file of it, as {name}/FILE.gguf or {name}:Q4_K_M")
    if config.load_format == "dummy":
        return folder
    # All files of one commit, even if the branch moves in the meantime.
    revision = folder.name if _COMMIT.fullmatch(folder.name) else config.revision
    # An adapter for prompts with sounds.
    adapters = [ADAPTER_WEIGHTS] if (folder / ADAPTER_CONFIG).exists() else []
    stems = (CONSOLIDATED,) if config.load_format == MISTRAL else (USUAL, CONSOLIDATED)
    for stem in stems:
        weights, single = _weight_files(folder, stem), files_of(stem)[0]
        folder = from_hub("model", name, [*weights, *adapters, _MODULES, *_TASKS], revision, config)
        if weights != [single] or (folder / single).exists():
            return folder
    raise _without_weights(name, revision, config, stems[0])


def from_hub(param: str, name: str, patterns: Sequence[str], revision: str | None, config: EngineConfig) -> Path:
    """Download matching files of a hub id; return their folder.

    param: option that names it. patterns: globs. revision: branch, tag or commit; None for the main branch. config:
    supplies download_dir and hf_token. Raises ConfigError for a name that is not org/name, and if the download fails.
    """
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        what = "a folder with a tokenizer.json" if param == "tokenizer" else "a GGUF file, a Hugging Face folder"
        raise ConfigError.because(param, f"there is no {param} at {name!r}", f"name {what}, or a hub id like org/name")
    return download(param, name, patterns, revision=revision, cache_dir=config.download_dir, token=config.hf_token)


def _weight_files(folder: Path, stem: str) -> list[str]:
    """Return glob patterns of the weight files, sorted: the shards that weight_map of the index in the folder lists, or
    the single file without an index.

    stem: beginning of their names. Raises ModelFileError for an index that cannot be read.
    """
    single, index = files_of(stem)
    shards = (read_object(folder, index) or {}).get("weight_map")
    if not isinstance(shards, dict):
        return [single]
    return sorted({glob.escape(file) for file in shards.values() if isinstance(file, str)})


def _without_weights(name: str, revision: str | None, config: EngineConfig, stem: str) -> ConfigError:
    """Return the ConfigError for a repository without safetensors, which names its pickle weights if it has some. Asks
    the hub for the list of files.

    name, revision: name and revision of the repository. config: supplies the hub's token. stem: beginning of the names
    of the files.
    """
    files = list_files(name, revision=revision, token=config.hf_token)
    at_top = [file for file in files if "/" not in file and file != "training_args.bin"]
    pickles = [file for file in at_top if file.endswith(PICKLE_SUFFIXES)]
    if pickles:
        problem = f"model {name!r} has pickle weights only ({pickles[0]}), which can run code and are never read"
        return ConfigError.because("model", problem, "convert them to safetensors, and name the folder or a revision")
    problem = f"model {name!r} has neither {' nor '.join(files_of(stem))} on the hub"
    return ConfigError.because("model", problem, "name a model with safetensors; pickle weights are never read")


def _gguf(repository: str, patterns: Sequence[str], name: str, config: EngineConfig) -> Path:
    """Download the GGUF files of a repository that match `patterns`; return the file, or the first one of a split
    model.

    name: the model as the user named it, for errors. Raises ConfigError unless exactly one model matches.
    """
    folder = from_hub("model", repository, patterns, config.revision, config)
    every = (path for path in folder.rglob("*.gguf") if path.is_file())
    fitting = (path for path in every if any(fnmatch(str(path.relative_to(folder)), one) for one in patterns))
    found = sorted(path for path in fitting if not ((part := PART.fullmatch(path.name)) and int(part["number"]) > 1))
    if len(found) != 1:
        files = ", ".join(str(path.relative_to(folder)) for path in found[:8]) or "none"
        problem = f"model {name!r} must be one GGUF file of {repository}, and these fit: {files}"
        raise ConfigError.because("model", problem, f"name the file itself, as {repository}/FILE.gguf")
    return found[0]
