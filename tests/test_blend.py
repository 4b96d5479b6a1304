from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data import blend
from megacp.data.blend import blend_index, exhaustive_blend_index, normalized, parse_blend, source_sizes

# `builder` is in test_pretrain.py.
VECTORS = json.loads((Path(__file__).parent / "golden" / "blending.json").read_text())


@pytest.mark.parametrize("case", VECTORS["build_blending_indices"], ids=lambda case: str(case["weights"]))
def test_order_is_megatrons(case: dict[str, Any]) -> None:
    weights = normalized(case["weights"]) if case["normalized"] else case["weights"]
    source, sample = blend_index(weights, case["size"])
    if case["dataset_index"] is not None:
        assert source.tolist() == case["dataset_index"]
        assert sample.tolist() == case["dataset_sample_index"]
    digest = hashlib.sha256(source.astype(np.int16).tobytes()).hexdigest()
    assert digest == case["sha256_dataset_index_int16"]
    assert np.bincount(source).tolist() == case["counts"]


@pytest.mark.parametrize("case", VECTORS["build_exhaustive_blending_indices"], ids=str)
def test_exhaustive_order_is_megatrons(case: dict[str, Any]) -> None:
    source, sample = exhaustive_blend_index(case["sizes"])
    assert source.tolist() == case["dataset_index"]
    assert sample.tolist() == case["dataset_sample_index"]


@pytest.mark.parametrize("case", VECTORS["size_per_split_per_dataset"], ids=str)
def test_sizes(case: dict[str, Any]) -> None:
    per_split = [source_sizes(normalized(case["weights"]), size, case["surplus"]) for size in case["sizes"]]
    assert [list(sizes) for sizes in zip(*per_split, strict=True)] == case["out"]


@pytest.mark.parametrize("case", VECTORS["get_blend_from_list"], ids=str)
def test_parse(case: dict[str, Any]) -> None:
    # No blend at all (null) is build_datasets' affair.
    if case["blend"] is not None:
        assert list(parse_blend(case["blend"])) == case["out"]


def test_parse_config_values() -> None:
    assert parse_blend("p 1") == (["p 1"], None)
    assert parse_blend([0.3, "p1", 1, "p2"]) == (["p1", "p2"], [0.3, 1.0])
    for weight in (0, -1, "nan", "inf"):
        with pytest.raises(ValueError, match="p1"):
            parse_blend([weight, "p1", 1, "p2"])
    with pytest.raises(ValueError, match="empty"):
        parse_blend([])


def plain(weights: list[float], size: int, caps: list[int] | None = None) -> list[tuple[int, int]]:
    """The rule, one step after the other."""
    taken, chosen = [0] * len(weights), []
    for i in range(size):
        open_ = [j for j in range(len(weights)) if caps is None or taken[j] < caps[j]]
        best = max(open_, key=lambda j: (weights[j] * max(i, 1.0) - taken[j], -j))
        chosen.append((best, taken[best]))
        taken[best] += 1
    return chosen


WEIGHTS = st.lists(st.integers(1, 30) | st.floats(1e-4, 1), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, size=st.integers(0, 3000), warm_up=st.sampled_from([0, 1, 64]))
def test_lanes_agree_with_the_rule(weights: list[float], size: int, warm_up: int) -> None:
    shares = normalized(weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "WARM_UP", warm_up)
        patch.setattr(blend, "LANES", 50)
        source, sample = blend_index(shares, size)
    assert list(zip(source.tolist(), sample.tolist(), strict=True)) == plain(shares.tolist(), size)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_exhaustive_lanes_agree_with_the_rule(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "WARM_UP", 2)
        source, sample = exhaustive_blend_index(sizes)
    shares = normalized(sizes).tolist()
    assert list(zip(source.tolist(), sample.tolist(), strict=True)) == plain(shares, sum(sizes), sizes)


def test_more_sources_than_int16_counts() -> None:
    count = 40_000
    weights = np.ones(count)
    weights[-2:] = 3
    source, sample = blend_index(normalized(weights), 5)
    assert source.tolist() == [count - 2, count - 1, 0, 1, 2]
    assert sample.tolist() == [0] * 5
