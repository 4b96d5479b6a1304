"""Attention over some of the keys of each query, joined with that over others.

Legend: T tokens of this rank, S keys at hand, N query heads, K key/value heads, D head width; rows are the queries of
spans, one span after the other.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, inf

from megacp.attention import kernels
from megacp.attention.spans import Spans


class Partial(NamedTuple):
    """Of all queries of a rank: out [T, N, D] and log-sum-exp [T, N] over the keys met so far, fp32 (fp64)."""

    out: Tensor
    lse: Tensor


def attend_further(done: Partial | None, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Partial:
    """Attention of q [T, N, D] over the keys k, v [S, K, D] of `spans`, joined into what is `done`, in place."""
    if done is not None and not q.is_cuda:
        kernels.join_on_cpu_(done.out, done.lse, q, k, v, spans, scale)
        return done
    part, part_lse = kernels.forward(q, k, v, spans, scale)
    if done is None:
        return whole(part.to(kernels.statistics_dtype(q.dtype)), part_lse.t(), spans, len(q))
    join_(*done, part, part_lse.t(), spans)
    return done


def join_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, spans: Spans) -> None:
    """Join a result [rows, N, D] and its log-sum-exp [rows, N] into out [T, N, D] and lse [T, N], in place."""
    if not spans.queries.is_block and len(spans.runs) == 1:
        rows, rows_lse = (kernels.query_rows(spans.runs[0], x) for x in (out, lse))
        kernels.merge_(rows, rows_lse, part.unflatten(0, rows.shape[:2]), part_lse.unflatten(0, rows.shape[:2]))
        return
    rows, rows_lse = spans.queries.of(out, lse)
    kernels.merge_(rows, rows_lse, part, part_lse)
    # Of a block they are views.
    if not spans.queries.is_block:
        spans.queries.put_(out, rows)
        spans.queries.put_(lse, rows_lse)


def whole(part: Tensor, part_lse: Tensor, spans: Spans, rows: int) -> Partial:
    """A first result [rows, N, D] as that of all T = `rows` queries; those outside the spans see nothing."""
    if spans.covers(rows):
        return Partial(part, part_lse)
    out, lse = part.new_zeros(rows, *part.shape[1:]), part_lse.new_full((rows, part.shape[1]), -inf)
    spans.queries.put_(out, part)
    spans.queries.put_(lse, part_lse)
    return Partial(out, lse)
