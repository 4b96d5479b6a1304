"""Every way to exchange keys, values and heads, on ranks that share one device over gloo, against one exact reference.

The caller's side, without torch: what is tried, and how the ranks' errors become rows. The ranks run `exact.py`.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from tools.gpu.report import Row, checked, failed
from tools.gpu.world import WorldError, run_world

# Norm of the error over the norm of what is right, a third of the worst row's where larger: see exact.py.
BOUNDS = {"cuda": 1.5e-2, "cpu": 2e-5}
# bf16 over four ranks against one. Partial results are merged in fp32, but the kernels round each of them: one rounding
# more than on one rank, which where all of them weigh the same is worth a factor of sqrt(3/2) = 1.22.
GROWTH = {"causal": 1.2, "no_mask": 1.3}


class Exchanged(NamedTuple):
    """Attention over a pack whose padded lengths suit every number of ranks tried, so that all compute the same."""

    comm_type: str
    name: str
    lengths: tuple[int, ...]
    room: tuple[int, ...]
    mask: Literal["causal", "no_mask"]
    window: list[int] | None
    heads: tuple[int, int]
    width: int


def pad(lengths: Sequence[int], multiple: int) -> tuple[int, ...]:
    return tuple(-(-length // multiple) * multiple for length in lengths)


def exchanges(kind: str, size: int) -> list[Exchanged]:
    cuda = kind == "cuda"
    heads, width = ((8, 2), 64) if cuda else ((4, 2), 16)
    packs = {"dense": (2048,) if cuda else (64,), "packed": (1, 700, 37, 1290) if cuda else (1, 37, 5)}
    masks: dict[str, tuple[Literal["causal", "no_mask"], list[int] | None]] = {
        "causal": ("causal", None),
        "full": ("no_mask", None),
        "window": ("causal", [300, 0] if cuda else [11, 0]),
        "two-sided window": ("no_mask", [300, 100] if cuda else [11, 3]),
    }
    types = {1: ["p2p"], 2: ["p2p", "all_gather", "a2a"], 4: ["p2p", "all_gather", "a2a", "a2a+p2p"]}[size]
    return [
        Exchanged(comm_type, f"{pack} {name}", lengths, pad(lengths, 8), *mask, heads, width)
        for comm_type in types
        for pack, lengths in packs.items()
        for name, mask in masks.items()
    ]


def ranks_of(size: int) -> str:
    return f"{size} rank{'s' * (size > 1)}"


# (comm type, case's name) -> name of a tensor -> error
Errors = dict[tuple[str, str], dict[str, float]]


def check_exchanges(kind: str, tolerance: float, seconds: float) -> Iterator[Row]:
    """A row for each type and number of ranks, with the worst of its cases, and one for each case that broke."""
    deadline, one = time.monotonic() + seconds, {}
    for size in (1, 2, 4):
        errors: Errors = {}
        yield from _run(kind, size, deadline, errors)
        yield from _rows(kind, size, errors, tolerance)
        if size == 1:
            one = {name: found for (_, name), found in errors.items()}
        # In bf16 only: fp32 errors are too small to compare.
        if size == 4 and kind == "cuda" and all(name in one for _, name in errors):
            yield from _growth(kind, errors, one, tolerance)


def _run(kind: str, size: int, deadline: float, errors: Errors) -> Iterator[Row]:
    """Fills `errors`; yields what broke. A type whose ranks failed is given up, the others get ranks anew."""
    todo = exchanges(kind, size)
    while todo:
        parts: list[list[dict[str, list[float]]]] = [[] for _ in range(size)]
        reason = None
        try:
            seconds = max(1.0, deadline - time.monotonic())
            for rank, message in run_world("tools.gpu.exact:exchanged_errors", size, (kind, size, todo), seconds):
                parts[rank].append(message)
        except WorldError as error:
            reason = str(error)
        for case, *ranks in zip(todo, *parts, strict=False):
            errors[case.comm_type, case.name] = together(ranks)
        done = min(map(len, parts))
        if reason is None:
            return
        broken = todo[min(done, len(todo) - 1)]
        yield failed("comm", f"{broken.comm_type} over {ranks_of(size)}, {broken.name}", reason)
        if time.monotonic() > deadline - 1:
            return
        todo = [case for case in todo[done:] if case.comm_type != broken.comm_type]


def together(ranks: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    """Errors of whole tensors from those of the ranks' shares."""
    found = {}
    for name in ranks[0]:
        squares, values, worst = zip(*(rank[name] for rank in ranks), strict=True)
        whole = math.sqrt(sum(squares) / (sum(values) + 1e-60))
        found[name] = math.inf if math.isnan(whole) else max(whole, max(worst) / 3)
    return found


def _rows(kind: str, size: int, errors: Errors, tolerance: float) -> Iterator[Row]:
    by_type: dict[str, list[dict[str, float]]] = defaultdict(list)
    for (comm_type, _), found in errors.items():
        by_type[comm_type].append(found)
    for comm_type, found in by_type.items():
        worst = {name: max(error[name] for error in found) for name in found[0]}
        check = f"{comm_type} over {ranks_of(size)}, worst of {len(found)} packs and masks"
        yield checked("comm", check, worst, BOUNDS[kind] * tolerance)


def _growth(kind: str, errors: Errors, one: dict[str, dict[str, float]], tolerance: float) -> Iterator[Row]:
    """How much larger errors are over four ranks than on one, at most, for each type and kind of mask."""
    masks = {case.name: case.mask for case in exchanges(kind, 4)}
    growth: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for (comm_type, name), found in errors.items():
        most = growth[comm_type, masks[name]]
        for x, error in found.items():
            most[x] = max(error / (one[name][x] + 1e-30), most.get(x, 0.0))
    for (comm_type, mask), ratios in growth.items():
        words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        check = f"{comm_type}, {mask}: error over 4 ranks / on 1"
        yield checked("comm", check, ratios, GROWTH[mask] * tolerance, words)
