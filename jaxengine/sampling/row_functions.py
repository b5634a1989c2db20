"""Functions that the sampling parameters of jaxengine.scheduler.base.sampling_fields apply to the logits of rows.

Pure, traced functions of logits f32[S, V / n], of the rows' parameters, [S, 1] each, and of counts i32[S, V / n]: 2 *
(times in the output) + (1 if in the prompt). A row whose parameters are neutral keeps its logits bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxengine.sampling.state import RowParams


def penalized(logits: jax.Array, rows: RowParams, counts: jax.Array) -> jax.Array:
    """Return the logits f32[S, V / n] after the repetition penalty (Keskar et al. 2019), which counts prompt and
    output, and then OpenAI's frequency and presence penalties, which count the output.

    rows: each row's parameters, [S, 1]. counts: i32[S, V / n], 2 * (times in the output) + (1 if in the prompt). n:
    number of devices that share the vocabulary.
    """
    times = counts >> 1
    repeated = jnp.where(logits > 0, logits / rows.repetition_penalty, logits * rows.repetition_penalty)
    logits = jnp.where(counts > 0, repeated, logits)
    return logits - rows.frequency_penalty * times - rows.presence_penalty * (times > 0)


def least_kept(best: jax.Array, temperature: jax.Array, rows: RowParams) -> jax.Array:
    """Return the logit, f32[S, 1], below which min_p drops tokens: such tokens are less than min_p times as likely as
    the best token.

    best: the rows' maxima, f32[S, 1]. temperature: f32[S, 1], > 0. A min_p of 0 gives -inf.
    """
    return best + temperature * jnp.log(rows.min_p)
