from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.batch import Sample, shard
from megacp.data.pack import PackLayout, Row, pack
from megacp.grid import CPGroup

VECTORS = json.loads((Path(__file__).parent / "golden" / "gpt_dataset.json").read_text())
# Left out of ltor_masks: cases that reset position ids without the attention mask or the other way round (for us both
# follow from the sequences of the pack, `mask_between_documents`).
MASKS = [case for case in VECTORS["ltor_masks"] if case["reset_position_ids"] == case["reset_attention_mask"]]


def row(tokens: list[int], starts: list[int]) -> Row:
    return Row(np.array(tokens, np.int64), np.array(starts, np.int64), len(tokens) - 1)


def real_positions(sample: Sample) -> torch.Tensor:
    """Where in the pack the tokens lie that are no padding, in order."""
    lengths, starts = sample.cu_seqlens.diff().tolist(), sample.cu_seqlens_padded.tolist()
    return torch.tensor([at + i for at, n in zip(starts, lengths, strict=False) for i in range(n)])


@pytest.mark.parametrize("case", MASKS, ids=range(len(MASKS)))
def test_masks_are_megatrons(case: dict[str, Any]) -> None:
    data = case["data"]
    starts = [i + 1 for i, token in enumerate(data) if token == case["eod"]]
    layout = PackLayout(mask_between_documents=case["reset_attention_mask"], eod_mask_loss=case["eod_mask_loss"])
    sample = pack([row([*data, 1], starts)], [0], layout)
    batch = shard(sample, CPGroup(ranks=(0,), rank=0, process_group=None))
    real = real_positions(sample)
    assert sample.tokens[real].tolist() == data
    assert sample.loss_mask[real].tolist() == case["loss_mask"]
    assert batch.position_ids[real].tolist() == case["position_ids"]
    if case["attention_mask"] is not None:
        sequence = torch.searchsorted(sample.cu_seqlens[1:], torch.arange(len(data)), right=True)
        hidden = (sequence[:, None] != sequence) | torch.ones(len(data), len(data)).triu(1).bool()
        assert hidden.int().tolist() == case["attention_mask"][0]


def test_dense_rows_need_no_padding() -> None:
    rows = [row(list(range(9)), [3, 8]), row(list(range(20, 29)), [])]
    sample = pack(rows, [4, 9], PackLayout(cp=2, tp=2, sequence_parallel=True))
    assert sample.tokens.tolist() == [*range(8), *range(20, 28)]
    assert sample.labels.tolist() == [*range(1, 9), *range(21, 29)]
    assert sample.loss_mask.tolist() == [1.0] * 16
    assert sample.cu_seqlens.tolist() == [0, 8, 16]
    assert sample.cu_seqlens_padded is sample.cu_seqlens
    assert sample.ids == (4, 9)


def test_the_tensors_of_a_sample_share_no_memory() -> None:
    source = row(list(range(9)), [])
    sample = pack([source], [0], PackLayout())
    sample.tokens.zero_()
    sample.loss_mask.zero_()
    assert sample.labels.tolist() == list(range(1, 9))
    assert source.tokens.tolist() == list(range(9))
    assert pack([source], [0], PackLayout()).loss_mask.sum() == 8


def test_documents_become_sequences() -> None:
    rows = [row([1, 2, 3, 4, 5, 6, 7], [1, 4]), row([11, 12, 13, 14, 15, 16, 17], [6])]
    layout = PackLayout(cp=2, mask_between_documents=True, eod_mask_loss=True)
    sample = pack(rows, [0, 1], layout)
    assert sample.cu_seqlens.tolist() == [0, 1, 4, 6, 12]
    assert sample.cu_seqlens_padded.tolist() == [0, 4, 8, 12, 20]
    assert sample.tokens.tolist() == [1, 0, 0, 0, 2, 3, 4, 0, 5, 6, 0, 0, 11, 12, 13, 14, 15, 16, 0, 0]
    assert sample.labels.tolist() == [2, 0, 0, 0, 3, 4, 5, 0, 6, 7, 0, 0, 12, 13, 14, 15, 16, 17, 0, 0]
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0]


def test_the_end_of_the_pack_is_filled_for_sequence_parallelism() -> None:
    layout = PackLayout(cp=2, tp=4, sequence_parallel=True, mask_between_documents=True)
    sample = pack([row(list(range(13)), [5])], [0], layout)
    assert sample.cu_seqlens.tolist() == [0, 5, 12]
    assert sample.cu_seqlens_padded.tolist() == [0, 8, 16]
    sample = pack([row(list(range(13)), [4])], [0], layout)
    assert sample.cu_seqlens.tolist() == [0, 4, 12, 12]
    assert sample.cu_seqlens_padded.tolist() == [0, 4, 12, 16]
    assert sample.loss_mask[12:].tolist() == [0.0] * 4


def test_missing_labels_have_no_weight() -> None:
    short = Row(np.array([5, 6, 7, 0, 0], np.int64), np.array([], np.int64), 2)
    sample = pack([row([1, 2, 3, 4, 5], []), short], [0, 1], PackLayout())
    assert sample.loss_mask.tolist() == [1, 1, 1, 1, 1, 1, 0, 0]


def test_a_row_may_weigh_its_labels() -> None:
    weights = np.array([1, 1, 0.5, 1], np.float32)
    weighed = Row(np.arange(5), np.array([2, 4]), 3, weights)
    layout = PackLayout(mask_between_documents=True)
    assert pack([weighed], [0], layout).loss_mask.tolist() == [1, 1, 0.5, 0]
    sample = pack([weighed, row([7, 8, 9], [])], [0, 1], replace(layout, eod_mask_loss=True))
    assert sample.loss_mask.tolist() == [1, 0, 0.5, 0, 1, 1]
    sample.loss_mask.zero_()
    assert weights.tolist() == [1, 1, 0.5, 1]


def test_rows_may_differ_in_length() -> None:
    rows = [row([1, 2, 3, 4], [2, 3]), row([11, 12], [1]), row([21, 22, 23, 24, 25, 26], [])]
    sample = pack(rows, [5, 6, 7], PackLayout(cp=1, mask_between_documents=True))
    assert sample.cu_seqlens.tolist() == [0, 2, 3, 4, 9]
    assert sample.cu_seqlens_padded.tolist() == [0, 2, 4, 6, 12]
    assert sample.tokens.tolist() == [1, 2, 3, 0, 11, 0, 21, 22, 23, 24, 25, 0]
    assert sample.labels.tolist() == [2, 3, 4, 0, 12, 0, 22, 23, 24, 25, 26, 0]
    assert pack(rows, [5, 6, 7], PackLayout(cp=1)).cu_seqlens.tolist() == [0, 3, 4, 9]


@settings(max_examples=100, deadline=None)
@given(
    starts=st.lists(st.lists(st.integers(1, 24), unique=True, max_size=8), min_size=1, max_size=3),
    cp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2, 3]),
    sequence_parallel=st.booleans(),
    masked=st.booleans(),
    eod_mask_loss=st.booleans(),
)
def test_any_pack_keeps_every_token_and_passes_the_door(
    starts: list[list[int]], cp: int, tp: int, sequence_parallel: bool, masked: bool, eod_mask_loss: bool
) -> None:
    length = 24
    rows = [row(list(range(100 * i + 1, 100 * i + length + 2)), sorted(begins)) for i, begins in enumerate(starts)]
    layout = PackLayout(cp, tp, sequence_parallel, masked, eod_mask_loss)
    sample = pack(rows, range(len(rows)), layout)
    real = real_positions(sample)
    padding = torch.ones(len(sample.tokens), dtype=torch.bool).index_fill(0, real, False)
    assert sample.tokens[real].tolist() == [token for r in rows for token in r.tokens[:-1]]
    assert (sample.labels[real] - sample.tokens[real] == 1).all()
    assert not sample.loss_mask[padding].any() and not sample.tokens[padding].any()
    masked_labels = sum(map(len, starts)) if eod_mask_loss else 0
    assert sample.loss_mask.sum() == length * len(rows) - masked_labels
    assert len(sample.tokens) % (2 * cp * (tp if sequence_parallel else 1)) == 0
    assert (sample.cu_seqlens_padded is sample.cu_seqlens) == (not padding.any())
    for rank in range(cp):
        shard(sample, CPGroup(ranks=tuple(range(cp)), rank=rank, process_group=None))
