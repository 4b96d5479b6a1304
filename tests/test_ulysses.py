"""The trade of heads for tokens: the order rows come in, heads that do not divide, what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, cycle, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.attention.order import by_ranks, in_order, zigzag
from megacp.attention.ulysses import check_heads, check_levels, to_heads, to_tokens
from megacp.batch import token_index
from tests.packs import (
    HEAD_DIM,
    HEADS,
    VIEWS,
    WINDOWS,
    Case,
    Grids,
    Kind,
    assert_equal_to_reference,
    build,
    inputs,
    layout,
    results,
)
from tests.spawn import run


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 5))
def test_inner_ranks_in_order_are_one_outer_rank(units: list[int], inner: int, outer: int) -> None:
    size = inner * outer
    room = tuple(unit * 2 * size for unit in units)
    offsets = torch.tensor([0, *accumulate(room)])
    by_rank, by_pack = zigzag(tuple(length // outer for length in room), inner, torch.device("cpu"))
    for rank in range(outer):
        shards = torch.cat([token_index(offsets, rank * inner + i, size) for i in range(inner)])
        whole = token_index(offsets, rank, outer)
        assert torch.equal(shards.index_select(0, by_pack), whole)
        assert torch.equal(whole.index_select(0, by_rank), shards)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_others_hold_comes_in_order(size: int) -> None:
    """Whether or not there is a place for what this rank holds itself among it, and back."""
    room = (4 * size, 2 * size, 0, 6 * size)
    offsets = torch.tensor([0, *accumulate(room)])
    indices = [token_index(offsets, rank, size) for rank in range(size)]
    pack = torch.randn(sum(room), 3, 2)
    for without, own in enumerate(indices):
        order = zigzag(room, size, torch.device("cpu"), without)
        left = torch.ones(len(pack), dtype=torch.bool)
        left[own] = False
        everybodys = torch.stack([pack[index] for index in indices])
        others = torch.cat((everybodys[:without], everybodys[without + 1 :]))
        everybodys[without] = torch.nan
        assert torch.equal(in_order(others.transpose(1, 2).contiguous(), order), pack[left])
        assert torch.equal(in_order(everybodys.transpose(1, 2).contiguous(), order, without), pack[left])
        assert torch.equal(by_ranks(pack[left], order, size - 1), others)


def test_sequences_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks cut sequences in 4 equal chunks, not one of 6 tokens: pad it"):
        zigzag((8, 6), 2, torch.device("cpu"))


def trades() -> list[str]:
    """Slices of heads that are not those of the whole pack, and ways back that do not lead home."""
    cp, found = Grids()[Kind("a2a")].cp, []
    for lengths in ([64, 64], [1, 37, 2, 50, 5], [3] * 200):
        packed, index, real, _ = layout(lengths, cp)
        whole = inputs(len(real), (12, 4), 1, torch.bfloat16)[:2]
        fused = torch.cat([x[index] for x in whole], dim=1)
        order = zigzag(packed.padded_lengths, cp.size, torch.device("cpu"))
        parts = to_heads(fused.split([12, 4], dim=1), order, cp)
        if not all(torch.equal(part, x.chunk(cp.size, dim=1)[cp.rank]) for part, x in zip(parts, whole, strict=True)):
            found.append(f"{lengths} heads")
        if not all(torch.equal(part, x[index]) for part, x in zip(to_tokens(parts, order, cp), whole, strict=True)):
            found.append(f"{lengths} tokens")
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_heads_and_tokens_are_traded_both_ways(cp: int) -> None:
    assert not any(run(trades, cp))


PACKS = [(64,) * 3, (1, 37, 2, 150, 5), (30, 0, 61, 0)]
TINY = tuple(1 + i % 7 for i in range(200))
# Some are divided by the ranks, some divide them, some do neither.
QUERY_AND_KEY_HEADS = [(12, 12), (12, 6), (12, 2), (12, 3), (4, 1)]


@pytest.mark.parametrize(
    ("cp", "kinds"),
    [
        (2, [Kind("a2a")]),
        (4, [Kind("a2a"), Kind("a2a+p2p", (2, 2))]),
        (4, [Kind("a2a+p2p", (4, 1)), Kind("a2a+p2p", (1, 4))]),
        (8, [Kind("a2a+p2p", (2, 4)), Kind("a2a+p2p", (4, 2))]),
    ],
)
def test_any_heads_in_float64(cp: int, kinds: list[Kind]) -> None:
    """Every pack under every view; kinds and heads take turns."""
    views = [*VIEWS.values(), WINDOWS["long window"], WINDOWS["to the right"]]
    rows = [*product(PACKS, views), *((TINY, view) for view in views[::3])]
    heads_of_each_kind = [heads for heads in QUERY_AND_KEY_HEADS for _ in kinds]
    turns = zip(cycle(kinds), cycle(heads_of_each_kind), rows, strict=False)
    assert_equal_to_reference([Case(kind, pack, view, heads, "float64") for kind, heads, (pack, view) in turns], cp)


def of_nothing() -> list[list[tuple[int, ...]]]:
    """Shapes of output and gradients of a pack without tokens."""
    grids, found = Grids(), []
    for kind in (Kind("a2a"), Kind("a2a+p2p", (1, 2)), Kind("a2a+p2p", (2, 1))):
        cp = grids[kind].cp
        packed = replace(layout([8], cp).packed, lengths=(0,), padded_lengths=(0,))
        got = results(build(kind, grids[kind]), inputs(0, HEADS["GQA"], 1), packed, cp)
        found.append([tuple(x.shape) for x in got])
    return found


def test_no_tokens_at_all() -> None:
    heads, key_heads = HEADS["GQA"]
    shapes = [(0, n, HEAD_DIM) for n in (heads, heads, key_heads, key_heads)]
    assert run(of_nothing, 2) == [[shapes] * 3] * 2


def refusal(check: Any, *args: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check(*args)
    return str(caught.value)


def test_heads_are_refused_with_what_would_do() -> None:
    for heads, size in ((12, 4), (8, 8), (3, 1)):
        check_heads(heads, size)
    assert refusal(check_heads, 6, 4) == (
        "cp_comm_type a2a cannot deal 6 query heads (of a tensor-parallel rank) over 4 ranks: use "
        "context_parallel_size 3 or 6, or cp_comm_type p2p, or a2a+p2p with hierarchical_context_parallel_sizes [2, 2]"
    )
    assert refusal(check_heads, 8, 16).endswith(
        "use context_parallel_size 8, or cp_comm_type p2p, or a2a+p2p with hierarchical_context_parallel_sizes [8, 2]"
    )
    assert refusal(check_heads, 5, 4).endswith("use context_parallel_size 1 or 5, or cp_comm_type p2p")


def test_levels_are_refused_with_what_would_do() -> None:
    for heads, size, levels in ((12, 8, [4, 2]), (5, 2, [1, 2]), (4, 4, [4, 1])):
        check_levels(heads, size, levels)
    for levels in ([], [4], [2, 3], [2, 2, 1]):
        assert refusal(check_levels, 8, 4, levels) == (
            "cp_comm_type a2a+p2p needs hierarchical_context_parallel_sizes [inner, outer] with the product 4, "
            f"e.g. [2, 2]; there is {levels}"
        )
    assert refusal(check_levels, 6, 8, [4, 2]) == (
        "cp_comm_type a2a+p2p cannot deal 6 query heads (of a tensor-parallel rank) over 4 inner ranks: use "
        "hierarchical_context_parallel_sizes [2, 4], or cp_comm_type p2p"
    )
    assert refusal(check_levels, 5, 8, [2, 4]).endswith("over 2 inner ranks: use cp_comm_type p2p")
