"""Opens the model that a user names: its configuration, weights and tokenizer.

It is a GGUF file, a Hugging Face folder, a hub id (downloaded first), or None for the embedded default model. Files are
only read as data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.checkpoint.control_vectors import read_control_vectors
from jaxengine.checkpoint.default_model import GENERATION_DEFAULTS, default_model_path
from jaxengine.checkpoint.hub_model import OTHER_FILES, download_model, from_hub
from jaxengine.checkpoint.input_source import InputSource
from jaxengine.checkpoint.plugins import load_plugins
from jaxengine.checkpoint.pooling import check_width, pooling_of_gguf, read_pooling, with_token_rows
from jaxengine.checkpoint.remote import RemoteFolder
from jaxengine.checkpoint.sentence_transformers import TOKENIZER
from jaxengine.checkpoint.stored_head import with_plain_modules, with_stored_frequencies, with_stored_head
from jaxengine.config.base.files import named_path
from jaxengine.config.base.lengths import given_length
from jaxengine.config.base.stores import is_url
from jaxengine.config.checks import READERS_OF_SAFETENSORS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.features.pooling_model import PoolingModel
from jaxengine.config.inputs.multimodal import AUDIO, IMAGE, MODALITIES
from jaxengine.models.config.compressed import TOKEN_MAP
from jaxengine.models.config.fields import MAX_HEAD_DIM, ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import RopeFactors
from jaxengine.models.config.readers.hf import CONFIG_FILE, config_file, errors_of, read_config_json
from jaxengine.models.config.readers.overrides import UnreadError, check_read, overridden, overridden_metadata
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import MISTRAL, inside, read_object
from jaxengine.models.params.source import WeightSource
from jaxengine.models.quantization.registry import ALIASES, ROUNDED, rounded
from jaxengine.models.registry import build_model, model_for_hf, read_gguf, read_hf
from jaxengine.models.weights.formats.orbax import LAYOUT_FILE
from jaxengine.models.weights.formats.safetensors import CONSOLIDATED, USUAL, SafetensorsCheckpoint, files_of
from jaxengine.models.weights.gguf.file import GGUFFile
from jaxengine.models.weights.gguf.kept import read_formats
from jaxengine.models.weights.load import HEAD, ROPE_FACTORS, ROPE_LONG, ROPE_SHORT
from jaxengine.models.weights.pooled import with_own_files
from jaxengine.models.weights.views.extended import ExtendedSource
from jaxengine.models.weights.views.mistral import under_transformers_names
from jaxengine.models.weights.views.split_latent import SplitLatentSource
from jaxengine.scheduler.base.sampling_fields import ROWS
from jaxengine.tokens.hf_tokenizer import read_hf_tokenizer
from jaxengine.tokens.rust_errors import rust_errors
from jaxengine.tokens.tokenizer import Tokenizer
from jaxengine.tokens.vocabularies.folded import folded_ids

_GENERAL_CLASS = "TokenizersBackend"  # general tokenizer class of transformers 5; transformers 4 has another
_MAX_SUPPRESSED = 1 << 20  # ids of a suppress_tokens, which may be most of a vocabulary
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
CONFIG, GENERATION = "config.json", "generation_config.json"
# Fields of generation_config.json that vLLM applies to requests.
GENERATION_FIELDS = (*ROWS, "max_new_tokens", "skip_special_tokens")


@dataclass(frozen=True, kw_only=True)
class ModelSource(InputSource):
    """Opened model.

    Attributes:
      weights: None for load_format="dummy"; the folder itself for weights in device layout (`convert`).
    """

    weights: WeightSource | Path | None = None

    def close(self) -> None:
        """Close the weight files, if any are open."""
        if self.weights is not None and not isinstance(self.weights, Path):
            self.weights.close()

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Context manager that closes the weight files if its block fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def files_beside_weights(self) -> list[Path]:
        """Return the configuration, tokenizer and template files of a model folder, sorted by path.

        Raises ModelFileError for a link that leads out of the folder.
        """
        found = {file for pattern in OTHER_FILES for file in self.path.glob(pattern)}
        found -= {file for pattern in _WEIGHT_FILES for file in self.path.glob(pattern)}
        for file in found:
            inside(self.path, file.name)
        return sorted(found)


def open_model(config: EngineConfig, *, keep_tables: bool = True) -> ModelSource:
    """Load the plugins, then open the model that `config.model` names, the default one for None. The caller closes the
    result.

    The result's config has the quantization that is asked for, only the towers that requests may use, and at most
    max_model_len positions. A tokenizer that the options name is downloaded if needed, and steering vectors are read.
    keep_tables: with `quantization` gguf, keep the token tables in the file's storage format too.

    Raises:
      ConfigError: there is no such file, folder or hub model, a plugin cannot be imported, or an option
        contradicts the model.
      DefaultModelMissing: no model is named, and the package with the default one is not installed.
      ModelFileError: a file is invalid, or describes an unsupported model.
      OSError: the folder for downloads cannot be written.
    """
    load_plugins(config.plugins)
    path = default_model_path() if config.model is None else find_model(config)
    source = _open_gguf(path, config, keep_tables) if path.is_file() else _open_folder(path, config)
    with source.closing_on_error():
        model = as_asked(source.config, config.quantization, is_gguf=source.path.is_file())
        model = as_it_sees(model, config)
        model = model.up_to(given_length(config.max_model_len) or model.max_position_embeddings)
        vectors = read_control_vectors(config.steering_vectors, model)
        tokenizer = None if config.skip_tokenizer_init else _find_tokenizer(config)
    return replace(source, config=model, control_vectors=vectors, tokenizer_path=tokenizer)


def as_asked(model: ModelConfig, asked: str | None, *, is_gguf: bool = False) -> ModelConfig:
    """Return the model with the quantization that the option requests: as in the checkpoint, or rounded during loading.

    asked: the option `quantization`; None for the checkpoint's. is_gguf: whether it is a GGUF file's, whose only method
    is "gguf". Raises ConfigError if the option contradicts the checkpoint.
    """
    if asked is None:
        return model
    method = "gguf" if is_gguf else getattr(model.quantization, "method", None)
    if method is None and asked in ROUNDED:
        return replace(model, quantization=rounded(asked))
    if method is not None and ALIASES.get(asked, asked) == method:
        return model
    allowed = [method, *(alias for alias, name in ALIASES.items() if name == method)] if method else [*ROUNDED]
    kind = f"quantised as {method!r}" if method else "not quantised"
    problem = f"quantization is {asked[:100]!r}, but the checkpoint is {kind}"
    raise ConfigError.because("quantization", problem, f"leave it out, or give {' or '.join(map(repr, allowed))}")


def as_it_sees(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """Return the model without the towers of modalities that requests may not contain. Layers that attend to images
    alone are then skipped.

    config: supplies limit_mm_per_prompt and language_model_only. Raises ConfigError if they exclude sounds that layers
    of the model attend to.
    """
    if model.tower is not None and model.tower.crosses:
        if config.mm_limit(IMAGE if model.tower.by_place else AUDIO):
            return model
        if model.tower.by_place:
            return replace(model, tower=None, skipped_layers=model.tower.crossed_layers)
        name = "language_model_only" if config.language_model_only else "limit_mm_per_prompt"
        problem = f"{name} leaves no sound, and {model.architecture} attends to one in each request"
        raise ConfigError.because(name, problem, "leave it out")
    sees, hears = (any(map(config.mm_limit, kinds)) for kinds in (MODALITIES, (AUDIO,)))
    used = [tower for tower in model.towers if (hears if tower.hears else sees)]
    return replace(model, tower=next(iter(used), None), sound_tower=used[1] if len(used) > 1 else None)


def _makes_types(folder: Path) -> bool:
    """Whether the token types that a folder's tokenizer makes are inputs of the model.

    They are if `model_input_names` in tokenizer_config.json has "token_type_ids", or, without that list, unless the
    tokenizer_class is transformers 5's general one. The file may be absent. Raises ModelFileError for an invalid one.
    """
    about = read_object(folder, TOKENIZER) or {}
    names = about.get("model_input_names")
    return "token_type_ids" in names if isinstance(names, list) else about.get("tokenizer_class") != _GENERAL_CLASS


def _find_tokenizer(config: EngineConfig) -> Path | None:
    """Return the folder of the tokenizer that the options name, downloaded if needed; None for the model's own.

    config: supplies tokenizer, tokenizer_revision and model. Raises ConfigError if it is not found, and for a revision
    of a tokenizer on this machine; DefaultModelMissing for a revision without a model, if the default one is missing.
    """
    revision = config.tokenizer_revision
    if config.tokenizer is None and revision is None:
        return None
    param, name = ("tokenizer", config.tokenizer) if config.tokenizer is not None else ("model", config.model)
    path = named_path(param, name) if name is not None else default_model_path()
    if path.exists():
        if revision is not None:
            problem = f"tokenizer_revision is {revision!r}, but the tokenizer is on this machine ({path})"
            advice = "leave it out, or name a tokenizer of the hub"
            raise ConfigError.because("tokenizer_revision", problem, advice)
        return path
    assert name is not None
    return from_hub(param, name, OTHER_FILES, revision, config)


def find_model(config: EngineConfig) -> Path:
    """Return the file or folder that `config.model`, which is not None, names; a URL or hub id is downloaded if needed.

    Of a URL only configuration and tokenizer files are downloaded, not the weights. Raises ConfigError for a name that
    cannot be looked up, a revision with a URL, or a failed download; ModelFileError for invalid files; OSError if the
    folder for downloads cannot be written.
    """
    assert config.model is not None
    if is_url(config.model):
        if config.revision is not None:
            raise ConfigError("revision", config.revision, "None for a model at a URL")
        return RemoteFolder(config.model).download(config.download_dir)
    try:
        path = Path(config.model).expanduser()
        if path.exists():
            return path
    except (OSError, ValueError, RuntimeError) as error:  # not a valid file name, or no permission
        problem = f"model {config.model[:200]!r} cannot be looked up ({str(error)[:200]})"
        raise ConfigError.because("model", problem, "name a file or folder that can be read, or a hub id") from None
    return download_model(config.model, config)


def _open_gguf(path: Path, config: EngineConfig, keep_tables: bool) -> ModelSource:
    """Open a GGUF file as the model that `config` describes, with hf_overrides and generation_config.

    With load_format "dummy" the model has no weights. keep_tables: with `quantization` gguf, keep the token tables in
    the file's storage format too. Raises ConfigError for options that do not fit, ModelFileError for an invalid file;
    the file is closed then.
    """
    if config.load_format not in ("auto", "gguf", "dummy"):
        raise ConfigError("load_format", config.load_format, f"auto, gguf or dummy for a file, {path}")
    if config.config_format == MISTRAL:
        raise ConfigError("config_format", config.config_format, f"auto or hf for a file, {path}")
    if config.tokenizer_mode == MISTRAL and config.tokenizer is None and not config.skip_tokenizer_init:
        raise ConfigError("tokenizer_mode", config.tokenizer_mode, f"auto or hf for a file, {path}, with its tokenizer")
    if path.name.endswith((".safetensors", ".safetensors.index.json", "config.json")):
        problem = f"model {str(path)!r} is one file of a Hugging Face folder"
        raise ConfigError.because("model", problem, f"name the folder, {str(path.parent)!r}")
    file = GGUFFile(path)
    try:
        return _of_gguf(path, file, config, keep_tables)
    except BaseException:
        file.close()
        raise


def _of_gguf(path: Path, file: GGUFFile, config: EngineConfig, keep_tables: bool) -> ModelSource:
    """Return the model of an open GGUF file, with hf_overrides and generation_config.

    With load_format "dummy" it closes the file; otherwise the model's weights own it. path: path of the file.
    keep_tables: with `quantization` gguf, keep the token tables in the file's storage format too. Raises ConfigError
    for options that do not fit, ModelFileError for an invalid file.
    """
    tied = HEAD not in file.names()
    with errors_of(path):
        pooling = pooling_of_gguf(file.metadata, config, file.stored)
        pooler = None if pooling is None else pooling.pooler
        factors = _rope_factors(file)
        with _named_overrides():
            metadata = overridden_metadata(file.metadata, config.hf_overrides or {})
        facts: dict[str, Any] = {"biased": file.biased, "stored": file.stored}
        model = read_gguf(metadata, tie_word_embeddings=tied, rope_factors=factors, pooler=pooler, **facts)
    if pooling is not None:
        pooling = with_token_rows(pooling, model, makes_types=lambda: False)
    if config.quantization == "gguf":
        quantization, kept = read_formats(file.formats(), partial(build_model, model), keep_tables=keep_tables)
        model = replace(model, quantization=quantization)
        file.keep(kept)
    if config.generation_config not in ("auto", "vllm"):
        model = _with_generation_config(model, path, config)
    defaults = _generation_defaults(None, config)
    weights = None if config.load_format == "dummy" else SplitLatentSource(file)
    if weights is None:
        file.close()
    return ModelSource(path=path, config=model, generation_defaults=defaults, pooling=pooling, weights=weights)


def _rope_factors(file: GGUFFile) -> RopeFactors:
    """Return the factors of rotary frequencies that a file has as tensors; () for each that it lacks.

    Raises ModelFileError for a tensor that is not a list of at most MAX_HEAD_DIM.
    """
    present, read = set(file.names()), []
    for name in (ROPE_FACTORS, ROPE_SHORT, ROPE_LONG):
        shape = file.shape(name) if name in present else (0,)
        if len(shape) != 1 or shape[0] > MAX_HEAD_DIM:
            raise ModelFileError(file.path, f"rope factors must be a list of at most {MAX_HEAD_DIM}, got {shape}", name)
        read.append(tuple(float(factor) for factor in file.read(name)) if name in present else ())
    return RopeFactors(*read)


def _open_folder(path: Path, config: EngineConfig) -> ModelSource:
    """Open a Hugging Face folder, or a folder that `convert` wrote, as the model that `config` describes.

    The weights decide about the head, plain modules and frequencies (stored_head), and sentence-transformers' files
    about the longest prompt of a pooling model. With load_format "dummy" the model has no weights. Raises ConfigError
    for options that do not fit, ModelFileError for invalid or missing files.
    """
    if not path.is_dir():
        raise ModelFileError(path, "must be a regular file or a folder")
    converted = (path / LAYOUT_FILE).is_file()
    allowed = ("auto", *(("orbax",) if converted else ("safetensors", MISTRAL, *READERS_OF_SAFETENSORS)), "dummy")
    if config.load_format not in allowed:
        raise ConfigError("load_format", config.load_format, f"{', '.join(allowed)} for {path}")
    if not (path / (name := config_file(path, config.config_format))).exists():
        raise ModelFileError(path, f"has no {name}; {_what_to_name(path)}")
    raw, model, pooling = _read_config(path, config)
    if pooling is not None:
        if converted:
            raise ConfigError("runner", config.runner, f"generate for a converted folder, {path}")
        if pooling.sentence is not None and pooling.sentence.max_seq_length is not None:
            longest = min(model.max_position_embeddings, pooling.sentence.max_seq_length)
            model = replace(model, max_position_embeddings=longest)
    model, defaults = _with_generation_config(model, path, config), _generation_defaults(path, config)
    weights = None if config.load_format == "dummy" else path if converted else open_weights(path, config)
    source = ModelSource(path=path, config=model, generation_defaults=defaults, pooling=pooling, weights=weights)
    with source.closing_on_error():
        if isinstance(weights, SafetensorsCheckpoint):
            weights = with_token_maps(under_transformers_names(weights, model), path, model)
        model = with_stored_head(model, raw, weights)
        model = with_stored_frequencies(with_plain_modules(model, weights), weights)
        if pooling is not None and weights is not None and not isinstance(weights, Path):
            names = model_for_hf(model.architecture).checkpoint_names
            weights = with_own_files(path, weights, names, pooling.pooler)
    return replace(source, config=model, weights=weights)


def with_token_maps(weights: WeightSource, path: Path, model: ModelConfig) -> WeightSource:
    """Return a view of a checkpoint whose layers with a memory of n-grams have the map of tokens that its hashes are
    of, from the folder's tokenizer; `weights` itself for other models, and for a checkpoint that stores it. Raises
    ModelFileError for a tokenizer that is missing, invalid or of another vocabulary.
    """
    ngrams = model.ngrams
    if ngrams is None or any(name.endswith(f".{TOKEN_MAP}") for name in weights.names()):
        return weights
    tokenizer, _, _ = read_hf_tokenizer(path)
    with rust_errors(path):
        found = folded_ids(tokenizer)
    if (count := max(found, default=-1) + 1) != ngrams.vocab_size or len(found) > model.vocab_size:
        allowed = f"engram_compressed_vocab_size = {ngrams.vocab_size} and at most {model.vocab_size} tokens"
        raise ModelFileError(path, f"the tokenizer must have {allowed}, got {count} and {len(found)}")
    ids = np.zeros(model.vocab_size, np.int32)
    ids[: len(found)] = found
    return ExtendedSource(weights, {f"model.layers.{layer}.engram.{TOKEN_MAP}": ids for layer in ngrams.layers})


def open_weights(path: Path, config: EngineConfig) -> SafetensorsCheckpoint:
    """Open the safetensors of the model that `config` names, at a URL or in a folder: transformers' or, if load_format
    says so or they are the only ones, Mistral AI's.

    path: the folder that `find_model` returned. Raises ModelFileError for missing or invalid files.
    """
    stem = CONSOLIDATED if config.load_format == MISTRAL or _only_consolidated(path, config) else USUAL
    if config.model is not None and is_url(config.model):
        return SafetensorsCheckpoint(path, RemoteFolder(config.model).open, stem=stem)
    return SafetensorsCheckpoint(path, stem=stem)


def _only_consolidated(path: Path, config: EngineConfig) -> bool:
    """Whether a folder's weights are Mistral AI's files only. Of a folder at a URL, which has no weights here, those of
    a model with params.json alone are.
    """
    if config.model is not None and is_url(config.model):
        return not (path / CONFIG_FILE).exists()
    has = {stem: any(map(Path.exists, map(path.joinpath, files_of(stem)))) for stem in (USUAL, CONSOLIDATED)}
    return has[CONSOLIDATED] and not has[USUAL]


def _read_config(path: Path, config: EngineConfig) -> tuple[dict[str, Any], ModelConfig, PoolingModel | None]:
    """Read a folder's config.json (or params.json, see `config_file`) with hf_overrides; return (its content with the
    overrides, the model, its PoolingModel or None if it generates).

    Raises ConfigError for an override that nothing reads and for options that contradict the model; ModelFileError for
    an invalid config.json.
    """
    stored, overrides = read_config_json(path, config.config_format), config.hf_overrides or {}

    def token_id(token: str) -> int | None:
        """Return the id of a token in the vocabulary, None if it has none. Raises ConfigError with
        skip_tokenizer_init.
        """
        if config.skip_tokenizer_init:
            raise ConfigError("skip_tokenizer_init", True, "False: classifier_from_token names tokens by their text")
        folder = _find_tokenizer(config) or path
        return Tokenizer.from_hf_folder(folder, mode=config.tokenizer_mode).backend.token_to_id(token)

    def makes_types() -> bool:
        return _makes_types((None if config.skip_tokenizer_init else _find_tokenizer(config)) or path)

    def read(raw: Mapping[str, Any]) -> tuple[ModelConfig, PoolingModel | None]:
        """Return (the model that a config.json describes, its PoolingModel or None if it generates).

        Raises ConfigError for options that contradict the model, ModelConfigError for wrong fields, ModelFileError for
        other invalid files.
        """
        pooling = read_pooling(path, raw, config, token_id)
        model = read_hf(raw, None if pooling is None else pooling.pooler)
        if pooling is not None:
            check_width(pooling, model.hidden_size)
            pooling = with_token_rows(pooling, model, makes_types=makes_types)
        return model, pooling

    try:
        raw = overridden(stored, overrides)
        model, pooling = read(raw)
    except ModelConfigError as error:
        changed = f" (with hf_overrides, {', '.join(overrides)})" if overrides else ""
        raise ModelFileError(path / config_file(path, config.config_format), f"{error}{changed}") from error
    with _named_overrides():
        check_read(stored, overrides, read)
    return raw, model, pooling


@contextmanager
def _named_overrides() -> Iterator[None]:
    """Context manager that turns an UnreadError, of an override that nothing reads, into a ConfigError."""
    try:
        yield
    except UnreadError as error:
        problem = f"hf_overrides has {error.name!r}, {error}"
        raise ConfigError.because("hf_overrides", problem, "leave it out, or correct its name") from None


def _what_to_name(path: Path) -> str:
    """Return advice on what to name instead of a folder that is not a model.

    It is a GGUF file in the folder, else a model in a subfolder, else what is allowed.
    """
    files = sorted(file.name for file in path.glob("*.gguf"))
    if files:
        return f"name the GGUF file itself, {str(path / files[0])!r}"
    inside = sorted(file.parent.name for file in path.glob(f"*/{CONFIG_FILE}"))
    if inside:
        return f"name the model inside, {str(path / inside[0])!r}"
    return f"name a folder with {CONFIG_FILE}, tokenizer.json and *.safetensors, or a GGUF file"


def _with_generation_config(model: ModelConfig, path: Path, config: EngineConfig) -> ModelConfig:
    """Return the model with the end-of-sequence ids and the suppressed tokens (`suppress_tokens`) of
    generation_config.json added, and its tower with what the file adds.

    The file is in the folder that the option generation_config names, else in the model's folder, as in vLLM; without a
    file nothing is added. Ids beyond the vocabulary and a suppressed -1, by which files mean none, are left out.
    Whisper has its suppressed tokens in the rules of its transcripts instead. path: path of the model. Raises
    ModelFileError for an invalid file, also if it suppresses every token, and ConfigError for a generation_config that
    cannot be a folder's name.
    """
    named = config.generation_config not in ("auto", "vllm")
    folder = named_path("generation_config", config.generation_config) if named else path
    fields = ConfigFields(read_object(folder, GENERATION) or {})
    with errors_of(folder / GENERATION):
        ends = [end for end in fields.token_ids("eos_token_id") if end < model.vocab_size]
        names = () if model.tower is not None and model.tower.has_rules else ("suppress_tokens",)
        suppressed = [each for name in names for each in fields.token_ids(name, least=-1, most=_MAX_SUPPRESSED)]
        suppressed = [each for each in suppressed if 0 <= each < model.vocab_size]
        if len(set(suppressed)) == model.vocab_size:
            raise fields.fail("suppress_tokens", "a list without some token of the vocabulary")
        tower = None if model.tower is None else model.tower.with_generation(fields)
    ends, suppressed = (tuple(dict.fromkeys(each)) for each in ((*model.eos_token_ids, *ends), suppressed))
    return replace(model, eos_token_ids=ends, suppressed_tokens=suppressed, tower=tower)


def _generation_defaults(path: Path | None, config: EngineConfig) -> dict[str, Any]:
    """Return default sampling parameters by name, from the options generation_config and override_generation_config.

    path: the model's folder; None for a GGUF file, which has no generation_config.json ("auto" then gives
    GENERATION_DEFAULTS for the default model, and none for others). generation_config "vllm" reads no file. Fields of a
    file other than GENERATION_FIELDS are ignored, and values of None are left out, also one that overrides a file's.
    max_new_tokens becomes max_tokens. Values are checked when they are used. Raises ConfigError for
    a named folder without the file or an unknown name to override, ModelFileError for an invalid file.
    """
    content: dict[str, Any] = {}
    if config.generation_config == "auto":
        content = GENERATION_DEFAULTS if config.model is None else {}
        content = content if path is None else read_object(path, GENERATION) or {}
    elif config.generation_config not in ("auto", "vllm"):
        folder = named_path("generation_config", config.generation_config)
        found = read_object(folder, GENERATION)
        if found is None:
            problem = f"generation_config is {config.generation_config!r}, and there is no {folder / GENERATION}"
            advice = f"name a folder with {GENERATION}, or 'auto' (the model's own) or 'vllm' (none)"
            raise ConfigError.because("generation_config", problem, advice)
        content = found
    names = {name: "max_tokens" if name == "max_new_tokens" else name for name in GENERATION_FIELDS}
    for name in config.override_generation_config or {}:
        if name not in names:
            problem = f"override_generation_config has {name!r}"
            raise ConfigError.because("override_generation_config", problem, f"it may have {', '.join(names)}")
    content = {**content, **(config.override_generation_config or {})}
    return {names[name]: content[name] for name in names if content.get(name) is not None}
