"""Who must not see whom, to the bit: a wrong cut or a wrong mask moves an output or a gradient that it must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megacp.attention import reference
from megacp.grid import CPGroup
from tests.packs import HEADS, KINDS, VIEWS, WINDOWS, Grids, Layout, View, build, everyone, inputs, layout, results

LENGTHS = (40, 1, 230, 7, 12)
EVERY_VIEW = [*VIEWS.values(), *(WINDOWS[name] for name in ("long window", "oneself", "to the right", "to the left"))]


class Move(NamedTuple):
    """Rows [first, last) of the pack change; `seeing` bool [S]: real rows that see one of them; `seen`: seen by one."""

    name: str
    first: int
    last: int
    seeing: Tensor
    seen: Tensor


def moves(view: View, room: Sequence[int]) -> Iterator[Move]:
    """A whole document or a token, near an end or inside."""
    starts = list(accumulate(room, initial=0))
    for number, tokens in ((0, [20]), (2, [1, 115, 229]), (3, [6])):
        length, start = LENGTHS[number], starts[number]
        sees = reference.visible(length, room[number], view.causal, view.window)[:length, :length]
        for first, last in ((0, length), *((token, token + 1) for token in tokens)):
            rows, columns = (torch.zeros(sum(room), dtype=torch.bool) for _ in range(2))
            rows[start : start + length] = sees[:, first:last].any(1)
            columns[start : start + length] = sees[first:last].any(0)
            yield Move(f"document {number}[{first}:{last}]", start + first, start + last, rows, columns)


def moved(before: Tensor, after: Tensor) -> Tensor:
    """bool [T]: rows that are not the same to the bit."""
    return (before != after).flatten(1).any(1)


def leaks_of(attention: Any, view: View, whole: Layout, cp: CPGroup) -> Iterator[str]:
    """Outputs and gradients that move with what they must not see, and outputs that stand still with what they see."""
    packed, index, real, room = whole
    *qkv, dout = (x.float() for x in inputs(len(real), HEADS["GQA"], 2))
    dout *= real[:, None, None]
    leaves = [x[index].requires_grad_() for x in qkv]
    out = attention(*leaves, packed, cp)
    grads = torch.autograd.grad(out, leaves, dout[index], retain_graph=True)
    for name, first, last, seeing, seen in moves(view, room):

        def shifted(x: Tensor, rows: slice = slice(first, last)) -> Tensor:
            other = x.clone()
            other[rows] += 1
            return other[index]

        # Padded queries of the document see what they like of it: nobody reads them.
        free = (_document(room, first) & ~real)[index]
        changed = moved(out, attention(*map(shifted, qkv), packed, cp))
        wrong = index[~free & (changed != seeing[index])].tolist()
        if wrong:
            yield f"outputs {wrong[:5]} against the mask when {name} moves"
        itself = (index >= first) & (index < last)
        again = torch.autograd.grad(out, leaves, shifted(dout), retain_graph=True)
        for key, before, after, allowed in zip("qkv", grads, again, (itself, seen[index], seen[index]), strict=True):
            wrong = index[moved(before, after) & ~allowed].tolist()
            if wrong:
                yield f"gradients of {key} {wrong[:5]} when dout of {name} moves"


def _document(room: Sequence[int], row: int) -> Tensor:
    """bool [S]: rows of the document that `row` lies in."""
    number = torch.repeat_interleave(torch.arange(len(room)), torch.tensor(room))
    return number == number[row]


def leaks() -> list[str]:
    grids, found = Grids(), []
    cp = grids[KINDS[1][0]].cp
    whole = layout(LENGTHS, cp)
    for kind in KINDS[cp.size]:
        for view in EVERY_VIEW:
            attention = build(kind, grids[kind], view)
            found += [f"{kind} {view}: {leak}" for leak in leaks_of(attention, view, whole, grids[kind].cp)]
    return found


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_sees_only_its_own(cp: int) -> None:
    assert sum(everyone(leaks, cp), []) == []


def padding_leaks() -> list[str]:
    """Kinds and views where what stands in padded rows reaches a real output or gradient."""
    grids, found = Grids(), []
    cp = grids[KINDS[1][0]].cp
    packed, index, real, _ = layout([5, 1, 43], cp)
    here = real[index]
    given = [x.float() for x in inputs(len(real), HEADS["GQA"], 3)]
    given[3] *= real[:, None, None]
    other = [x.clone() for x in given]
    for x, shift in zip(other, (50, 100, -100), strict=False):
        x[~real] += shift
    for kind in KINDS[cp.size]:
        for view in EVERY_VIEW:
            attention = build(kind, grids[kind], view)
            pair = [results(attention, [x[index] for x in each], packed, grids[kind].cp) for each in (given, other)]
            if not all(torch.equal(a[here], b[here]) for a, b in zip(*pair, strict=True)):
                found.append(f"{kind} {view}")
    return found


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_padding_is_seen_by_no_one(cp: int) -> None:
    assert sum(everyone(padding_leaks, cp), []) == []
