"""`p2p`: keys and values travel round a ring of ranks while each rank computes with those at hand.

Ring Attention (Liu et al. 2023) over the zigzag cut: per sequence a rank holds an early and a late chunk, in this
order, called first and second half here. Partial results are merged by their log-sum-exps; backward recomputes each
block from the final ones, and the gradients of keys and values travel with the ring until they are home.

Legend: T tokens of this rank, N query heads, K key/value heads, D head width.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megacp.attention import kernels
from megacp.attention.kernels import Gradients, Spans, attend, self_spans, statistics_dtype
from megacp.batch import PackedSeqParams
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
                    found.append((start + q * half, q_halves * half, start + k * half, k_length))
        q_starts, q_lengths, k_starts, k_lengths = zip(*found, strict=True) if found else ((),) * 4
        return Spans(q_starts, q_lengths, k_starts, k_lengths, causal)


@lru_cache(maxsize=1024)
def block(pack: Pack, rank: int, number: int, causal: bool) -> Spans:
    """What `rank` computes at ring step `number`; spans that are all masked are left out."""
    if causal:
        queries, keys, diagonal = step(rank, pack.size, number)
        return pack.spans((queries, keys), causal=diagonal)
    return pack.spans((WHOLE, WHOLE), keys=pack.real_rows((rank - number) % pack.size))


@lru_cache(maxsize=1024)
def own_block(pack: Pack, rank: int, causal: bool) -> tuple[Spans, Spans]:
    """Step 0 in two parts of equal work, so that both ends of the backward ring have something to hide behind."""
    if causal:
        return pack.spans((SECOND, FIRST)), pack.spans((FIRST, FIRST), (SECOND, SECOND), causal=True)
    keys = pack.real_rows(rank)
    return pack.spans((FIRST, WHOLE), keys=keys), pack.spans((SECOND, WHOLE), keys=keys)


class Exchange:
    """Sends tensors to the next rank of the ring and receives the like from the one before, while the caller computes.

    NCCL does so on a stream of its own, which waits for what the caller has enqueued so far.
    """

    def __init__(self, cp: Group) -> None:
        self.group = cp.process_group
        self.next, self.previous = (cp.ranks[(cp.rank + shift) % cp.size] for shift in (1, -1))
        self.pending: list[Any] = []

    def start(self, *pairs: tuple[Tensor, Tensor]) -> None:
        """Post (what to send, where to receive) of each pair; both must be left alone until `wait`."""
        operations = []
        for outgoing, incoming in pairs:
            operations.append(dist.P2POp(dist.isend, outgoing, self.next, self.group))
            operations.append(dist.P2POp(dist.irecv, incoming, self.previous, self.group))
        self.pending = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        for work in self.pending:
            work.wait()
        self.pending = []


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, spans: Spans) -> None:
    """Join the result of one block into out [T, N, D] and lse [T, N], in place."""
    if len(part) == len(out):
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


def _whole(part: Tensor, part_lse: Tensor, spans: Spans, rows: int) -> tuple[Tensor, Tensor]:
    """The result of the first block as out [T, N, D] and lse [T, N] of all rows."""
    if len(part) == rows:
        return part, part_lse
    out = part.new_zeros(rows, *part.shape[1:])
    lse = part_lse.new_full((rows, part.shape[1]), -torch.inf)
    _merge(out, lse, part, part_lse, spans)
    return out, lse


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pack: Pack, cp: Group, causal: bool, scale: float) -> Tensor:
        dtype = statistics_dtype(q.dtype)
        out = lse = None
        kv, spare = torch.stack((k, v)), k.new_empty(2, *k.shape)
        exchange = Exchange(cp)
        for number in range(cp.size):
            if number < cp.size - 1:
                exchange.start((kv, spare))
            spans = block(pack, cp.rank, number, causal)
            part, part_lse = kernels.forward(q, kv[0], kv[1], spans, scale)
            if out is None or lse is None:
                out, lse = _whole(part.to(dtype), part_lse.t(), spans, len(q))
            else:
                _merge(out, lse, part, part_lse.t(), spans)
            exchange.wait()
            kv, spare = spare, kv
        assert out is not None and lse is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout = pack, cp, causal, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        pack, cp, causal, scale = ctx.layout
        dq, dk, dv = _backward(dout.contiguous(), q, k, v, out, lse.t(), pack, cp, causal, scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pack: Pack,
    cp: Group,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in fp32 (fp64). Rank r works on its own block at both ends, on the keys of rank r - i in between.

    What it adds to the gradients of rank r - i goes on to rank r + 1 while that one computes its own share.
    """
    dtype = statistics_dtype(q.dtype)
    dq, home = q.new_zeros(q.shape, dtype=dtype), k.new_zeros(2, *k.shape, dtype=dtype)
    kv, spare, share, arriving = torch.stack((k, v)), k.new_empty(2, *k.shape), home, home
    own, exchange = own_block(pack, cp.rank, causal), Exchange(cp)
    for number in range(cp.size + 1):
        pairs = []
        if number < cp.size - 1:
            pairs.append((kv, spare))
        if number > 1:
            arriving = torch.empty_like(home)
            pairs.append((share, arriving))
        exchange.start(*pairs)
        if number in (0, cp.size):
            keys, values, spans, total = k, v, own[number > 0], home
        else:
            keys, values = kv
            spans, total = block(pack, cp.rank, number, causal), torch.zeros_like(home)
        kernels.backward(dout, q, keys, values, out, lse, spans, scale, Gradients(dq, total[0], total[1]))
        exchange.wait()
        if number > 1:
            total += arriving
        kv, spare, share = spare, kv, total
    return dq, home[0], home[1]


class RingAttention(torch.nn.Module):
    """Attention of one layer over the ring; without a partner plain attention over whole sequences."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.causal = model.attn_mask_type == "causal"
        self.scale = model.softmax_scale or model.head_dim**-0.5
        left, right = model.window_size or (-1, -1)
        if left >= 0 or (right >= 0 and not self.causal):
            raise ValueError(f"window_size {model.window_size} is not available with native attention: leave it out")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, cp: Group) -> Tensor:
        if sum(packed.padded_lengths) != len(q) * cp.size or len(k) != len(q):
            raise ValueError(
                f"a pack of {sum(packed.padded_lengths)} tokens over {cp.size} ranks does not lie in {len(q)} queries "
                f"and {len(k)} keys a rank"
            )
        if cp.size == 1 or not len(q):
            return attend(q, k, v, self_spans(packed.lengths, packed.padded_lengths, self.causal), self.scale)
        pack = Pack(packed.lengths, packed.padded_lengths, cp.size)
        return _Ring.apply(q, k, v, pack, cp, self.causal, self.scale)
