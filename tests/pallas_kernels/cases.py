"""The attention cases every implementation must pass, in the order of the kernel notes' conformance list.

Cases of one shape and spec share one executable. `QUICK` is the subset that the mutation gate runs.
"""

from __future__ import annotations

from tests.pallas_kernels.problems import Case

MIXED_Q, MIXED_KV = (1, 1, 1, 5, 40, 1), (100, 17, 129, 300, 140, 33)

BATCHES = [
    Case("first token", (1,), (1,)),
    Case("page edges", (1, 1, 1, 1), (15, 16, 17, 32)),
    Case("block edges", (1, 1, 1, 1, 1, 1), (127, 128, 129, 255, 256, 257)),
    Case("prefill", (1, 2, 15, 16, 17, 32), (1, 2, 15, 16, 17, 32)),
    Case("prefill longer than a tile", (70,), (70,)),
    Case("chunk over long context", (5, 3), (300, 128)),
    Case("chunk starts and ends inside a page", (20, 7), (50, 23)),
    Case("q tile straddles a kv block", (40, 9, 2), (140, 133, 129)),
    Case("mixed", MIXED_Q, MIXED_KV),
    Case("single tokens behind runs", (12, 1, 9, 1, 1), (12, 200, 140, 1, 128)),
    Case("prefill only", (30, 30, 30), (30, 160, 30)),
    Case("no sequences", (), ()),
    Case("empty sequences", (0, 3, 0, 1, 0), (0, 3, 0, 20, 0)),
    Case("nothing scheduled", (0, 4, 0, 1), (50, 30, 16, 9)),
    Case("all tokens used", (90, 6), (90, 12)),
    Case("page table past the end is huge", MIXED_Q, MIXED_KV, past_end=2**31 - 1),
    Case("page table past the end is another's page", MIXED_Q, MIXED_KV, past_end=3),
    Case("infinite unseen slots", MIXED_Q, MIXED_KV, unseen=float("inf")),
    Case("stale unseen slots", MIXED_Q, MIXED_KV, unseen=1000.0),
    Case("shared prefix", (1, 1, 8, 1), (90, 83, 88, 130), shared_pages=5),
    Case("verify tails", (2, 3, 4, 5, 6, 7, 8), (130, 3, 68, 129, 16, 257, 40)),
    Case("skewed lengths", (1, 1, 1, 1, 1, 1, 1, 1), (384, 2, 1, 3, 1, 2, 5, 1)),
    Case("large logits", (1, 20, 1), (130, 150, 16), query_scale=3e3),
    Case("equal logits", (1, 20, 1), (130, 150, 16), query_scale=0.0),
    Case("large values", (1, 20, 1), (130, 150, 16), value_scale=1e4),
    Case("tiny values", (1, 20, 1), (130, 150, 16), value_scale=1e-30),
]

# T <= S: the program without runs, which must still serve any batch.
ROWS_ONLY = [
    Case("decode bucket", (1,) * 8, (1, 15, 16, 17, 128, 129, 300, 31), num_tokens=8),
    Case("padded decode bucket", (1, 1, 1), (129, 1, 256), num_tokens=8),
    Case("runs in a decode bucket", (3, 0, 1, 4), (130, 0, 20, 4), num_tokens=8),
    Case("one sequence, one token", (1,), (200,), num_tokens=1, max_seqs=1),
    Case("one sequence, no token", (), (), num_tokens=1, max_seqs=1),
    Case("ten rows", (1,) * 10, tuple(range(120, 130)), num_tokens=10, max_seqs=10),
]

# Where only a size changes, the dtypes are crossed with some of the sizes: each pair is one more program to compile.
ONE, BOTH = ("float32",), ("float32", "bfloat16")
SMALL = {"num_tokens": 24, "max_seqs": 4}
SMALL_Q, SMALL_KV = (1, 9, 1, 6), (70, 19, 130, 6)

HEADS = [
    Case(f"heads {heads}", SMALL_Q, SMALL_KV, heads=heads, dtypes=BOTH if heads in ((8, 8), (28, 4)) else ONE, **SMALL)
    for heads in ((1, 1), (8, 8), (32, 8), (28, 4), (16, 1), (12, 3), (5, 1), (64, 8))
]
DIMS = [
    Case(f"dims {dims}", SMALL_Q, SMALL_KV, dims=dims, dtypes=BOTH if dims in ((80, 80), (192, 128)) else ONE, **SMALL)
    for dims in ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128))
]
PAGES = [
    Case(
        f"page size {size}",
        SMALL_Q,
        (70, 50, 300, 6),
        page_size=size,
        max_pages=-(-384 // size),
        dtypes=BOTH if size == 64 else ONE,
        **SMALL,
    )
    for size in (8, 32, 48, 64, 128, 256)
]
WINDOWS = [
    Case(
        f"window {window}",
        (1, 40, 3, 1, 12),
        (200, 150, 131, 16, 300),
        window=window,
        dtypes=BOTH if window == 16 else ONE,
    )
    for window in (1, 15, 16, 17, 100, 400)
]
LOGITS = [
    Case("soft cap 30", MIXED_Q, MIXED_KV, soft_cap=30.0, query_scale=40.0),
    Case("soft cap 50", MIXED_Q, MIXED_KV, soft_cap=50.0, query_scale=100.0),
    Case("scale", MIXED_Q, MIXED_KV, sm_scale=0.7),
    *(Case(f"{sinks} sinks", MIXED_Q, MIXED_KV, sinks=sinks) for sinks in ("zero", "large", "absent", "mixed")),
    Case("sinks and window", (1, 40, 3, 1, 12), (200, 150, 131, 16, 300), sinks="mixed", window=16),
]
MASKS = [
    Case("bidirectional", (5, 40, 1), (30, 140, 17), causal=False),
    Case("bidirectional past a block", (2, 20), (130, 257), causal=False),
    Case("tree chain", (8, 1, 5, 33), (140, 20, 133, 60), tree="chain"),
    Case("tree branches", (8, 1, 5, 33), (140, 20, 133, 60), tree="branches"),
]
LONG = [
    Case(f"long {length}", (1, 3), (length, 2), heads=(2, 1), num_tokens=6, max_seqs=2, max_pages=530, page_size=8)
    for length in (4095, 4096, 4097)
]

ATTENTION = BATCHES + ROWS_ONLY + HEADS + DIMS + PAGES + WINDOWS + LOGITS + MASKS + LONG
QUICK = [
    next(case for case in ATTENTION if case.name == name)
    for name in (
        "mixed",
        "q tile straddles a kv block",
        "block edges",
        "single tokens behind runs",
        "nothing scheduled",
        "runs in a decode bucket",
        "window 16",
        "sinks and window",
        "soft cap 30",
        "tree branches",
    )
]
