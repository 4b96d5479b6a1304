"""`p2p`: keys and values travel round a ring of ranks while each rank computes with those at hand.

Ring Attention (Liu et al. 2023) over the zigzag cut: per sequence a rank holds an early and a late chunk, in this
order, called first and second half here. Partial results are merged by their log-sum-exps; backward recomputes each
block from the final ones, and the gradients of keys and values travel with the ring until they are home. Under a
sliding window no ring is needed: halo.py.

Legend: T tokens of this rank, N query heads, K key/value heads, D head width. Keys and values travel together as
[2, K, T, D], by heads.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacp.attention import kernels
from megacp.attention.halo import halo_attention
from megacp.attention.kernels import Gradients, attend, rows_of, statistics_dtype, together
from megacp.attention.order import check_pack
from megacp.attention.partial import attend_further
from megacp.attention.spans import Mask, Span, Spans, self_spans
from megacp.batch import PackedSeqParams
from megacp.collectives import Exchange
from megacp.config import ModelConfig
from megacp.grid import Group

# A part of each local sequence: offset and length, in halves.
Part = tuple[int, int]
WHOLE, FIRST, SECOND = (0, 2), (0, 1), (1, 1)


def step(rank: int, size: int, number: int) -> tuple[Part, Part, bool]:
    """What ring step `number` computes under a causal mask: part of the queries, part of the keys, on the diagonal?

    At that step rank r holds the keys of rank (r - number) mod size. Of an earlier rank's keys only the first half lies
    before own queries, and before all of them; a later rank's keys lie all before the second half and after the first.
    """
    source = (rank - number) % size
    if source == rank:
        return WHOLE, WHOLE, True
    return (WHOLE, FIRST, False) if source < rank else (SECOND, WHOLE, False)


class Pack(NamedTuple):
    """Real and padded lengths of the sequences of the whole pack, and among how many ranks it is cut."""

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    size: int

    def real_rows(self, rank: int) -> tuple[int, ...]:
        """How many rows of each of the rank's sequences are real: its first ones. Pure padding counts as real."""
        counts = []
        for length, padded in zip(self.lengths, self.padded_lengths, strict=True):
            half = padded // (2 * self.size)
            ahead = (rank * half, padded - (rank + 1) * half)
            counts.append(sum(min(max((length or padded) - before, 0), half) for before in ahead))
        return tuple(counts)

    def spans(self, *parts: tuple[Part, Part], causal: bool = False, keys: tuple[int, ...] | None = None) -> Spans:
        """Parts of each local sequence's queries against parts of its keys, or against its first `keys[i]` keys."""
        starts = accumulate((padded // self.size for padded in self.padded_lengths), initial=0)
        found = []
        for i, (start, padded) in enumerate(zip(starts, self.padded_lengths, strict=False)):
            half = padded // (2 * self.size)
            for (q, q_halves), (k, k_halves) in parts:
                k_length = k_halves * half if keys is None else keys[i]
                if half and k_length:
                    high = 0 if causal else None
                    found.append(Span(start + q * half, q_halves * half, start + k * half, k_length, high=high))
        return Spans(tuple(found))


@lru_cache(maxsize=64)
def _causal(pack: Pack, queries: Part, keys: Part, diagonal: bool) -> Spans:
    """A block of `step`: over all steps there are three."""
    return pack.spans((queries, keys), causal=diagonal)


@lru_cache(maxsize=16)
def _two_sided(pack: Pack) -> tuple[Spans, ...]:
    """All queries against the keys of each rank; ranks with equally many real ones share spans."""
    counts = [pack.real_rows(rank) for rank in range(pack.size)]
    spans = {keys: pack.spans((WHOLE, WHOLE), keys=keys) for keys in set(counts)}
    return tuple(spans[keys] for keys in counts)


def block(pack: Pack, rank: int, number: int, mask: Mask) -> Spans:
    """What `rank` computes at ring step `number`; spans that are all masked are left out."""
    if mask.right == 0:
        return _causal(pack, *step(rank, pack.size, number))
    return _two_sided(pack)[(rank - number) % pack.size]


@lru_cache(maxsize=32)
def own_block(pack: Pack, rank: int, mask: Mask) -> tuple[Spans, Spans]:
    """Step 0 in two parts of equal work, so that both ends of the backward ring have something to hide behind.

    Under a causal mask the first has each query and each key once, and sets the gradients that others are added to.
    """
    if mask.right == 0:
        return pack.spans((FIRST, FIRST), (SECOND, SECOND), causal=True), pack.spans((SECOND, FIRST))
    keys = pack.real_rows(rank)
    return pack.spans((FIRST, WHOLE), keys=keys), pack.spans((SECOND, WHOLE), keys=keys)


def _shift(exchange: Exchange, *pairs: tuple[Tensor, Tensor]) -> None:
    """Post (what goes to the next rank, where the like from the one before arrives) of each pair."""
    rank, size = exchange.group.rank, exchange.group.size
    sends = [(outgoing, (rank + 1) % size) for outgoing, _ in pairs]
    exchange.start(sends, [(incoming, (rank - 1) % size) for _, incoming in pairs])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pack: Pack, group: Group, mask: Mask, scale: float
    ) -> Tensor:
        own, done = together(k, v), None
        kv, exchange = own, Exchange(group)
        for number in range(group.size):
            incoming = own
            if number < group.size - 1:
                incoming = torch.empty_like(own)
                _shift(exchange, (kv, incoming))
            done = attend_further(done, q, *rows_of(kv), block(pack, group.rank, number, mask), scale)
            # At the last step nothing is under way, but what was sent before may still be read.
            exchange.receive()
            kv = incoming
        assert done is not None
        out = done.out.to(q.dtype)
        ctx.save_for_backward(q, own, out, done.lse)
        ctx.layout = pack, group, mask, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, own, out, lse = ctx.saved_tensors
        pack, group, mask, scale = ctx.layout
        grads = _backward(dout.contiguous(), q, own, out, lse.t(), pack, group, mask, scale)
        return *(grad.to(q.dtype) for grad in grads), None, None, None, None


def _backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    pack: Pack,
    group: Group,
    mask: Mask,
    scale: float,
) -> Gradients:
    """In fp32 (fp64). Rank r works on its own block at both ends, on the keys of rank r - i in between.

    What it adds to the gradients of rank r - i goes on to rank r + 1 while that one computes its own share.
    """
    dtype, (k, v) = statistics_dtype(q.dtype), rows_of(kv)
    halves, exchange = own_block(pack, group.rank, mask), Exchange(group)
    own, empty = None, q.new_empty(0)
    share = arriving = computed = empty  # gradients of others' keys: [2, T, K, D]
    for number in range(group.size + 1):
        pairs, incoming = [], empty
        if number < group.size - 1:
            incoming = torch.empty_like(kv)
            pairs.append((kv, incoming))
        if number > 1:
            arriving = torch.empty_like(share)
            pairs.append((share, arriving))
        _shift(exchange, *pairs)
        if own is None or number == group.size:
            own = kernels.backward(dout, q, k, v, out, lse, halves[number > 0], scale, own, dtype)
            _, dk, dv = own
        else:
            # Under a name of its own: `share` is being sent.
            computed = k.new_zeros(2, *k.shape, dtype=dtype)
            dk, dv = computed
            spans, into = block(pack, group.rank, number, mask), Gradients(own.q, dk, dv)
            kernels.backward(dout, q, *rows_of(kv), out, lse, spans, scale, into)
        # Own keys are kept anyway, others' are let go.
        exchange.receive() if number == 0 else exchange.wait()
        if number > 1:
            dk += arriving[0]
            dv += arriving[1]
        # Of the keys that travel two lots live at most, at the end none.
        kv, share = incoming, computed
    assert own is not None
    return own


def without_idle_limits(mask: Mask, longest: int) -> Mask:
    """The same mask for sequences of at most `longest` tokens: a window that holds them all is none."""
    left, right = (None if limit is None or limit >= longest - 1 else limit for limit in mask)
    return Mask(left, right)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    padded_lengths: tuple[int, ...],
    group: Group,
    mask: Mask,
    scale: float,
) -> Tensor:
    """q [T, N, D], k and v [T, K, D] -> [T, N, D], differentiable: this rank's zigzag rows of a pack of these lengths.

    Keys and values travel round a ring, or under a sliding window only to the neighbours that see them; without a
    partner it is plain attention over whole sequences. ValueError if the lengths do not describe the rows.
    """
    check_pack(padded_lengths, group.size, q, k)
    if group.size == 1 or not len(q):
        return attend(q, k, v, self_spans(lengths, padded_lengths, mask), scale)
    mask = without_idle_limits(mask, max(padded_lengths))
    if mask.windowed:
        return halo_attention(q, k, v, lengths, padded_lengths, group, mask, scale)
    return _Ring.apply(q, k, v, Pack(lengths, padded_lengths, group.size), group, mask, scale)


class RingAttention(torch.nn.Module):
    """`p2p` attention of one layer."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.mask = Mask.of(model)
        self.scale = model.softmax_scale or model.head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, cp: Group) -> Tensor:
        return ring_attention(q, k, v, packed.lengths, packed.padded_lengths, cp, self.mask, self.scale)
