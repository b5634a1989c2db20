"""`jaxengine convert --quantize`: rounds a model's matrices to fewer bits and writes a compressed-tensors
checkpoint.
"""

from __future__ import annotations

import json
import math
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from jaxengine.api.llm import LLM
from jaxengine.checkpoint.model_source import open_model
from jaxengine.checkpoint.stored_head import say_head
from jaxengine.commands.new_folder import new_folder
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.config.readers.hf import CONFIG_FILE, read_config_json
from jaxengine.models.config.readers.overrides import overridden
from jaxengine.models.params.files import inside
from jaxengine.models.quantization.registry import rounded
from jaxengine.models.registry import build_model
from jaxengine.models.weights.compress import compress
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.runner.start.open import ProgressBar

# Tokens of a text that are scored in one request.
WINDOW = 512


def quantize(config: EngineConfig, name: str, folder: Path, text: str | None = None) -> str:
    """Write the model to a new folder, with its matrices rounded as by quantization=`name`; return a report of several
    lines.

    config: names the model; its hf_overrides go into the folder's config.json. name: "fp8", "int4" or "int8". text:
    path of a text file, on which the report then gives the model's perplexity before and after; None for no perplexity.
    The report has the relative error of each kind of matrix, the perplexity, and the folder.

    Raises ConfigError, before anything is written, for a model without safetensors or one that is already quantised,
    for a text file that cannot be read or is blank, and for a text with a pooling model. Raises ModelFileError for a
    folder that exists and for invalid model files. The perplexity is measured after the folder is complete; it raises
    the errors of `LLM`.
    """
    content = None if text is None else _read(text)
    with closing(open_model(config)) as source:
        weights, quantization = source.weights, source.config.quantization
        if weights is None or isinstance(weights, Path) or source.path.is_file() or quantization is not None:
            kind = "has no safetensors" if quantization is None else "is quantised already"
            problem = f"model {config.model or 'the embedded one'!r} {kind}"
            raise ConfigError.because("model", problem, "name a Hugging Face folder or hub id with plain safetensors")
        if text is not None and source.pooling is not None:
            raise ConfigError("perplexity", text, "absent for a pooling model, which predicts no text")
        names = [file.name for file in source.files_beside_weights()]
        # The pooling files of sentence-transformers are in subfolders.
        names += [str(file.relative_to(source.path)) for file in source.path.glob("[0-9]_*/config.json")]
        files = {name: inside(source.path, name) for name in names}
        stored = read_config_json(source.path, config.config_format)
        raw = say_head(overridden(stored, config.hf_overrides or {}), source.config.tie_word_embeddings)
        model = build_model(replace(source.config, quantization=rounded(name)), Build("float32"))
        with new_folder(folder) as part, ProgressBar("Rounding", "tensor", not config.disable_log_stats) as bar:
            raw["quantization_config"], errors = compress(weights, model, part, bar.update)
            for relative, file in files.items():
                (part / relative).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, part / relative)
            (part / CONFIG_FILE).write_text(json.dumps(raw, indent=2))
    lines = [f"{kind}: relative error {error:.2%}" for kind, error in errors.items()]
    if content is not None:
        size = min(WINDOW, model.config.max_position_embeddings - 1)
        written = replace(config, model=str(folder), hf_overrides=None, config_format="auto", load_format="auto")
        before, after = (_perplexity(each, content, size) for each in (config, written))
        lines.append(f"perplexity on {text}: {before:.3f} before, {after:.3f} after")
    return "\n".join([*lines, f"{folder} is a model for --model"])


def _read(path: str) -> str:
    """Return the text of the UTF-8 file that --perplexity names. Raises ConfigError for one that cannot be read, and
    for a blank one.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, ValueError) as error:
        problem = f"perplexity {path!r} cannot be read ({str(error)[:200]})"
        raise ConfigError.because("perplexity", problem, "name a text file") from None
    if not text.strip():
        raise ConfigError("perplexity", path, "a file with text in it")
    return text


def _perplexity(config: EngineConfig, text: str, size: int) -> float:
    """Return the perplexity of a text, in windows of `size` tokens of which the first is not predicted; NaN for a text
    of less than two tokens.

    config: of its options only model, revision, download_dir, hf_token, hf_overrides and disable_log_stats are used.
    Loads the model into an engine, and shuts the engine down at the end. Raises the errors of `LLM`.
    """
    named = "model", "revision", "download_dir", "hf_token", "hf_overrides"
    options = {name: getattr(config, name) for name in named}
    # One step size of each kind is enough, as speed does not matter.
    steps = {"cudagraph_capture_sizes": [], "prefill_sizes": []}
    options |= {"max_model_len": size + 1, "max_num_seqs": 1, "compilation_config": steps}
    with LLM(**options, disable_log_stats=config.disable_log_stats) as llm:
        ids = llm.get_tokenizer().encode(text)
        windows = [{"prompt_token_ids": ids[start : start + size]} for start in range(0, len(ids), size)]
        windows = [window for window in windows if len(window["prompt_token_ids"]) > 1]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate(windows, params, use_tqdm=not config.disable_log_stats)
        entries = [entry for output in outputs for entry in output.prompt_logprobs or [] if entry]
        found = [next(iter(entry.values())).logprob for entry in entries]
    return math.exp(-sum(found) / len(found)) if found else math.nan
