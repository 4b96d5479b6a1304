"""A run that is stopped and started again is the same run."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacp import checkpoint, start, step, train
from megacp.blocks import Block
from megacp.config import ConfigError, load_config
from megacp.data.loader import Loader
from megacp.model.gpt import GPT
from tests import spawn
from tests.jobs import assert_same, job, keeps, losses, records, tensors
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
    run(job, 2, config, keeps(straight))
    job(config, keeps(straight))
    assert "has done 10 iterations, train.train_iters = 10" in capsys.readouterr().out
    assert sorted((path, path.stat().st_mtime_ns) for path in straight.rglob("*")) == before


def begin(config: Path, *overrides: str) -> tuple[str | None, int]:
    """(name of the checkpoint, iteration) of a run's start."""
    found = start.find_start(load_config(config, overrides, 1))
    return found.folder and found.folder.name, found.progress.iteration


def test_where_a_run_starts(config: Path, straight: Path, tmp_path: Path) -> None:
    """`save` goes before `load`, a checkpoint inside `save` before both."""
    done, empty = f"checkpoint.save={straight}/checkpoints", f"checkpoint.save={tmp_path}/new"
    assert begin(config) == (None, 0)
    assert begin(config, empty) == (None, 0)
    assert begin(config, empty, f"checkpoint.load={tmp_path}/new") == (None, 0)
    assert begin(config, done) == ("iter_0000010", 10)
    assert begin(config, empty, from_five(straight)) == ("iter_0000005", 5)
    assert begin(config, done, from_five(straight)) == ("iter_0000005", 5)
    job(config, [*keeps(tmp_path), from_five(straight), "train.exit_interval=6"])
    assert begin(config, f"checkpoint.save={tmp_path}/checkpoints", from_five(straight)) == ("iter_0000006", 6)
    with pytest.raises(ConfigError, match="no checkpoint in"):
        begin(config, empty, f"checkpoint.load={tmp_path}")


def test_other_kinds_of_samples_do_not_go_on(config: Path, straight: Path, tmp_path: Path) -> None:
    """What was consumed counts samples of one kind; those of pretraining may change their length."""
    meta = checkpoint.read_meta(straight / "checkpoints")
    blocks = [Block(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors(straight / "checkpoints").items()]
    save = f"checkpoint.save={straight}/checkpoints"
    assert begin(config, save, "data.seq_length=32") == ("iter_0000010", 10)
    meta["config"]["data"]["sft"] = True
    checkpoint.save(tmp_path / "tuned", 10, blocks, meta)
    load = [f"checkpoint.save={tmp_path}/new", f"checkpoint.load={tmp_path}/tuned"]
    with pytest.raises(ConfigError, match=r"data\.sft = true, not false: set it to true to go on, or begin anew"):
        begin(config, *load)
    assert begin(config, *load, "checkpoint.finetune=true") == ("iter_0000010", 0)
    del meta["config"]["data"]["sft"]  # of before there was any
    checkpoint.save(tmp_path / "tuned", 10, blocks, meta)
    assert begin(config, *load) == ("iter_0000010", 10)


def test_weights_alone_are_no_run_to_go_on_with(config: Path, straight: Path, tmp_path: Path) -> None:
    """As tools/convert_hf.py import saves them."""
    meta = checkpoint.read_meta(straight / "checkpoints") | {"weights_only": True, "hf_config": {"eos_token_id": 7}}
    blocks = [Block(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors(straight / "checkpoints").items()]
    checkpoint.save(tmp_path / "imported", 0, blocks, meta)
    load = f"checkpoint.load={tmp_path}/imported"
    with pytest.raises(ConfigError, match=r"checkpoint\.load: .* holds weights alone: set checkpoint\.finetune=true"):
        begin(config, *keeps(tmp_path), load)
    job(config, [*keeps(tmp_path), load, "checkpoint.finetune=true", "train.exit_interval=1"])
    job(config, [*keeps(tmp_path), load, "checkpoint.finetune=true", "train.exit_interval=2"])
    kept = checkpoint.read_meta(tmp_path / "checkpoints")
    assert (kept["progress"]["iteration"], kept["hf_config"]) == (2, {"eos_token_id": 7}) and "weights_only" not in kept


def test_a_rollback_happens_once(config: Path, straight: Path, tmp_path: Path) -> None:
    """A job that is put back into the queue goes on, also when keep_last has removed what it rolled back to."""
    root = tmp_path / "checkpoints"
    shutil.copytree(straight / "checkpoints", root)
    back = [*keeps(tmp_path), f"checkpoint.load={root}/iter_0000005"]
    assert begin(config, *back) == ("iter_0000005", 5)
    stops = ["train.exit_interval=7", "checkpoint.keep_last=1"]
    job(config, [*back, *stops])
    assert not (root / "iter_0000005").exists() and (root / "iter_0000010").exists()
    assert begin(config, *back) == ("iter_0000007", 7)
    job(config, back)
    assert begin(config, *back) == ("iter_0000010", 10)
    assert_same(root, straight / "checkpoints")
    # A wish for another checkpoint is a new one.
    assert begin(config, *keeps(tmp_path), f"checkpoint.load={root}/iter_0000007") == ("iter_0000007", 7)


def test_fine_tuning_takes_the_weights_alone(
    config: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that was stopped then goes on from its own checkpoints."""
    tunes = [f"checkpoint.load={straight}/checkpoints", "checkpoint.finetune=true"]
    # A step that changes nothing but the moments.
    still = ["optimizer.lr=1e-30", "optimizer.lr_warmup_iters=0", "train.exit_interval=1"]
    job(config, [*keeps(tmp_path), *tunes, *still])
    ours, theirs = (tensors(folder / "checkpoints") for folder in (tmp_path, straight))
    weights = [name for name in theirs if not name.startswith("exp_avg")]
    assert weights and all(torch.equal(ours[name], theirs[name]) for name in weights)
    meta = checkpoint.read_meta(tmp_path / "checkpoints")
    assert (meta["progress"]["iteration"], meta["progress"]["consumed_samples"], meta["optimizer"]["step"]) == (1, 4, 1)
    assert losses(tmp_path)[1] < losses(straight)[1]
    assert "iterations and optimizer state start anew" in capsys.readouterr().out
    moments = [name for name in theirs if name.startswith("exp_avg_sq.")]
    # One gradient's share of what ten have left.
    assert sum(float(ours[name].sum()) for name in moments) < 0.5 * sum(float(theirs[name].sum()) for name in moments)
    assert begin(config, *keeps(tmp_path), *tunes) == ("iter_0000001", 1)
    # A rollback is none: it takes everything.
    back = [f"checkpoint.load={straight}/checkpoints/iter_0000005", "checkpoint.finetune=true"]
    assert begin(config, *keeps(straight), *back) == ("iter_0000005", 5)


def test_initial_weights_are_not_drawn_to_be_overwritten(
    config: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def recorded(*arguments: Any, draw: bool) -> GPT:
        drawn.append(draw)
        return GPT(*arguments, draw=draw)

    monkeypatch.setattr(step, "GPT", recorded)
    job(config, [*keeps(tmp_path), "train.exit_interval=1"])
    job(config, [*keeps(tmp_path), "train.exit_interval=2"])
    assert drawn == [True, False]


def job_that_looks_alone(path: Path, overrides: Sequence[str]) -> str:
    """What a job says whose last rank has a disk of its own behind checkpoint.save, with nothing on it."""
    find_start = train.find_start
    if dist.get_rank() == dist.get_world_size() - 1:
        train.find_start = lambda config: start.Start()
    else:
        train.find_start = lambda config: start.Start(Path(config.checkpoint.save), step.Progress(iteration=10))
    try:
        job(path, overrides)
    except ConfigError as error:
        return str(error)
    finally:
        train.find_start = find_start
    return ""


@pytest.mark.parametrize("wanted", [10, 12], ids=["some have nothing to do", "all go on"])
def test_ranks_that_see_other_checkpoints_are_told(config: Path, tmp_path: Path, wanted: int) -> None:
    """All of them and at once: none waits for ranks that have gone home or load something else."""
    message = f"ranks [0, 1] at {tmp_path}/checkpoints (iteration 10); ranks [2] at the very beginning"
    overrides = [*keeps(tmp_path), "train.global_batch_size=6", f"train.train_iters={wanted}"]
    assert [message in told for told in run(job_that_looks_alone, 3, config, overrides, timeout=60)] == [True] * 3
    assert list((tmp_path / "checkpoints").glob("*")) == []


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
