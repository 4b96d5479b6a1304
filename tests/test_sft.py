"""Conversations on disk -> packs: tokens, weights and order, the same on every layout and after every stop."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacp import start
from megacp.batch import Sample, shard
from megacp.config import DataConfig
from megacp.data import sft
from megacp.data.loader import Loader, Sampler
from megacp.data.pack import PackLayout, pack
from megacp.data.sft import MASK_SUFFIX, SFTDataset, build_sft_datasets, open_conversations
from megacp.data.tokens import TokenFileWriter
from megacp.grid import CPGroup
from tests.conversations import numbered, write_conversations
from tests.test_pack import real_positions

LENGTHS = [30, 5, 17, 9, 64, 12, 40, 3, 22, 1, 50, 7]


def config(path: Any, **fields: Any) -> DataConfig:
    return DataConfig(**{"data_path": path, "seq_length": 64, "split": "1", "sft": True, **fields})


def train(path: Any, size: int = 1, seed: int = 0, **fields: Any) -> SFTDataset:
    built = build_sft_datasets(config(path, **fields), (size, 0, 0), seed)[0]
    assert isinstance(built, SFTDataset)
    return built


def sequences(sample: Sample) -> list[tuple[list[int], list[int], list[float]]]:
    """(tokens, labels, weights) of every conversation of a pack."""
    begins, lengths = sample.cu_seqlens_padded.tolist(), sample.cu_seqlens.diff().tolist()
    spans = [slice(begin, begin + length) for begin, length in zip(begins, lengths, strict=False) if length]
    return [(sample.tokens[s].tolist(), sample.labels[s].tolist(), sample.loss_mask[s].tolist()) for s in spans]


def test_a_row_is_its_conversations(tmp_path: Path) -> None:
    """Each label is the next token of the same conversation, with the weight the mask gives that token."""
    chats = numbered(LENGTHS)
    data = train(write_conversations(tmp_path / "chats", chats))
    seen = []
    for i in range(data.pattern.packs):
        row, blind = data.row(i), data.row(i, read=False)
        assert blind.starts.tolist() == row.starts.tolist() and blind.labels == row.labels
        assert row.weights is not None and blind.weights is not None
        assert np.array_equal(row.weights, blind.weights) and not blind.tokens.any()
        found = sequences(pack([row], [i], PackLayout(cp=2, mask_between_documents=True)))
        for number, (tokens, labels, weights) in zip(data.conversations(i), found, strict=True):
            wanted, mask = chats[number]
            assert tokens == wanted.tolist()
            assert labels[:-1] == wanted[1:].tolist()
            assert weights == [*mask[1:].tolist(), 0]
            seen.append(number)
    assert sorted(seen) == list(range(len(LENGTHS)))
    for outside in (-1, len(data)):
        with pytest.raises(IndexError, match="chats: pack"):
            data.row(outside)


LAYOUTS = [
    (dp, PackLayout(cp, tp, sequence_parallel=tp > 1, mask_between_documents=True))
    for dp, cp, tp in [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 4, 1), (1, 1, 2), (2, 2, 2)]
]


def one_step(data: SFTDataset, consumed: int, dp: int, layout: PackLayout) -> dict[int, list]:
    """Pack number -> its conversations, over all data-parallel ranks of a step."""
    found: dict[int, list] = {}
    for rank in range(dp):
        sampler = Sampler(1, 4, rank, dp)
        loader = Loader(data, sampler, layout, range(layout.cp), consumed_samples=consumed, prefetch=False)
        for sample, _ in loader.next_step():
            (number,) = sample.ids
            found[number] = sequences(sample)
            assert len(sample.tokens) <= data.pattern.seq_length
            for cp_rank in range(layout.cp):
                shard(sample, CPGroup(ranks=tuple(range(layout.cp)), rank=cp_rank, process_group=None))
    return found


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.one_of(st.integers(1, 64), st.integers(1, 9)), min_size=1, max_size=30),
    seed=st.integers(0, 99),
    steps=st.integers(1, 4),
    packed=st.booleans(),
)
def test_packs_are_the_same_on_any_layout_and_after_a_stop(
    tmp_path: Path, lengths: list[int], seed: int, steps: int, packed: bool
) -> None:
    prefix = write_conversations(tmp_path / "chats", numbered(lengths))
    fields: dict[str, Any] = {"sft_packing": packed, "pack_multiple": 8}
    whole = train(prefix, 4 * steps, seed, **fields)
    expected = {}
    for step in range(steps):
        expected.update(one_step(whole, 4 * step, *LAYOUTS[0]))
    assert sorted(expected) == list(range(4 * steps))
    tokens = [found[0] for i in range(whole.pattern.packs) for found in sequences(pack_of(whole, i))]
    assert sorted(tokens) == sorted((100 * i + 1 + np.arange(n)).tolist() for i, n in enumerate(lengths))
    for step in range(steps):
        # Opened anew, with another size of the run, on another layout.
        later, (dp, layout) = (
            train(prefix, 4 * steps + 8, seed, **fields),
            LAYOUTS[1 + (seed + step) % (len(LAYOUTS) - 1)],
        )
        found = one_step(later, 4 * step, dp, layout)
        assert found == {number: expected[number] for number in found} and len(found) == 4


def pack_of(data: SFTDataset, i: int) -> Sample:
    return pack([data.row(i)], [i], PackLayout(mask_between_documents=True))


def test_training_goes_on_in_another_order_each_epoch(tmp_path: Path) -> None:
    data = train(write_conversations(tmp_path / "chats", numbered([5] * 40)), 30)
    packs = data.pattern.packs
    assert packs == 10 and len(data) == 30
    epochs = [[data.conversations(packs * epoch + i) for i in range(packs)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(number for pack in epoch for number in pack) == list(range(40))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert data.conversations(0) == epochs[0][0]


def test_beyond_their_one_epoch_packs_of_evaluation_are_empty(tmp_path: Path) -> None:
    prefix = write_conversations(tmp_path / "chats", numbered(LENGTHS))
    _, valid, test = build_sft_datasets(config(prefix, split="0,1,0"), (0, 16, None), 0)
    assert test is None and isinstance(valid, SFTDataset) and len(valid) == 16
    rows = [valid.row(i) for i in range(16)]
    full = [row for row in rows if row.labels]
    assert len(full) == valid.pattern.packs < 16
    sample = pack([valid.row(15), valid.row(14)], [15, 14], PackLayout(cp=4, mask_between_documents=True))
    assert not sample.loss_mask.any() and not sample.tokens.any() and len(sample.tokens) == 2 * 8
    for rank in range(4):
        shard(sample, CPGroup(ranks=(0, 1, 2, 3), rank=rank, process_group=None))


def test_conversations_without_tokens_are_no_sequences(tmp_path: Path) -> None:
    data = train(write_conversations(tmp_path / "chats", numbered([0, 4, 0, 3])))
    assert data.pattern.packs == 1
    found = sequences(pack_of(data, 0))
    assert sorted(len(tokens) for tokens, _, _ in found) == [3, 4]
    alone = train(write_conversations(tmp_path / "nothing", numbered([0, 0])))
    assert alone.row(0).labels == 0 and alone.row(0).tokens.tolist() == [0, 0]


def test_splits_and_several_prefixes(tmp_path: Path) -> None:
    """Of each prefix its share, packed together."""
    one = write_conversations(tmp_path / "one", numbered([10] * 8))
    two = write_conversations(tmp_path / "two", [(50 + part, mask) for part, mask in numbered([20] * 4)])
    data = config([one, two], split="75,25,0")
    held = []
    for dataset in build_sft_datasets(data, (1, 1, 0), 0)[:2]:
        assert isinstance(dataset, SFTDataset)
        rows = [pack_of(dataset, i) for i in range(dataset.pattern.packs)]
        held.append(sorted(found[0][0] for row in rows for found in sequences(row)))
    assert held == [sorted([*range(1, 601, 100), 51, 151, 251]), sorted([601, 701, 351])]
    own = DataConfig(train_data_path=one, valid_data_path=[two], seq_length=64, sft=True)
    train_data, valid_data, test_data = build_sft_datasets(own, (5, None, 0), 0)
    assert isinstance(train_data, SFTDataset) and isinstance(valid_data, SFTDataset) and test_data is None
    assert (len(train_data.pattern.classes), len(valid_data.pattern.classes)) == (8, 4)


def test_the_second_time_the_plan_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_conversations(tmp_path / "chats", numbered(LENGTHS))
    changes: list[dict[str, Any]] = [{}, {"data_cache_path": str(tmp_path / "elsewhere")}, {"sft_packing": False}]
    for fields in changes:
        first = train(prefix, **fields)
        with monkeypatch.context() as patch:
            patch.setattr(sft, "plan", None)
            patch.setattr(sft, "plan_unpacked", None)
            second = train(prefix, **fields)
        assert [first.conversations(i) for i in range(len(first))] == [
            second.conversations(i) for i in range(len(first))
        ]
        assert (first.pattern.fill, first.pattern.tokens) == (second.pattern.fill, second.pattern.tokens)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"index_cache", "elsewhere"}


@pytest.mark.parametrize(
    ("change", "plans", "orders"),
    [
        ({"size": 40}, 1, 1),
        ({"seed": 1}, 1, 2),
        # As many packs, by another plan.
        ({"pack_multiple": 8}, 2, 2),
        ({"pack_multiple": 32}, 2, 2),
        ({"seq_length": 128}, 2, 2),
        ({"sft_packing": False}, 2, 2),
        ({"split": "3,1"}, 2, 2),
        ({"file": True}, 2, 2),
        ({"mask": True}, 1, 2),
    ],
)
def test_cache_and_checkpoint_tell_plans_apart(tmp_path: Path, change: dict[str, Any], plans: int, orders: int) -> None:
    """By what a plan depends on, and by nothing else."""
    lengths = LENGTHS[:7]
    prefix = write_conversations(tmp_path / "chats", numbered(lengths))

    def order(file: bool = False, mask: bool = False, **fields: Any) -> str:
        if mask:
            write_mask(prefix + MASK_SUFFIX, lengths)
        if file:
            write_conversations(tmp_path / "chats", numbered([*lengths[1:], lengths[0]]))
        return start.sample_order(train(prefix, **fields))

    kept = {order(), order(), order(**change)}
    assert len(list((tmp_path / "index_cache").glob("*/manifest.json"))) == plans
    assert len(kept) == orders


def test_masks_of_any_size_have_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share has one of its own; large masks are sampled, to their very end."""
    prefix = write_conversations(tmp_path / "chats", numbered(LENGTHS))
    last = [0] * (sum(LENGTHS) - 1) + [1]

    def hashes() -> list[str]:
        return [open_conversations(prefix, share).mask_hash() for share in ((0, 1), (0, 0.5), (1, 1))]

    for size in (1 << 24, 64):
        monkeypatch.setattr(sft, "_HASHED", size)
        monkeypatch.setattr(sft, "_PIECES", 8)
        write_mask(prefix + MASK_SUFFIX, LENGTHS)
        before = hashes()
        write_mask(prefix + MASK_SUFFIX, LENGTHS, 1 - np.array(last, np.uint8))
        after = hashes()
        assert len({*before, after[0]}) == 4 and before[1:] == after[1:]


def spoil(folder: Path, case: str) -> str:
    """A prefix with something wrong."""
    prefix = write_conversations(folder / case, numbered(LENGTHS))
    mask = f"{prefix}{MASK_SUFFIX}"
    if case == "no_mask":
        Path(f"{mask}.idx").unlink()
    elif case == "fewer":
        write_mask(mask, LENGTHS[:-1])
    elif case == "other":
        write_mask(mask, [*LENGTHS[:3], 10, 63, *LENGTHS[5:]])
    elif case == "tokens":
        for ending in (".bin", ".idx"):
            shutil.copy(prefix + ending, mask + ending)
    elif case == "damaged":
        path = Path(f"{mask}.idx")
        content = bytearray(path.read_bytes())
        struct.pack_into("<2i", content, 34, -1, 36)
        path.write_bytes(content)
    return prefix


def write_mask(prefix: str, lengths: Sequence[int], mask: np.ndarray | None = None) -> None:
    """Of ones, unless `mask` has the numbers of all conversations."""
    whole = np.ones(sum(lengths), np.uint8) if mask is None else mask
    with TokenFileWriter(prefix, np.uint8) as writer:
        for part in np.split(whole, np.cumsum(lengths)[:-1]):
            writer.add_document(part)


@pytest.mark.parametrize(
    ("case", "fields", "words"),
    [
        ("no_mask", {}, ["no_mask_loss_mask.idx"]),
        ("fewer", {}, ["fewer has 12 conversations", "fewer_loss_mask 11", "prepare_sft"]),
        ("other", {}, ["conversation 3 has 9 tokens in", "but 10 in", "other_loss_mask (2 of 12 differ)"]),
        ("tokens", {}, ["tokens_loss_mask: stores uint16", "uint8"]),
        ("damaged", {}, ["damaged_loss_mask.idx"]),
        ("long", {"seq_length": 48}, ["long, train: 2 of 12 conversations", "64 tokens", "--max-length 48"]),
        ("weights", {"weights": True}, ["train: with data.sft a list holds prefixes only"]),
        ("empty", {"split": "1,0.001"}, ["valid has none of the 12 conversations", "0.083"]),
    ],
)
def test_refuses_in_one_line(tmp_path: Path, case: str, fields: dict[str, Any], words: list[str]) -> None:
    prefix = spoil(tmp_path, case)
    path = [0.5, prefix, 0.5, prefix] if fields.pop("weights", False) else prefix
    with pytest.raises((ValueError, OSError)) as error:
        build_sft_datasets(config(path, **fields), (1, 1 if "split" in fields else 0, 0), 0)
    message = str(error.value)
    assert "\n" not in message and not [word for word in words if word not in message], message


def test_a_mask_is_zeros_and_ones(tmp_path: Path) -> None:
    """Other numbers would be weights of the loss, in silence."""
    chats = numbered([5, 6])
    chats[1][1][3] = 2
    conversations = open_conversations(write_conversations(tmp_path / "chats", chats))
    conversations.read(0)
    with pytest.raises(ValueError, match="chats_loss_mask: conversation 1 holds 2"):
        conversations.read(1)


def test_rows_of_unequal_length_in_one_microbatch(tmp_path: Path) -> None:
    data = train(write_conversations(tmp_path / "chats", numbered(LENGTHS)), sft_packing=False)
    layout = PackLayout(cp=2, mask_between_documents=True)
    sample = pack([data.row(i) for i in range(5)], range(5), layout)
    numbers = [number for i in range(5) for number in data.conversations(i)]
    assert sample.cu_seqlens.diff().tolist() == [LENGTHS[number] for number in numbers]
    assert sample.tokens[real_positions(sample)].tolist() == [
        token for number in numbers for token in range(100 * number + 1, 100 * number + 1 + LENGTHS[number])
    ]
