"""Wrong fine-tuning configs are refused at once, with the rule, the numbers and what would do; right ones pass."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megacp import support, support_data
from megacp.config import ConfigError, load_config
from megacp.data import sft
from megacp.data.tokens import TokenFileWriter
from megacp.support_data import SFT_RULES, loss_masks_exist
from tests.conversations import numbered, write_conversations
from tests.test_support import RIGHT

CP = "parallel.context_parallel_size"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree: dict[str, Any] = {part: dict(values) for part, values in RIGHT.items()}
    tree["data"] = {"data_path": "chats", "seq_length": 128, "sft": True}
    tree["model"]["vocab_size"] = 5000
    Path("right.yaml").write_text(yaml.safe_dump(tree))
    for name in ("chats", "more", "fewer", "alone", "half"):
        write_conversations(tmp_path / name, numbered([5, 6, 7]))
    with TokenFileWriter("fewer_loss_mask", np.uint8) as writer:
        writer.add_document(np.ones(5, np.uint8))
    for name in ("alone_loss_mask.idx", "alone_loss_mask.bin", "half_loss_mask.bin"):
        Path(name).unlink()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], []),
        (["data.sft=false"], ["chats has a loss mask beside it", "what users say is learned too"]),
        (["data.sft=false", "data.data_path=[0.5, alone, 0.5, more]"], ["more has a loss mask"]),
        (["data.sft=false", "data.data_path=alone"], []),
        (["model.max_position_embeddings=128"], []),
        (["model.max_position_embeddings=64"], ["data.seq_length = 128 exceeds", "64", "model.rope_scaling"]),
        (["model.max_position_embeddings=64", "model.rope_scaling.type=linear", "model.rope_scaling.factor=2"], []),
    ],
)
def test_what_is_hardly_meant_is_said(overrides: list[str], words: list[str]) -> None:
    found = list(support.oversights(load_config("right.yaml", overrides, 1)))
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


# (rule, overrides, ranks, what the message must contain)
WRONG: dict[str, tuple[Any, list[str], int, list[str]]] = {
    "documents": (
        support_data.sft_has_its_own_masks,
        ["data.mask_between_documents=true"],
        1,
        ["data.mask_between_documents and data.sft", "set mask_between_documents to false"],
    ),
    "ends of documents": (
        support_data.sft_has_its_own_masks,
        ["data.eod_mask_loss=true"],
        1,
        ["data.eod_mask_loss and data.sft", "eod_mask_loss to false"],
    ),
    "weights": (
        support_data.sft_takes_no_weights,
        ["data.data_path=[0.5, chats, 2, more]"],
        1,
        ["data.data_path", "has weights", "['chats', 'more']"],
    ),
    "multiple over cp": (
        support_data.packs_are_of_multiples,
        ["data.pack_multiple=4", CP + "=4"],
        4,
        ["pack_multiple = 4", "2*4 = 8", "use 8, 16, 32 or 64", "all layouts"],
    ),
    "default over cp": (
        support_data.packs_are_of_multiples,
        [CP + "=16"],
        16,
        ["pack_multiple = 16", "2*16 = 32", "use 32, 64 or 128"],
    ),
    "multiple and length over cp": (
        support_data.packs_are_of_multiples,
        [CP + "=3"],
        3,
        ["pack_multiple = 16", "2*3 = 6", "use 12 or 18"],
    ),
    "length over multiple": (
        support_data.packs_are_of_multiples,
        ["data.seq_length=100"],
        1,
        ["seq_length = 100", "pack_multiple = 16", "96 or 112"],
    ),
    "packing of text": (
        support_data.packing_is_of_conversations,
        ["data.sft=false", "data.sft_packing=false"],
        1,
        ["sft_packing = False does nothing without data.sft", "leave it out"],
    ),
    "multiple of text": (
        support_data.packing_is_of_conversations,
        ["data.sft=false", "data.pack_multiple=8"],
        1,
        ["pack_multiple = 8 does nothing without data.sft"],
    ),
    "no mask": (
        loss_masks_exist,
        ["data.data_path=[chats, alone]"],
        1,
        ["alone_loss_mask.idx, the loss mask of alone", "tools/prepare_sft.py", "data.sft to false"],
    ),
    "half a mask": (loss_masks_exist, ["data.data_path=half"], 1, ["half_loss_mask.bin, the loss mask of half"]),
    "mask of others": (
        loss_masks_exist,
        ["data.data_path=fewer"],
        1,
        ["fewer has 3 conversations, fewer_loss_mask 1", "tools/prepare_sft.py"],
    ),
    "no data": (support_data.data_files_exist, ["data.data_path=chat"], 1, ["chat.idx does not exist", "chats"]),
    "no folder": (support_data.data_files_exist, ["data.data_path=a/b"], 1, ["no folder a", "tools/prepare_sft.py"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_config_is_refused_at_once(case: str) -> None:
    rule, overrides, ranks, expected = WRONG[case]
    begin = time.process_time()
    with pytest.raises(ConfigError) as refusal:
        load_config("right.yaml", overrides, ranks)
    assert time.process_time() - begin < 1.0
    message = str(refusal.value)
    assert "\n" not in message and not [part for part in expected if part not in message], message
    config = load_config("right.yaml", [], 1)
    assert list(rule(config, 1)) == []


def test_each_rule_refuses_something() -> None:
    assert {*SFT_RULES, loss_masks_exist} <= {rule for rule, _, _, _ in WRONG.values()}


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ([], 1),
        ([CP + "=8"], 8),
        (["data.data_path=[chats, more]"], 1),
        (["data.pack_multiple=32", CP + "=16"], 16),
        (["data.pack_multiple=128"], 1),
        # One conversation a pack is padded for itself.
        (["data.sft_packing=false", "data.seq_length=100", CP + "=16"], 16),
        (["data.sft=false", "data.data_path=[0.5, chats, 2, alone]"], 1),
    ],
)
def test_right_config_passes(overrides: list[str], ranks: int) -> None:
    load_config("right.yaml", overrides, ranks)


def test_one_name_for_masks() -> None:
    assert support_data.MASK_SUFFIX == sft.MASK_SUFFIX
