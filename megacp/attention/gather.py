"""`all_gather`: every rank fetches the keys and values of all others, its own queries attend to those they see.

As in the context parallelism of Llama 3 (Grattafiori et al. 2024), for the memory of all keys and values of one layer:
they are fetched again in backward, not kept in between, so that a deep model holds them once. Unlike there a rank sets
out with its own keys, about 1/size of the work, while the others' are on their way; gradients travel home likewise.
They are summed over ranks in fp32 (fp64), as results over own and other keys are; on a GPU each comes out of its kernel
in the dtype of the queries.

Legend: S tokens of all other ranks, T of this one, N query heads, K key/value heads, D head width. Keys and values
travel together as [2, K, T, D], by heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacp.attention import kernels
from megacp.attention.kernels import Gradients, attend, rows_of, statistics_dtype, together
from megacp.attention.order import Order, by_ranks, check_pack, in_order, zigzag
from megacp.attention.partial import attend_further
from megacp.attention.ring import Pack, block, own_block, without_idle_limits
from megacp.attention.spans import Mask, Span, Spans, self_spans, span
from megacp.batch import PackedSeqParams
from megacp.collectives import start_gather_of_others, start_trade
from megacp.config import ModelConfig
from megacp.grid import Group


class Piece(NamedTuple):
    """Neighbouring tokens of a sequence: their first row, first position and number."""

    row: int
    position: int
    length: int


class Seen(NamedTuple):
    """What a rank's queries see: of `own` keys, in all and in two parts of about equal work, and of the others'.

    In backward one part is computed while keys are fetched, the other while gradients are sent.
    """

    own: tuple[Spans, ...]
    at_fetch: tuple[Spans, ...]
    at_send: tuple[Spans, ...]
    others: tuple[Spans, ...]


def _bands(queries: Piece, keys: list[Piece], limit: int, mask: Mask) -> list[Span | None]:
    """What `queries` see of each piece of the keys before position `limit`; pieces they see whole are one with the next
    if that one lies behind it."""
    found: list[Span | None] = []
    place, last = 0, None
    for piece in keys:
        length = min(max(limit - piece.position, 0), piece.length)
        band = span(queries.row, queries.length, queries.position, piece.row, length, piece.position, mask)
        found.append(band)
        if not band:
            continue
        if last and _is_whole(band, queries) and _is_whole(last, queries) and last.k + last.k_length == band.k:
            band = last._replace(k_length=last.k_length + band.k_length)
            found[place], found[-1] = None, band
        place, last = len(found) - 1, band
    return found


def _is_whole(band: Span, queries: Piece) -> bool:
    return band.low is None and band.high is None and band.q_length == queries.length


def _in_common(
    first: list[Span | None], second: list[Span | None], halves: tuple[Piece, Piece]
) -> list[Span | None] | None:
    """Both halves as one where they see the same pieces whole, else None."""
    for a, b in zip(first, second, strict=True):
        same = a and b and a[2:] == b[2:] and _is_whole(a, halves[0]) and _is_whole(b, halves[1])
        if not same and (a or b):
            return None
    nothing: list[Span | None] = [None] * len(second)
    return [band and band._replace(q_length=2 * band.q_length) for band in first] + nothing


def _by_pieces(found: list[list[Span | None]]) -> tuple[Spans, ...]:
    """[sequence][piece] -> Spans of each piece, of all sequences: no key is twice in one, and of one sequence they are
    a block, which is read in place."""
    columns = (tuple(band for band in column if band) for column in zip(*found, strict=True))
    return tuple(Spans(column) for column in columns if column)


class _Cut(NamedTuple):
    """A sequence cut over ranks: its real and its padded length, and its first row on each rank."""

    length: int
    padded: int
    row: int
    size: int

    @property
    def chunk(self) -> int:
        return self.padded // (2 * self.size)

    def limit(self, mask: Mask) -> int:
        """Keys that may be seen. Padding ends a sequence, so without a look ahead no real token sees it; else it is cut
        off. A sequence of padding alone sees itself, so that every row has a finite result."""
        return self.padded if mask.right == 0 else self.length or self.padded

    def halves(self, rank: int) -> tuple[Piece, Piece]:
        """The early and the late chunk of a rank."""
        late = self.padded - (rank + 1) * self.chunk
        return Piece(self.row, rank * self.chunk, self.chunk), Piece(self.row + self.chunk, late, self.chunk)

    def others(self, rank: int) -> list[Piece]:
        """What the other ranks hold, in order, before the halves of this one, between and behind; rows among theirs."""
        last, start = 2 * self.size - 1, self.row * (self.size - 1)
        bounds = (0, rank), (rank + 1, last - rank), (last - rank + 1, last + 1)
        rows = (0, rank, last - rank - 1)
        return [
            Piece(start + row * self.chunk, first * self.chunk, (end - first) * self.chunk)
            for row, (first, end) in zip(rows, bounds, strict=True)
        ]


def _cuts(pack: Pack) -> Iterator[_Cut]:
    row = 0
    for length, padded in zip(pack.lengths, pack.padded_lengths, strict=True):
        yield _Cut(length, padded, row, pack.size)
        row += padded // pack.size


@lru_cache(maxsize=32)
def seen(pack: Pack, rank: int, mask: Mask) -> Seen:
    """What `rank` sees of a pack."""
    first, second, across, others = [], [], [], []
    for cut in _cuts(pack):
        halves, limit = cut.halves(rank), cut.limit(mask)
        own = [_bands(queries, [keys], limit, mask) for queries in halves for keys in halves]
        first.append(own[0])
        across.append(own[1] + own[2])
        second.append(own[3])
        early, late = (_bands(queries, cut.others(rank), limit, mask) for queries in halves)
        others.append(_in_common(early, late, halves) or early + late)
    if not mask.windowed:
        parts = own_block(pack, rank, mask)
        return Seen((block(pack, rank, 0, mask),), parts[:1], parts[1:], _by_pieces(others))
    both = [half for halves in zip(first, second, strict=True) for half in halves]
    # With padding at hand only, own queries may see no own key.
    own = (*_by_pieces(both), *_by_pieces(across)) or (Spans(()),)
    at_fetch = (*_by_pieces(first), *_by_pieces(across)) or (Spans(()),)
    return Seen(own, at_fetch, _by_pieces(second), _by_pieces(others))


def _keys_and_values(received: Tensor, order: Order, cp: Group) -> tuple[Tensor, Tensor]:
    """[P, 2, K, T, D], what was gathered -> k and v [S, K, D] of the others in the order of the pack."""
    without = cp.rank if len(received) == cp.size else None
    keys, values = in_order(received.flatten(1, 2), order, without).chunk(2, dim=1)
    return keys, values


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Seen, order: Order, cp: Group, scale: float) -> Tensor:
        own, done = together(k, v), None
        received, fetch = start_gather_of_others(own, cp)
        for spans in plan.own:
            done = attend_further(done, q, *rows_of(own), spans, scale)
        fetch.receive()
        keys, values = _keys_and_values(received, order, cp)
        del received
        for spans in plan.others:
            done = attend_further(done, q, keys, values, spans, scale)
        fetch.wait()
        assert done is not None
        out = done.out.to(q.dtype)
        ctx.save_for_backward(q, own, out, done.lse)
        ctx.layout = plan, order, cp, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, own, out, lse = ctx.saved_tensors  # recomputation hands them out once
        grads = _backward(dout.contiguous(), q, own, out, lse.t(), *ctx.layout)
        return *(grad.to(q.dtype) for grad in grads), None, None, None, None


def _backward(
    dout: Tensor, q: Tensor, own: Tensor, out: Tensor, lse: Tensor, plan: Seen, order: Order, cp: Group, scale: float
) -> Gradients:
    """In fp32 (fp64). A half of the own keys' hides what is fetched, the other one what is sent home."""
    received, fetch = start_gather_of_others(own, cp)
    dtype, kv = statistics_dtype(q.dtype), rows_of(own)

    def add(parts: tuple[Spans, ...], k: Tensor, v: Tensor, into: Gradients | None) -> Gradients:
        for spans in parts:
            into = kernels.backward(dout, q, k, v, out, lse, spans, scale, into, dtype)
        assert into is not None
        return into

    home = add(plan.at_fetch, *kv, None)
    fetch.receive()
    keys, values = _keys_and_values(received, order, cp)
    del received
    shares = q.new_zeros(len(keys), 2 * keys.shape[1], keys.shape[2], dtype=dtype)
    add(plan.others, keys, values, Gradients(home.q, *shares.chunk(2, dim=1)))
    del keys, values
    sent = by_ranks(shares, order, cp.size - 1)
    del shares
    returned = torch.empty_like(sent)
    exchange = start_trade(sent, returned, cp)
    add(plan.at_send, *kv, home)
    fetch.wait()
    exchange.wait()
    for share in returned:
        for total, part in zip((home.k, home.v), share.chunk(2, dim=1), strict=True):
            total += part
    return home


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
        order = zigzag(packed.padded_lengths, cp.size, q.device, without=cp.rank)
        mask = without_idle_limits(self.mask, max(packed.padded_lengths))
        plan = seen(Pack(*lengths, cp.size), cp.rank, mask)
        return _Gather.apply(q, k, v, plan, order, cp, self.scale)
