from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from megacp.attention.stretches import Stretches

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=6), st.booleans())
def test_rows_are_taken_put_and_added(pairs: list[tuple[int, int]], behind: bool) -> None:
    """Gaps, overlaps, any order and stretches without a row; `behind` puts each where the one before ends."""
    lengths = tuple(length for _, length in pairs)
    first = pairs[0][0] if pairs else 0
    starts = tuple(first + sum(lengths[:i]) if behind else start for i, (start, _) in enumerate(pairs))
    stretches = Stretches(starts, lengths)
    rows = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    x = torch.arange(60.0).view(30, 2)
    assert (stretches.rows, stretches.index(CPU).tolist()) == (len(rows), rows)
    assert stretches.offsets(CPU).tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert stretches.covers(len(rows)) >= (behind and first == 0) and stretches.is_block >= behind
    assert not stretches.covers(len(rows)) or rows == list(range(len(rows)))

    taken, turned = stretches.of(x)[0], stretches.of(x.t(), dim=1)[0]
    assert torch.equal(taken, x[rows]) and torch.equal(turned, x.t()[:, rows])
    total, wanted = torch.ones(30, 2), torch.ones(30, 2)
    stretches.add_(total, taken.half())
    for row in rows:
        wanted[row] += x[row]
    assert torch.equal(total, wanted)
    put = torch.zeros(2, 30)
    stretches.put_(put, turned, dim=1)
    assert torch.equal(put[:, rows], turned) and int((put != 0).any(0).sum()) == len(set(rows) - {0}) + (0 in rows)


@pytest.mark.parametrize(("starts", "block"), [((4, 7), True), ((0, 3), True), ((4, 8), False), ((7, 4), False)])
def test_a_block_is_not_copied(starts: tuple[int, ...], block: bool) -> None:
    x = torch.zeros(20, 3)
    (taken,) = Stretches(starts, (3, 2)).of(x)
    assert (taken.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == block


def test_what_a_device_needs_is_made_once() -> None:
    stretches = Stretches((3, 0), (2, 2))
    with FakeTensorMode():
        assert stretches.index(CPU).shape == (4,) and stretches.offsets(CPU).shape == (3,)
    index, offsets = stretches.index(CPU), stretches.offsets(CPU)
    assert type(index) is type(offsets) is torch.Tensor, "no fake tensor is kept"
    assert stretches.index(CPU) is index and stretches.offsets(CPU) is offsets
    assert stretches == Stretches((3, 0), (2, 2)) and hash(stretches) == hash(Stretches((3, 0), (2, 2)))
