"""Compiled inner loops of the sampler: one row of logits in, one token out, without sorting the vocabulary.

A row's weights w = exp((logit - max) / temperature) lie in [0, 1], and their float32 bit patterns have the order of
their values. So top-k and top-p find their cut digit by digit (a radix select): a histogram of the candidates' leading
digit, a walk down from the most likely one, then the next digit among those on the border. What a filter leaves stays
in token-id order, in which the cumulative distribution is inverted. Every row is computed alone and in a fixed order,
so its token does not depend on the batch.

Functions are module-level because only those are cached on disk by Numba.
"""

from typing import Any

import numpy as np

from kernels.cpu.runtime import compiled, compiled_short

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # short, so that n * _LN2_HIGH is exact; the rest of ln 2 is _LN2_LOW
_LN2_LOW = np.float32(-2.12194440e-4)
_SMALLEST_EXPONENT = np.float32(-87.0)  # below it a float32 exponential is no normal number: the weight is 0
_ROUND_UP = np.float32(12582912.0)  # 1.5 * 2**23: adding it and taking it off rounds to the nearest integer

# A weight's 30 low bits as three digits (the two above are 0 up to weight 1). Numbers with the same first digit differ
# by a factor of at most 1.125, so that one digit decides nearly everything.
_DIGIT_BITS = 10
_NUM_DIGITS = 3
_DIGIT_MASK = (1 << _DIGIT_BITS) - 1

_PHILOX_ROUNDS = 10
_SPAN = 512  # weights summed together, so that the inversion looks at one sum for each

TOKEN_OF_BAD_ROW = -1  # what `choose_tokens` writes for a row whose logits are not finite


@compiled_short
def philox_uniform(seed: Any, sequence_idx: Any, position: Any) -> Any:
    """Return a float64 in [0, 1) that is a function of its arguments alone.

    Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3), key `seed`,
    counter (position, sequence_idx).
    """
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    key_0, key_1 = np.uint64(seed) & mask, np.uint64(seed) >> half
    count_0, count_1 = np.uint64(position) & mask, np.uint64(position) >> half
    count_2, count_3 = np.uint64(sequence_idx) & mask, np.uint64(sequence_idx) >> half
    for _ in range(_PHILOX_ROUNDS):
        product_0 = np.uint64(0xD2511F53) * count_0
        product_1 = np.uint64(0xCD9E8D57) * count_2
        count_0, count_2 = (product_1 >> half) ^ count_1 ^ key_0, (product_0 >> half) ^ count_3 ^ key_1
        count_1, count_3 = product_1 & mask, product_0 & mask
        key_0 = (key_0 + np.uint64(0x9E3779B9)) & mask
        key_1 = (key_1 + np.uint64(0xBB67AE85)) & mask
    bits = (count_0 << np.uint64(21)) ^ (count_1 >> np.uint64(11))
    return np.float64(bits & np.uint64((1 << 53) - 1)) * 2.0**-53


@compiled
def penalize(
    logits: Any, token_ids: Any, num_prompt_tokens: Any, repetition: Any, presence: Any, frequency: Any, counts: Any
) -> None:
    """Apply penalties to `logits` [vocab], in place: repetition over all tokens, the others over output tokens.

    `counts` is int32 [vocab] of zeros, and is so again afterwards. Its low bit says that a token occurs, the rest how
    often it does in the output.
    """
    for idx in range(len(token_ids)):
        token_id = token_ids[idx]
        counts[token_id] |= 1
        if idx >= num_prompt_tokens:
            counts[token_id] += 2
    for idx in range(len(token_ids)):
        token_id = token_ids[idx]
        count = counts[token_id]
        if count == 0:
            continue
        counts[token_id] = 0
        logit = logits[token_id]
        logit = logit / repetition if logit > 0 else logit * repetition
        if count > 1:
            logit -= presence + frequency * (count >> 1)
        logits[token_id] = logit


@compiled
def _maximum(logits: Any) -> Any:
    """Return the largest logit, or NaN when any of them is one."""
    largest = logits[0]
    any_nan = False
    for idx in range(len(logits)):
        logit = logits[idx]
        largest = max(largest, logit)
        any_nan |= logit != logit
    return np.float32(np.nan) if any_nan else largest


@compiled
def _weigh(logits: Any, largest: Any, temperature: Any, scale_bits: Any) -> None:
    """Replace logits by exp((logit - largest) / temperature) (0 below exp(-87)), to a relative error of 4e-6.

    exp(x) = 2**n * exp(r) with |r| <= ln(2) / 2; both loops are free of branches, so that they are vectorised.
    """
    for idx in range(len(logits)):
        x = (logits[idx] - largest) / temperature
        alive = x > _SMALLEST_EXPONENT
        x = x if alive else np.float32(0.0)
        n = (x * _LOG2_E + _ROUND_UP) - _ROUND_UP
        r = (x - n * _LN2_HIGH) - n * _LN2_LOW
        p = np.float32(1.9875691500e-4)
        p = p * r + np.float32(1.3981999507e-3)
        p = p * r + np.float32(8.3334519073e-3)
        p = p * r + np.float32(4.1665795894e-2)
        p = p * r + np.float32(1.6666665459e-1)
        p = p * r + np.float32(5.0000001201e-1)
        logits[idx] = p * r * r + r + np.float32(1.0)
        scale_bits[idx] = (np.int32(n) + np.int32(127)) << np.int32(23) if alive else np.int32(0)
    scales = scale_bits.view(np.float32)
    for idx in range(len(logits)):
        logits[idx] *= scales[idx]


@compiled
def _compact(weights: Any, ids: Any, smallest: Any) -> Any:
    """Move weights that are neither 0 nor below `smallest` to the front, their ids to `ids`; return their number."""
    count = 0
    for idx in range(len(weights)):
        weight = weights[idx]
        if weight > 0 and weight >= smallest:
            weights[count] = weight
            ids[count] = idx
            count += 1
    return count


@compiled
def _cut(weights: Any, ids: Any, count: Any, amount: Any, by_count: Any) -> Any:
    """Keep the likeliest of the first `count` candidates until they amount to `amount`; return how many there are.

    Amounts are candidates when `by_count` is 1, and weight when it is 0; the candidate that reaches the amount is kept.
    Equal weights rank by lower id. The order of those kept is unchanged.
    """
    bits = weights.view(np.int32)
    histogram = np.empty(1 << _DIGIT_BITS, np.float64)
    reached = 0.0
    prefix = 0  # the leading digits of the weight at which the cut lies
    shift = _NUM_DIGITS * _DIGIT_BITS
    while shift > 0:
        shift -= _DIGIT_BITS
        histogram[:] = 0.0
        for idx in range(count):
            if bits[idx] >> (shift + _DIGIT_BITS) == prefix:
                digit = (bits[idx] >> shift) & _DIGIT_MASK
                histogram[digit] += 1.0 if by_count else np.float64(weights[idx])
        digit = _DIGIT_MASK
        while digit > 0 and reached + histogram[digit] < amount:
            reached += histogram[digit]
            digit -= 1
        prefix = (prefix << _DIGIT_BITS) | digit
        kept = 0
        for idx in range(count):
            if bits[idx] >> shift >= prefix:
                weights[kept] = weights[idx]
                ids[kept] = ids[idx]
                kept += 1
        count = kept
    return _cut_equals(weights, ids, count, prefix, amount - reached, by_count)


@compiled
def _cut_equals(weights: Any, ids: Any, count: Any, cut_bits: Any, missing: Any, by_count: Any) -> Any:
    """Of the candidates whose weight has exactly `cut_bits`, keep the first ones until they amount to `missing`."""
    bits = weights.view(np.int32)
    kept = 0
    for idx in range(count):
        if bits[idx] == cut_bits:
            if missing <= 0.0:
                continue
            missing -= 1.0 if by_count else np.float64(weights[idx])
        weights[kept] = weights[idx]
        ids[kept] = ids[idx]
        kept += 1
    return kept


@compiled
def _sum(weights: Any, begin: Any, end: Any) -> Any:
    """Return the float64 sum of weights[begin:end]; four running sums, because one would wait for each addition."""
    sum_0 = sum_1 = sum_2 = sum_3 = 0.0
    idx = begin
    while idx + 4 <= end:
        sum_0 += weights[idx]
        sum_1 += weights[idx + 1]
        sum_2 += weights[idx + 2]
        sum_3 += weights[idx + 3]
        idx += 4
    while idx < end:
        sum_0 += weights[idx]
        idx += 1
    return (sum_0 + sum_1) + (sum_2 + sum_3)


@compiled
def _invert(weights: Any, count: Any, uniform: Any) -> Any:
    """Return the first index at which the running sum of weights[:count] exceeds `uniform` of their whole sum."""
    num_spans = (count + _SPAN - 1) // _SPAN
    span_sums = np.empty(num_spans, np.float64)
    total = 0.0
    for span in range(num_spans):
        span_sums[span] = _sum(weights, span * _SPAN, min(count, (span + 1) * _SPAN))
        total += span_sums[span]
    target = uniform * total
    reached = 0.0
    span = 0
    while span < num_spans - 1 and reached + span_sums[span] <= target:
        reached += span_sums[span]
        span += 1
    chosen = span * _SPAN
    for idx in range(span * _SPAN, min(count, (span + 1) * _SPAN)):
        # Rounding may leave the running sum just short of the target at the end: the last weight above 0 is taken then.
        if weights[idx] > 0:
            chosen = idx
            reached += weights[idx]
            if reached > target:
                break
    return chosen


@compiled
def _choose(logits: Any, ids: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, uniform: Any) -> Any:
    """Return one row's token. Overwrites `logits` and `ids`, both [vocab]."""
    largest = _maximum(logits)
    if not np.isfinite(largest):
        return TOKEN_OF_BAD_ROW
    _weigh(logits, largest, temperature, ids)
    has_top_k = 0 < top_k < len(logits)
    if not has_top_k and top_p >= 1.0 and min_p <= 0.0:
        return _invert(logits, len(logits), uniform)
    count = _compact(logits, ids, min_p)
    if has_top_k and top_k < count:
        count = _cut(logits, ids, count, np.float64(top_k), 1)
    if top_p < 1.0:
        count = _cut(logits, ids, count, top_p * _sum(logits, 0, count), 0)
    return ids[_invert(logits, count, uniform)]


@compiled
def choose_tokens(
    logits: Any,
    row_idxs: Any,
    temperatures: Any,
    top_ks: Any,
    top_ps: Any,
    min_ps: Any,
    uniforms: Any,
    ids: Any,
    token_ids: Any,
) -> None:
    """Write the token of row `row_idxs[i]` of `logits` (float32 [rows, vocab]) to `token_ids[i]`, for every i.

    A row whose largest logit is not finite, or that holds a NaN, gets TOKEN_OF_BAD_ROW. Overwrites these rows of
    `logits`, and `ids` (int32 scratch [rows, vocab]). The order of filters is min-p, top-k, top-p, each over what the
    one before left.
    """
    for idx in range(len(row_idxs)):
        token_ids[idx] = _choose(
            logits[row_idxs[idx]], ids[idx], temperatures[idx], top_ks[idx], top_ps[idx], min_ps[idx], uniforms[idx]
        )


@compiled
def best_tokens(logits: Any, count: Any, ids: Any) -> None:
    """Write the ids of the `count` largest of `logits` [vocab] to `ids`, best first, equal ones by lower id."""
    found = 0
    for idx in range(len(logits)):
        if found == count and not logits[idx] > logits[ids[found - 1]]:
            continue
        found = min(found + 1, count)
        place = found - 1
        while place > 0 and logits[idx] > logits[ids[place - 1]]:
            ids[place] = ids[place - 1]
            place -= 1
        ids[place] = idx
