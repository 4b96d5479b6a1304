"""Blends: which source each sample of a weighted mixture comes from.

Pure numpy. The order is Megatron-LM's (megatron/core/datasets/helpers.cpp,
blended_megatron_dataset_builder.py), number for number; the way to it is not, since a greedy of ten million
steps takes too long in Python.

Legend: k sources, n samples of the blend, C lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Steps a lane runs before its own part, so that a guessed start has met the true sequence by then.
WARM_UP = 64
LANES = 4096
# Source samples built beyond what the weights ask for (Megatron-LM's mid_level_dataset_surplus).
SURPLUS = 0.005


def parse_blend(paths: str | Sequence[str | float]) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights) of a `data_path`; weights None where none are given.

    A list of even length whose every other entry reads as a number is `weight prefix weight prefix ...`; all
    else is a list of prefixes. ValueError for a weight that is not positive.
    """
    entries = [paths] if isinstance(paths, str) else list(paths)
    if not entries:
        raise ValueError("a data path is an empty list; give a prefix, or: weight prefix weight prefix ...")
    try:
        weights = [float(entry) for entry in entries[0::2]] if len(entries) % 2 == 0 else None
    except ValueError:
        weights = None
    if weights is None:
        return [str(entry) for entry in entries], None
    prefixes = [str(entry).strip() for entry in entries[1::2]]
    for weight, prefix in zip(weights, prefixes, strict=True):
        if not (weight > 0 and math.isfinite(weight)):
            raise ValueError(
                f"the weight of {prefix} in a blend is {weight:g}; it must be above 0, or leave the path out"
            )
    return prefixes, weights


def normalized(weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """float64 [k], summing to 1."""
    values = np.asarray(weights, np.float64)
    return values / values.sum()


def source_sizes(weights: np.ndarray, size: int, surplus: float = 0.0) -> list[int]:
    """Samples to take from (surplus 0) or to build for each source, so that `size` can be drawn by weight."""
    return [math.ceil(math.ceil(size * float(weight)) * (1 + surplus)) for weight in weights]


def blend_index(
    weights: Sequence[float] | np.ndarray, size: int, caps: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(source, sample of that source) of each of `size` samples: int16 or int32 [n], int64 [n].

    Sample i goes to the source furthest behind its share: the largest weight * max(i, 1) - taken, the first
    among equals. A source that has given `caps` samples gives no more. Source numbers are int16 only where
    that holds them all.

    The greedy is run as C lanes in lockstep, lane i over its own stretch of the sequence. Where a lane
    starts, what each source has given by then is guessed (shares rounded by largest remainder) and mended by
    a warm-up; a lane whose start is then not the end of the lane before it is run again from there. So the
    result is exact whatever the guesses were.
    """
    shares = np.asarray(weights, np.float64)
    limits = np.full(len(shares), np.inf) if caps is None else np.asarray(caps, np.float64)
    steps = max(1, 4 * WARM_UP, -(-size // LANES))
    lanes = -(-size // steps)
    begins = np.arange(lanes) * steps
    source = np.empty((steps, lanes), np.int16 if len(shares) <= np.iinfo(np.int16).max else np.int32)
    sample = np.empty((steps, lanes), np.int64)

    early = np.maximum(begins - WARM_UP, 0)
    starts, _, _ = _advance(shares, limits, _shares_taken(shares, early), early, begins)
    ends = np.empty_like(starts)
    lanes_left = np.arange(lanes)
    while len(lanes_left):
        begin = begins[lanes_left]
        ends[:, lanes_left], source[:, lanes_left], sample[:, lanes_left] = _advance(
            shares, limits, starts[:, lanes_left], begin, begin + steps
        )
        lanes_left = 1 + np.flatnonzero((ends[:, :-1] != starts[:, 1:]).any(axis=0))
        starts[:, lanes_left] = ends[:, lanes_left - 1]
    return source.T.ravel()[:size], sample.T.ravel()[:size]


def exhaustive_blend_index(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """As `blend_index`, with every sample of every source once, in proportion to `sizes`."""
    return blend_index(np.asarray(sizes) / sum(sizes), sum(sizes), sizes)


def _shares_taken(shares: np.ndarray, position: np.ndarray) -> np.ndarray:
    """A guess at what each source has given before `position`: float64 [k, C], summing to it."""
    exact = shares[:, None] * position
    taken = np.floor(exact)
    missing = position - taken.sum(axis=0)
    rank = np.argsort(np.argsort(taken - exact, axis=0, kind="stable"), axis=0)
    return taken + (rank < missing)


def _advance(
    shares: np.ndarray, limits: np.ndarray, taken: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps begin..end-1 of each lane from the state `taken` [k, C]: the state after, and [steps, C] choices.

    A lane with fewer steps than the longest starts late; what its rows hold until then means nothing.
    """
    taken = taken.copy()
    steps = int((end - begin).max(initial=0))
    source = np.zeros((steps, len(begin)), np.int32)
    sample = np.zeros((steps, len(begin)), np.int64)
    lane = np.arange(len(begin))
    capped = np.isfinite(limits).any()
    for step in range(steps):
        position = end - steps + step
        behind = shares[:, None] * np.maximum(position, 1.0) - taken
        if capped:
            behind[taken >= limits[:, None]] = -np.inf
        chosen = behind.argmax(axis=0)
        source[step] = chosen
        sample[step] = taken[chosen, lane]
        taken[chosen, lane] += position >= begin
    return taken, source, sample
