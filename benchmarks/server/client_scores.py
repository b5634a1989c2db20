"""Scores by the Python API of the texts about which lm-eval asks a server, to compare both; and the folder `tokenizer`,
for clients that send token ids.

The engine has the options of the server that `python -m benchmarks clients` starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The steps that so few clients need compile in a minute or two.
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "compilation_config": {"cudagraph_capture_sizes": [1, 8], "prefill_sizes": [32, 128]},
}
PAIRS = (
    ("The capital of France is", " Paris."),
    ("The capital of France is", " fishing."),
    ("2 + 2 =", " 4"),
    ("Ünïcödé and 漢字 are", " no trouble 🙂 at all"),
)
PROMPTS, UNTIL, MAX_TOKENS = ("The capital of France is", "Once upon a time"), ["."], 16


def write_scores(path: str) -> None:
    """Write a JSON file with expected scores, and save the tokenizer in the folder `tokenizer` next to it. Starts an
    engine.

    The file has "pairs", texts of PAIRS with log-likelihoods of the continuations and whether they are greedy, and
    "generated", PROMPTS with greedy texts, with their "until" and "max_tokens".
    """
    from jaxengine import LLM, SamplingParams  # not at the top: importers may need only ENGINE

    llm = LLM(**ENGINE)
    llm.get_tokenizer().save_pretrained(Path(path).parent / "tokenizer")
    encode = llm.get_tokenizer().encode
    pairs = []
    for context, continuation in PAIRS:
        ids, first = encode(context + continuation), len(encode(context))
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        scores = [found[token] for token, found in list(zip(ids, output.prompt_logprobs, strict=True))[first:] if found]
        assert len(scores) == len(ids) - first
        total, is_greedy = sum(score.logprob for score in scores), all(score.rank == 1 for score in scores)
        pairs.append({"pair": [context, continuation], "logprob": total, "is_greedy": is_greedy})
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, stop=UNTIL)
    texts = [output.outputs[0].text for output in llm.generate(list(PROMPTS), params, use_tqdm=False)]
    generated = [{"prompt": prompt, "text": text} for prompt, text in zip(PROMPTS, texts, strict=True)]
    found = {"pairs": pairs, "generated": generated, "until": UNTIL, "max_tokens": MAX_TOKENS}
    Path(path).write_text(json.dumps(found, indent=1) + "\n")
