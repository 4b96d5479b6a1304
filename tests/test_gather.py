"""What `all_gather` computes of a mask, keeps and sends. What comes out of it is tested in test_attention.py."""

from __future__ import annotations

from itertools import accumulate, cycle, groupby, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megacp.attention import kernels, reference
from megacp.attention.gather import seen
from megacp.attention.ring import Pack
from megacp.attention.spans import Mask, Spans
from megacp.batch import token_index
from megacp.collectives import Exchange
from tests.packs import (
    HEAD_DIM,
    HEADS,
    VIEWS,
    WINDOWS,
    Case,
    Grids,
    Kind,
    View,
    assert_equal_to_reference,
    build,
    inputs,
    layout,
    padded,
)
from tests.spawn import run

KIND = Kind("all_gather")
EVERY_VIEW = {**VIEWS, **WINDOWS}


def mask_of(view: View) -> Mask:
    left, right = (None if limit < 0 else limit for limit in view.window or (-1, -1))
    return Mask(left, 0 if view.causal else right)


def seen_pairs(spans: Spans, rows: Tensor, keys: Tensor, total: int) -> Tensor:
    """int64 [S, S]: how often each query of the pack meets each key. `rows` and `keys` are their places in the pack."""
    count = torch.zeros(total, total, dtype=torch.int64)
    for q, q_length, k, k_length, low, high in spans.spans:
        ahead = torch.arange(k_length)[None, :] - torch.arange(q_length)[:, None]
        seen = torch.ones(q_length, k_length, dtype=torch.bool)
        if low is not None:
            seen &= ahead >= low
        if high is not None:
            seen &= ahead <= high
        count[rows[q : q + q_length, None], keys[k : k + k_length][None, :]] += seen
    return count


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("view", EVERY_VIEW)
def test_spans_tile_the_mask(size: int, view: str) -> None:
    """All ranks together meet every visible pair once and no other; no key outside a window is read."""
    lengths, mask = (1, 23, 0, 16, 0), mask_of(EVERY_VIEW[view])
    room = padded(lengths, size)
    offsets, total = torch.tensor([0, *accumulate(room)]), sum(room)
    count, area = torch.zeros(total, total, dtype=torch.int64), 0
    for rank in range(size):
        own = token_index(offsets, rank, size)
        others = torch.tensor(sorted(set(range(total)) - set(own.tolist())))
        plan = seen(Pack(lengths, room, size), rank, mask)
        for keys, parts in ((own, plan.own), (others, plan.others)):
            for spans in parts:
                count += seen_pairs(spans, own, keys, total)
                area += sum(q * k for q, k in zip(spans.q_lengths, spans.k_lengths, strict=True))
                read = spans.keys.index(torch.device("cpu"))
                assert len(read.unique()) == len(read), "one call reads and adds to each key once"
        whole, by_parts = (
            sum(seen_pairs(spans, own, own, total) for spans in parts)
            for parts in (plan.own, plan.at_fetch + plan.at_send)
        )
        assert torch.equal(torch.as_tensor(whole), torch.as_tensor(by_parts))
    causal, window = EVERY_VIEW[view]
    shown = [
        reference.visible(real if real and mask.right != 0 else space, space, causal == "causal", window)
        for real, space in zip(lengths, room, strict=True)
    ]
    assert torch.equal(count, torch.block_diag(*shown).long())
    # A span of m queries under a window (l, r) meets at most m + l + r keys; own halves are computed together.
    if mask.windowed and mask.left is not None and mask.right is not None:
        half = max(room) // (2 * size)
        assert area <= total * (half + mask.left + mask.right)


@pytest.mark.parametrize("view", EVERY_VIEW)
def test_one_sequence_is_read_in_place(view: str) -> None:
    for rank in range(4):
        mask = mask_of(EVERY_VIEW[view])
        plan = seen(Pack((60,), (64,), 4), rank, mask)
        assert plan.own and all(len(spans.spans) == 1 for spans in plan.others)
        assert all(spans.keys.is_block for spans in plan.own)
        if not mask.windowed:
            assert len(plan.own) == 1 and len(plan.others) == (1 if rank in (0, 3) or mask.right is None else 2)


class Traffic(NamedTuple):
    tokens: int
    saved: int
    events: list[Any]


def traffic(dtype: str) -> Traffic:
    """Tokens of this rank, numbers kept for backward, and in order: kernels, waits, and what is sent to whom."""
    grid = Grids()[KIND]
    packed, index, real, _ = layout([64, 30], grid.cp)
    q, k, v, dout = (x[index].to(getattr(torch, dtype)) for x in inputs(len(real), HEADS["GQA"], 1))
    leaves, saved, events = [x.requires_grad_() for x in (q, k, v)], [], []
    start_, receive, wait = Exchange.start, Exchange.receive, Exchange.wait
    forward, further, backward = kernels.forward, kernels.join_on_cpu_, kernels.backward

    def keep(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    def start(self: Exchange, sends: Any, receives: Any) -> None:
        events.append([(index, tensor.numel(), tensor.dtype) for tensor, index in sends])
        start_(self, sends, receives)

    def noted(name: str, original: Any) -> Any:
        def call(*args: Any) -> Any:
            events.append(name)
            return original(*args)

        return call

    Exchange.start, Exchange.receive, Exchange.wait = start, noted("receive", receive), noted("wait", wait)
    kernels.forward, kernels.join_on_cpu_ = noted("kernel", forward), noted("kernel", further)
    kernels.backward = noted("kernel", backward)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = build(KIND, grid)(*leaves, packed, grid.cp)
        torch.autograd.grad(out, leaves, dout)
    finally:
        Exchange.start, Exchange.receive, Exchange.wait = start_, receive, wait
        kernels.forward, kernels.join_on_cpu_, kernels.backward = forward, further, backward
    return Traffic(len(q), sum(saved), events)


@pytest.mark.parametrize(("dtype", "sums"), [("bfloat16", torch.float32), ("float64", torch.float64)])
def test_what_is_kept_and_sent_and_that_work_hides_it(dtype: str, sums: torch.dtype) -> None:
    heads, kv_heads = HEADS["GQA"]
    for rank, (tokens, saved, events) in enumerate(run(traffic, 3, dtype)):
        numbers = 2 * tokens * kv_heads * HEAD_DIM
        assert saved == 2 * tokens * heads * HEAD_DIM + numbers + tokens * heads  # q, out; k, v; log-sum-exp
        sends = [sorted(event) for event in events if isinstance(event, list)]
        others = [index for index in range(3) if index != rank]
        own = [(index, numbers, getattr(torch, dtype)) for index in others]
        assert sends == [own, own, [(index, numbers, sums) for index in others]]
        order = [name for name, _ in groupby(event for event in events if not isinstance(event, list))]
        assert order == ["kernel", "receive", "kernel", "wait"] * 2


@pytest.mark.parametrize("cp", [2, 4])
def test_equals_reference_in_float64(cp: int) -> None:
    packs = [(64,) * 3, (1, 37, 2, 150, 5), (30, 0, 61, 0)]
    tiny = tuple(1 + i % 7 for i in range(200))
    rows = [*product(packs, EVERY_VIEW.values()), (tiny, VIEWS["causal"]), (tiny, VIEWS["two-sided"])]
    turns = zip(cycle([(4, 4), (12, 6), (12, 2), (3, 1)]), rows, strict=False)
    table = [Case(KIND, pack, view, heads, "float64") for heads, (pack, view) in turns]
    # Some ranks hold nothing but padding that sees nothing.
    table.append(Case(KIND, (1,), VIEWS["two-sided"], (4, 4), "float64", multiple=64))
    assert_equal_to_reference(table, cp)
