"""Gain from drafts on the default model: tokens per step and tokens per second, compared with the same engine without
drafts.

Without --draft, drafts are looked up (n-grams); with --method grammar only tokens to which a grammar leaves no
alternative are drafted. `python -m benchmarks first_layers FOLDER` makes a draft model for --draft, and
`python -m benchmarks train_head FOLDER` an EAGLE-3 head, which needs --method eagle3.

Prompts run one at a time, and all at once if --num-seqs allows it, by both engines in turn; tokens must be equal. The
answers to `json` and `json edit` are under grammars, which determine the names of properties; the latter repeats values
of its prompt. --always drafts in every step, whether it pays or not, to show how many drafts are right.
"""

from __future__ import annotations

import json
import logging
import time
from argparse import Namespace

from benchmarks.engines import engine_options
from benchmarks.harness import Option, OptionError, shared
from benchmarks.recorder import Recorder
from jaxengine import LLM, SamplingParams

TEXT = (
    "The quarterly report shows that the northern region sold 1,204 units, the southern region sold 980 units and the "
    "western region sold 1,455 units. Returns were 3 percent in the north, 4 percent in the south and 2 percent in the "
    "west. The board will meet on 14 March to discuss the western region and the plan for next year."
)
CODE = (
    "def area(width, height):\n    result = width * height\n    print('area', result)\n    return result\n\n"
    "def volume(width, height, depth):\n    result = width * height * depth\n    print('volume', result)\n"
    "    return result\n"
)
ADDRESS = {
    "name": "Margaret Hamilton",
    "company": "Northern Lighthouse Engineering Limited",
    "street": "17 Harbour Road, Building C, Second Floor",
    "city": "London",
    "instructions": "Leave the parcel with the porter at the side entrance and ring the bell twice",
}
PROMPTS = {
    "edit": f"Copy the following text, but replace 'region' by 'area':\n\n{TEXT}",
    "summarise": f"Summarise in three bullet points, quoting the figures:\n\n{TEXT}",
    "code": f"Rename the variable result to value in this code and print the whole code:\n\n{CODE}",
    "chat": "Tell me a short story about a lighthouse keeper.",
    "json": "Write the order of a customer as JSON.",
    "json edit": f"Change the city to Paris in this JSON, and print the whole JSON:\n\n{json.dumps(ADDRESS)}",
}
PROPERTIES = {
    name: {"type": kind}
    for name, kind in (
        ("customer_number", "integer"),
        ("is_paid_already", "boolean"),
        ("number_of_articles", "integer"),
        ("is_to_be_delivered", "boolean"),
        ("price_in_euros", "integer"),
        ("has_been_returned", "boolean"),
    )
}
ORDER = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}
TEXTS = {"type": "object", "properties": dict.fromkeys(ADDRESS, {"type": "string"}), "required": [*ADDRESS]}
ENGINE = engine_options(dtype="float32", max_model_len=1024, max_num_batched_tokens=256, kv_cache_memory_bytes=1 << 29)
OPTIONS = {
    "max_tokens": Option(96),
    "temperature": Option(0.0),
    "drafts": Option(7, "tokens drafted at once"),
    "num_seqs": Option(1, "sequences that run at once"),
    "draft": Option(None, "the draft model, or the head"),
    "method": Option(None, "what --draft is, or grammar", choices=("draft_model", "eagle3", "grammar")),
    "always": Option(False, "draft in every step"),
    "only": Option(tuple(PROMPTS), "prompts", choices=tuple(PROMPTS), metavar="NAME"),
    **shared(rounds=3),
}


def answer(llm: LLM, names: list[str], params: list[SamplingParams]) -> tuple[list[list[int]], float, int]:
    """Chat with all named prompts at once; return each answer's token ids, the elapsed seconds, and the number of
    engine steps.

    names: keys of PROMPTS. params: one SamplingParams for each name. Answers are in the order of `names`.
    """
    steps, start = llm.core.engine.stats.num_steps, time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": PROMPTS[name]}] for name in names], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return [list(each.outputs[0].token_ids) for each in outputs], seconds, llm.core.engine.stats.num_steps - steps


def run(args: Namespace, recorder: Recorder) -> None:
    """Time an engine with drafts and one without on each prompt of `args.only` alone and, with several sequences, on
    all at once; add a row for each: whether tokens are equal, steps, tokens a second and ratios. Print how many drafts
    were accepted by position.

    Each time is the best of `args.rounds`, after one to warm up. args.always: drafts are always of the largest width.
    Raises OptionError if --method and --draft do not fit together. Numbers are rounded.
    """
    logging.getLogger("jaxengine").setLevel(logging.ERROR)
    if args.method and (args.method == "grammar") == bool(args.draft):
        raise OptionError("--method says what --draft is, or without it grammar")
    method = {"method": args.method or ("draft_model" if args.draft else "ngram")}
    method |= {"model": args.draft} if args.draft else {}
    engine = ENGINE | {"max_num_seqs": args.num_seqs}
    plain = LLM(**engine)
    drafting = LLM(**engine, speculative_config=method | {"num_speculative_tokens": args.drafts})
    if args.always:
        widest = max(drafting.core.config.widths)
        drafting.core.engine.scheduler.extension("drafts").width.choose = lambda num_rows, runs: widest
    grammars = {"json": {"json": ORDER, "disable_any_whitespace": True}, "json edit": {"json": TEXTS}}
    common = {"temperature": args.temperature, "seed": 1, "max_tokens": args.max_tokens, "ignore_eos": True}
    cases = [(name, [name]) for name in args.only]
    for name, names in [*cases, ("all at once", [*args.only])] if args.num_seqs > 1 else cases:
        params = [SamplingParams(**common, structured_outputs=grammars.get(each)) for each in names]
        for llm in (plain, drafting):
            answer(llm, names, params)  # prefixes cached, widths measured
        best, steps, equal = [float("inf")] * 2, [0, 0], True
        for _ in range(args.rounds):
            found = [answer(llm, names, params) for llm in (plain, drafting)]
            best = [min(before, seconds) for before, (_, seconds, _) in zip(best, found, strict=True)]
            steps = [each[2] for each in found]
            equal &= found[0][0] == found[1][0]
        num_tokens = sum(map(len, found[0][0]))
        row = {"prompt": name, "tokens equal": equal, "steps without": steps[0], "steps with": steps[1]}
        row |= {"fewer steps": round(steps[0] / steps[1], 2)}
        row |= {f"tokens/s {kind}": round(num_tokens / best[at], 1) for at, kind in enumerate(("without", "with"))}
        recorder.add(row | {"ratio": round(best[0] / best[1], 2)})
    drafts = drafting.core.engine.extensions.by_name["drafts"].stats
    print(f"drafts {drafts.num_tokens}, accepted {drafts.accepted.tolist()} by place")
