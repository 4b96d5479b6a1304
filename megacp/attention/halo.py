"""`p2p` under a sliding window: every chunk fetches the few rows it sees of its neighbours, and no others.

A sequence cut over c ranks is 2c chunks on a line, of which each rank keeps an early and a late one, its first and
second half. At distance n = 1, 2, .., as far as the window reaches, chunk x needs rows of chunk x - n, of x + n too
where it looks ahead. They come straight from the rank that keeps them rather than hand to hand: each row crosses the
network once per chunk that sees it, and no hop waits for another. All ranks know from the lengths alone who sends what.

Distance n + 1 is on its way while n is computed, so buffers of two distances exist at a time. Backward fetches the rows
again, and what a distance adds to their gradients goes straight home while the next one is computed.

Legend: T tokens of this rank, N query heads, K key/value heads, D head width; rows [.., 2, K, D] are keys and values.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacp.attention import kernels
from megacp.attention.kernels import Gradients, statistics_dtype
from megacp.attention.partial import attend_further
from megacp.attention.spans import Mask, Span, Spans, span
from megacp.attention.stretches import Stretches
from megacp.collectives import Exchange
from megacp.grid import Group


class Message(NamedTuple):
    """Rows of one chunk of each sequence, as stretches: to `peer` (index in the group), or from it into the buffer."""

    peer: int
    stretches: Stretches


class Distance(NamedTuple):
    """Exchange and work at one distance: `spans` of the keys before and of those after, whose rows are the buffer's."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    spans: tuple[Spans, ...] = ()

    @property
    def rows(self) -> int:
        return sum(message.stretches.rows for message in self.receives)


class Plan(NamedTuple):
    """What one rank does, `distances[0]` being its own chunks, each against itself; `own` is the same by half.

    `joined` says whether every rank has a message at distance 1.
    """

    distances: tuple[Distance, ...]
    own: tuple[Spans, Spans]
    joined: bool


@lru_cache(maxsize=4096)
def _band(length: int, shift: int, keys: int, mask: Mask) -> Span | None:
    """What a chunk sees of the first `keys` rows of the chunk `shift` before it (after it if negative)."""
    # Only how far apart they are matters, so that all equally long sequences share an entry of the cache.
    return span(0, length, max(shift, 0) * length, 0, keys, max(-shift, 0) * length, mask) if keys else None


class Line(NamedTuple):
    """The chunks of every sequence of a pack: which exist where, and what they see of each other under `mask`."""

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    size: int
    mask: Mask

    @property
    def last(self) -> int:
        return 2 * self.size - 1

    def home(self, chunk: int) -> int:
        """The rank that keeps a chunk."""
        return min(chunk, self.last - chunk)

    def local(self, rank: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The two chunks of a rank, each with its first row of every sequence."""
        begins = tuple(accumulate((padded // self.size for padded in self.padded_lengths), initial=0))[:-1]
        middles = (begin + padded // (self.last + 1) for begin, padded in zip(begins, self.padded_lengths, strict=True))
        return (rank, begins), (self.last - rank, tuple(middles))

    def keys(self, sequence: int, chunk: int) -> int:
        """How many keys of a chunk may be seen, its first ones: the real ones.

        A mask that does not look ahead hides padding by itself. A sequence of padding alone sees itself, so that it has
        a finite result.
        """
        padded = self.padded_lengths[sequence]
        length = padded // (self.last + 1)
        if self.mask.right == 0:
            return length
        return min(max((self.lengths[sequence] or padded) - chunk * length, 0), length)

    def seen(self, chunk: int, source: int) -> list[tuple[int, Span]]:
        """(sequence, what its `chunk` sees of its `source`, rows counted in each) where it sees something."""
        if not (0 <= chunk <= self.last and 0 <= source <= self.last):
            return []
        bands = (
            (number, _band(padded // (self.last + 1), chunk - source, self.keys(number, source), self.mask))
            for number, padded in enumerate(self.padded_lengths)
        )
        return [(number, band) for number, band in bands if band]

    def reach(self, limit: int | None) -> int:
        """The largest distance that a side of the window comes to: the nearest row is (n - 1) * length + 1 away."""
        lengths = {padded // (self.last + 1) for padded in self.padded_lengths} - {0}
        if limit is None:
            return self.last if lengths else 0
        return max((min((limit + length - 1) // length, self.last) for length in lengths), default=0)

    def joined(self) -> bool:
        """Whether every rank surely has a message at distance 1: in some sequence each chunk has a key to show."""
        return any(padded and self.keys(number, self.last) for number, padded in enumerate(self.padded_lengths))


def _own(line: Line, rank: int) -> list[tuple[Span, ...]]:
    """Per half, what its chunk of every sequence sees of itself."""
    return [
        tuple(band._replace(q=starts[i] + band.q, k=starts[i] + band.k) for i, band in line.seen(chunk, chunk))
        for chunk, starts in line.local(rank)
    ]


def _distance(line: Line, rank: int, shifts: list[int]) -> Distance:
    """Chunks show their keys to those `shifts` after them. Both ends of a message list it by shift, then by chunk."""
    # Half by half, not by sequence: a message lies in one piece, and sequences of one length make one kernel call.
    sends, receives, spans, row = [], [], [], 0
    for shift in shifts:
        found = []
        for chunk, starts in line.local(rank):
            if shown := line.seen(chunk + shift, chunk):
                stretches = zip(*((starts[i] + band.k, band.k_length) for i, band in shown), strict=True)
                sends.append(Message(line.home(chunk + shift), Stretches(*stretches)))
            if seen := line.seen(chunk, chunk - shift):
                lengths = tuple(band.k_length for _, band in seen)
                begins = tuple(accumulate(lengths, initial=row))
                receives.append(Message(line.home(chunk - shift), Stretches(begins[:-1], lengths)))
                found += [
                    band._replace(q=starts[i] + band.q, k=begin) for (i, band), begin in zip(seen, begins, strict=False)
                ]
                row = begins[-1]
        if found:
            spans.append(Spans(tuple(found)))
    return Distance(tuple(sends), tuple(receives), tuple(spans))


@lru_cache(maxsize=64)
def make_plan(line: Line, rank: int) -> Plan:
    """What `rank` sends, receives and computes."""
    first, second = _own(line, rank)
    own = Distance(spans=(Spans(tuple(sorted((*first, *second)))),))
    back, ahead = map(line.reach, line.mask)
    further = (
        _distance(line, rank, [shift for shift, limit in ((number, back), (-number, ahead)) if number <= limit])
        for number in range(1, max(back, ahead) + 1)
    )
    return Plan((own, *further), (Spans(first), Spans(second)), line.joined() or back == ahead == 0)


def _start(exchange: Exchange, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
    """Post an exchange; what a rank has for itself is copied at once."""
    here = exchange.group.rank
    mine = ([tensor for tensor, peer in pairs if peer == here] for pairs in (sends, receives))
    for outgoing, incoming in zip(*mine, strict=True):
        incoming.copy_(outgoing)
    exchange.start(*([pair for pair in pairs if pair[1] != here] for pairs in (sends, receives)))


def _greet(exchange: Exchange, device: torch.device) -> None:
    """One number round the group. NCCL wants the first exchange on a group joined by all of its ranks."""
    token, group = torch.zeros(2, device=device), exchange.group
    exchange.start([(token[:1], (group.rank + 1) % group.size)], [(token[1:], (group.rank - 1) % group.size)])
    exchange.wait()


def _shown(distance: Distance, k: Tensor, v: Tensor) -> list[tuple[Tensor, int]]:
    """Own rows [.., 2, K, D] that others see, and who."""
    return [(torch.stack(message.stretches.of(k, v), dim=1), message.peer) for message in distance.sends]


def _parts(distance: Distance, buffer: Tensor) -> list[tuple[Tensor, int]]:
    """The rows of the buffer that each message fills, and whose they are."""
    parts = buffer[: distance.rows].split([message.stretches.rows for message in distance.receives])
    return [(part, message.peer) for part, message in zip(parts, distance.receives, strict=True)]


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, group: Group, scale: float) -> Tensor:
        exchange, done = Exchange(group), None
        if not plan.joined:
            _greet(exchange, q.device)
        keys, values = k, v
        for distance, coming in zip(plan.distances, (*plan.distances[1:], Distance()), strict=True):
            shown, rows = _shown(coming, k, v), k.new_empty(coming.rows, 2, *k.shape[1:])
            _start(exchange, shown, _parts(coming, rows))
            for spans in distance.spans:
                done = attend_further(done, q, keys, values, spans, scale)
            exchange.wait()
            keys, values = rows.unbind(1)
        assert done is not None
        out = done.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, done.lse)
        ctx.plan, ctx.group, ctx.scale = plan, group, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = _backward(dout.contiguous(), q, k, v, out, lse.t(), ctx.plan, ctx.group, ctx.scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, plan: Plan, group: Group, scale: float
) -> Gradients:
    """Gradients in fp32 (fp64). Both ends work on a half of the own chunks each, to hide what is on its way then."""
    dtype = statistics_dtype(q.dtype)
    dq, home = q.new_zeros(q.shape, dtype=dtype), k.new_zeros(len(k), 2, *k.shape[1:], dtype=dtype)
    # What others fetch from this rank, they return: to the sends of a distance belong the receives of its gradients.
    nothing, (first, second) = Distance(), (Distance(spans=(spans,)) for spans in plan.own)
    order = (first, *plan.distances[1:], second)
    exchange, fetched, share = Exchange(group), k.new_empty(0), home
    for done, distance, coming in zip((nothing, *order), order, (*order[1:], nothing), strict=False):
        shown, rows = _shown(coming, k, v), k.new_empty(coming.rows, 2, *k.shape[1:])
        returned = [(home.new_empty(message.stretches.rows, *home.shape[1:]), message.peer) for message in done.sends]
        # Held by a name of its own until the wait: `share` is replaced before.
        sends = shown + _parts(done, share)
        _start(exchange, sends, _parts(coming, rows) + returned)
        if distance is first or distance is second:
            keys, values, share = k, v, home
        else:
            (keys, values), share = fetched.unbind(1), torch.zeros_like(fetched, dtype=dtype)
        for spans in distance.spans:
            kernels.backward(dout, q, keys, values, out, lse, spans, scale, Gradients(dq, share[:, 0], share[:, 1]))
        exchange.wait()
        for message, (gradient, _) in zip(done.sends, returned, strict=True):
            message.stretches.add_(home, gradient)
        fetched = rows
    return Gradients(dq, home[:, 0], home[:, 1])


def halo_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    padded_lengths: tuple[int, ...],
    group: Group,
    mask: Mask,
    scale: float,
) -> Tensor:
    """Differentiable attention within a window, [T, N, D], of this rank's zigzag rows of a pack over `group`."""
    return _Halo.apply(q, k, v, make_plan(Line(lengths, padded_lengths, group.size, mask), group.rank), group, scale)
