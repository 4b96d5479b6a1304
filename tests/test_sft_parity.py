"""Real tiny fine-tuning runs on packs of very uneven conversations: every layout gives the numbers of one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megacp import checkpoint, step, train
from megacp.config import ConfigError
from megacp.data.pack import Row
from megacp.data.pretrain import Dataset
from megacp.data.sft import SFTDataset
from tests.conversations import uneven, write_conversations
from tests.jobs import job, keeps, losses, records
from tests.spawn import run
from tests.test_parity import CP2, CP4, SP, TP2, check_gradients, types
from tests.tiny import Result, run_steps, setup, write_config

STEPS = 6
UNPACKED = ("data.sft_packing=false", "train.micro_batch_size=2")
LAYOUTS = {
    "cp2": (2, [CP2]),
    "cp4": (4, [CP4]),
    "dp2": (2, []),
    "tp2-sp-cp2": (4, [TP2, CP2, SP]),
    "dp2-cp2": (4, [CP2]),
    "cp4 a2a+p2p": (4, [CP4, *types("a2a+p2p", "[2, 2]")]),
}
SKIPPED = 2


class Sparse:
    """The dataset with little to learn: of every four packs the odd ones nothing, one its first label, one all it has.

    Under dp2 the second rank then never has a supervised token. In step number SKIPPED nobody has.
    """

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def row(self, i: int, read: bool = True) -> Row:
        row = self.data.row(i, read)
        if i % 2 or i // 4 == SKIPPED:
            return replace(row, labels=0)
        assert row.weights is not None
        return replace(row, weights=np.ones_like(row.weights), labels=1) if i % 4 == 2 else row


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft_parity")
    chats = write_conversations(folder / "chats", uneven(60, 128, 257))
    return write_config(
        folder,
        Path(chats),
        data={"seq_length": 128, "sft": True, "split": "80,20,0"},
        train={"global_batch_size": 4, "train_iters": 10, "device": "cpu", "num_threads": 1},
    )


@cache
def one_rank(config: Path, overrides: tuple[str, ...] = (), sparse: bool = False) -> Result:
    return run(run_steps, 1, config, overrides, STEPS, Sparse if sparse else None)[0]


@pytest.mark.parametrize(
    ("layout", "overrides", "sparse"),
    [
        *((layout, (), False) for layout in ("cp2", "cp4", "dp2", "tp2-sp-cp2", "cp4 a2a+p2p")),
        *((layout, (), True) for layout in ("cp4", "dp2", "tp2-sp-cp2")),
        *((layout, UNPACKED, False) for layout in ("cp4", "dp2", "tp2-sp-cp2")),
        ("dp2-cp2", ("train.micro_batch_size=2",), False),
    ],
)
def test_losses_and_gradients(config: Path, layout: str, overrides: tuple[str, ...], sparse: bool) -> None:
    ranks, axes = LAYOUTS[layout]
    expected = one_rank(config, overrides, sparse)
    assert expected.losses[0] == pytest.approx(np.log(257), rel=0.05)
    assert expected.losses[-1] < expected.losses[0]
    assert [math.isnan(loss) for loss in expected.losses] == [sparse and number == SKIPPED for number in range(STEPS)]
    results = run(run_steps, ranks, config, [*overrides, *axes], STEPS, Sparse if sparse else None)
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=1e-5, nan_ok=True)
    check_gradients(results, expected)


def epoch(config: Path, *overrides: str) -> tuple[Result, float]:
    """Gradients and loss of all training conversations in one step; how many tokens were supervised."""
    _, one = setup(config, overrides)
    assert isinstance(one.train_data, SFTDataset)
    whole = [*overrides, f"train.global_batch_size={one.train_data.pattern.packs}"]
    _, one = setup(config, whole)
    with closing(train.make_loader(one, one.train_data, 0)) as loader:
        tokens = step.forward_backward(one, loader)[1]
    return run_steps(config, whole, 1), tokens


def test_a_pack_is_its_conversations_one_at_a_time(config: Path) -> None:
    packed, tokens = epoch(config)
    alone, tokens_alone = epoch(config, "data.sft_packing=false")
    assert tokens == tokens_alone
    taught = [mask[1:].sum() for _, mask in uneven(60, 128, 257)[:48]]
    assert tokens == sum(taught) and min(taught) == 0
    assert packed.losses == pytest.approx(alone.losses, rel=1e-5)
    check_gradients([packed], alone)


def test_a_step_of_masked_packs_is_skipped_and_counted(config: Path) -> None:
    _, one = setup(config, [])
    with closing(train.make_loader(one, Sparse(one.train_data), 0)) as loader:
        seen = [train.train_step(one, loader) for _ in range(STEPS)]
    assert [taken.skipped for taken in seen] == [number == SKIPPED for number in range(STEPS)]
    assert (seen[SKIPPED].tokens, seen[SKIPPED].grad_norm) == (0, 0)
    assert (one.progress.skipped, one.progress.nonfinite, one.progress.consumed_samples) == (1, 0, 4 * STEPS)
    assert [bool(np.isfinite(taken.loss)) for taken in seen] == [number != SKIPPED for number in range(STEPS)]


def evaluations(config: Path, overrides: Sequence[str]) -> tuple[float, int]:
    """Loss over validation data, and how many of its packs are empty."""
    _, one = setup(config, overrides)
    assert isinstance(one.valid_data, SFTDataset)
    return step.evaluate(one, one.valid_data), len(one.valid_data) - one.valid_data.pattern.packs


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, []),
        (4, [CP4]),
        (2, [CP2, *types("all_gather")]),
        (4, [TP2, CP2, SP, *types("a2a")]),
        (4, [CP4, *types("a2a+p2p", "[2, 2]")]),
    ],
    ids=["dp2", "cp4", "cp2 all_gather", "tp2-sp-cp2 a2a", "cp4 a2a+p2p"],
)
def test_evaluation_is_of_every_conversation_once(config: Path, ranks: int, layout: list[str]) -> None:
    """However many packs are asked for: those beyond the epoch are empty and weigh nothing."""
    asked = ["train.eval_interval=1", "train.eval_iters=2"]
    expected, empty = evaluations(config, [*asked, "train.global_batch_size=12", "data.sft_packing=false"])
    assert empty == 24 - 12
    for loss, empty in run(evaluations, ranks, config, [*asked, *layout]):
        assert empty == 8 - 3
        assert loss == pytest.approx(expected, rel=1e-5)


def test_a_stopped_run_goes_on_with_the_same_packs(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Over the end of an epoch and on another layout; other packs are told or refused."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _, one = setup(config, [])
    assert isinstance(one.train_data, SFTDataset) and one.train_data.pattern.packs < 40
    job(config, keeps(whole))
    run(job, 2, config, [*keeps(parts), "train.exit_interval=3"])
    place = checkpoint.find(parts / "checkpoints")
    assert place.name == "iter_0000003"
    assert checkpoint.read_meta(place)["config"]["data"]["pack_multiple"] == 16
    with pytest.raises(ConfigError, match=r"data.pack_multiple = 16, not 32: set it to 16 to go on, or begin anew"):
        job(config, [*keeps(parts), "data.pack_multiple=32"])
    with pytest.raises(ConfigError, match=r"data.sft_packing = true, not false: set it to true to go on, or begin"):
        job(config, [*keeps(parts), "data.sft_packing=false"])
    with pytest.raises(ConfigError, match=r"data.seq_length = \d+, not 512: set it to"):
        job(config, [*keeps(parts), "data.seq_length=512"])
    run(job, 4, config, [*keeps(parts), CP2])
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    assert records(parts)[10]["consumed_samples"] == 40
    assert "another order" not in capsys.readouterr().out
    load = f"checkpoint.load={place}"
    job(config, [*keeps(tmp_path / "seed"), load, "train.seed=1", "train.exit_interval=1"])
    assert "warning: the samples have another order" in capsys.readouterr().out
    job(
        config,
        [*keeps(tmp_path / "new"), load, "checkpoint.finetune=true", "data.pack_multiple=32", "train.exit_interval=1"],
    )
    assert "fine-tuning the weights" in capsys.readouterr().out
