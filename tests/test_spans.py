from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacp.attention import reference
from megacp.attention.spans import LONGEST_HALVED, Mask, Run, Span, Spans, joined, self_spans, span
from megacp.config import ModelConfig

LIMITS = st.none() | st.integers(0, 12)
LONG_LIMITS = st.none() | st.sampled_from([0, 1, 5, 63, 64, 100, 255, 300, 500])
LONG = st.sampled_from([1, 7, 64, 65, 192, 193, 256, 400, 512, 640])


def band(rows: int, keys: int, low: int | None, high: int | None) -> Tensor:
    """bool [rows, keys]: i + low <= j <= i + high."""
    ahead = torch.arange(keys) - torch.arange(rows)[:, None]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    return seen & (ahead >= (-rows if low is None else low)) & (ahead <= (keys if high is None else high))


def visible(span: Span) -> Tensor:
    return band(span.q_length, span.k_length, span.low, span.high)


def painted(spans: Iterable[Span], rows: int, keys: int) -> Tensor:
    """int [rows, keys]: how many of the spans let a query see a key?"""
    count = torch.zeros(rows, keys, dtype=torch.int32)
    for each in spans:
        count[each.q : each.q + each.q_length, each.k : each.k + each.k_length] += visible(each)
    return count


def members(run: Run) -> list[Span]:
    shape = (run.q_length, run.k_length, run.low, run.high)
    return [
        Span(run.q + i * run.q_step, shape[0], run.k + i * run.k_step, shape[1], shape[2], shape[3])
        for i in range(run.count)
    ]


def result_rows(run: Run) -> list[int]:
    return [run.part + i * run.part_step + row for i in range(run.count) for row in range(run.q_length)]


def scores(spans: Spans) -> int:
    """How many products of a query and a key are computed, at most."""
    first, further = spans.passes
    return sum(run.count * run.q_length * run.k_length for run in (*first, *further))


@settings(max_examples=400, deadline=None)
@given(
    *(st.integers(0, 14), st.integers(0, 20), st.integers(0, 14), st.integers(0, 20)),
    *(LIMITS, LIMITS, LIMITS, LIMITS),
)
def test_span_is_what_is_visible(
    q_length: int,
    q_position: int,
    k_length: int,
    k_position: int,
    left: int | None,
    right: int | None,
    other_left: int | None,
    other_right: int | None,
) -> None:
    ahead = (k_position + torch.arange(k_length)) - (q_position + torch.arange(q_length))[:, None]
    seen = (ahead >= (-99 if left is None else -left)) & (ahead <= (99 if right is None else right))
    found = span(3, q_length, q_position, 2, k_length, k_position, Mask(left, right))
    if found is None:
        assert not seen.any()
        return
    assert torch.equal(painted([found], 20, 20)[3 : 3 + q_length, 2 : 2 + k_length] > 0, seen)
    # Nothing could be cut off, no limit is idle, and the band counted from the last query and key is the same.
    block = visible(found)
    assert all(edge.any() for edge in (block[0], block[-1], block[:, 0], block[:, -1]))
    for idle in ({"low": None}, {"high": None}):
        other = found._replace(**idle)
        assert other == found or not torch.equal(visible(other), block)
    assert found.is_trimmed and found.trimmed() == found
    assert all(limit is None or limit >= 0 for limit in found.window) and found.fits(found.window)
    end = found.k_length - found.q_length
    for window in (found.window, Mask(other_left, other_right)):
        low = None if window.left is None else end - window.left
        high = None if window.right is None else end + window.right
        assert torch.equal(band(found.q_length, found.k_length, low, high), block) or not found.fits(window)


@settings(max_examples=60, deadline=None)
@given(LONG, LONG, st.sampled_from([-300, -64, 0, 5, 200]), LONG_LIMITS, LONG_LIMITS, st.integers(1, 3))
def test_runs_compute_what_is_visible_once(
    q_length: int, k_length: int, ahead: int, left: int | None, right: int | None, count: int
) -> None:
    one = span(2, q_length, 500 + ahead, 1, k_length, 500, Mask(left, right))
    if one is None:
        return
    spans = Spans(tuple(one._replace(q=one.q + i * (q_length + 3), k=one.k + i * k_length) for i in range(count)))
    rows, keys = 5 + count * (q_length + 3), 2 + count * k_length
    seen = painted(spans.spans, rows, keys)
    first, further = spans.passes
    runs = [*first, *further]
    assert torch.equal(painted([each for run in runs for each in members(run)], rows, keys), seen)
    assert [row for run in first for row in result_rows(run)] == list(range(spans.rows))
    # Results are joined where they belong.
    places = [row for each in spans.spans for row in range(each.q, each.q + each.q_length)]
    for run in runs:
        queries = [row for each in members(run) for row in range(each.q, each.q + each.q_length)]
        assert [places[row] for row in result_rows(run)] == queries
        assert run.low is None or run.q_length <= 192, "rows of a window are tiled"


def test_plain_attention_is_not_cut() -> None:
    """One call for each shape, as without windows: causal and full attention are what is trained most."""
    for mask in (Mask(), Mask(None, 0)):
        spans = self_spans((2048, 2048, 200, 7), (2048, 2048, 200, 7), mask)
        first, further = spans.passes
        assert [(run.count, run.q_length) for run in first] == [(2, 2048), (1, 200), (1, 7)] and further == ()
    first, further = self_spans((512,), (512,), Mask(None, 0)).passes
    assert [(run.count, run.q_length) for run in first] == [(4, 128)]
    assert [(run.count, run.q_length, run.k_length) for run in further] == [(2, 128, 128), (1, 256, 256)]
    assert all(run.causal for run in first) and not any(run.causal for run in further)
    assert len(self_spans((2 * LONGEST_HALVED,), (2 * LONGEST_HALVED,), Mask(None, 0)).passes[0]) == 1


def test_narrow_windows_are_cheap() -> None:
    length = 4096
    causal = length * (length + 1) // 2
    for mask, most in ((Mask(256, 0), 512), (Mask(64, 0), 128), (Mask(0, 0), 64), (Mask(128, 128), 512)):
        spans = self_spans((length,), (length,), mask)
        assert scores(spans) <= most * length < causal / 3
        assert len(spans.passes[0]) <= 8
    # A wide one computes little more than it shows.
    spans = self_spans((length,), (length,), Mask(1024, 0))
    assert scores(spans) <= 1.3 * int(painted(spans.spans, length, length).sum())


def test_tiny_sequences_need_few_calls() -> None:
    lengths = (40,) * 300 + (24,) * 200
    for mask in (Mask(), Mask(None, 0), Mask(16, 0), Mask(3, 2)):
        spans = self_spans(lengths, lengths, mask)
        assert len(spans.spans) == 500 and len(spans.passes[0]) == 2 and len(spans.by_window) == 1


def test_runs_join_equal_neighbours_only() -> None:
    a = Span(0, 4, 0, 8, None, 4)
    spans = [a, a._replace(q=4, k=0), a._replace(q=8, k=0), a._replace(q=12, k=8), a._replace(q=16, k=4, high=5)]
    runs = joined(zip(range(0, 20, 4), spans, strict=True))
    assert [(run.count, run.k_step) for run in runs] == [(3, 0), (1, 8), (1, 8)]
    backwards = joined(zip((0, 4), (a._replace(k=8), a._replace(q=4)), strict=True))
    assert [run.count for run in backwards] == [1, 1]  # views have no negative strides


@pytest.mark.parametrize("k_step", [0, 1, 3, 4, 7, 8, 20])
def test_keys_that_spans_share_are_dealt_out(k_step: int) -> None:
    run = Run(9, 0, 4, 4, 5, 8, k_step, 0, 4, 0, 4)
    sets = run.apart()
    assert len(sets) == {0: 9, 1: 8, 3: 3, 4: 2, 7: 2, 8: 1, 20: 1}[k_step]
    assert all(part.count for part in sets) and [members(part)[0] for part in sets] == members(run)[: len(sets)]
    assert sorted(each for part in sets for each in members(part)) == sorted(members(run))
    assert sorted(row for part in sets for row in result_rows(part)) == result_rows(run)
    for part in sets:
        assert painted([each._replace(low=None, high=None) for each in members(part)], 36, 200).sum(0).max() <= 4
    groups = run.groups(20)
    assert [part.count for part in groups] == [2, 2, 2, 2, 1]
    assert [each for part in groups for each in members(part)] == members(run)
    assert run.groups(72) == [run] and len(run.groups(1)) == 9


@pytest.mark.parametrize(
    "mask", [Mask(), Mask(None, 0), Mask(3, 0), Mask(2, 1), Mask(None, 2), Mask(0, 0), Mask(4, None)]
)
def test_self_spans(mask: Mask) -> None:
    lengths, room = (5, 0, 16, 1, 0, 7), (8, 4, 16, 4, 0, 8)
    spans = self_spans(lengths, room, mask)
    seen = painted(spans.spans, sum(room), sum(room))
    assert seen.max() == 1
    window = [-1 if limit is None else limit for limit in mask]
    for start, real, padded in zip(accumulate(room, initial=0), lengths, room, strict=False):
        own = reference.visible(real or padded, padded, False, window)
        block = seen[start : start + padded]
        assert block.sum() == block[:, start : start + padded].sum(), "nobody sees another sequence"
        real_rows = slice(start, start + (real or padded))
        assert torch.equal(seen[real_rows, start : start + padded] > 0, own[: real or padded])
        assert not (seen[real_rows, start + (real or padded) : start + padded]).any()
    if mask == Mask(None, 0):
        assert spans.covers(sum(room)) and spans.keys.covers(sum(room))


def test_windows_are_shared() -> None:
    """Spans that one call of a variable-length kernel can serve go together, limits that hide nothing with others."""
    lengths = (1, 300, 2, 40, 1)
    for mask in (Mask(None, 0), Mask(50, 0), Mask(), Mask(9, 4)):
        spans = self_spans(lengths, lengths, mask)
        (group,) = spans.by_window
        assert group.window == mask and group.spans is spans and group.parts.starts == spans.q_starts

    # A chunk of 8 against itself, against all before, and against the one before through a window.
    chunk = [
        Span(0, 8, 0, 8, None, 0),
        Span(8, 8, 0, 32),
        Span(16, 8, 8, 8, 0),
        Span(24, 1, 9, 1),
        Span(25, 8, 0, 12, None, 4),
    ]
    found = Spans(tuple(chunk)).by_window
    assert {group.window: group.spans.q_starts for group in found} == {
        Mask(None, 0): (0, 24, 25),
        Mask(0, None): (16,),
        Mask(): (8,),
    }
    assert {group.window: group.parts.starts for group in found}[Mask(None, 0)] == (0, 24, 25)


@pytest.mark.parametrize(
    "wrong", [Span(0, 4, 0, 4, None, -1), Span(0, 4, 0, 4, 1), Span(0, 4, 0, 9, None, 2), Span(0, 4, 0, 0, None, 0)]
)
def test_untrimmed_spans_are_refused(wrong: Span) -> None:
    """A kernel would give a row without keys a log-sum-exp, and count a window from the wrong end."""
    with pytest.raises(ValueError, match=r"Span\(q=0.*trim it"):
        Spans((wrong,))
    trimmed = wrong.trimmed()
    assert trimmed is None or Spans((trimmed,)).rows


@pytest.mark.parametrize(
    ("kind", "window", "mask"),
    [
        ("causal", None, Mask(None, 0)),
        ("no_mask", None, Mask()),
        ("causal", [128, 0], Mask(128, 0)),
        ("causal", [128, -1], Mask(128, 0)),
        ("causal", [0, 7], Mask(0, 0)),
        ("no_mask", [-1, -1], Mask()),
        ("no_mask", [3, 4], Mask(3, 4)),
        ("no_mask", [-1, 0], Mask(None, 0)),
    ],
)
def test_mask_of_a_model(kind: str, window: list[int] | None, mask: Mask) -> None:
    model = cast(ModelConfig, SimpleNamespace(attn_mask_type=kind, window_size=window))
    assert Mask.of(model) == mask
    assert mask.windowed == (mask not in (Mask(), Mask(None, 0)))
