"""Reads the files that sentence-transformers adds to a checkpoint: pooling, Dense modules, normalisation, prompts,
maximum input length, and how a cross-encoder scores.

These are modules.json and the folders it names. Files are only read as data; modules of unknown classes are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxengine.config.features.pooling_model import DOCUMENT, QUERY, SentenceModel
from jaxengine.models.config.fields import MAX_HIDDEN, ConfigFields, ModelConfigError
from jaxengine.models.config.pooler import (
    CLS,
    DENSE_ACTIVATIONS,
    LAST,
    MAX,
    MEAN,
    MEAN_SQRT_LEN,
    WEIGHTED_MEAN,
    Dense,
    Splade,
)
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import MAX_JSON_BYTES, parse_object, read_object, read_text

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
# Files with a Transformer module's settings of its input. The first one that exists counts.
TOKENIZER = "tokenizer_config.json"
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
TRANSFORMER = tuple(f"sentence_{kind}_config.json" for kind in _KINDS)
# Fields of config.json that hf_overrides may add, and that then take precedence.
_BY_USERS = ("classifier_from_token", "method")
_MAX_PROMPTS, _MAX_PROMPT_CHARS = 1000, 10_000
_MODES = {
    "lasttoken": LAST,
    "mean": MEAN,
    "cls": CLS,
    "max": MAX,
    "weightedmean": WEIGHTED_MEAN,
    "mean_sqrt_len_tokens": MEAN_SQRT_LEN,
}
_CROSS_ENCODER = "CrossEncoder"  # model_type in PROMPTS
# Boolean fields that sentence-transformers before version 5 wrote instead.
_EARLIER_MODES = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def read_sentence_model(folder: Path) -> SentenceModel | None:
    """Return the content of a model folder's sentence-transformers files; None if it has no modules.json. Of several
    modules Pooling the last counts.

    Raises ModelFileError for files that are invalid, modules that are not supported or out of order, and prompts of
    a model that does not pool them (include_prompt).
    """
    modules = _read_modules(folder)
    if modules is None:
        return None
    pooling = normalize = splade = None
    dense: list[Dense] = []
    pools = any(kind.endswith("Pooling") for kind, _, _ in modules)
    by_tokens = not pools and any(is_of_pylate for _, _, is_of_pylate in modules)
    for kind, path, _ in modules:
        if kind == "SpladePooling" and pooling is None:
            pooling, splade = (CLS, True), _read_splade(folder, path)
        elif kind == "Pooling":
            pooling = _read_pooling(folder, path)
        elif kind == "Dense" and (pooling is not None or by_tokens) and not normalize and splade is None:
            dense.append(_read_dense(folder, path))
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "MLMTransformer"):
            text = f"the module {kind!r} is not supported here; supported are Transformer, Pooling, Dense and Normalize"
            raise ModelFileError(folder / MODULES, f"{text}, in this order, and MLMTransformer with SpladePooling")
    if by_tokens:
        pooling = CLS, True
    if pooling is None:
        raise ModelFileError(folder / MODULES, "has no module Pooling")
    prompts, default = _read_prompts(folder)
    pooling_type, include_prompt = pooling
    if not include_prompt and any(prompts.values()):
        raise ModelFileError(
            folder / MODULES, "include_prompt is false, which is not supported for a model with prompts"
        )
    longest, lower = _read_input(folder)
    return SentenceModel(
        pooling_type,
        bool(normalize),
        prompts,
        default,
        longest,
        tuple(dense),
        lower,
        by_tokens,
        splade,
        messages=reads_messages(folder, parts=True),
        has_processor=_has_processor(folder),
    )


def _has_processor(folder: Path) -> bool:
    """Whether transformers opens a processor for a folder, and not only its tokenizer: tokenizer_config.json has
    processor_class, or there is a file of PROCESSORS. Raises ModelFileError for an invalid file.
    """
    named = read_object(folder, TOKENIZER) or {}
    return "processor_class" in named or any((folder / name).is_file() for name in PROCESSORS)


def with_cross_encoder(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return config.json with the settings of a CrossEncoder's files added under config.json's names; None for a folder
    without modules.json, or whose config_sentence_transformers.json has another model_type.

    They are the activation of the scores and, for a decoder, the tokens whose logits are the score. raw: the
    config.json, which is not changed; its own fields about tokens take precedence. Raises ModelFileError for invalid
    files, modules other than Transformer and LogitScore, and a default prompt.
    """
    about = read_object(folder, PROMPTS) or {}
    modules = _read_modules(folder)
    if modules is None or about.get("model_type") != _CROSS_ENCODER:
        return None
    kinds = [kind for kind, _, _ in modules]
    if kinds not in (["Transformer"], ["Transformer", "LogitScore"]):
        text = f"the modules of a {_CROSS_ENCODER} must be Transformer, or Transformer and LogitScore, got"
        raise ModelFileError(folder / MODULES, f"{text} {', '.join(kinds)[:200]}")
    if (default := about.get("default_prompt_name")) is not None:
        text = f"default_prompt_name must be null for a {_CROSS_ENCODER}, got {str(default)[:100]}"
        raise ModelFileError(folder / PROMPTS, text)
    found: dict[str, Any] = {}
    if about.get("activation_fn") is not None:
        found["sentence_transformers"] = {"activation_fn": about["activation_fn"]}
    if len(kinds) > 1:
        found |= _read_logit_score(folder, modules[1][1])
    return {**raw, **{name: value for name, value in found.items() if name not in _BY_USERS or name not in raw}}


def _read_logit_score(folder: Path, path: str) -> dict[str, Any]:
    """Return a LogitScore module as fields of config.json: classifier_from_token, a list of token ids, and method.

    The score is the logit of true_token_id, minus that of false_token_id if there is one. path: path of the module's
    folder within `folder`. Raises ModelFileError for invalid fields, and a module_input_name other than causal_logits.
    """
    fields = ConfigFields(read_object(folder, name := f"{path}/config.json") or {})
    with errors_of(folder / name):
        fields.require(module_input_name="causal_logits")
        yes = fields.integer("true_token_id", minimum=0)
        no = fields.integer("false_token_id", None, minimum=0)
    if no is None:
        return {"classifier_from_token": [yes], "method": "no_post_processing"}
    return {"classifier_from_token": [no, yes], "method": "from_2_way_softmax"}


def _read_modules(folder: Path) -> list[tuple[str, str, bool]] | None:
    """Return (class name, path, whether it is of PyLate, which embeds tokens) of each module in modules.json, in order;
    None without the file. The name has no package, and at most 100 characters; a path is "" if absent.

    Raises ModelFileError for an invalid file, or other than 1 to 100 modules.
    """
    source = read_text(folder, MODULES, MAX_JSON_BYTES)
    if source is None:
        return None
    listed = parse_object(folder / MODULES, f'{{"modules": {source}}}')["modules"]
    if not isinstance(listed, list) or not 1 <= len(listed) <= 100:
        raise ModelFileError(folder / MODULES, "must hold a list of modules")
    found = []
    for module in listed:
        kind, path = (module.get("type"), module.get("path", "")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelFileError(folder / MODULES, "each module must have a type and a path")
        found.append((kind.rpartition(".")[2][:100], path, kind.startswith("pylate.")))
    return found


def _read_splade(folder: Path, path: str) -> Splade:
    """Return the settings of a SpladePooling module: pooling_strategy, "max" (by default) or "sum", and how many
    logarithms its activation_function has, 1 for "relu" (by default) and 2 for "log1p_relu". num_tokens is 0, because
    the module does not state it.

    path: path of the module's folder within `folder`. Raises ModelFileError for settings that are not supported.
    """
    name = f"{path}/config.json"
    fields = ConfigFields(read_object(folder, name) or {})
    with errors_of(folder / name):
        strategy, kind = fields.text("pooling_strategy", "max"), fields.text("activation_function", "relu")
    logs = {"relu": 1, "log1p_relu": 2}
    for field, value, allowed in (("pooling_strategy", strategy, ("max", "sum")), ("activation_function", kind, logs)):
        if value not in allowed:
            raise ModelFileError(folder / name, f"{field} must be {' or '.join(allowed)}, got {value[:100]}")
    return Splade(0, strategy, logs[kind])


def _read_pooling(folder: Path, path: str) -> tuple[str, bool]:
    """Return (pooling type, whether the tokens of a prepended prompt are pooled) of a Pooling module: pooling_mode, or
    the mode of an earlier version's switch that is true, and include_prompt, by default True.

    The type is MEAN if the module names no mode. path: path of the module's folder within the model's; "" for the
    model's folder itself. Raises ModelFileError if it has no config.json, has a switch that is neither true nor false,
    or names several modes or one that is not supported.
    """
    name = f"{path}/config.json" if path else "config.json"
    raw = read_object(folder, name)
    if raw is None:
        raise ModelFileError(folder / name, "cannot be read: there is no such file")
    mode, fields = raw.get("pooling_mode"), ConfigFields(raw)
    modes = [mode] if isinstance(mode, str) else mode
    with errors_of(folder / name):
        if modes is None:
            modes = [each for field, each in _EARLIER_MODES.items() if fields.boolean(field, False)] or ["mean"]
        includes_prompt = fields.boolean("include_prompt", True)
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in [*_MODES]:
        text = f"pooling_mode must be one of {', '.join(_MODES)}, got {str(modes)[:100]}"
        raise ModelFileError(folder / name, text)
    return _MODES[modes[0]], includes_prompt


def _read_dense(folder: Path, path: str) -> Dense:
    """Return the sizes (in_features and out_features, at most MAX_HIDDEN), activation (activation_function, Tanh by
    default) and whether there is a bias (True by default) of a Dense module from its config.json.

    path: path of the module's folder within `folder`. Raises ModelFileError if it has no config.json, and for fields
    that are invalid or not supported.
    """
    name = f"{path}/config.json"
    raw = read_object(folder, name)
    if raw is None or not path:
        raise ModelFileError(folder / name, "cannot be read: there is no such file")
    fields = ConfigFields(raw)
    with errors_of(folder / name):
        fields.require(module_input_name="sentence_embedding", module_output_name="sentence_embedding")
        fields.require(use_residual=False)
        sizes = fields.integer("in_features"), fields.integer("out_features")
        named = fields.text("activation_function", "torch.nn.modules.activation.Tanh")
        activation = named.rpartition(".")[2]
        if activation not in DENSE_ACTIVATIONS or not named.startswith("torch.nn.modules."):
            raise fields.fail("activation_function", f"torch.nn.modules' {', '.join(DENSE_ACTIVATIONS)}")
        if max(sizes) > MAX_HIDDEN:
            raise ModelConfigError(f"in_features and out_features must be at most {MAX_HIDDEN}, got {sizes}")
        return Dense(*sizes, fields.boolean("bias", True), activation, path)


def _read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return (texts that are prepended to inputs, by name; name of the default one, None without one).

    They are in the folder's config_sentence_transformers.json, which may be absent: ({}, None). PyLate's query_prefix
    and document_prefix, unless empty, replace the texts named QUERY and DOCUMENT. Raises ModelFileError for an invalid
    file, too many or too long texts, and a default_prompt_name that is none of the names.
    """
    raw: dict[str, Any] = read_object(folder, PROMPTS) or {}
    prompts, default = raw.get("prompts"), raw.get("default_prompt_name")
    prompts = {} if prompts is None else prompts
    # PyLate's names for what it prepends.
    for name in (QUERY, DOCUMENT):
        if raw.get(f"{name}_prefix") and isinstance(prompts, dict):
            prompts = {**prompts, name: raw[f"{name}_prefix"]}
    texts = isinstance(prompts, dict) and len(prompts) <= _MAX_PROMPTS
    if not texts or not all(isinstance(text, str) and len(text) <= _MAX_PROMPT_CHARS for text in prompts.values()):
        allowed = f"at most {_MAX_PROMPTS} texts of at most {_MAX_PROMPT_CHARS} characters, by name"
        raise ModelFileError(folder / PROMPTS, f"prompts must be {allowed}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        allowed = ", ".join(prompts) or "the names in prompts"
        text = f"default_prompt_name must be one of {allowed}, got {str(default)[:100]}"
        raise ModelFileError(folder / PROMPTS, text)
    return prompts, default


def reads_messages(folder: Path, *, parts: bool = False) -> bool:
    """Return whether texts become messages, from which the checkpoint's chat template makes a prompt: whether the
    modality_config of the first module has an entry "message".

    parts: whether contents may be lists of parts (its format "structured") as well as texts ("flat"). Raises
    ModelFileError for arguments of the template, and for other contents of messages.
    """
    file, raw = _read_transformer(folder)
    fields = ConfigFields(raw)
    with errors_of(folder / file):
        kinds, more = (fields.mapping(name) or {} for name in ("modality_config", "processing_kwargs"))
        if "message" not in kinds:
            return False
        ConfigFields(more).require(chat_template={})
        message = ConfigFields(ConfigFields(kinds).mapping("message") or {})
        if not parts or message.value("format", None) != "structured":
            message.require(format="flat")
    return True


def _read_transformer(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return (name, content) of the file with the input's settings, the first of TRANSFORMER that exists; without one
    the first name, and {}. Raises ModelFileError for an invalid file.
    """
    file = next((name for name in TRANSFORMER if (folder / name).is_file()), TRANSFORMER[0])
    return file, read_object(folder, file) or {}


def _read_input(folder: Path) -> tuple[int | None, bool]:
    """Return (max_seq_length, the limit of the input in tokens, None without one; do_lower_case, False if absent).

    Without a limit in the module's file the tokenizer's model_max_length counts, as in sentence-transformers, if it is
    an integer >= 1. Raises ModelFileError for a max_seq_length or do_lower_case of another type, or below 1.
    """
    file, raw = _read_transformer(folder)
    longest, lower = raw.get("max_seq_length"), raw.get("do_lower_case")
    if lower is not None and type(lower) is not bool:
        raise ModelFileError(folder / file, f"do_lower_case must be true, false or null, got {str(lower)[:100]}")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ModelFileError(folder / file, f"max_seq_length must be an integer >= 1 or null, got {str(longest)[:100]}")
    if longest is None:
        limit = (read_object(folder, TOKENIZER) or {}).get("model_max_length")
        longest = limit if type(limit) is int and limit >= 1 else None
    return longest, lower is True
