"""`all_gather`: every rank fetches the keys and values of all ranks, its own queries attend to those they see.

As in the context parallelism of Llama 3 (Grattafiori et al. 2024). One collective and no partial results to merge, for
the memory of all keys and values of one layer: they are gathered again in backward, not kept in between, so that a deep
model holds them once. Gradients of keys and values are summed over ranks in fp32 (fp64).

Legend: S tokens of the whole pack, T of this rank, N query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megacp.attention import kernels
from megacp.attention.kernels import Gradients, attend, statistics_dtype
from megacp.attention.order import Order, check_pack, zigzag
from megacp.attention.spans import Mask, Spans, self_spans, span
from megacp.batch import PackedSeqParams
from megacp.collectives import all_gather, all_to_all
from megacp.config import ModelConfig
from megacp.grid import Group


@lru_cache(maxsize=32)
def prefix_spans(
    lengths: tuple[int, ...], padded_lengths: tuple[int, ...], rank: int, size: int, mask: Mask
) -> tuple[Spans, ...]:
    """First halves of the sequences of `rank` (of `size`), then second halves, against the keys of the pack they see.

    Apart, since no key should be twice in one `Spans`: of one sequence each half then sees a block of keys, which is
    read in place. Where nothing is masked both halves see the same, and are one.

    Padding ends a sequence, so without a look ahead no real token sees it; else its keys are cut off. A sequence of
    padding alone sees itself, so that every row has a finite result.
    """
    pieces, row, start = [], 0, 0
    for length, padded in zip(lengths, padded_lengths, strict=True):
        half = padded // (2 * size)
        keys = padded if mask.right == 0 else length or padded
        if mask == Mask():
            halves = ((row, 2 * half, 0),)
        else:
            halves = ((row, half, rank * half), (row + half, half, padded - (rank + 1) * half))
        pieces.append([span(*rows, start, keys, 0, mask) for rows in halves])
        row, start = row + 2 * half, start + padded
    found = (tuple(part for part in parts if part) for parts in zip(*pieces, strict=True))
    return tuple(Spans(parts) for parts in found if parts)


def gathered(k: Tensor, v: Tensor, order: Order, cp: Group) -> tuple[Tensor, Tensor]:
    """k and v [T, K, D] of this rank -> those of the whole pack [S, K, D], in its order; slices of one tensor."""
    rows = all_gather(torch.cat((k, v), dim=1), cp)
    keys, values = rows.index_select(0, order.by_pack).chunk(2, dim=1)
    return keys, values


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: tuple[Spans, ...], order: Order, cp: Group, scale: float
    ) -> Tensor:
        keys, values = gathered(k, v, order, cp)
        # A query that sees nothing is in none of the parts.
        out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:2], -torch.inf, dtype=statistics_dtype(q.dtype))
        for spans in parts:
            part, part_lse = kernels.forward(q, keys, values, spans, scale)
            spans.queries.put_(out, part.to(out.dtype))
            spans.queries.put_(lse, part_lse.t())
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout = parts, order, cp, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors  # recomputation hands them out once
        dq, shares = _shares(dout, q, k, v, out, lse, *ctx.layout)
        # On gloo this costs two thirds of an all-reduce; the order of the sum is the same in every run.
        dk, dv = all_to_all(shares, ctx.layout[2]).sum(0).chunk(2, dim=1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _shares(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    parts: tuple[Spans, ...],
    order: Order,
    cp: Group,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """dq [T, N, D], and what own queries add to the gradients of each rank's keys and values, [size, T, 2K, D]."""
    keys, values = gathered(k, v, order, cp)
    dtype = statistics_dtype(q.dtype)
    dq, dkv = q.new_zeros(q.shape, dtype=dtype), q.new_zeros(len(keys), 2 * k.shape[1], k.shape[2], dtype=dtype)
    dk, dv = dkv.chunk(2, dim=1)
    for spans in parts:
        kernels.backward(dout, q, keys, values, out, lse.t(), spans, scale, Gradients(dq, dk, dv))
    return dq, dkv.index_select(0, order.by_rank).unflatten(0, (cp.size, -1))


class GatherAttention(torch.nn.Module):
    """Attention of one layer by `all_gather`; without a partner plain attention over whole sequences."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.mask = Mask.of(model)
        self.scale = model.softmax_scale or model.head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, cp: Group) -> Tensor:
        check_pack(packed.padded_lengths, cp.size, q, k)
        lengths = packed.lengths, packed.padded_lengths
        if cp.size == 1 or not len(q):
            return attend(q, k, v, self_spans(*lengths, self.mask), self.scale)
        order = zigzag(packed.padded_lengths, cp.size, q.device)
        return _Gather.apply(q, k, v, prefix_spans(*lengths, cp.rank, cp.size, self.mask), order, cp, self.scale)
