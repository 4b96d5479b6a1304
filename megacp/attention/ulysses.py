"""`a2a` and `a2a+p2p`: an all-to-all gives each rank a share of the heads, of more tokens.

`a2a` is DeepSpeed-Ulysses (Jacobs et al. 2023): all ranks trade, and each attends over whole sequences. `a2a+p2p`
trades among neighbours only, the inner ranks, with a ring between such groups (USP, Fang & Zhao 2024). What a rank
holds after the all-to-all is, put in order, its group's share of the zigzag cut over groups: the ring need not know.

Legend: T tokens of this rank, N query heads, K key/value heads, D head width, P inner ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor

from megacp.attention.order import Order, check_pack, in_order, zigzag
from megacp.attention.ring import ring_attention
from megacp.attention.spans import Mask
from megacp.batch import PackedSeqParams
from megacp.collectives import others_of, start_trade
from megacp.config import ModelConfig
from megacp.grid import CPGroup, Group


def to_heads(parts: Sequence[Tensor], order: Order, inner: Group, by_heads: bool = True) -> tuple[Tensor, ...]:
    """This rank's share of the heads of each part [T, n, D], for all inner ranks' tokens in order: [P*T, n/P, D].

    All parts travel in one message; the results are slices of one tensor, in which a head's rows lie in one piece of
    memory, as kernels read keys fastest, or by rows.
    """
    dealt = [part.unflatten(1, (inner.size, -1)).transpose(0, 1) for part in parts]  # [P, T, n/P, D]
    widths = [part.shape[2] for part in dealt]
    length, heads, width = len(parts[0]), sum(widths), parts[0].shape[2]
    shape = (heads, length, width) if by_heads else (length, heads, width)
    sent, received = parts[0].new_empty(inner.size - 1, *shape), parts[0].new_empty(inner.size, *shape)
    by_rows = [blocks.transpose(1, 2) if by_heads else blocks for blocks in (sent, received)]
    for part, out, here in zip(dealt, *(blocks.split(widths, dim=2) for blocks in by_rows), strict=True):
        out[: inner.rank] = part[: inner.rank]
        out[inner.rank :] = part[inner.rank + 1 :]
        here[inner.rank] = part[inner.rank]
    start_trade(sent, [received[rank] for rank in others_of(inner)], inner).wait()
    del sent, by_rows, out  # views hold it too
    if by_heads:
        return in_order(received, order).split(widths, dim=1)
    return received.flatten(0, 1).index_select(0, order.by_pack).split(widths, dim=1)


def to_tokens(parts: Sequence[Tensor], order: Order, inner: Group) -> tuple[Tensor, ...]:
    """The way back: [P*T, n/P, D] -> [T, n, D] of each part."""
    widths, rows = [part.shape[1] for part in parts], order.by_rank.unflatten(0, (inner.size, -1))
    places = torch.cat((rows[: inner.rank], rows[inner.rank + 1 :])).flatten()
    sent = parts[0].new_empty(len(places), sum(widths), parts[0].shape[2])
    for part, out in zip(parts, sent.split(widths, dim=1), strict=True):
        torch.index_select(part, 0, places, out=out)
    sent = sent.unflatten(0, (inner.size - 1, -1))
    received = torch.empty_like(sent)
    start_trade(sent, received, inner).wait()
    del sent, out  # the loop's last view holds it too
    found = []
    for part, share in zip(parts, received.transpose(0, 1).split(widths, dim=2), strict=True):
        whole = part.new_empty(rows.shape[1], inner.size, *part.shape[1:])
        torch.index_select(part, 0, rows[inner.rank], out=whole[:, inner.rank])
        whole[:, : inner.rank] = share[:, : inner.rank]
        whole[:, inner.rank + 1 :] = share[:, inner.rank :]
        found.append(whole.flatten(1, 2))
    return tuple(found)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, order: Order, inner: Group) -> tuple[Tensor, ...]:
        ctx.layout, ctx.heads = (order, inner), k.shape[1]
        copies = lcm(k.shape[1], inner.size) // k.shape[1]
        if copies > 1:
            # Copies of a head lie together: query head n still meets key head n*K//N.
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        return to_heads((q, k, v), order, inner)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = to_tokens(grads, *ctx.layout)
        if dk.shape[1] > ctx.heads:
            dk, dv = (grad.unflatten(1, (ctx.heads, -1)).sum(2) for grad in (dk, dv))
        return dq, dk, dv, None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, order: Order, inner: Group) -> Tensor:
        ctx.layout = order, inner
        return to_tokens((out,), order, inner)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        order, inner = ctx.layout
        return *to_heads((dout,), order, inner, by_heads=False), None, None


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, inner: Group, outer: Group, mask: Mask, scale: float
) -> Tensor:
    """q [T, N, D], k and v [T, K, D] -> [T, N, D], over inner.size * outer.size ranks; `inner` must divide N.

    Key/value heads that it does not divide are repeated until it does, their gradients summed.
    """
    check_pack(packed.padded_lengths, inner.size * outer.size, q, k)
    if inner.size == 1 or not len(q):
        return ring_attention(q, k, v, packed.lengths, packed.padded_lengths, outer, mask, scale)
    order = zigzag(tuple(padded // outer.size for padded in packed.padded_lengths), inner.size, q.device)
    q, k, v = _ToHeads.apply(q, k, v, order, inner)
    out = ring_attention(q, k, v, packed.lengths, packed.padded_lengths, outer, mask, scale)
    return _ToTokens.apply(out, order, inner)


def _levels(heads: int, size: int) -> list[int]:
    """`size` ranks as [inner, outer]: the largest inner level, not all of them, that divides `heads`."""
    inner = max(n for n in range(1, size) if size % n == 0 and heads % n == 0)
    return [inner, size // inner]


def check_heads(heads: int, size: int) -> None:
    """ValueError if `heads` query heads cannot be dealt evenly over `size` ranks by a2a."""
    if heads % size == 0:
        return
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    nearest = [max(n for n in divisors if n < size), *(n for n in divisors if n > size)][:2]
    levels = _levels(heads, size)
    hierarchy = f", or a2a+p2p with hierarchical_context_parallel_sizes {levels}" if levels[0] > 1 else ""
    raise ValueError(
        f"cp_comm_type a2a cannot deal {heads} query heads (of a tensor-parallel rank) over {size} ranks: "
        f"use context_parallel_size {' or '.join(map(str, nearest))}, or cp_comm_type p2p{hierarchy}"
    )


def check_levels(heads: int, size: int, levels: Sequence[int]) -> None:
    """ValueError if a2a+p2p cannot run `heads` query heads over `size` ranks in a hierarchy of these sizes."""
    if len(levels) != 2 or prod(levels) != size:
        raise ValueError(
            f"cp_comm_type a2a+p2p needs hierarchical_context_parallel_sizes [inner, outer] with the product {size}, "
            f"e.g. {_levels(heads, size)}; there is {list(levels)}"
        )
    if heads % levels[0]:
        better = _levels(heads, size)
        hierarchy = f"hierarchical_context_parallel_sizes {better}, or " if better[0] > 1 else ""
        raise ValueError(
            f"cp_comm_type a2a+p2p cannot deal {heads} query heads (of a tensor-parallel rank) over {levels[0]} inner "
            f"ranks: use {hierarchy}cp_comm_type p2p"
        )


class UlyssesAttention(torch.nn.Module):
    """Attention of one layer by `a2a`. ValueError if the number of ranks does not divide that of the query heads."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.mask = Mask.of(model)
        self.scale = model.softmax_scale or model.head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, cp: CPGroup) -> Tensor:
        check_heads(q.shape[1], cp.size)
        alone = Group((cp.ranks[cp.rank],), 0)
        return ulysses_attention(q, k, v, packed, cp, alone, self.mask, self.scale)


class HierarchicalAttention(torch.nn.Module):
    """Attention of one layer by `a2a+p2p`: heads over the first level of the group, the ring over the second.

    ValueError if the group has no two levels, or the size of the first does not divide the number of query heads.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.mask = Mask.of(model)
        self.scale = model.softmax_scale or model.head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, cp: CPGroup) -> Tensor:
        inner = outer = cp
        if cp.size > 1:
            check_levels(q.shape[1], cp.size, [level.size for level in cp.levels])
            inner, outer = cp.levels
        return ulysses_attention(q, k, v, packed, inner, outer, self.mask, self.scale)
