"""Attention over some of the keys of each query, joined with that over others.

Legend: T tokens of this rank, N query heads, D head width; rows are the queries of spans, one span after the other.
"""

from __future__ import annotations

from torch import Tensor, inf

from megacp.attention import kernels
from megacp.attention.spans import Spans


def join_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, spans: Spans) -> None:
    """Join a result [rows, N, D] and its log-sum-exp [rows, N] into out [T, N, D] and lse [T, N], in place."""
    if spans.covers(len(out)):
        kernels.merge_(out, lse, part, part_lse)
    elif len(spans.runs) == 1:
        run = spans.runs[0]
        rows, rows_lse = kernels.query_rows(run, out), kernels.query_rows(run, lse)
        kernels.merge_(rows, rows_lse, part.unflatten(0, rows.shape[:2]), part_lse.unflatten(0, rows.shape[:2]))
    elif len(part):
        index = kernels.row_index(spans.q_starts, spans.q_lengths, out.device)
        rows, rows_lse = out.index_select(0, index), lse.index_select(0, index)
        kernels.merge_(rows, rows_lse, part, part_lse)
        out.index_copy_(0, index, rows)
        lse.index_copy_(0, index, rows_lse)


def whole(part: Tensor, part_lse: Tensor, spans: Spans, rows: int) -> tuple[Tensor, Tensor]:
    """A first result as out [T, N, D] and lse [T, N] of all T = `rows` queries; those outside the spans see nothing."""
    if spans.covers(rows):
        return part, part_lse
    out, lse = part.new_zeros(rows, *part.shape[1:]), part_lse.new_full((rows, part.shape[1]), -inf)
    if len(part):
        index = kernels.row_index(spans.q_starts, spans.q_lengths, out.device)
        out.index_copy_(0, index, part)
        lse.index_copy_(0, index, part_lse)
    return out, lse
