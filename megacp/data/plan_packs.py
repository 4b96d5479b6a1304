"""Which conversations share a pack: lengths -> a pattern of length classes -> the packs of an epoch.

Pure numpy. A conversation takes up room in units of `multiple` tokens: its class is its length in units, rounded up.
The pattern says which classes meet in a pack, the same in every epoch. Which conversation of a class takes which of its
places, and the order of the packs, are drawn anew for each (seed, epoch). Nothing here knows of ranks.

Legend: n conversations, p packs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

_LARGEST_UINT16 = np.iinfo(np.uint16).max


@dataclass(frozen=True)
class PackPattern:
    """
    classes   uint16 or int32 [n]: class of each conversation, 1 or more
    places    the same [n]: class of each place of the packs, pack after pack; `classes` in another order
    offsets   int64 [p+1]: where each pack begins in `places`
    tokens    of all conversations
    """

    classes: np.ndarray
    places: np.ndarray
    offsets: np.ndarray
    seq_length: int
    multiple: int
    tokens: int

    @property
    def packs(self) -> int:
        return len(self.offsets) - 1

    @property
    def rounded_tokens(self) -> int:
        """Tokens with each conversation rounded up to the multiple."""
        return int(self.places.sum(dtype=np.int64)) * self.multiple

    @property
    def fill(self) -> float:
        """Share of the packs' room that rounded conversations take: how well they were packed."""
        return self.rounded_tokens / max(1, self.packs * self.seq_length)

    @property
    def rounding_loss(self) -> float:
        """Share of the rounded tokens that is padding."""
        return 1 - self.tokens / max(1, self.rounded_tokens)


def plan(lengths: np.ndarray, seq_length: int, multiple: int) -> PackPattern:
    """Packs of at most `seq_length` rounded tokens by best fit, the longest conversations first.

    lengths int [n] in tokens, n >= 1. ValueError where a conversation is longer than a pack, or `multiple` does not
    divide `seq_length`.
    """
    if seq_length % multiple:
        raise ValueError(f"packs of {seq_length} tokens are no multiple of {multiple}")
    classes = _classes(lengths, seq_length, multiple)
    counts = np.bincount(classes)
    places, sizes = _best_fit(counts, seq_length // multiple)
    return _pattern(classes, places, sizes, lengths, seq_length, multiple)


def plan_unpacked(lengths: np.ndarray, seq_length: int, multiple: int) -> PackPattern:
    """As `plan`, with every conversation in a pack of its own."""
    classes = _classes(lengths, seq_length, multiple)
    return _pattern(classes, classes, np.ones(len(classes), np.int64), lengths, seq_length, multiple)


def epoch_packs(pattern: PackPattern, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers of conversations int32 or int64 [n], pack after pack; offsets int64 [p+1]) of one epoch.

    Every conversation comes once. Shuffled by sorting raw bits of PCG64, a stream that numpy keeps the same in all its
    releases, as it does not for its shuffles.
    """
    count = len(pattern.classes)
    bits = np.random.PCG64([seed, epoch])
    narrow = np.int32 if count <= np.iinfo(np.int32).max else np.int64
    members = np.lexsort((bits.random_raw(count), pattern.classes)).astype(narrow)
    order = np.argsort(bits.random_raw(pattern.packs), kind="stable")
    drawn = np.empty_like(members)
    drawn[np.argsort(pattern.places, kind="stable")] = members
    begins, sizes = pattern.offsets[:-1][order], np.diff(pattern.offsets)[order]
    offsets = _offsets(sizes)
    return drawn[np.arange(count) + np.repeat(begins - offsets[:-1], sizes)], offsets


def _classes(lengths: np.ndarray, seq_length: int, multiple: int) -> np.ndarray:
    long = lengths > seq_length
    if long.any():
        longest = int(lengths.max())
        raise ValueError(
            f"{np.count_nonzero(long):,} of {len(lengths):,} conversations are longer than data.seq_length = "
            f"{seq_length}, the longest has {longest} tokens: set data.seq_length to "
            f"{-(-longest // multiple) * multiple} or more, or write them anew with tools/prepare_sft.py "
            f"--max-length {seq_length}"
        )
    narrow = np.uint16 if seq_length // multiple < _LARGEST_UINT16 else np.int32
    # A conversation without tokens takes room too: every pack then holds finitely many.
    return np.maximum(-(-lengths // multiple), 1).astype(narrow)


def _pattern(
    classes: np.ndarray, places: np.ndarray, sizes: np.ndarray, lengths: np.ndarray, seq_length: int, multiple: int
) -> PackPattern:
    tokens = int(lengths.sum(dtype=np.int64))
    return PackPattern(classes, places.astype(classes.dtype), _offsets(sizes), seq_length, multiple, tokens)


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


class _Bins:
    """Open packs, those of equal content as one group, by the room that each still has.

    Content is a path in a forest: node i adds times[i] conversations of class sizes[i] to what node parents[i] holds.
    """

    def __init__(self) -> None:
        self.groups: dict[int, list[tuple[int, int]]] = {}  # room -> (number of packs, node)
        self.rooms: list[int] = []  # the keys, ascending
        self.parents: list[int] = []
        self.sizes: list[int] = []
        self.times: list[int] = []

    def add(self, room: int, packs: int, node: int) -> None:
        if room not in self.groups:
            insort(self.rooms, room)
        self.groups.setdefault(room, []).append((packs, node))

    def fill(self, groups: list[tuple[int, int]], room: int, size: int, count: int) -> int:
        """Puts `count` conversations of class `size` into packs that have `room`; how many find no place."""
        while groups and count:
            packs, node = groups.pop()
            each = min(room // size, count)
            used = min(packs, count // each)
            count -= used * each
            if used < packs:
                groups.append((packs - used, node))
            self.parents.append(node)
            self.sizes.append(size)
            self.times.append(each)
            self.add(room - each * size, used, len(self.parents) - 1)
        return count

    def fill_tightest(self, size: int, count: int) -> int:
        """The same for all open packs, those with the least room first."""
        for room in self.rooms[bisect_left(self.rooms, size) :]:
            count = self.fill(self.groups[room], room, size, count)
            if self.groups[room]:
                break
            del self.groups[room], self.rooms[bisect_left(self.rooms, room)]
        return count

    def content(self, node: int) -> np.ndarray:
        """The classes in a pack, the largest first."""
        sizes, times = [], []
        while node >= 0:
            sizes.append(self.sizes[node])
            times.append(self.times[node])
            node = self.parents[node]
        return np.repeat(sizes[::-1], times[::-1])


def _best_fit(counts: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(classes int64 [n] pack after pack, conversations of each pack int64 [p]); counts[k] conversations of class k.

    Best-fit decreasing (Johnson et al. 1974): each goes where the least room is left that still takes it. A pack that
    takes one of a class is the tightest for the next one too, so it is filled at a stroke; packs of equal content do
    the same, so they move together. The work grows with the distinct packs, not with the conversations.
    """
    bins = _Bins()
    for size in np.flatnonzero(counts)[::-1].tolist():
        count = bins.fill_tightest(size, int(counts[size]))
        bins.fill([(count, -1)], capacity, size, count)
    parts, sizes = [], []
    for packs, node in (group for groups in bins.groups.values() for group in groups):
        content = bins.content(node)
        parts.append(np.tile(content, packs))
        sizes.append(np.full(packs, len(content)))
    return np.concatenate(parts), np.concatenate(sizes)
