"""vLLM's pooler_config: how a pooling model answers unless the request overrides it. Also the option hf_overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxengine.config.base.errors import ConfigError, not_built
from jaxengine.config.base.values import plain
from jaxengine.models.config.pooler import POOLING_TYPES

POOLING_TASKS = ("embed", "classify")
_TASKS = (*POOLING_TASKS, "token_embed", "token_classify")
ROPE_OPTIONS = ("rope_scaling", "rope_theta")
# Names that `settle_names` replaces.
EARLIER = ("override_pooler_config", "task", *ROPE_OPTIONS)
# vLLM's other fields, with the values that have no effect here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tok_pooling_type": ("ALL",),
    "enable_flash_late_interaction": (False, True),  # selects a kernel of vLLM
    "enable_chunked_processing": (False,),
    "max_embed_len": (),
    "logit_mean": (),
    "logit_sigma": (),
    "logit_bias": (),
    "logit_scale": (),
    "step_tag_id": (),
    "returned_token_ids": (),
}
_EARLIER = {
    "seq_pooling_type": "pooling_type",
    "normalize": "use_activation",
    "softmax": "use_activation",
    "activation": "use_activation",
}
# Fields of config.json about pooling.
POOLING_FIELDS = (
    "num_labels",
    "id2label",
    "problem_type",
    "classifier_from_token",
    "method",
    "is_original_qwen3_reranker",
    "is_matryoshka",
    "matryoshka_dimensions",
)


@dataclass(frozen=True, init=False)
class PoolerConfig:
    """Overrides of the checkpoint's pooling; None keeps the checkpoint's value.

    Attributes:
      task: "embed", "classify", "token_embed" or "token_classify": what requests get that name none.
      pooling_type: "LAST", "MEAN", "CLS", "MAX", "WEIGHTED_MEAN" or "MEAN_SQRT_LEN".
      use_activation: normalise embeddings, or turn scores into probabilities.
      dimensions: leading dimensions of embeddings to keep; needs a Matryoshka model.
    """

    task: str | None = None
    pooling_type: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None

    def __init__(self, **given: Any):
        """Set the fields, also by other names that vLLM has for them. vLLM's other fields are accepted with the values
        that have no effect here.

        Raises ConfigError for unknown fields, a field given twice with different values, and values that are not
        allowed or not supported.
        """
        for name, value in _chosen(given).items():
            object.__setattr__(self, name, value)
        for name, allowed in (("task", _TASKS), ("pooling_type", POOLING_TYPES)):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ConfigError(f"pooler_config.{name}", value, ", ".join(allowed))
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise ConfigError("pooler_config.use_activation", self.use_activation, "True or False")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise ConfigError("pooler_config.dimensions", self.dimensions, "a whole number of at least 1")

    @classmethod
    def read(cls, value: Any) -> PoolerConfig | None:
        """Return the config for a dict of its fields; None for None. A config is returned unchanged. Raises ConfigError
        for other values, and as the constructor does.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError("pooler_config", value, "a dict of its fields")
        return cls(**{str(key): each for key, each in value.items()})


def _chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a PoolerConfig that are not None, by this engine's names. Raises ConfigError for unknown
    fields, a field given twice with different values, and values of vLLM's other fields that would have an effect.
    """
    name, known = "pooler_config", [field.name for field in fields(PoolerConfig)]
    chosen: dict[str, Any] = {}
    for key, each in given.items():
        key, each = _EARLIER.get(key, key), plain(each)
        if key in known:
            if each is not None and chosen.setdefault(key, each) != each:
                problem = f"{name} has {key} twice, as {chosen[key]!r} and as {each!r}"
                raise ConfigError.because(name, problem, "give it once")
        elif key not in _NEUTRAL:
            raise ConfigError.because(name, f"{name} has no {key!r}", f"it has {', '.join(known)}")
        elif each is not None and each not in _NEUTRAL[key]:
            raise not_built(name, f"{name}.{key}", each, (None, *_NEUTRAL[key]))
    return chosen


def read_hf_overrides(value: Any) -> Mapping[str, Any] | None:
    """Return the option hf_overrides, a dict of fields of config.json; None for None.

    Raises ConfigError for anything but a mapping with text keys. Whether the fields exist is checked later, against the
    model's files.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError("hf_overrides", value, "a dict of fields of config.json")
    if other := [name for name in value if not isinstance(name, str)]:
        raise ConfigError("hf_overrides", other[0], "names of fields of config.json")
    return value


def settle_names(options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the options in which vLLM's earlier ones are replaced by their successors:
    override_pooler_config and task by pooler_config, runner and convert; rope_scaling and rope_theta by hf_overrides.

    Raises ConfigError for an unknown task, and for an option that is given twice with different values.
    """
    settled = {name: value for name, value in options.items() if name not in EARLIER}
    earlier = {"pooler_config": options.get("override_pooler_config"), **_read_task(options.get("task"))}
    for name, value in earlier.items():
        if value is not None and settled.setdefault(name, value) != value:
            raise ConfigError.because(name, f"{name} is given twice", "leave out its earlier name")
    ropes = {name: options[name] for name in ROPE_OPTIONS if options.get(name) is not None}
    if not ropes:
        return settled
    overrides = settled.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping):
        return settled  # read_hf_overrides refuses it
    for name, value in ropes.items():
        if overrides.get(name, value) != value:
            raise ConfigError.because(name, f"{name} is given twice", "leave it out of hf_overrides")
    return settled | {"hf_overrides": {**overrides, **ropes}}


def _read_task(task: Any) -> dict[str, str]:
    """Return the options `runner` and `convert` that vLLM's earlier option `task` stands for; {} for None and "auto".

    Raises ConfigError for an unknown task.
    """
    by_task: dict[str, dict[str, str]] = {
        "auto": {},
        "generate": {"runner": "generate"},
        "embed": {"runner": "pooling", "convert": "embed"},
        "embedding": {"runner": "pooling", "convert": "embed"},
        "classify": {"runner": "pooling", "convert": "classify"},
        "score": {"runner": "pooling"},
        "reward": {"runner": "pooling"},
    }
    if task is None:
        return {}
    if not isinstance(task, str) or task not in by_task:
        raise ConfigError("task", task, ", ".join(by_task))
    return by_task[task]
