"""Packs of an epoch: nobody is lost, nothing is too long, the best fit is the best fit, and the shuffle is for ever."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.plan_packs import PackPattern, epoch_packs, plan, plan_unpacked

ROOT = Path(__file__).parents[1]
LENGTHS = st.lists(st.one_of(st.integers(0, 96), st.integers(0, 9)), min_size=1, max_size=80)


def packs_of(pattern: PackPattern, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    conversations, offsets = epoch_packs(pattern, seed, epoch)
    return [part.tolist() for part in np.split(conversations, offsets[1:-1])]


def rounded(lengths: Sequence[int], multiple: int) -> list[int]:
    return [max(1, -(-length // multiple)) * multiple for length in lengths]


def long_tailed(count: int, seq_length: int, seed: int = 0) -> np.ndarray:
    """Lognormal, as chats are: the mean twice the median, some cut off by seq_length."""
    draw = np.random.default_rng(seed).lognormal(np.log(seq_length / 20), 1.2, count)
    return np.clip(draw, 4, seq_length).astype(np.int32)


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    multiple=st.sampled_from([2, 4, 8, 16, 48, 96]),
    packed=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 2**20),
)
def test_every_conversation_comes_once_and_no_pack_is_too_long(
    lengths: list[int], multiple: int, packed: bool, seed: int, epoch: int
) -> None:
    array = np.array(lengths, np.int32)
    pattern = (plan if packed else plan_unpacked)(array, 96, multiple)
    packs, room = packs_of(pattern, seed, epoch), rounded(lengths, multiple)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    sizes = [sum(room[i] for i in pack) for pack in packs]
    assert all(0 < size <= 96 for size in sizes)
    # The pattern is that of every epoch.
    wanted = [tuple(part) for part in np.split(pattern.places, pattern.offsets[1:-1])]
    assert Counter(wanted) == Counter(tuple(pattern.classes[pack].tolist()) for pack in packs)
    assert len(packs) == pattern.packs == (len(lengths) if not packed else pattern.packs)
    assert pattern.rounded_tokens == sum(room)
    assert pattern.fill == pytest.approx(sum(room) / (96 * len(packs)))
    assert pattern.rounding_loss == pytest.approx(1 - sum(lengths) / sum(room))


def one_by_one(sizes: Sequence[int], capacity: int) -> list[int]:
    """Room left in each pack after best-fit decreasing, in words: the tightest pack that takes it, else a new one."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        room = min(fitting, default=capacity)
        if fitting:
            rooms.remove(room)
        rooms.append(room - size)
    return sorted(rooms)


@settings(max_examples=150, deadline=None)
@given(sizes=st.lists(st.one_of(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=120))
def test_moving_groups_is_best_fit_decreasing(sizes: list[int]) -> None:
    pattern = plan(np.array(sizes), 40, 1)
    room = [40 - int(part.sum()) for part in np.split(pattern.places, pattern.offsets[1:-1])]
    assert sorted(room) == one_by_one(sizes, 40)


@pytest.mark.parametrize(("seq_length", "multiple"), [(4096, 16), (131072, 16)])
def test_long_tailed_conversations_fill_their_packs(seq_length: int, multiple: int) -> None:
    pattern = plan(long_tailed(100_000, seq_length), seq_length, multiple)
    assert pattern.fill >= 0.98
    assert 0 < pattern.rounding_loss < 0.05
    assert pattern.tokens / (pattern.packs * seq_length) == pytest.approx(pattern.fill * (1 - pattern.rounding_loss))


def test_epochs_and_seeds_shuffle_conversations_and_packs() -> None:
    pattern = plan(long_tailed(2000, 512), 512, 16)
    draws = [packs_of(pattern, *key) for key in [(1, 0), (1, 1), (2, 0)]]
    assert draws[0] == packs_of(pattern, 1, 0)
    for i, one in enumerate(draws):
        for other in draws[:i]:
            assert one != other
            # Not the same packs in another order: conversations of a class change places.
            common = set(map(frozenset, one)) & set(map(frozenset, other))
            assert len(common) < 0.2 * len(one)
    places = [[len(pack) for pack in draw] for draw in draws]
    assert places[0] != places[1] and sorted(places[0]) == sorted(places[1])


def test_the_shuffle_is_the_same_for_ever() -> None:
    """A resumed run may have another release of numpy."""
    pattern = plan(np.array([30, 5, 17, 9, 64, 12, 40, 3, 22]), 64, 8)
    assert packs_of(pattern, 1234, 3) == [[5, 3, 7], [4], [6, 2], [0, 8, 1]]


def test_too_long_a_conversation_is_refused_with_what_to_do() -> None:
    for make in (plan, plan_unpacked):
        with pytest.raises(ValueError, match="2 of 4 conversations are longer than data.seq_length = 64") as error:
            make(np.array([64, 65, 3, 99]), 64, 16)
        assert "99 tokens" in str(error.value) and "seq_length to 112" in str(error.value)
        assert "prepare_sft.py --max-length 64" in str(error.value)
    with pytest.raises(ValueError, match="packs of 60 tokens are no multiple of 16"):
        plan(np.array([3]), 60, 16)


def test_planning_needs_no_torch() -> None:
    code = "import sys, megacp.data.plan_packs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
