"""vLLM's speculative_config: the source of drafts, and their number."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.values import kind_missed, plain, whole_number

if TYPE_CHECKING:
    from jaxengine.models.config.drafts.draft_heads import DraftHeadConfig
    from jaxengine.models.config.model_config import ModelConfig

logger = logging.getLogger(__name__)

NAME = "speculative_config"
NGRAM, DRAFT_MODEL, MTP, GRAMMAR = "ngram", "draft_model", "mtp", "grammar"
EAGLE, EAGLE3, DFLASH, DSPARK = "eagle", "eagle3", "dflash", "dspark"
METHODS = (NGRAM, DRAFT_MODEL, MTP, EAGLE, EAGLE3, DFLASH, DSPARK, GRAMMAR)
# Methods whose head has a checkpoint of its own, and what errors call it.
HEADS = {EAGLE: "an EAGLE head", EAGLE3: "an EAGLE-3 head", DFLASH: "a DFlash head", DSPARK: "a DSpark head"}
# Names of a model by which earlier vLLM versions chose the method "ngram".
_NGRAM_MODELS = (NGRAM, f"[{NGRAM}]")
# vLLM's earlier names of the method "mtp", one for each family.
_FAMILIES = (
    *("deepseek", "mimo", "mimo_v2", "glm4_moe", "glm4_moe_lite", "glm_ocr", "ernie", "nemotron_h", "exaone_moe"),
    *("exaone4_5", "qwen3_next", "qwen3_5", "longcat_flash", "bailing_hybrid", "bailing_hybrid_v3", "minimax_m3"),
    *("pangu_ultra_moe", "step3p5", "step5", "hy_v3", "hy_v4", "glm5_next", "kimi_k3", "qwen4_exp", "dots3_note"),
    *("gemma4", "inkling"),
)
_ALIASES = {f"{family}_{MTP}": MTP for family in _FAMILIES}
MAX_DRAFTS = 15
MAX_LOOKUP = 32
# Lookups of three tokens, then of two: longer ones rarely match, and single tokens predict little.
_LOOKUP = (2, 3)
# Widths of steps: tokens of a decode, the last one and drafts. Each width needs its own programs.
_WIDTHS = (2, 4, 8, 16)
# Methods that need, and that may have, a checkpoint of their own, and fields that only some methods have.
STORED = (DRAFT_MODEL, *HEADS)
_MAY_BE_STORED = (*STORED, MTP)
_OF_DRAFTER = ("model", "revision", "draft_tensor_parallel_size")
_OF_METHODS = {
    "prompt_lookup_max": (NGRAM,),
    "prompt_lookup_min": (NGRAM,),
    "streams": tuple(HEADS),
    **dict.fromkeys(_OF_DRAFTER, _MAY_BE_STORED),
}
# Fields of vLLM's about how drafts are computed, and for which requests. None can change a token.
_HOW: dict[str, str | tuple[str, ...]] = {
    **dict.fromkeys(("disable_padded_drafter_batch", "enforce_eager", "use_local_argmax_reduction"), "bool"),
    "draft_sample_method": ("greedy", "probabilistic"),
    "max_model_len": "int",
}
# Options of a flat form, and the field of each.
FLAT = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "spec_model": "model",
    "spec_method": "method",
    "spec_tokens": "num_speculative_tokens",
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """Drafts that each step may verify; output tokens are the same as without.

    Attributes:
      method: "ngram", which looks the last tokens up among earlier ones; "draft_model", a smaller model; "mtp", the
        layer of a checkpoint that predicts the token after the next; "eagle", "eagle3", "dflash" and "dspark", a head
        with its own checkpoint that reads the model's hidden states, and drafts one token after another or all at once;
        or "grammar", which proposes only tokens that a grammar leaves no choice of. The other methods do that, too.
      num_speculative_tokens: limit of drafts of a request per step, 1 to 15.
      prompt_lookup_max: most tokens that an n-gram lookup compares; prompt_lookup_min: fewest. One defaults to the
        other; without either 3 and 2.
      model: the draft model or head, or the checkpoint with the layer of "mtp", named like the engine's `model`; None
        for the layer of the model's own checkpoint. revision: its revision on the hub.
      draft_tensor_parallel_size: devices that split it; they are those of the model.
      streams: numbers of layers after which a head reads hidden states, from its config.json; not an option.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    model: str | None = None
    revision: str | None = None
    draft_tensor_parallel_size: int | None = None
    streams: tuple[int, ...] | None = field(default=None, repr=False)

    @classmethod
    def read(cls, value: Any) -> SpeculativeConfig | None:
        """Return the config for a dict of vLLM's fields or of this class's; None for None. A config is returned
        unchanged. A field that is None counts as absent; of prompt_lookup_max and _min, one alone stands for both.
        Fields on which no token depends here (_HOW) are checked, logged and left out.

        Raises ConfigError for unknown fields, fields that the method does not have, and values that are missing or not
        allowed.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(NAME, value, "a dict of its fields")
        known = [each.name for each in fields(cls)]
        chosen = {str(key): whole_number(plain(each)) for key, each in value.items() if each is not None}
        for name in filter(chosen.__contains__, _HOW):
            given, kind = chosen.pop(name), _HOW[name]
            if kind == "int" and str(given).isdecimal():  # some recipes have a text
                given = int(str(given)[:20])
            if (wanted := kind_missed(given, kind)) or kind == "int" and given < 1:
                raise ConfigError(f"{NAME}.{name}", given, wanted or "at least 1")
            logger.info("%s.%s=%r changes nothing here: no token depends on it", NAME, name, given)
        if other := next((key for key in chosen if key not in known), None):
            raise ConfigError.because(NAME, f"{NAME} has no {other!r}", f"it has {', '.join(known[:-1])}")
        method = _method(chosen.get("model"), chosen.get("method"))
        names_method = method == NGRAM and chosen.get("model") in _NGRAM_MODELS
        accepted = {"model"} if names_method else set[str]()
        others = (name for name in chosen if method not in _OF_METHODS.get(name, METHODS))
        if (other := next((name for name in others if name not in accepted), None)) is not None:
            problem = f"{NAME}.{other} is {chosen[other]!r}, and {method!r} has no {other}"
            raise ConfigError.because(NAME, problem, f"leave it out, or give method={_OF_METHODS[other][0]!r}")
        count = chosen.get("num_speculative_tokens")
        if count is None:
            problem = f"{NAME}.num_speculative_tokens is not given"
            raise ConfigError.because(NAME, problem, f"say how many drafts a step may have, 1 to {MAX_DRAFTS}")
        own: dict[str, Any] = {name: chosen.get(name) for name in _OF_DRAFTER} if method in _MAY_BE_STORED else {}
        limits = {"num_speculative_tokens": MAX_DRAFTS}
        if method == NGRAM:
            most = chosen.get("prompt_lookup_max", chosen.get("prompt_lookup_min", _LOOKUP[1]))
            least = chosen.get("prompt_lookup_min", chosen.get("prompt_lookup_max", _LOOKUP[0]))
            own = {"prompt_lookup_max": most, "prompt_lookup_min": least}
            limits |= dict.fromkeys(own, MAX_LOOKUP)
        if "streams" in chosen:
            own["streams"] = _read_streams(chosen["streams"])
        config = cls(method, count, **own)
        for name, limit in limits.items():
            given = getattr(config, name)
            if type(given) is not int or not 1 <= given <= limit:
                raise ConfigError(f"{NAME}.{name}", given, f"1 to {limit}")
        if method == NGRAM and own["prompt_lookup_min"] > own["prompt_lookup_max"]:
            allowed = f"at most prompt_lookup_max, {config.prompt_lookup_max}"
            raise ConfigError(f"{NAME}.prompt_lookup_min", config.prompt_lookup_min, allowed)
        for name in ("model", "revision"):
            if not isinstance(getattr(config, name), str | None):
                raise ConfigError(f"{NAME}.{name}", getattr(config, name), "a text")
        return config

    @property
    def has_model(self) -> bool:
        """Whether a model or head on the devices proposes the drafts."""
        return self.method not in (NGRAM, GRAMMAR)

    @property
    def guesses(self) -> bool:
        """Whether the method proposes drafts; False for "grammar", whose only drafts are tokens that a grammar leaves
        no alternative to.
        """
        return self.method != GRAMMAR

    def guides(self, num_stages: int, max_in_flight: int) -> bool:
        """Return whether proposed drafts get grammar masks: in an engine with one pipeline stage that dispatches a step
        before the last one ended, since the masks are computed while the step is in flight.

        num_stages: pipeline stages. max_in_flight: limit of steps in flight. False for the method "grammar".
        """
        return self.guesses and num_stages == 1 and max_in_flight > 1

    @property
    def reads_hidden(self) -> bool:
        """Whether the drafter, an MTP layer or one of HEADS, reads the model's hidden states."""
        return self.method in (MTP, *HEADS)

    @property
    def reads_next_tokens(self) -> bool:
        """Whether the drafter reads, next to the model's hidden state of each token, the token that came after it."""
        return self.method in (MTP, EAGLE, EAGLE3)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of tokens, besides 1, that a decode may have in one step (the last token and drafts), ascending."""
        return tuple(sorted({min(width, self.num_speculative_tokens + 1) for width in _WIDTHS}))


def _read_streams(given: Any) -> tuple[int, ...]:
    """Return the field `streams`, which only a dict of another config has, as a tuple of ints.

    Raises ConfigError for anything but a list or tuple of integers.
    """
    if not isinstance(given, list | tuple) or any(type(each) is not int for each in given):
        raise ConfigError(f"{NAME}.streams", given, "whole numbers, or nothing: the head says them")
    return tuple(given)


def settle_speculation(options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the options in which the flat ones (FLAT) are replaced by a speculative_config.

    Raises ConfigError, whose param is the first flat option, if a field is given twice with different values or next to
    speculative_config, and for values that SpeculativeConfig.read refuses.
    """
    flat = {name: options[name] for name in FLAT if options.get(name) is not None}
    settled = {name: value for name, value in options.items() if name not in FLAT}
    if not flat:
        return settled
    chosen: dict[str, Any] = {}
    for name, value in flat.items():
        if chosen.setdefault(FLAT[name], value) != value:
            raise ConfigError.because(name, f"{NAME}.{FLAT[name]} is given twice", "give it once")
    if settled.get(NAME) is not None:
        raise ConfigError.because(
            next(iter(flat)), f"{next(iter(flat))} is given together with {NAME}", f"give only {NAME}"
        )
    try:
        return {**settled, NAME: SpeculativeConfig.read(chosen)}
    except ConfigError as error:
        error.param = next(iter(flat))  # the option that the user gave
        raise


def check_speculation(options: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError if speculative_config is given and its drafts cannot be made or verified with the other options
    or the model. options: fields of EngineConfig by name.

    Refused with any method: pooling models; states that cannot be rolled back; other states with rl_exact or pipeline
    parallelism; several processes; max_num_batched_tokens below 2; and a method that drafts only by a grammar with
    skip_tokenizer_init. Refused with a method that has a model: pipeline parallelism; mtp without a model, of a model
    whose next-token layers are missing or not read; a model that takes images or sounds; one whose attending layers all
    free keys, unless disable_hybrid_kv_cache_manager; and a draft_tensor_parallel_size other than tensor_parallel_size.
    """
    if options[NAME] is None:
        return

    def refuse(why: str, advice: str = "leave it out") -> ConfigError:
        return ConfigError.because(NAME, f"{NAME} is given, but {why}", advice)

    if model.pooler is not None:
        raise refuse(f"{model.architecture} pools and generates nothing")
    if model.keeps_states:
        if any(state.token_inputs is None for state in model.states):
            raise refuse(f"{model.architecture} keeps states that cannot be rolled back after a wrong draft")
        if options["rl_exact"]:
            raise refuse(f"rl_exact is given, which writes the states of {model.architecture} token by token")
        if (stages := options["pipeline_parallel_size"]) > 1:
            raise refuse(f"pipeline_parallel_size is {stages}, and {model.architecture} keeps states of sequences")
    if options["nnodes"] > 1:
        raise refuse(f"nnodes is {options['nnodes']}, and an engine of several processes verifies no drafts yet")
    if options["max_num_batched_tokens"] < 2:
        raise refuse(f"max_num_batched_tokens is {options['max_num_batched_tokens']}, which leaves a step no draft")
    chosen = options[NAME]
    if not chosen.guesses and options["skip_tokenizer_init"]:
        raise refuse(f"skip_tokenizer_init is set, and without a tokenizer no request has a {GRAMMAR}")
    if not chosen.has_model:
        return
    if (stages := options["pipeline_parallel_size"]) > 1:
        raise refuse(f"pipeline_parallel_size is {stages}, and {chosen.method} needs a single stage")
    if chosen.method == MTP and chosen.model is None and not model.num_nextn_predict_layers:
        unread = f"the {model.num_unread_layers} next-token layers of this {model.architecture} are not read"
        none = f"num_nextn_predict_layers of this {model.architecture} is 0"
        raise refuse(unread if model.num_unread_layers else none)
    if model.tower is not None:
        raise refuse(f"{model.architecture} takes images, and {chosen.method} does not", "limit each modality to 0")
    hybrid = not options["disable_hybrid_kv_cache_manager"]
    if hybrid and model.attending and all(each.reach is not None for each in model.attending):
        why = f"every layer of {model.architecture} frees keys that {chosen.method} needs"
        raise refuse(why, "give disable_hybrid_kv_cache_manager, which keeps them, or leave it out")
    if (size := chosen.draft_tensor_parallel_size) not in (None, options["tensor_parallel_size"]):
        allowed = f"{options['tensor_parallel_size']}, tensor_parallel_size: the drafter is split like the model"
        raise ConfigError(f"{NAME}.draft_tensor_parallel_size", size, allowed)


def check_draft_model(draft: ModelConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the model `draft` cannot propose drafts for `model`: it has another vocabulary size, pools,
    has a tower or keeps recurrent states.
    """
    if draft.vocab_size != model.vocab_size:
        what = f"has a vocabulary of {draft.vocab_size} tokens, and {model.architecture} one of {model.vocab_size}"
    elif draft.pooler is not None:
        what = "pools and generates nothing"
    elif draft.tower is not None:
        what = "takes images, and drafts are made from tokens alone"
    elif draft.keeps_states:
        what = "keeps states of sequences, which cannot be rolled back after a wrong draft"
    else:
        return
    problem = f"{NAME}.model, a {draft.architecture}, {what}"
    raise ConfigError.because(NAME, problem, "name a text model of the same vocabulary that keeps keys and values")


def check_layer(draft: ModelConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the next-token layer of a checkpoint with the config `draft` is not one for `model`: the
    checkpoint has no such layer, or another class, number of layers, hidden size or vocabulary size.
    """
    names = ("architecture", "num_layers", "hidden_size", "vocab_size")
    other = next((name for name in names if getattr(draft, name) != getattr(model, name)), None)
    if other is not None:
        what = f"has the {other} {getattr(draft, other)}, and the model {getattr(model, other)}"
    elif not draft.num_nextn_predict_layers:
        what = "has no next-token layer that is read: its num_nextn_predict_layers is 0"
    else:
        return
    problem = f"{NAME}.model, a {draft.architecture}, {what}"
    raise ConfigError.because(NAME, problem, "name a checkpoint of this model with such a layer, or leave it out")


def check_head(method: str, head: DraftHeadConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the head of a method was made for another model than `model`: it has another hidden size or
    vocabulary size, or reads layers that do not exist or are not ascending. Also for a model with several hidden states
    per token. method: one of HEADS.
    """
    last = model.num_layers
    if head.target_size != model.hidden_size:
        what = f"reads hidden states of {head.target_size} numbers, and {model.architecture} has {model.hidden_size}"
    elif head.vocab_size != model.vocab_size:
        what = f"has a vocabulary of {head.vocab_size} tokens, and {model.architecture} one of {model.vocab_size}"
    elif model.num_streams > 1:
        what = f"reads one hidden state of a token, and {model.architecture} has {model.num_streams}"
    elif list(head.streams) != sorted(set(head.streams)) or not all(0 <= each <= last for each in head.streams):
        what = f"reads hidden states after {list(head.streams)} layers, and {model.architecture} has {last} layers"
    else:
        return
    raise ConfigError.because(NAME, f"{NAME}.model, {HEADS[method]}, {what}", "name one that was made for this model")


def _method(model: Any, method: Any) -> str:
    """Return the name of the drafting method: the given one, with earlier names translated, or without one, as in
    earlier vLLM versions, "ngram" for a model named "ngram" or "[ngram]" and "draft_model" for another model.

    model, method: the fields as given; None if they are not. Raises ConfigError for an unknown method, for neither
    method nor model, and for a method that needs a model without one.
    """
    if model is not None and method is None:
        method = NGRAM if model in _NGRAM_MODELS else DRAFT_MODEL
    method = _ALIASES.get(method, method) if isinstance(method, str) else method
    if method not in METHODS:
        what = f"{NAME}.method is {method!r}" if method is not None else f"{NAME} has no method"
        built = ", ".join(map(repr, METHODS))
        raise ConfigError.because(NAME, what, f"give one of {built}, or name a draft model")
    if method in STORED and model is None:
        raise ConfigError.because(NAME, f"{NAME}.method is {method!r} without a model", f"name it in {NAME}.model")
    return method
