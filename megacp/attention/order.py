"""The order rows come in from a group of ranks, and the order attention needs them in.

Legend: S tokens of a pack, or of one rank's part of it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megacp.batch import token_index


class Order(NamedTuple):
    """int32 [S] each: `index_select` by `by_rank` takes rows in pack order to rank after rank, by `by_pack` back."""

    by_rank: Tensor
    by_pack: Tensor


@lru_cache(maxsize=16)
def zigzag(padded_lengths: tuple[int, ...], size: int, device: torch.device) -> Order:
    """How the rows of a pack with sequences of `padded_lengths` are dealt over `size` ranks (batch.token_index).

    The cut is the same at every scale: what one of c ranks holds of each sequence, taken for a sequence of its own and
    cut again over `size` ranks, is what the cut over c*size ranks gives to ranks c*size + 0, 1, .. of the whole.
    """
    offsets = torch.tensor([0, *accumulate(padded_lengths)])
    by_rank = torch.cat([token_index(offsets, rank, size) for rank in range(size)])
    by_pack = torch.empty_like(by_rank)
    by_pack[by_rank] = torch.arange(len(by_rank))
    return Order(by_rank.to(device, torch.int32), by_pack.to(device, torch.int32))
