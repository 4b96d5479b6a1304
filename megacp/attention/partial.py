"""Attention over some of the keys of each query, joined with that over others.

Legend: T tokens of this rank, N query heads, D head width; rows are the queries of spans, one span after the other.
"""

from __future__ import annotations

from torch import Tensor, inf

from megacp.attention import kernels
from megacp.attention.spans import Spans


def join_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, spans: Spans) -> None:
    """Join a result [rows, N, D] and its log-sum-exp [rows, N] into out [T, N, D] and lse [T, N], in place."""
    if not spans.queries.is_block and len(spans.runs) == 1:
        run = spans.runs[0]
        rows, rows_lse = kernels.query_rows(run, out), kernels.query_rows(run, lse)
        kernels.merge_(rows, rows_lse, part.unflatten(0, rows.shape[:2]), part_lse.unflatten(0, rows.shape[:2]))
        return
    rows, rows_lse = spans.queries.of(out, lse)
    kernels.merge_(rows, rows_lse, part, part_lse)
    # Of a block they are views.
    if not spans.queries.is_block:
        spans.queries.put_(out, rows)
        spans.queries.put_(lse, rows_lse)


def whole(part: Tensor, part_lse: Tensor, spans: Spans, rows: int) -> tuple[Tensor, Tensor]:
    """A first result as out [T, N, D] and lse [T, N] of all T = `rows` queries; those outside the spans see nothing."""
    if spans.covers(rows):
        return part, part_lse
    out, lse = part.new_zeros(rows, *part.shape[1:]), part_lse.new_full((rows, part.shape[1]), -inf)
    spans.queries.put_(out, part)
    spans.queries.put_(lse, part_lse)
    return out, lse
