"""A run that is stopped and started again is the same run."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest

from megacp import checkpoint, step, train
from megacp.config import ConfigError, load_config
from megacp.data.loader import Loader
from tests import spawn
from tests.jobs import assert_same, job, keeps, losses, records
from tests.spawn import run
from tests.tiny import write_config, write_data

SHORT = {"train_iters": 10, "num_threads": 1}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    return write_config(folder, write_data(folder), train={**SHORT, "global_batch_size": 4, "device": "cpu"})


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten iterations on one rank, with checkpoints at 5 and 10."""
    folder = tmp_path_factory.mktemp("straight")
    job(config, [*keeps(folder), "checkpoint.save_interval=5"])
    return folder


def from_five(straight: Path) -> str:
    return f"checkpoint.load={straight}/checkpoints/iter_0000005"


def job_with_signal(path: Path, overrides: Sequence[str], number: int) -> None:
    """A job in which the last rank alone gets a signal while iteration 5 runs."""
    forward_backward = step.forward_backward

    def signalled(one: step.Run, loader: Loader):
        if one.progress.iteration == 4 and one.grid.rank == one.grid.world_size - 1:
            os.kill(os.getpid(), number)
        return forward_backward(one, loader)

    step.forward_backward = signalled
    try:
        job(path, overrides)
    finally:
        step.forward_backward = forward_backward


def test_five_and_five_are_ten_bit_for_bit(config: Path, tmp_path: Path) -> None:
    """On cp2 x dp2 with dropout; stopped by a signal to one of four ranks, resumed by new processes."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    overrides = ["parallel.context_parallel_size=2", "model.hidden_dropout=0.1", "data.mask_between_documents=true"]
    run(job, 4, config, [*overrides, *keeps(whole)])
    run(job_with_signal, 4, config, [*overrides, *keeps(parts)], signal.SIGUSR1)
    assert checkpoint.find(parts / "checkpoints").name == "iter_0000005"
    assert list(records(parts)) == [1, 2, 3, 4, 5]
    spawn.stop()
    run(job, 4, config, [*overrides, *keeps(parts)])
    assert losses(parts) == losses(whole)
    assert_same(whole / "checkpoints", parts / "checkpoints")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ["train.micro_batch_size=2"]),
        (2, ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]),
        (2, ["parallel.context_parallel_size=2"]),
        (4, ["parallel.tensor_model_parallel_size=2"]),
    ],
    ids=["dp2", "tp2-sp", "cp2", "tp2-dp2"],
)
def test_another_layout_goes_on_with_the_same_losses(
    config: Path, straight: Path, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    run(job, ranks, config, [*layout, *keeps(tmp_path), from_five(straight)])
    expected = {iteration: loss for iteration, loss in losses(straight).items() if iteration > 5}
    assert losses(tmp_path) == pytest.approx(expected, rel=1e-5)
    ours, theirs = (records(folder)[10] for folder in (tmp_path, straight))
    for key in ("learning_rate", "consumed_samples", "skipped", "nan"):
        assert ours[key] == theirs[key]


def test_a_longer_run_and_another_batch_size_go_on_with_the_next_samples(
    config: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer, smaller = tmp_path / "longer", tmp_path / "smaller"
    # The schedule follows train_iters unless it is told its length.
    job(config, [*keeps(longer), from_five(straight), "train.train_iters=12", "optimizer.lr_decay_iters=10"])
    expected = {iteration: loss for iteration, loss in losses(straight).items() if iteration > 5}
    assert {iteration: loss for iteration, loss in losses(longer).items() if iteration <= 10} == expected
    assert "another order" not in capsys.readouterr().out
    job(config, [*keeps(smaller), from_five(straight), "train.train_iters=20", "train.global_batch_size=2"])
    assert [record["consumed_samples"] for record in records(smaller).values()] == list(range(22, 52, 2))
    many = step.Progress(iteration=5, consumed_samples=10_000)
    assert len(train.read_data(load_config(config), many)[0]) >= 10_000 + 5 * 4
    job(config, [*keeps(tmp_path / "seed"), from_five(straight), "train.seed=1"])
    assert "warning: the samples have another order" in capsys.readouterr().out


def test_a_run_that_is_done_does_nothing(config: Path, straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in straight.rglob("*"))
    job(config, keeps(straight))
    assert "has done 10 iterations, train.train_iters = 10" in capsys.readouterr().out
    assert sorted((path, path.stat().st_mtime_ns) for path in straight.rglob("*")) == before


def test_where_a_run_starts(config: Path, straight: Path, tmp_path: Path) -> None:
    """`save` goes before `load`, a checkpoint inside `save` before both."""

    def start(*overrides: str) -> tuple[str | None, int]:
        found = train.find_start(load_config(config, overrides, 1))
        return found.folder and found.folder.name, found.progress.iteration

    done, empty = f"checkpoint.save={straight}/checkpoints", f"checkpoint.save={tmp_path}/new"
    assert start() == (None, 0)
    assert start(empty) == (None, 0)
    assert start(empty, f"checkpoint.load={tmp_path}/new") == (None, 0)
    assert start(done) == ("iter_0000010", 10)
    assert start(empty, from_five(straight)) == ("iter_0000005", 5)
    assert start(done, from_five(straight)) == ("iter_0000005", 5)
    job(config, [*keeps(tmp_path), from_five(straight), "train.exit_interval=6"])
    assert start(f"checkpoint.save={tmp_path}/checkpoints", from_five(straight)) == ("iter_0000006", 6)
    with pytest.raises(ConfigError, match="no checkpoint in"):
        start(empty, f"checkpoint.load={tmp_path}")


def test_exit_interval_and_keep_last(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*keeps(tmp_path), "train.exit_interval=4", "checkpoint.save_interval=1", "checkpoint.keep_last=2"]
    job(config, overrides)
    assert "stopping after iteration 4: train.exit_interval = 4" in capsys.readouterr().out
    job(config, overrides)
    assert list(records(tmp_path)) == list(range(1, 9))
    folders = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert folders == ["iter_0000007", "iter_0000008"]


def test_exit_duration(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(config, [*keeps(tmp_path), "train.exit_duration_in_mins=1e-9"])
    assert list(records(tmp_path)) == [1]
    assert "exit_duration_in_mins = 1e-09 has passed" in capsys.readouterr().out
    assert checkpoint.find(tmp_path / "checkpoints").name == "iter_0000001"


def test_broken_newest_checkpoint_is_passed_over(config: Path, straight: Path, tmp_path: Path) -> None:
    """The run is rolled back; its records then have every iteration once."""
    job(config, [*keeps(tmp_path), "checkpoint.save_interval=5", "train.exit_interval=7"])
    root = tmp_path / "checkpoints"
    file = next((root / "iter_0000007").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="iter_0000007.*iter_0000005"):
        job(config, keeps(tmp_path))
    assert losses(tmp_path) == losses(straight)
    assert_same(root, straight / "checkpoints")
    for index in root.glob("*/index.json"):
        index.write_text("{}")
    with warnings.catch_warnings(), pytest.raises(ConfigError, match="checkpoint.save: no whole checkpoint in"):
        warnings.simplefilter("ignore")
        job(config, keeps(tmp_path))
