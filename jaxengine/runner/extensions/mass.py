"""Report on the distribution that each token was drawn from: the probability that truncation left, and its support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxengine.runner.base.extension import DeviceExtension, HostExtension, StageShape
from jaxengine.runner.programs.pending_step import PendingStep
from jaxengine.sampling.logprobs import NUM_MASS_SCORES, sampling_mass, support_words
from jaxengine.sampling.sampler import MoreScores

NAME = "mass"


class MassExtension(DeviceExtension):
    """Device extension that reports more of each sampled token, in the stage that samples. With enable_sampling_mass:
    its raw log-probability, its processed one, and the log of the probability that truncation kept. With
    return_sampling_mask: the support of its draw, one bit for each token of the vocabulary.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        """Choose what is reported: NUM_MASS_SCORES scores with enable_sampling_mass, the support with
        return_sampling_mask.
        """
        super().__init__(shape)
        mass = (NUM_MASS_SCORES, sampling_mass) if shape.config.enable_sampling_mass else (0, None)
        has_support = shape.config.return_sampling_mask
        self.more_scores = MoreScores(*mass, support_words if has_support else None)
        self.description = f"{mass[0]} scores of what sampling kept" + ", and its support" * has_support

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of the supports that wait for the host: those of all rows of the largest step, for each step
        that may be in flight; every device has those of all replicas. {} without return_sampling_mask.
        """
        if not self.shape.config.return_sampling_mask:
            return {}
        buckets, model = self.shape.buckets, self.shape.model
        rows = max(each.num_tokens if each.width > 1 else buckets.sample_size(each) for each in buckets)
        num_words = -(-model.mesh.padded_vocab_size(model.config.vocab_size) // 32)
        return {"sampling masks": self.shape.config.max_in_flight * self.shape.num_ranks * rows * num_words * 4}

    def on_host(self, runner: Any) -> HostExtension:
        return Supports(runner)


class Supports(HostExtension):
    """Host extension that reads the supports of a step's draws."""

    def words(self, pending: PendingStep) -> np.ndarray:
        """Return the supports of all rows of a step, u32[replicas, rows, ceil(V / 32)] (`support_words`); waits for
        them. If rows have several positions, these follow each other.
        """
        words = pending.result("support")
        assert words is not None
        return words
