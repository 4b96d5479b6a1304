"""What `all_gather` computes of a mask, keeps and sends. What comes out of it is tested in test_attention.py."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, cycle, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megacp.attention import gather, reference
from megacp.attention.gather import prefix_spans
from megacp.attention.spans import Mask, Spans
from megacp.batch import token_index
from tests.packs import (
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


def seen_pairs(spans: Spans, rows: Tensor, total: int) -> Tensor:
    """int64 [S, S]: how often each query of the pack meets each key."""
    count = torch.zeros(total, total, dtype=torch.int64)
    for q, q_length, k, k_length, low, high in spans.spans:
        ahead = torch.arange(k_length)[None, :] - torch.arange(q_length)[:, None]
        seen = torch.ones(q_length, k_length, dtype=torch.bool)
        if low is not None:
            seen &= ahead >= low
        if high is not None:
            seen &= ahead <= high
        count[rows[q : q + q_length, None], torch.arange(k, k + k_length)[None, :]] += seen
    return count


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("view", EVERY_VIEW)
def test_spans_tile_the_mask(size: int, view: str) -> None:
    """All ranks together meet every visible pair once and no other; no key outside a window is read."""
    lengths, mask = (1, 23, 0, 16, 0), mask_of(EVERY_VIEW[view])
    room = padded(lengths, size)
    offsets = torch.tensor([0, *accumulate(room)])
    count, area = torch.zeros(sum(room), sum(room), dtype=torch.int64), 0
    for rank in range(size):
        for spans in prefix_spans(lengths, room, rank, size, mask):
            count += seen_pairs(spans, token_index(offsets, rank, size), sum(room))
            area += sum(q * k for q, k in zip(spans.q_lengths, spans.k_lengths, strict=True))
            keys = spans.keys.index(torch.device("cpu"))
            assert len(keys.unique()) == len(keys), "one call reads and adds to each key once"
    causal, window = EVERY_VIEW[view]
    shown = [
        reference.visible(real if real and mask.right != 0 else space, space, causal == "causal", window)
        for real, space in zip(lengths, room, strict=True)
    ]
    assert torch.equal(count, torch.block_diag(*shown).long())
    # A span of m queries under a window (l, r) meets at most m + l + r keys.
    if mask.left is not None and mask.right is not None:
        half = max(room) // (2 * size)
        assert area <= sum(room) * (half + mask.left + mask.right)


@pytest.mark.parametrize("view", EVERY_VIEW)
def test_one_sequence_is_read_in_place(view: str) -> None:
    for rank in range(4):
        parts = prefix_spans((60,), (64,), rank, 4, mask_of(EVERY_VIEW[view]))
        assert parts and all(spans.queries.is_block and spans.keys.is_block for spans in parts)


class Traffic(NamedTuple):
    rows: int
    saved: list[int]
    forward: Counter[str]
    both: Counter[str]


def traffic() -> Traffic:
    """Tokens of this rank, rows of each tensor kept for backward, and calls of collectives."""
    grid = Grids()[KIND]
    packed, index, real, _ = layout([64, 30], grid.cp)
    q, k, v, dout = (x[index].float() for x in inputs(len(real), HEADS["GQA"], 1))
    leaves, saved, calls = [x.requires_grad_() for x in (q, k, v)], [], Counter[str]()

    def keep(x: Tensor) -> Tensor:
        saved.append(max(x.shape[:1], default=0))
        return x

    originals = {name: getattr(gather, name) for name in ("all_gather", "all_to_all")}

    def counted(name: str) -> Any:
        def call(*args: Any) -> Tensor:
            calls[name] += 1
            return originals[name](*args)

        return call

    for name in originals:
        setattr(gather, name, counted(name))
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = build(KIND, grid)(*leaves, packed, grid.cp)
        forward = calls.copy()
        torch.autograd.grad(out, leaves, dout)
    finally:
        for name, original in originals.items():
            setattr(gather, name, original)
    return Traffic(len(q), saved, forward, calls)


def test_only_own_rows_are_kept_and_one_collective_gathers_them() -> None:
    for rows, saved, forward, both in run(traffic, 2):
        assert saved == [rows] * 5  # q, k, v, out, log-sum-exp
        assert forward == Counter(all_gather=1)
        assert both == Counter(all_gather=2, all_to_all=1)


def sums_dtype(dtype: str) -> set[torch.dtype]:
    """What gradients of keys and values are summed in."""
    grid, found, original = Grids()[KIND], set(), gather.all_to_all

    def spy(x: Tensor, *args: Any) -> Tensor:
        found.add(x.dtype)
        return original(x, *args)

    packed, index, real, _ = layout([40], grid.cp)
    q, k, v, dout = (x[index].to(getattr(torch, dtype)) for x in inputs(len(real), HEADS["GQA"], 1))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    gather.all_to_all = spy
    try:
        torch.autograd.grad(build(KIND, grid)(*leaves, packed, grid.cp), leaves, dout)
    finally:
        gather.all_to_all = original
    return found


def test_partial_sums_are_fp32() -> None:
    assert run(sums_dtype, 2, "bfloat16") == [{torch.float32}] * 2
    assert run(sums_dtype, 2, "float64") == [{torch.float64}] * 2


@pytest.mark.parametrize("cp", [2, 4])
def test_equals_reference_in_float64(cp: int) -> None:
    packs = [(64,) * 3, (1, 37, 2, 150, 5), (30, 0, 61, 0)]
    tiny = tuple(1 + i % 7 for i in range(200))
    rows = [*product(packs, EVERY_VIEW.values()), (tiny, VIEWS["causal"]), (tiny, VIEWS["two-sided"])]
    turns = zip(cycle([(4, 4), (12, 6), (12, 2), (3, 1)]), rows, strict=False)
    assert_equal_to_reference([Case(KIND, pack, view, heads, "float64") for heads, (pack, view) in turns], cp)
