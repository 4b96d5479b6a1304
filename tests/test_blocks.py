"""Descriptions of local tensors as blocks of global ones, under every cut by rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from megacp.blocks import Block, Piece, Shard, describe, row_blocks, shard_of

QKV = Shard((Piece("q", 4, (8, 3), (4, 0)), Piece("k", 2, (4, 3), (2, 0)), Piece("v", 2, (4, 3), (2, 0))))


def facts(blocks: list[Block]) -> list[tuple]:
    return [(b.name, b.global_shape, b.offsets, tuple(b.tensor.shape)) for b in blocks]


def test_a_whole_parameter() -> None:
    assert facts(row_blocks(QKV, torch.zeros(8, 3), 0)) == [
        ("q", (8, 3), (4, 0), (4, 3)),
        ("k", (4, 3), (2, 0), (2, 3)),
        ("v", (4, 3), (2, 0), (2, 3)),
    ]


def test_a_slice_across_pieces() -> None:
    blocks = row_blocks(QKV, torch.zeros(4, 3), 3, prefix="exp_avg.")
    assert facts(blocks) == [
        ("exp_avg.q", (8, 3), (7, 0), (1, 3)),
        ("exp_avg.k", (4, 3), (2, 0), (2, 3)),
        ("exp_avg.v", (4, 3), (2, 0), (1, 3)),
    ]


@pytest.mark.parametrize(("first_row", "rows"), [(0, 0), (3, 0), (8, 0)])
def test_an_empty_slice_has_no_blocks(first_row: int, rows: int) -> None:
    assert row_blocks(QKV, torch.zeros(rows, 3), first_row) == []


@pytest.mark.parametrize(("offset", "real"), [(0, 4), (4, 1), (8, 0)])
def test_padding_rows_are_left_out(offset: int, real: int) -> None:
    """A vocabulary of 5 in rows of 4: the second rank has one, the third none."""
    shard = Shard((Piece("word", 4, (5, 2), (offset, 0)),))
    assert sum(len(block.tensor) for block in row_blocks(shard, torch.zeros(4, 2), 0)) == real
    assert row_blocks(shard, torch.zeros(4 - real, 2), real) == []


def test_columns_of_a_row_layer() -> None:
    shard = Shard((Piece("o", 6, (6, 8), (0, 4)),))
    assert facts(row_blocks(shard, torch.zeros(2, 4), 3)) == [("o", (6, 8), (3, 4), (2, 4))]


def test_writing_into_a_block_writes_into_the_parameter() -> None:
    parameter = torch.zeros(8, 3)
    for number, block in enumerate(row_blocks(QKV, parameter, 0)):
        block.tensor.fill_(number + 1)
    assert parameter[:, 0].tolist() == [1, 1, 1, 1, 2, 2, 3, 3]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Shard, list[int]]:
    """A parameter of some pieces, the last ones perhaps padded, and where it is cut into slices."""
    pieces = []
    for number in range(draw(st.integers(1, 4))):
        rows, offset = draw(st.integers(1, 6)), draw(st.integers(0, 5))
        height = draw(st.integers(max(1, offset - 2), offset + rows + 2))
        pieces.append(Piece(f"p{number}", rows, (height, 2), (offset, 0)))
    total = sum(piece.rows for piece in pieces)
    inner = draw(st.lists(st.integers(0, total), max_size=5))
    return Shard(tuple(pieces)), [0, *sorted(inner), total]


@settings(deadline=None, max_examples=200)
@given(cuts())
def test_any_slices_together_are_the_parameter(cut: tuple[Shard, list[int]]) -> None:
    """Each saved row is in exactly one block, at its place in the global tensor; no padding is in any."""
    shard, ends = cut
    parameter = torch.arange(2.0 * ends[-1]).view(-1, 2)
    found: dict[tuple[str, int], float] = {}
    for first, last in zip(ends[:-1], ends[1:], strict=True):
        for block in row_blocks(shard, parameter[first:last], first):
            assert block.tensor.shape[1] == block.global_shape[1] == 2
            for row, value in enumerate(block.tensor[:, 0].tolist()):
                place = (block.name, block.offsets[0] + row)
                assert place not in found and place[1] < block.global_shape[0]
                found[place] = value
    wanted, start = {}, 0
    for piece in shard.pieces:
        for row in range(piece.rows):
            if piece.offsets[0] + row < piece.global_shape[0]:
                wanted[piece.name, piece.offsets[0] + row] = 2.0 * (start + row)
        start += piece.rows
    assert found == wanted


def test_description_must_fit() -> None:
    with pytest.raises(ValueError, match="q have 8 rows, the parameter 9"):
        describe(Parameter(torch.zeros(9, 3)), QKV)


def test_description_stays_with_the_parameter() -> None:
    parameter = describe(Parameter(torch.zeros(8, 3)), QKV)
    assert shard_of(parameter) is QKV
    assert np.shares_memory(row_blocks(QKV, parameter.data, 0)[1].tensor.numpy(), parameter.detach().numpy())
