"""`jaxengine calibrate`: measures the largest keys and values of a model over texts, for a quantised cache
(kv_cache_scales).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.runner.start.devices import open_stages
from jaxengine.runner.start.kv_scales import measure, write_largest
from jaxengine.runner.start.open import ProgressBar, open_resolved


def calibrate(config: EngineConfig, texts: Path, output: Path) -> str:
    """Run each line of the text file `texts` as a prompt, write the largest magnitudes of keys and values to the file
    `output`, and return a summary for the user.

    There is a magnitude for every layer and KV head. Blank lines are skipped. Raises ConfigError, before weights are
    loaded, for a file without texts, a prompt that is empty or longer than max_model_len - 1, or an output that cannot
    be written. Also raises ConfigError, ModelConfigError, ModelFileError and DefaultModelMissing if the model cannot be
    loaded.
    """
    try:
        lines = [line for line in texts.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        problem = f"prompts {str(texts)!r} cannot be read ({str(error)[:200]})"
        raise ConfigError.because("prompts", problem, "give a text file with a prompt on each line") from None
    if not lines:
        raise ConfigError("prompts", str(texts), "a file with a prompt on each line")
    if not output.parent.is_dir() or output.is_dir():
        raise ConfigError("output", str(output), "a file in a folder that is there")
    if not os.access(output if output.exists() else output.parent, os.W_OK):
        raise ConfigError("output", str(output), "a file that may be written")
    source, resolved, platform, devices, mesh = open_resolved(config)
    with source.closing_on_error():
        tokenizer = source.load_tokenizer(config)
        assert tokenizer is not None, "calibrate has no skip_tokenizer_init"
        prompts = [np.asarray(ids, np.int32) for ids in tokenizer.encode_batch(lines)]
        for number, prompt in enumerate(prompts, 1):
            if not 1 <= len(prompt) < resolved.max_model_len:
                problem = f"prompt {number} of {str(texts)!r} has {len(prompt)} tokens"
                most = resolved.max_model_len - 1
                raise ConfigError.because("prompts", problem, f"allowed: 1 to {most} (max_model_len - 1)")
    show = not config.disable_log_stats
    with ProgressBar("Loading weights", "B", show) as bar:
        stages = open_stages(source, resolved, platform, devices, mesh, progress=bar.update)
    with ProgressBar("Prompts", "prompt", show) as bar:
        largest = measure(stages, resolved, platform, prompts, progress=bar.update)
    write_largest(output, largest)
    total = sum(map(len, prompts))
    return f"{len(prompts)} prompts, {total} tokens: the largest of {len(largest.k)} layers are in {output}"
