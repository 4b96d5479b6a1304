"""p2p attention: who computes and sends what, with and without a window, and that the numbers are the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacp import collectives
from megacp.attention import reference
from megacp.attention.halo import Line, Message, Plan, make_plan
from megacp.attention.ring import Pack, RingAttention, block, own_block, ring_attention, step
from megacp.attention.spans import Mask, Spans
from megacp.batch import token_index
from megacp.config import ModelConfig
from megacp.grid import CPGroup
from tests.spawn import run

HEADS, KV_HEADS, WIDTH = 4, 2, 8
PACKS = {
    "dense": [64],
    "rows": [64] * 3,
    "odd": [1, 37, 2, 150, 5],
    "ones": [1] * 5,
    "empty end": [30, 61, 0],
    "tiny": [1 + i % 7 for i in range(200)],
}
CAUSAL, FULL = Mask(None, 0), Mask()
WINDOWS = [Mask(1, 0), Mask(0, 0), Mask(7, 0), Mask(100, 0), Mask(10000, 0), Mask(5, 3), Mask(None, 4), Mask(0, 70)]


def padded(lengths: list[int], size: int) -> list[int]:
    """Each sequence on a multiple of 2*size, a piece of real length 0 with some room."""
    return [-(-max(length, 1) // (2 * size)) * 2 * size for length in lengths]


def rows_of(room: list[int], size: int) -> list[Tensor]:
    """Which rows of the pack each rank holds."""
    return [token_index(torch.tensor([0, *accumulate(room)]), rank, size) for rank in range(size)]


def visible(lengths: list[int], room: list[int], mask: Mask) -> Tensor:
    """bool [S, S] over the whole pack. A mask that does not look ahead leaves padding to itself, so may see it."""
    window = [-1 if limit is None else limit for limit in mask]
    ends = room if mask.right == 0 else [length or space for length, space in zip(lengths, room, strict=True)]
    return torch.block_diag(
        *(reference.visible(end, space, False, window).long() for end, space in zip(ends, room, strict=True))
    ).bool()


def shown(spans: Spans) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows of queries and keys of every span, and which of them see each other."""
    for one in spans.spans:
        ahead = torch.arange(one.k_length)[None, :] - torch.arange(one.q_length)[:, None]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if one.low is not None:
            seen &= ahead >= one.low
        if one.high is not None:
            seen &= ahead <= one.high
        yield slice(one.q, one.q + one.q_length), slice(one.k, one.k + one.k_length), seen


def count(where: Tensor, spans: Spans, queries: Tensor, keys: Tensor) -> None:
    """Add one to [S, S] wherever a query sees a key; `queries` and `keys` are the pack's rows of local ones."""
    for q, k, seen in shown(spans):
        where[queries[q][:, None], keys[k][None, :]] += seen.long()


def test_step_table() -> None:
    whole, first, second = (0, 2), (0, 1), (1, 1)
    assert [step(1, 4, number) for number in range(4)] == [
        (whole, whole, True),
        (whole, first, False),
        (second, whole, False),
        (second, whole, False),
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
def test_blocks_tile_the_mask(size: int, mask: Mask) -> None:
    """All blocks of all ranks together compute what the mask shows once, and no whole block of what it hides."""
    lengths = [1, 23, 0, 16]
    room = padded(lengths, size)
    pack, rows = Pack(tuple(lengths), tuple(room), size), rows_of(room, size)
    total, own, split = (torch.zeros(sum(room), sum(room), dtype=torch.int64) for _ in range(3))
    for rank, number in product(range(size), range(size)):
        count(total, block(pack, rank, number, mask), rows[rank], rows[(rank - number) % size])
    for rank in range(size):
        count(own, block(pack, rank, 0, mask), rows[rank], rows[rank])
        for part in own_block(pack, rank, mask):
            count(split, part, rows[rank], rows[rank])
    assert torch.equal(total, visible(lengths, room, mask).long())
    assert torch.equal(split, own)


def test_steps_share_their_blocks() -> None:
    """However many ranks there are, a pack of long lists is kept few times, and made once."""
    size = 8
    for mask, lengths, most in ((CAUSAL, (30, 16), 3), (FULL, (32, 16), 1), (FULL, (30, 16), 3)):
        pack = Pack(lengths, (32, 16), size)
        blocks = [block(pack, 3, number, mask) for number in (*range(size), *range(size))]
        assert len({id(spans) for spans in blocks}) <= most
        assert all(first is again for first, again in zip(blocks[:size], blocks[size:], strict=True))


def delivered(plans: list[Plan], rows: list[Tensor], rank: int, number: int) -> Tensor:
    """Which rows of the pack lie in the buffer of a rank at a distance, by what its peers send, in their order."""
    sent = {
        peer: iter([m for m in plans[peer].distances[number].sends if m.peer == rank]) for peer in range(len(plans))
    }
    buffer = torch.full((plans[rank].distances[number].rows,), -1)

    def at(message: Message) -> Tensor:
        ends = zip(message.stretches.starts, message.stretches.lengths, strict=True)
        return torch.cat([torch.arange(start, start + length) for start, length in ends])

    for message in plans[rank].distances[number].receives:
        source = next(sent[message.peer])
        assert source.stretches.lengths == message.stretches.lengths
        buffer[at(message)] = rows[message.peer][at(source)]
    assert not any(list(left) for left in sent.values())
    return buffer


def plans_of(lengths: list[int], room: list[int], size: int, mask: Mask) -> list[Plan]:
    return [make_plan(Line(tuple(lengths), tuple(room), size, mask), rank) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("mask", WINDOWS, ids=str)
def test_halo_tiles_the_window(size: int, mask: Mask) -> None:
    """Over all ranks every visible pair is computed once and no other; no row is sent or read that nobody sees."""
    for lengths in ([1, 23, 0, 160], [1], [64, 64], [2 * size] * 3, [0, 0]):
        room = padded(lengths, size)
        rows, plans = rows_of(room, size), plans_of(lengths, room, size, mask)
        total, own, split = (torch.zeros(sum(room), sum(room), dtype=torch.int64) for _ in range(3))
        for rank, number in product(range(size), range(len(plans[0].distances))):
            buffer = delivered(plans, rows, rank, number) if number else rows[rank]
            reads = torch.zeros(len(buffer), dtype=torch.bool)
            for spans in plans[rank].distances[number].spans:
                count(total, spans, rows[rank], buffer)
                for _, keys, seen in shown(spans):
                    reads[keys] = True
                    assert seen.any(0).all() and seen.any(1).all()
            assert reads.all() or not number
        for rank in range(size):
            count(own, plans[rank].distances[0].spans[0], rows[rank], rows[rank])
            for part in plans[rank].own:
                count(split, part, rows[rank], rows[rank])
        assert torch.equal(total, visible(lengths, room, mask).long())
        assert torch.equal(split, own)
        assert len({len(plan.distances) for plan in plans}) == len({plan.joined for plan in plans}) == 1
        if plans[0].joined and len(plans[0].distances) > 1:
            assert all(any(m.peer != rank for m in plans[rank].distances[1].sends) for rank in range(size))


def test_window_goes_as_far_as_it_reaches() -> None:
    """First halves move up in rank, second halves down; at each distance as many rows as the window still covers."""
    size, length = 4, 16
    line = Line((8 * length,), (8 * length,), size, Mask(20, 0))
    plans = [make_plan(line, rank) for rank in range(size)]
    moves = [
        [(m.peer, m.stretches.starts, m.stretches.lengths) for d in plan.distances for m in d.sends] for plan in plans
    ]
    assert moves == [
        [(1, (0,), (16,)), (2, (12,), (4,))],
        [(2, (0,), (16,)), (0, (16,), (16,)), (3, (12,), (4,))],
        [(3, (0,), (16,)), (1, (16,), (16,)), (3, (12,), (4,)), (0, (28,), (4,))],
        [(3, (0,), (16,)), (2, (16,), (16,)), (2, (12,), (4,)), (1, (28,), (4,))],
    ]


class Case(NamedTuple):
    pack: str
    mask: Mask
    dtype: torch.dtype


def world() -> CPGroup:
    return CPGroup(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def inputs(rows: int, seed: int = 1) -> list[Tensor]:
    """q, k, v and the gradient of the output, float64 [rows, heads, D]."""
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(rows, n, WIDTH, generator=generator, dtype=torch.float64) for n in heads]


def real_rows(lengths: list[int], room: list[int]) -> Tensor:
    return torch.cat([torch.arange(space) < length for length, space in zip(lengths, room, strict=True)])


def local_results(table: list[Case]) -> list[list[Tensor]]:
    """This rank's out, dq, dk, dv per case, from slices of one fused projection."""
    cp, results = world(), []
    for case in table:
        lengths = PACKS[case.pack]
        room = padded(lengths, cp.size)
        index = rows_of(room, cp.size)[cp.rank]
        q, k, v, dout = inputs(sum(room))
        dout *= real_rows(lengths, room)[:, None, None]
        fused = torch.cat([x[index] for x in (q, k, v)], dim=1).to(case.dtype).requires_grad_()
        q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out = ring_attention(q, k, v, tuple(lengths), tuple(room), cp, case.mask, 0.4)
        results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), dout[index].to(case.dtype))])
    return results


def exact(case: Case, size: int) -> list[Tensor]:
    """out, dq, dk, dv of the whole pack."""
    lengths = PACKS[case.pack]
    room = padded(lengths, size)
    q, k, v, dout = inputs(sum(room))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    window = [-1 if limit is None else limit for limit in case.mask]
    out = reference.attention(q, k, v, lengths, room, causal=False, window=window, softmax_scale=0.4)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout * real_rows(lengths, room)[:, None, None])]


def check(table: list[Case], size: int) -> None:
    for case, *ranks in zip(table, *run(local_results, size, table), strict=True):
        lengths = PACKS[case.pack]
        room = padded(lengths, size)
        real, rows = real_rows(lengths, room), rows_of(room, size)
        wanted = exact(case, size)
        bound = 1e-10 if case.dtype == torch.float64 else 2e-5
        for rank, index in enumerate(rows):
            for number, (mine, whole) in enumerate(zip(ranks[rank], wanted, strict=True)):
                # What the output is on padding is nobody's business, as long as it is a number.
                error = (mine - whole[index])[real[index] if number == 0 else slice(None)].abs()
                assert mine.isfinite().all() and (not error.numel() or error.max() < bound), (case, rank, number)


@pytest.mark.parametrize("size", [2, 4])
def test_equals_reference(size: int) -> None:
    double = [Case(*case, torch.float64) for case in product(PACKS, WINDOWS)]
    check([*double, *(Case(*case, torch.float32) for case in product(PACKS, WINDOWS[2:6:3]))], size)


def test_equals_reference_on_many_ranks() -> None:
    table = [Case("odd", mask, torch.float64) for mask in (Mask(7, 0), Mask(40, 0), Mask(5, 30))]
    check([*table, Case("odd", CAUSAL, torch.float64), Case("rows", Mask(9, 0), torch.float64)], 8)


def traffic(lengths: list[int], mask: Mask) -> list[list[tuple[int, int]]]:
    """(peer, bytes) of everything this rank sends, by call of Exchange.start, forward and then backward."""
    cp, calls, original = world(), [], collectives.Exchange.start
    room = padded(lengths, cp.size)

    def start(self: collectives.Exchange, sends: Any, receives: Any) -> None:
        calls.append([(peer, x.numel() * x.element_size()) for x, peer in sends])
        original(self, sends, receives)

    index = rows_of(room, cp.size)[cp.rank]
    q, k, v, dout = (x[index].bfloat16() for x in inputs(sum(room)))
    collectives.Exchange.start = start
    try:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ring_attention(q, k, v, tuple(lengths), tuple(room), cp, mask, 1.0)
        grads = torch.autograd.grad(out, leaves, dout)
        assert all(x.isfinite().all() and x.dtype == torch.bfloat16 for x in (out, *grads))
    finally:
        collectives.Exchange.start = original
    return calls


@pytest.mark.parametrize("mask", [Mask(20, 0), Mask(5, 3), Mask(0, 0)], ids=str)
def test_bytes_sent(mask: Mask) -> None:
    """Each row once per chunk that sees it; backward the same again, and fp32 gradients the way back."""
    size, lengths = 4, [64, 20, 3]
    room = padded(lengths, size)
    seen, last = visible(lengths, room, mask), 2 * size - 1
    starts = list(accumulate(room, initial=0))
    there, back = (torch.zeros(size, size, dtype=torch.int64) for _ in range(2))
    for (start, space), target, source in product(zip(starts, room, strict=False), range(last + 1), range(last + 1)):
        h = space // (last + 1)
        block = seen[start + target * h : start + (target + 1) * h, start + source * h : start + (source + 1) * h]
        reader, home = min(target, last - target), min(source, last - source)
        if target != source and reader != home:
            numbers = int(block.any(0).sum()) * 2 * KV_HEADS * WIDTH
            there[home, reader] += 2 * numbers
            back[reader, home] += 4 * numbers
    sent = torch.zeros(size, size, dtype=torch.int64)
    for rank, calls in enumerate(run(traffic, size, lengths, mask)):
        for peer, amount in (pair for call in calls for pair in call):
            sent[rank, peer] += amount
    assert torch.equal(sent, 2 * there + back)
    assert bool(sent.any()) == (mask != Mask(0, 0))


def test_every_rank_joins_the_first_exchange() -> None:
    """Even where a pack leaves some of them nothing to exchange."""
    for calls in run(traffic, 4, [1], Mask(5, 3)):
        assert calls[0]


def test_window_wider_than_the_pack_is_none() -> None:
    plain = run(traffic, 2, [64], CAUSAL)
    assert run(traffic, 2, [64], Mask(63, 0)) == plain != run(traffic, 2, [64], Mask(62, 0))


def padding_is_finite() -> bool:
    """Gradients from padded rows too, some of which see nothing at all."""
    cp, fine = world(), True
    lengths, room = (3, 0, 9, 70), (16, 8, 64, 80)
    index = rows_of(list(room), cp.size)[cp.rank]
    for mask in (Mask(5, 3), Mask(2, None), Mask(7, 0), Mask(None, 1)):
        q, k, v, dout = (x[index].float() for x in inputs(sum(room)))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ring_attention(q, k, v, lengths, room, cp, mask, 1.0)
        grads = torch.autograd.grad(out, leaves, dout)
        fine &= all(bool(x.isfinite().all()) for x in (out, *grads))
        if mask.right != 0:
            blind = ~visible(list(lengths), list(room), mask).any(1)[index]
            fine &= not out[blind].any() and not grads[0][blind].any()
    return fine


def test_padding_is_finite() -> None:
    assert all(run(padding_is_finite, 4))


def subgroup_ring() -> list[bool]:
    """Ranks that are neither 0, 1, .. nor in order: partners must be named by their global ranks."""
    members = (3, 1)
    group = dist.new_group(list(members))
    if dist.get_rank() not in members:
        return []
    cp = CPGroup(members, members.index(dist.get_rank()), group)
    index = rows_of([64], 2)[cp.rank]
    q, k, v, _ = inputs(64)
    close = []
    for mask in (CAUSAL, Mask(9, 0)):
        out = ring_attention(q[index], k[index], v[index], (64,), (64,), cp, mask, 1.0)
        window = None if mask == CAUSAL else (9, 0)
        wanted = reference.attention(q, k, v, [64], window=window, softmax_scale=1.0)
        close.append(torch.allclose(out, wanted[index], atol=1e-10))
    return close


def test_ring_of_any_ranks() -> None:
    assert run(subgroup_ring, 4) == [[], [True, True], [], [True, True]]


def test_module_reads_the_window() -> None:
    def attention(**fields: Any) -> RingAttention:
        return RingAttention(ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=8, **fields))

    assert attention().mask == attention(window_size=[-1, -1]).mask == CAUSAL
    assert attention(window_size=[5, 0]).mask == Mask(5, 0)
    assert attention(attn_mask_type="no_mask", window_size=[5, 3]).mask == Mask(5, 3)
    assert attention(kv_channels=64).scale == 0.125 and attention(softmax_scale=0.3).scale == 0.3


def test_wrong_pack_is_refused() -> None:
    q, k, v, _ = inputs(32)
    with pytest.raises(ValueError, match="64 tokens over 1 ranks does not lie in 32 queries"):
        ring_attention(q, k, v, (64,), (64,), CPGroup((0,), 0), CAUSAL, 1.0)
