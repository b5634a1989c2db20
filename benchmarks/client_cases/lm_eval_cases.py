"""lm-eval's model for completions, with the server's tokenizer: its scores must equal the Python API's for the same
texts.
"""

import json
from pathlib import Path

from case import BASE, KEY, MODEL, SCORES, report
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PACKAGES = ["lm-eval"]


async def scores():
    """Score texts and generate continuations with lm-eval's client. Raises AssertionError unless log-likelihoods equal
    those of the file SCORES up to 1e-3, and what is greedy and the continuations equal it exactly.
    """
    expected = json.loads(Path(SCORES).read_text())
    model = LocalCompletionsAPI(
        base_url=BASE + "/v1/completions",
        model=MODEL,
        tokenizer_backend="remote",
        auth_token=KEY,
        header={"Authorization": f"Bearer {KEY}"},
        batch_size=3,
        max_length=256,
        max_retries=1,
    )
    asked = [Instance("loglikelihood", {}, tuple(each["pair"]), at) for at, each in enumerate(expected["pairs"])]
    for each, (total, is_greedy) in zip(expected["pairs"], model.loglikelihood(asked), strict=True):
        assert abs(total - each["logprob"]) < 1e-3 and is_greedy == each["is_greedy"], (each, total, is_greedy)
    until = {"until": expected["until"], "max_gen_toks": expected["max_tokens"]}
    prompts = enumerate(each["prompt"] for each in expected["generated"])
    found = model.generate_until([Instance("generate_until", {}, (prompt, until), at) for at, prompt in prompts])
    assert found == [each["text"] for each in expected["generated"]], (found, expected["generated"])


report(globals())
