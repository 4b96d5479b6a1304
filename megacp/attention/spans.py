"""Who sees whom: bands of queries and keys, and how they fall apart into calls of a dense kernel.

A `Span` is a rectangle of queries and keys with a band of visible pairs in it. `Spans` are what one attention computes.
A `Run` is spans of one shape at one distance, computed at once: `Spans.passes` cuts bands into runs of little waste.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from megacp.attention.stretches import Stretches
from megacp.config import ModelConfig

# The CPU kernel computes whole blocks of 512 keys along the diagonal. Halving a sequence skips most of what is masked
# there; beyond 1024 rows that is worth no more than its extra passes over memory, below 128 the products get too small.
SHORTEST_HALF, LONGEST_HALVED = 128, 1024
# Windows are computed in tiles of queries, each against all keys that one of its rows sees: low tiles waste little of a
# narrow window, high ones keep the products large (from 192 rows on the CPU kernel works in blocks of 64).
NARROW, LOW_TILE, HIGH_TILE = 256, 64, 192
# So few scores of a causal chunk are computed in one masked call, not in two whose results are merged.
SMALL = 2**18


class Mask(NamedTuple):
    """Which keys a query sees, by position in its sequence: from `left` before it to `right` after it; None: no limit.

    Mask(None, 0) is causal, Mask() is full, Mask(128, 0) a causal window of 128 earlier tokens and oneself.
    """

    left: int | None = None
    right: int | None = None

    @staticmethod
    def of(model: ModelConfig) -> Mask:
        """`window_size` counts as in TransformerEngine, -1 for no limit; a causal model never looks ahead."""
        left, right = (None if limit < 0 else limit for limit in model.window_size or (-1, -1))
        return Mask(left, 0 if model.attn_mask_type == "causal" else right)

    @property
    def windowed(self) -> bool:
        """Neither plainly causal nor full?"""
        return self.left is not None or bool(self.right)


class Span(NamedTuple):
    """Queries [q, q + q_length) and keys [k, k + k_length).

    Query i sees key j, both counted within the span, if i + low <= j <= i + high; None is no limit.
    """

    q: int
    q_length: int
    k: int
    k_length: int
    low: int | None = None
    high: int | None = None

    def trimmed(self) -> Span | None:
        """Without queries that see no key, keys that no query sees, limits without effect; None: nothing is left."""
        first = max(0, -self.high) if self.high is not None else 0
        last = min(self.q_length, self.k_length - self.low) if self.low is not None else self.q_length
        if first >= last or self.k_length <= 0:
            return None
        begin = max(0, first + self.low) if self.low is not None else 0
        end = min(self.k_length, last + self.high) if self.high is not None else self.k_length
        low = None if self.low is None else self.low + first - begin
        high = None if self.high is None else self.high + first - begin
        rows, keys = last - first, end - begin
        if low is not None and low <= 1 - rows:
            low = None
        if high is not None and high >= keys - 1:
            high = None
        return Span(self.q + first, rows, self.k + begin, keys, low, high)

    @property
    def is_trimmed(self) -> bool:
        """Does every query see a key, and the last query all keys its left limit does not hide? True without keys."""
        if self.k_length == 0:
            return self.low is None and self.high is None
        low_fits = self.low is None or self.low + self.q_length <= self.k_length
        return low_fits and (self.high is None or 0 <= self.high >= self.k_length - self.q_length)

    @property
    def window(self) -> Mask:
        """The band as FlashAttention-2 counts it: as if the last query stood at the last key. Limits are never < 0."""
        ahead = self.k_length - self.q_length
        left = None if self.low is None else ahead - self.low
        return Mask(left, None if self.high is None else self.high - ahead)

    def fits(self, window: Mask) -> bool:
        """Would this window hide the same? Any limit that hides nothing will do for none."""
        least = self.k_length - 1, self.q_length - 1
        limits = zip(self.window, window, least, strict=True)
        return all(own == other or (own is None and other is not None and other >= n) for own, other, n in limits)

    def rows(self, first: int, last: int) -> Span | None:
        """Queries [first, last) of the span, trimmed."""
        shift = (None if limit is None else limit + first for limit in (self.low, self.high))
        return Span(self.q + first, last - first, self.k, self.k_length, *shift).trimmed()


def span(q: int, q_length: int, q_position: int, k: int, k_length: int, k_position: int, mask: Mask) -> Span | None:
    """The visible part of a rectangle, trimmed; None if nothing is visible.

    Its queries lie in rows [q, q + q_length), the first at `q_position` in its sequence; its keys likewise.
    """
    ahead = q_position - k_position
    low = None if mask.left is None else ahead - mask.left
    high = None if mask.right is None else ahead + mask.right
    return Span(q, q_length, k, k_length, low, high).trimmed()


class Run(NamedTuple):
    """`count` spans of one shape, `q_step` and `k_step` rows apart: one call of a dense kernel.

    Its results belong at row `part`, `part + part_step`, .. of the result of all spans.
    """

    count: int
    q: int
    q_length: int
    q_step: int
    k: int
    k_length: int
    k_step: int
    part: int
    part_step: int
    low: int | None = None
    high: int | None = None

    @property
    def causal(self) -> bool:
        """Query i sees keys 0..i of as many keys as queries."""
        return self.low is None and self.high == 0 and self.q_length == self.k_length

    def every(self, first: int, step: int) -> Run:
        """Spans first, first + step, .. of the run."""
        return self._replace(
            count=len(range(first, self.count, step)),
            q=self.q + first * self.q_step,
            q_step=self.q_step * step,
            k=self.k + first * self.k_step,
            k_step=self.k_step * step,
            part=self.part + first * self.part_step,
            part_step=self.part_step * step,
        )

    def apart(self) -> list[Run]:
        """The spans dealt out in turn to as few runs as it takes for no key to be twice in one."""
        if self.k_step >= self.k_length:
            return [self]
        many = min(self.count, -(-self.k_length // self.k_step)) if self.k_step else self.count
        return [self.every(i, many) for i in range(many)]

    def groups(self, keys: int) -> list[Run]:
        """The run in parts of at most `keys` keys, counted once for each span, or of one span."""
        if self.count * self.k_length <= keys:
            return [self]
        most = max(1, keys // self.k_length)
        starts = range(0, self.count, most)
        return [self.every(i, 1)._replace(count=min(most, self.count - i)) for i in starts]

    def below_diagonal(self, half: int) -> Run:
        """Second halves against first halves, once every sequence has been cut in stretches of `half` rows."""
        return Run(
            self.count * self.q_length // (2 * half),
            *(self.q + half, half, 2 * half),
            *(self.k, half, 2 * half),
            *(self.part + half, 2 * half),
        )

    def halved(self) -> list[Run]:
        """The same attention with less of the masked triangle computed: the diagonal, then what lies below it."""
        half, below = self.q_length, []
        together = self.count == 1 or (self.q_step == self.q_length and self.k_step == self.k_length)
        if not (together and self.q_length <= LONGEST_HALVED):
            return [self]
        while half % 2 == 0 and half // 2 >= SHORTEST_HALF:
            half //= 2
            below.append(self.below_diagonal(half))
        count = self.count * self.q_length // half
        diagonal = Run(count, self.q, half, half, self.k, half, half, self.part, half, None, 0)
        return [diagonal, *below[::-1]] if below else [self]

    def passes(self) -> tuple[list[Run], list[Run]]:
        """Runs that touch each query row once, in order of their rows, and those that add to them.

        A run without limits, or as causal as the kernel's own mask, or one of few rows is computed as it is.
        """
        if self.causal:
            first, *further = self.halved()
            return [first], further
        full = self.low is None and self.high is None
        low_enough = self.q_length <= _tile(self) and (self.low is not None or self.q_length * self.k_length <= SMALL)
        if full or low_enough:
            return [self], []
        if self.low is None and self.high is not None and self.k_length == self.q_length + self.high:
            diagonal = self._replace(k=self.k + self.high, k_length=self.q_length, high=0)
            first, further = diagonal.passes()
            return first, [*further, self._replace(k_length=self.high, high=None)]
        pieces = [piece.passes() for i in range(self.count) for piece in self.every(i, self.count).cut()]
        return [run for first, _ in pieces for run in first], [run for _, further in pieces for run in further]

    def cut(self) -> list[Run]:
        """A single band by rows: those that see the first key, tiles of rows that see equally many, the last ones."""
        whole = Span(self.q, self.q_length, self.k, self.k_length, self.low, self.high)
        rows, tile = self.q_length, _tile(self)
        left_from = rows if self.low is None else min(max(-self.low, 0), rows)
        right_until = 0 if self.high is None else min(max(self.k_length - self.high, 0), rows)
        if left_from <= right_until:
            stretches = [(0, left_from, rows), (left_from, right_until, tile), (right_until, rows, tile)]
        else:
            stretches = [(0, right_until, rows), (right_until, left_from, rows), (left_from, rows, tile)]
        pieces = [
            (self.part + row, whole.rows(row, min(row + height, last)))
            for first, last, height in stretches
            for row in range(first, last, height)
        ]
        return joined((part, piece) for part, piece in pieces if piece)


def joined(spans: Iterable[tuple[int, Span]]) -> list[Run]:
    """Runs of (row of the result, span): neighbours of one shape at one distance are one."""
    runs: list[Run] = []
    for part, (q, q_length, k, k_length, low, high) in spans:
        last = runs[-1] if runs else None
        if last and (last.q_length, last.k_length, last.low, last.high) == (q_length, k_length, low, high):
            longer = last._replace(count=last.count + 1)
            if last.count == 1:
                longer = longer._replace(q_step=q - last.q, k_step=k - last.k, part_step=q_length)
            place = (longer.q + last.count * longer.q_step, longer.k + last.count * longer.k_step)
            if place == (q, k) and longer.q_step > 0 and longer.k_step >= 0:
                runs[-1] = longer
                continue
        runs.append(Run(1, q, q_length, q_length, k, k_length, k_length, part, q_length, low, high))
    return runs


def _tile(run: Run) -> int:
    """Rows of a tile, by how many keys a row sees."""
    low = -run.q_length if run.low is None else run.low
    high = run.k_length if run.high is None else run.high
    return LOW_TILE if min(high - low, run.k_length) < NARROW else HIGH_TILE


@dataclass(frozen=True)
class Spans:
    """What one attention computes. Spans may overlap in keys, never in queries.

    None has length 0 in queries; one without keys gives 0 and log-sum-exp -inf. Bands must be trimmed (ValueError).
    """

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        for span in self.spans:
            if not span.is_trimmed:
                raise ValueError(f"{span} has queries or keys at its ends that see nothing: trim it")

    @cached_property
    def q_starts(self) -> tuple[int, ...]:
        return tuple(span.q for span in self.spans)

    @cached_property
    def q_lengths(self) -> tuple[int, ...]:
        return tuple(span.q_length for span in self.spans)

    @cached_property
    def k_starts(self) -> tuple[int, ...]:
        return tuple(span.k for span in self.spans)

    @cached_property
    def k_lengths(self) -> tuple[int, ...]:
        return tuple(span.k_length for span in self.spans)

    @cached_property
    def queries(self) -> Stretches:
        return Stretches(self.q_starts, self.q_lengths)

    @cached_property
    def keys(self) -> Stretches:
        return Stretches(self.k_starts, self.k_lengths)

    @property
    def rows(self) -> int:
        """Queries of all spans."""
        return self.queries.rows

    def covers(self, rows: int) -> bool:
        """Are the queries of the spans rows 0..rows-1, in this order?"""
        return self.queries.covers(rows)

    def tile(self, rows: int, keys: int) -> bool:
        """Do they hold queries 0..rows-1 and keys 0..keys-1, each once, so that first passes meet all of them once?"""
        plain = all(run.k_length and (run.causal or (run.low is None and run.high is None)) for run in self.runs)
        return plain and self.covers(rows) and self.keys.covers(keys)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The spans, joined."""
        return tuple(joined(zip(accumulate(self.q_lengths, initial=0), self.spans, strict=False)))

    @cached_property
    def passes(self) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        """`Run.passes` of all runs."""
        pieces = [run.passes() for run in self.runs]
        return tuple(run for first, _ in pieces for run in first), tuple(run for _, add in pieces for run in add)

    @cached_property
    def by_window(self) -> tuple[Windowed, ...]:
        """The spans that one window serves, together: as few windows as there are different effective limits."""
        starts = list(accumulate(self.q_lengths, initial=0))
        sets: dict[Mask, list[int]] = {}
        # What has few limits of its own fits in with others.
        for i in sorted(range(len(self.spans)), key=lambda i: self.spans[i].window.count(None)):
            window = next((window for window in sets if self.spans[i].fits(window)), self.spans[i].window)
            sets.setdefault(window, []).append(i)
        windowed = []
        for window, found in sets.items():
            members = sorted(found)
            spans = self if len(sets) == 1 else Spans(tuple(self.spans[i] for i in members))
            parts = Stretches(tuple(starts[i] for i in members), spans.q_lengths)
            windowed.append(Windowed(window, spans, parts))
        return tuple(windowed)


class Windowed(NamedTuple):
    """Spans with one window, as `Span.window` counts it, and the rows of their results among those of all."""

    window: Mask
    spans: Spans
    parts: Stretches


@lru_cache(maxsize=64)
def self_spans(lengths: tuple[int, ...], padded_lengths: tuple[int, ...], mask: Mask) -> Spans:
    """Every sequence of a whole pack attends to itself.

    Padding ends a sequence: where nobody looks ahead no real token sees it anyway; else its keys are cut off. A
    sequence of padding alone sees itself, so that it has a finite result.
    """
    found = []
    starts = accumulate(padded_lengths, initial=0)
    for start, real, padded in zip(starts, lengths, padded_lengths, strict=False):
        keys = padded if mask.right == 0 else real or padded
        found.append(span(start, padded, 0, start, keys, 0, mask))
    return Spans(tuple(found_span for found_span in found if found_span))
