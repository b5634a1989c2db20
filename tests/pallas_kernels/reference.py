"""Float64 oracle of every operation on pages and on states, written for the reader and not for speed.

Imports numpy only and shares no code with the implementations it judges. Works on canonical pages
[P, page_size, 2, K, H] (or separate keys and values), one sequence, token and head at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def ragged_paged_attention(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    cu_q_lens: np.ndarray,
    kv_lens: np.ndarray,
    page_table: np.ndarray,
    num_seqs: int,
    *,
    sm_scale: float,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    lookback: int = 0,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    slopes: np.ndarray | None = None,
    biases: np.ndarray | None = None,
    tree_mask: np.ndarray | None = None,
    kv_limits: np.ndarray | None = None,
    mutual: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute softmax attention of q [T, N, H] over k_pages [P, page_size, K, H] and v_pages [..., Hv]: return (output
    [T, N, Hv], natural log-sum-exp [T, N]), both float64.

    A token that belongs to no sequence gives output 0 and lse -inf. So does a token that sees no key, except that its
    lse is its sink's logit if there are sinks. Reads exactly the visible slots, so anything else may hold NaN.
    Arguments: see RaggedBatch (cu_q_lens [S + 1], kv_lens [S], page_table [S, W]), AttentionSpec and attention.op
    (sinks and slopes [N], biases [T, N, E], tree_mask u32 [T, ceil(Q / 32)]). kv_limits [T]: exclusive end of the keys
    that a token sees beyond its own position; if `mutual`, without those of tokens whose limit is 0.
    """
    num_tokens, num_q_heads, _ = q.shape
    page_size, num_kv_heads, v_head_dim = v_pages.shape[1:]
    group = num_q_heads // num_kv_heads
    out = np.zeros((num_tokens, num_q_heads, v_head_dim))
    lse = np.full((num_tokens, num_q_heads), -np.inf)
    for seq in range(num_seqs):
        first, end = int(cu_q_lens[seq]), int(cu_q_lens[seq + 1])
        num_computed = int(kv_lens[seq]) - (end - first)
        for token in range(first, end):
            tree_row = None if tree_mask is None else tree_mask[token]
            limits = causal, window, chunk, lookback
            keys = visible_keys(num_computed, end - first, token - first, *limits, tree_row)
            if kv_limits is not None:  # later keys, up to the token's limit
                later = np.arange(token + 1, first - num_computed + min(kv_limits[token], kv_lens[seq]))
                later = later[kv_limits[later] > 0] if mutual else later
                keys = np.append(keys, later - first + num_computed)
            pages, offsets = page_table[seq, keys // page_size], keys % page_size
            for head in range(num_q_heads):
                k = k_pages[pages, offsets, head // group].astype(np.float64)
                v = v_pages[pages, offsets, head // group].astype(np.float64)
                logits = k @ q[token, head].astype(np.float64) * sm_scale
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                if slopes is not None:
                    logits = logits - float(slopes[head]) * np.abs(keys - (num_computed + token - first))
                if biases is not None:
                    distance = num_computed + token - first - keys
                    near = np.minimum(distance, biases.shape[2] - 1)
                    logits = logits + np.where(distance == near, biases[token, head, near].astype(np.float64), 0.0)
                sink = -np.inf if sinks is None else float(sinks[head])
                out[token, head], lse[token, head] = softmax_average(logits, v, sink)
    return out, lse


def visible_keys(
    num_computed: int,
    q_len: int,
    index: int,
    causal: bool,
    window: int | None,
    chunk: int | None,
    lookback: int,
    tree_row: np.ndarray | None,
) -> np.ndarray:
    """Return the positions of the keys that new token `index` of a sequence sees, ascending.

    num_computed, q_len: tokens of the sequence before the step, and its new tokens. causal, window, chunk,
    lookback: see AttentionSpec. tree_row: u32, bit b says whether the token sees new token b of its sequence; it
    narrows the causal range. None if there is no tree.
    """
    position = num_computed + index
    keys = np.arange(position + 1 if causal else num_computed + q_len)
    if tree_row is not None:
        new = np.maximum(keys - num_computed, 0)
        keys = keys[(keys < num_computed) | ((tree_row[new // 32] >> (new % 32).astype(np.uint32)) & 1).astype(bool)]
    if chunk is not None:
        keys = keys[position // chunk - keys // chunk <= lookback]
    return keys if window is None else keys[np.abs(keys - position) < window]


def softmax_average(logits: np.ndarray, values: np.ndarray, sink: float) -> tuple[np.ndarray, float]:
    """Return the mean [Hv] of values [n, Hv] weighted by the softmax of logits [n], and the natural log-sum-exp. `sink`
    is one more logit whose value is 0; at -inf it has no effect. Returns zeros and -inf if no logit is above -inf.
    """
    largest = max(np.max(logits, initial=-np.inf), sink)
    if largest == -np.inf:
        return np.zeros(values.shape[-1]), -np.inf
    weights = np.exp(logits - largest)
    total = weights.sum() + np.exp(sink - largest)
    return weights @ values / total, largest + np.log(total)


def select_keys(
    q: np.ndarray,
    weights: np.ndarray,
    key_pages: np.ndarray,
    cu_q_lens: np.ndarray,
    kv_lens: np.ndarray,
    page_table: np.ndarray,
    num_seqs: int,
    count: int,
    pooling: np.ndarray | None = None,
) -> np.ndarray:
    """Return i64 [T, count], the positions that attention.selected.select_keys selects, by scores in float64: all
    causal positions, ascending, if they are at most `count`, else those of the largest scores, the best first. Unused
    entries are -1.

    A key's score is the sum over heads i of weights [T, I] times relu(q[i] . key), with q [T, I, J] and key_pages [P,
    page_size, J]. The other arguments are those of RaggedBatch. Reads exactly the visible slots. With `pooling`
    [m, J] the result is numbers of groups of m tokens, and the keys in key_pages [P, page_size, 2 * J] are followed by
    gates.
    """
    found, page_size = np.full((len(q), count), -1), key_pages.shape[1]
    for seq in range(num_seqs):
        first, end = int(cu_q_lens[seq]), int(cu_q_lens[seq + 1])
        for token in range(first, end):
            seen = np.arange(int(kv_lens[seq]) - (end - first) + token - first + 1)
            keys = key_pages[page_table[seq, seen // page_size], seen % page_size].astype(np.float64)
            if pooling is not None:
                seen = seen[: len(seen) // len(pooling)]
                grouped = keys[: len(seen) * len(pooling)].reshape(len(seen), *pooling.shape[:1], keys.shape[1])
                shares = np.exp(grouped[..., pooling.shape[1] :] + pooling)
                keys = (grouped[..., : pooling.shape[1]] * shares).sum(axis=1) / shares.sum(axis=1)
            scores = np.maximum(keys @ q[token].astype(np.float64).T, 0.0) @ weights[token].astype(np.float64)
            best = seen if len(seen) <= count else np.argsort(-scores, kind="stable")[:count]
            found[token, : len(best)] = best
    return found


def selected_attention(
    q: np.ndarray,
    k_pages: np.ndarray,
    cu_q_lens: np.ndarray,
    page_table: np.ndarray,
    num_seqs: int,
    positions: np.ndarray,
    *,
    v_head_dim: int,
    sm_scale: float,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Compute softmax attention of q [T, N, H] over the keys at `positions` [T, k] alone, of k_pages [P, page_size, H],
    whose first v_head_dim elements are their values: return float64 [T, N, v_head_dim]. sm_scale: factor of the logits.
    sinks: one more logit of each head, whose value is 0; None for none.

    A token of no sequence, or without a position >= 0, gives 0. The other arguments are those of RaggedBatch.
    """
    out, page_size = np.zeros((*q.shape[:2], v_head_dim)), k_pages.shape[1]
    for seq in range(num_seqs):
        for token in range(int(cu_q_lens[seq]), int(cu_q_lens[seq + 1])):
            own = positions[token][positions[token] >= 0]
            keys = k_pages[page_table[seq, own // page_size], own % page_size].astype(np.float64)
            for head in range(q.shape[1]):
                logits = keys @ q[token, head].astype(np.float64) * sm_scale
                sink = -np.inf if sinks is None else float(sinks[head])
                out[token, head], _ = softmax_average(logits, keys[:, :v_head_dim], sink)
    return out


def select_blocks(
    q: np.ndarray,
    key_pages: np.ndarray,
    cu_q_lens: np.ndarray,
    kv_lens: np.ndarray,
    page_table: np.ndarray,
    num_seqs: int,
    *,
    size: int,
    count: int,
    local: int,
) -> np.ndarray:
    """Return i64 [T, K, count], the blocks that attention.selected.select_blocks selects, by scores in float64: all
    that a token sees, ascending, if they are at most `count`, else the last `local` and those of the largest scores,
    the best first. Unused entries are -1.

    q: [T, K, J]. key_pages: keys of the indexer [P, page_size, J]. The other arguments are those of
    attention.selected.select_blocks and RaggedBatch.
    """
    found, page_size = np.full((*q.shape[:2], count), -1), key_pages.shape[1]
    for seq in range(num_seqs):
        first, end = int(cu_q_lens[seq]), int(cu_q_lens[seq + 1])
        for token in range(first, end):
            seen = np.arange(int(kv_lens[seq]) - (end - first) + token - first + 1)
            keys = key_pages[page_table[seq, seen // page_size], seen % page_size].astype(np.float64)
            products = q[token].astype(np.float64) @ keys.T
            firsts = range(0, len(seen), size)
            scores = np.stack([products[:, at : at + size].max(axis=1) for at in firsts], axis=1)
            scores[:, max(len(firsts) - local, 0) :] = np.inf
            order = np.argsort(-scores, axis=1, kind="stable") if len(firsts) > count else np.indices(scores.shape)[1]
            found[token, :, : len(firsts)] = order[:, :count]
    return found


def block_attention(
    q: np.ndarray,
    joined_pages: np.ndarray,
    cu_q_lens: np.ndarray,
    kv_lens: np.ndarray,
    page_table: np.ndarray,
    num_seqs: int,
    blocks: np.ndarray,
    *,
    size: int,
    sm_scale: float,
) -> np.ndarray:
    """Compute softmax attention of q [T, N, H] over the keys of `blocks` [T, K, k] of `size` tokens that each token
    sees: return float64 [T, N, Hv], 0 for a token of no sequence. joined_pages: keys followed by their values,
    [P, page_size, K, H + Hv]. sm_scale: factor of the logits. The other arguments are those of RaggedBatch.
    """
    num_kv_heads, width, page_size = joined_pages.shape[2], q.shape[2], joined_pages.shape[1]
    out = np.zeros((*q.shape[:2], joined_pages.shape[3] - width))
    for seq in range(num_seqs):
        first, end = int(cu_q_lens[seq]), int(cu_q_lens[seq + 1])
        for token in range(first, end):
            position = int(kv_lens[seq]) - (end - first) + token - first
            for head in range(q.shape[1]):
                group = head * num_kv_heads // q.shape[1]
                chosen = blocks[token, group]
                own = (chosen[chosen >= 0][:, None] * size + np.arange(size)).ravel()
                own = own[own <= position]
                rows = joined_pages[page_table[seq, own // page_size], own % page_size, group].astype(np.float64)
                logits = rows[:, :width] @ q[token, head].astype(np.float64) * sm_scale
                out[token, head], _ = softmax_average(logits, rows[:, width:], -np.inf)
    return out


def kv_cache_update(
    k_pages: np.ndarray, v_pages: np.ndarray, k: np.ndarray, v: np.ndarray, slot_mapping: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return copies of k_pages [P, page_size, K, H] and v_pages [P, page_size, K, Hv] with k [T, K, H] and v [T, K, Hv]
    written to their slots.

    slot_mapping: i32 [T], the slot of each token; negative ones are dropped.
    """
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    page_size = k_pages.shape[1]
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            k_pages[slot // page_size, slot % page_size] = k[token]
            v_pages[slot // page_size, slot % page_size] = v[token]
    return k_pages, v_pages


def quantized_matmul(
    x: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
) -> np.ndarray:
    """Multiply x [M, in] by codes [in, out] * scales [n, out] - zeros [n, out] or None: return float64 [M, out]. Input
    i uses row i * n // in of scales and zeros.
    """
    y = np.zeros((x.shape[0], codes.shape[1]))
    for i in range(codes.shape[0]):
        scale = i * scales.shape[0] // codes.shape[0]
        weights = codes[i].astype(np.float64) * scales[scale].astype(np.float64)
        if zeros is not None:
            weights = weights - zeros[scale].astype(np.float64)
        y += np.outer(x[:, i].astype(np.float64), weights)
    return y


def lora_product(
    x: np.ndarray,
    a: np.ndarray,
    bs: list[np.ndarray],
    slots: np.ndarray,
    modules: tuple[int, ...],
) -> np.ndarray:
    """Return what the adapter in each row's slot adds to the product: float64 [T, out], the outputs of all sources one
    after the other; zeros for slot -1.

    x: [T, in]. a: [modules, slots, rank, in]. slots: [T], -1 for rows without an adapter. bs, modules: for each source,
    a matrix that is part of the product, B [slots, rank, its outputs] and the index of its A in `a`.
    """
    out = np.zeros((len(x), sum(b.shape[2] for b in bs)))
    for row, slot in enumerate(slots):
        if slot >= 0:
            inner = [a[module, slot].astype(np.float64) @ x[row].astype(np.float64) for module in modules]
            out[row] = np.concatenate([b[slot].astype(np.float64).T @ one for one, b in zip(inner, bs, strict=True)])
    return out


def causal_conv(
    x: np.ndarray,
    weight: np.ndarray,
    windows: np.ndarray,
    cu_q_lens: np.ndarray,
    reads: np.ndarray,
    writes: np.ndarray,
    num_seqs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute a causal convolution of x [T, C] with weight [C, k] along each sequence: return (y [T, C], all windows
    [R, k - 1, C] after the step), both float64. `windows` itself is not changed.

    The operation, and its arguments, are those of jaxengine.pallas_kernels.state.conv; cu_q_lens and num_seqs are those
    of RaggedBatch, reads [S] (-1: zeros) and writes [S] (R or more: nowhere) those of StateRows.
    """
    y, windows, kernel = np.zeros(x.shape), windows.astype(np.float64), weight.shape[1]
    for seq in range(num_seqs):
        first, end = int(cu_q_lens[seq]), int(cu_q_lens[seq + 1])
        if first == end:
            continue
        before = windows[reads[seq]] if reads[seq] >= 0 else np.zeros(windows.shape[1:])
        tokens = np.concatenate([before, x[first:end]])
        for token in range(first, end):
            y[token] = (weight.T * tokens[token - first : token - first + kernel]).sum(axis=0)
        if writes[seq] < len(windows):
            windows[writes[seq]] = tokens[1 - kernel :]
    return y, windows


def gated_delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    cu_q_lens: np.ndarray,
    reads: np.ndarray,
    writes: np.ndarray,
    num_seqs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the gated delta rule along each sequence: return (o [T, N, Hv], all states after the step), both float64.

    The operation, and its arguments, are those of jaxengine.pallas_kernels.state.delta: q, k [T, K, H], v [T, N, Hv],
    decay [T, N] or [T, N, H], beta [T, N], state [R, N, H, Hv]. cu_q_lens and num_seqs are those of RaggedBatch, reads
    [S] (-1: zeros) and writes [S] (R or more: nowhere) those of StateRows.
    """
    q, k, v, decay, beta, state = (array.astype(np.float64) for array in (q, k, v, decay, beta, state))
    o, group = np.zeros(v.shape), v.shape[1] // q.shape[1]

    def take(token: int, head: int, m: np.ndarray) -> None:
        key = k[token, head // group]
        m *= np.exp(decay[token, head])[..., None]
        m += np.outer(key, beta[token, head] * (v[token, head] - key @ m))
        o[token, head] = q[token, head // group] @ m

    _recur(take, state, cu_q_lens, reads, writes, num_seqs)
    return o, state


def state_space(
    x: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    decay: np.ndarray,
    dt: np.ndarray,
    state: np.ndarray,
    cu_q_lens: np.ndarray,
    reads: np.ndarray,
    writes: np.ndarray,
    num_seqs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute Mamba-2's recurrence along each sequence: return (y [T, N, P], all states after the step), both float64.

    The operation, and its arguments, are those of jaxengine.pallas_kernels.state.space: x [T, N, P], b, c [T, G, H],
    decay, dt [T, N], state [R, N, P, H]. cu_q_lens and num_seqs are those of RaggedBatch, reads [S] (-1: zeros) and
    writes [S] (R or more: nowhere) those of StateRows.
    """
    x, b, c, decay, dt, state = (array.astype(np.float64) for array in (x, b, c, decay, dt, state))
    y, group = np.zeros(x.shape), x.shape[1] // b.shape[1]

    def take(token: int, head: int, m: np.ndarray) -> None:
        m *= np.exp(decay[token, head])
        m += np.outer(dt[token, head] * x[token, head], b[token, head // group])
        y[token, head] = m @ c[token, head // group]

    _recur(take, state, cu_q_lens, reads, writes, num_seqs)
    return y, state


def selective_scan(
    x: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    dt: np.ndarray,
    a: np.ndarray,
    state: np.ndarray,
    cu_q_lens: np.ndarray,
    reads: np.ndarray,
    writes: np.ndarray,
    num_seqs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute Mamba's recurrence along each sequence: return (y [T, C], all states after the step), both float64.

    The operation, and its arguments, are those of jaxengine.pallas_kernels.state.scan: x, dt [T, C], b, c [T, H], a [C,
    H], state [R, C, H]. cu_q_lens and num_seqs are those of RaggedBatch, reads [S] (-1: zeros) and writes [S] (R or
    more: nowhere) those of StateRows.
    """
    x, b, c, dt, a, state = (array.astype(np.float64) for array in (x, b, c, dt, a, state))
    y = np.zeros(x.shape)

    def take(token: int, channel: int, m: np.ndarray) -> None:
        m *= np.exp(dt[token, channel] * a[channel])
        m += dt[token, channel] * x[token, channel] * b[token]
        y[token, channel] = m @ c[token]

    _recur(take, state, cu_q_lens, reads, writes, num_seqs)
    return y, state


def _recur(
    take: Callable[[int, int, np.ndarray], None],
    state: np.ndarray,
    cu_q_lens: np.ndarray,
    reads: np.ndarray,
    writes: np.ndarray,
    num_seqs: int,
) -> None:
    """Run a recurrence along each sequence, and write its last matrices into `state` [R, heads, ...] in place.

    take(token, head, matrix): updates one head's matrix in place; it is called for every token in order and every head
    (a channel of Mamba). cu_q_lens, num_seqs: see RaggedBatch. reads, writes: row of `state` from which each sequence's
    matrices come (-1: zeros) and to which they go (R or more: nowhere). A sequence without tokens changes nothing.
    """
    for seq in range(num_seqs):
        first, end = int(cu_q_lens[seq]), int(cu_q_lens[seq + 1])
        if first == end:
            continue
        matrices = state[reads[seq]].copy() if reads[seq] >= 0 else np.zeros(state.shape[1:])
        for token in range(first, end):
            for head, m in enumerate(matrices):
                take(token, head, m)
        if writes[seq] < len(state):
            state[writes[seq]] = matrices
