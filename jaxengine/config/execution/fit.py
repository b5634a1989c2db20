"""The option `fit`: what the user left open is chosen so that the model fits."""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.config.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """The field of EngineConfig about sizes that the engine chooses.

    Attributes:
      fit: choose the options that are left open so that the model fits: how it is split over the devices that are
        there, as `jaxengine plan` does, max_model_len, and max_num_seqs and max_num_batched_tokens if they must be
        lower. Parallel sizes of 1 count as left open.
    """

    fit: bool = False


def check_fit(fit: bool, nnodes: int) -> None:
    """Raise ConfigError for `fit` with several processes (nnodes > 1), since each would have to choose the same
    sizes.
    """
    if fit and nnodes > 1:
        raise ConfigError("fit", True, f"False with nnodes {nnodes}: `jaxengine plan` says which sizes to give")


def refuse_fit(fit: bool) -> None:
    """Raise ConfigError if `fit` is set where sizes must be final; only the start of an engine chooses them."""
    if fit:
        raise ConfigError("fit", True, "False: sizes are chosen when an engine starts, `jaxengine plan` shows all")
