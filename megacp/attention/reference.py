"""Exact attention over whole sequences: slow, dense, float64. What every backend is tested against.

Legend: S tokens of the whole pack in global order, N query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible(length: int, padded_length: int, causal: bool, window: Sequence[int] | None = None) -> Tensor:
    """bool [padded_length, padded_length]: may the query of a row see the key of a column of one sequence?

    window [left, right]: how many earlier and later neighbours are seen besides oneself, -1 is no limit
    (TransformerEngine's convention). Padding is seen by no one.
    """
    position = torch.arange(padded_length)
    ahead = position[None, :] - position[:, None]
    seen = (position < length).expand_as(ahead)
    left, right = window or (-1, -1)
    if causal:
        seen = seen & (ahead <= 0)
    if left >= 0:
        seen = seen & (ahead >= -left)
    if right >= 0:
        seen = seen & (ahead <= right)
    return seen


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    padded_lengths: Sequence[int] | None = None,
    *,
    causal: bool = True,
    window: Sequence[int] | None = None,
    softmax_scale: float | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v within each sequence: q [S, N, D], k and v [S, K, D] -> float64 [S, N, D].

    Differentiable. Sequences have real `lengths` and lie `padded_lengths` apart (default: nothing is padded).
    softmax_scale defaults to D**-0.5. A row that sees nothing is 0.
    """
    room = list(lengths if padded_lengths is None else padded_lengths)
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    outs = []
    for length, *rows in zip(lengths, *(x.double().split(room) for x in (q, k, v)), strict=True):
        query, key, value = (x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in rows)
        seen = visible(length, query.shape[1], causal, window)
        scores = scale * query @ key.transpose(1, 2)
        # A finite floor instead of -inf: the gradient of a row that sees nothing would be NaN.
        weights = scores.masked_fill(~seen, -1e300).softmax(-1).masked_fill(~seen, 0.0)
        outs.append((weights @ value).transpose(0, 1))
    return torch.cat(outs)
