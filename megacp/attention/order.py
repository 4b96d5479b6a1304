"""The rows of a pack on a group of ranks: whether they are all there, the order they come in, and the one needed.

Legend: S tokens of a pack, or of one rank's part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megacp.attention.stretches import on_device, ranges
from megacp.batch import token_index


class Order(NamedTuple):
    """int32 [S] each: `index_select` by `by_rank` takes rows in pack order to rank after rank, by `by_pack` back."""

    by_rank: Tensor
    by_pack: Tensor


def check_pack(padded_lengths: Sequence[int], size: int, q: Tensor, k: Tensor) -> None:
    """ValueError if a pack cut over `size` ranks does not lie in q [T, ..] and k [T, ..] of this one."""
    total = sum(padded_lengths)
    if total != len(q) * size or len(k) != len(q):
        raise ValueError(
            f"a pack of {total} tokens over {size} ranks does not lie in {len(q)} queries and {len(k)} keys a rank"
        )


@lru_cache(maxsize=8)
def zigzag(padded_lengths: tuple[int, ...], size: int, device: torch.device, without: int | None = None) -> Order:
    """How the rows of a pack with sequences of `padded_lengths` are dealt over `size` ranks (batch.token_index).

    `without`: of the pack and of the ranks this one is left out, with the rows that it holds.

    The cut is the same at every scale: what one of c ranks holds of each sequence, taken for a sequence of its own and
    cut again over `size` ranks, is what the cut over c*size ranks gives to ranks c*size + 0, 1, .. of the whole.
    """
    chunks = 2 * size
    if wrong := [padded for padded in padded_lengths if padded % chunks]:
        raise ValueError(f"{size} ranks cut sequences in {chunks} equal chunks, not one of {wrong[0]} tokens: pad it")
    # Which chunks of a sequence a rank holds is a cut of as many tokens as there are chunks. [size, sequences, 2]
    ranks = [rank for rank in range(size) if rank != without]
    held = torch.stack([token_index(torch.tensor([0, chunks]), rank, size) for rank in ranks])[:, None]
    here = held.flatten().argsort().argsort().view_as(held)  # counted among those that are not left out
    by_rank = (here + torch.arange(len(padded_lengths))[:, None] * here.numel()).flatten()
    lengths = (torch.tensor(padded_lengths, dtype=torch.int64) // chunks).repeat_interleave(here.numel())
    starts = _before(lengths)
    # Chunk for chunk, so that what is as long as the pack is made on the device.
    places = torch.empty_like(starts)
    places[by_rank] = _before(lengths[by_rank])
    table = torch.stack((starts[by_rank], lengths[by_rank], places, lengths)).to(torch.int32)
    rank_starts, rank_lengths, pack_starts, pack_lengths = on_device(table, device)
    total = sum(padded_lengths) // size * len(ranks)
    return Order(ranges(rank_starts, rank_lengths, total), ranges(pack_starts, pack_lengths, total))


def in_order(received: Tensor, order: Order, without: int | None = None) -> Tensor:
    """[P, n, T, D], what P ranks hold by heads -> [S, n, D] in the order of the pack.

    By heads too: each head's rows lie in one piece of memory, which is how kernels read keys fastest. `order` does not
    count rank `without`, which has a place in `received`.
    """
    ranks, heads, length, width = received.shape
    if ranks == 1:
        return received[0].transpose(0, 1)  # the rows of a single rank are in order
    source = order.by_pack.long() // length
    # Between a rank's rows and the next one's lie those of its other heads.
    places = order.by_pack + source * ((heads - 1) * length)
    if without is not None:
        places += (source >= without) * (heads * length)
    flat, out = received.view(-1, width), received.new_empty(heads, len(places), width)
    for head in range(heads):
        torch.index_select(flat[head * length :], 0, places, out=out[head])
    return out.transpose(0, 1)


def by_ranks(rows: Tensor, order: Order, ranks: int) -> Tensor:
    """[S, ...] in the order of the pack -> [ranks, T, ...]."""
    if ranks > 1:
        rows = rows.index_select(0, order.by_rank)
    return rows.unflatten(0, (ranks, -1))


def _before(lengths: Tensor) -> Tensor:
    """Where each begins if one lies after the other."""
    return lengths.cumsum(0) - lengths
