"""The loop around the steps."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from megacp import step, train
from megacp.config import ConfigError, load_config
from megacp.data.loader import Loader
from megacp.data.tokens import TokenFileWriter
from megacp.log import Work
from tests.jobs import assert_same, job, keeps, losses, records, tensors
from tests.spawn import run
from tests.tiny import write_config, write_data


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    kinds = {"global_batch_size": 4, "train_iters": 8, "device": "cpu", "num_threads": 1}
    return write_config(folder, write_data(folder), train=kinds)


def test_a_loss_that_is_nan_stops_the_run(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in a row, after a single one that is forgiven; meanwhile nothing is saved."""
    forward_backward = step.forward_backward

    def infinite(one: step.Run, loader: Loader) -> tuple[float, float, Work]:
        total, tokens, work = forward_backward(one, loader)
        return (math.inf if one.progress.iteration in (1, 3, 4) else total), tokens, work

    monkeypatch.setattr(step, "forward_backward", infinite)
    overrides = [*keeps(tmp_path), "train.max_consecutive_nonfinite=2", "checkpoint.save_interval=1"]
    with pytest.raises(FloatingPointError, match="not finite in 2 steps in a row, up to iteration 5"):
        job(config, overrides)
    assert [record["nan"] for record in records(tmp_path).values()] == [0, 1, 1, 2, 3]
    assert ["lm_loss" in record for record in records(tmp_path).values()] == [True, False, True, False, False]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert saved == ["iter_0000001", "iter_0000003"]


def test_a_run_that_ends_on_nan_says_so_and_keeps_its_weights(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job(config, [*keeps(tmp_path / "before"), "train.exit_interval=6"])
    forward_backward = step.forward_backward

    def infinite(one: step.Run, loader: Loader) -> tuple[float, float, Work]:
        total, tokens, work = forward_backward(one, loader)
        return (math.inf if one.progress.iteration >= 6 else total), tokens, work

    monkeypatch.setattr(step, "forward_backward", infinite)
    capsys.readouterr()
    job(config, keeps(tmp_path / "whole"))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "the last 2 steps had a loss or gradient that is not finite" in line]
    before, whole = (tensors(tmp_path / name / "checkpoints") for name in ("before", "whole"))
    assert before.keys() == whole.keys() and all(torch.equal(before[name], whole[name]) for name in before)


def test_evaluation_leaves_training_alone(config: Path, tmp_path: Path) -> None:
    """Bit for bit, dropout on."""
    overrides = ["model.hidden_dropout=0.2", "parallel.context_parallel_size=2"]
    alone, evaluated = tmp_path / "alone", tmp_path / "evaluated"
    run(job, 2, config, [*overrides, *keeps(alone)])
    run(job, 2, config, [*overrides, *keeps(evaluated), "train.eval_interval=2", "train.eval_iters=3"])
    assert losses(evaluated) == losses(alone)
    assert_same(evaluated / "checkpoints", alone / "checkpoints")
    valid = records(evaluated, "valid")
    assert list(valid) == [2, 4, 6, 8] and not records(alone, "valid")
    assert valid[8]["ppl"] == pytest.approx(math.exp(valid[8]["lm_loss"]))


def test_test_data_is_evaluated_once_at_the_end(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not when the run stops before, and without it training is the same."""
    overrides = [*keeps(tmp_path), "train.eval_iters=2"]
    split = "data.split='90,5,5'"
    job(config, [*overrides, split, "train.exit_interval=4"])
    assert not records(tmp_path, "test")
    capsys.readouterr()
    # The last iteration is the end, no reason to stop.
    job(config, [*overrides, split, "train.exit_interval=4"])
    ((iteration, record),) = records(tmp_path, "test").items()
    assert iteration == 8 and record["ppl"] == pytest.approx(math.exp(record["lm_loss"]))
    assert not records(tmp_path, "valid")
    line = f"test at iteration 8 | lm loss: {record['lm_loss']:.6f} | ppl: {record['ppl']:.3f}"
    assert capsys.readouterr().out.splitlines()[-1] == line
    job(config, [*keeps(tmp_path / "none"), split])
    assert losses(tmp_path / "none") == losses(tmp_path) and not records(tmp_path / "none", "test")


def test_where_test_data_comes_from(config: Path, tmp_path: Path) -> None:
    def data(*overrides: str) -> list[int]:
        sets = train.read_data(load_config(config, ["data.split='90,5,5'", *overrides], 1))
        return [len(one) if one is not None else 0 for one in sets]

    assert data()[1:] == [0, 0]
    valid, test = data("train.eval_iters=2")[1:]
    assert valid == 0 and test >= 8
    own = write_data(tmp_path, documents=3)
    paths = ["data.data_path=null", f"data.train_data_path={own}"]
    assert data(*paths, "train.eval_iters=2")[2] == 0
    assert data(*paths, f"data.test_data_path={own}", "train.eval_iters=2")[2] >= 8
    assert data(*paths, f"data.test_data_path={own}")[2] == 0


def test_a_share_too_small_for_test_data_stops_nothing(config: Path, tmp_path: Path) -> None:
    """969,30,1 leaves none of a hundred documents; data of its own must hold some."""
    small = ["data.split='969,30,1'", "train.eval_iters=1", "train.exit_interval=1"]
    with pytest.warns(UserWarning, match="no evaluation on test data at the end.* leaves test none") as told:
        job(config, [*keeps(tmp_path), *small])
    assert len(told) == 1 and list(records(tmp_path)) == [1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job(config, [*keeps(tmp_path), *small[:1]])
    assert not records(tmp_path, "test")
    with TokenFileWriter(tmp_path / "empty", np.uint16):
        pass
    own = write_data(tmp_path, documents=3)
    paths = ["data.data_path=null", f"data.train_data_path={own}", f"data.test_data_path={tmp_path}/empty"]
    with pytest.raises(ConfigError, match="empty"):
        train.read_data(load_config(config, [*paths, "train.eval_iters=1"], 1))


def test_threads_are_shared_among_local_ranks(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever OMP_NUM_THREADS says; train.num_threads is the way to choose."""
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(train, "usable_cores", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("RANK", raising=False)
    for threads in ("null", "5"):
        with train.process_group(load_config(config, [f"train.num_threads={threads}"], 1), torch.device("cpu")):
            pass
    assert seen == [4, 5]


def test_metrics(config: Path, tmp_path: Path) -> None:
    job(config, [*keeps(tmp_path), "logging.log_interval=2", "logging.peak_tflops=1", "train.exit_interval=6"])
    written = records(tmp_path)
    assert list(written) == [2, 4, 6]
    assert [record["consumed_samples"] for record in written.values()] == [8, 16, 24]
    for record in written.values():
        assert record["tokens_per_second"] == pytest.approx(4 * 64 * 1000 / record["iteration_ms"])
        assert record["mfu"] == record["tflops_per_rank"] > 0
    # A crash in the middle of a line, then a start from the checkpoint.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iteration": 8, "lm_loss": 1.0}\n{"kind": "tra')
    job(config, keeps(tmp_path))
    assert list(records(tmp_path)) == [2, 4, 6, 7, 8]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["start", *["train"] * 4, "start", *["train"] * 2]
