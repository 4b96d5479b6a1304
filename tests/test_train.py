"""The loop around the steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megacp import step
from megacp.data.loader import Loader
from megacp.log import Work
from tests.jobs import assert_same, job, keeps, losses, records
from tests.spawn import run
from tests.tiny import write_config, write_data


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    kinds = {"global_batch_size": 4, "train_iters": 8, "device": "cpu", "num_threads": 1}
    return write_config(folder, write_data(folder), train=kinds)


def test_a_loss_that_is_nan_stops_the_run(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in a row, after a single one that is forgiven."""
    forward_backward = step.forward_backward

    def infinite(one: step.Run, loader: Loader) -> tuple[float, float, Work]:
        total, tokens, work = forward_backward(one, loader)
        return (math.inf if one.progress.iteration in (1, 3, 4) else total), tokens, work

    monkeypatch.setattr(step, "forward_backward", infinite)
    overrides = [*keeps(tmp_path), "train.max_consecutive_nonfinite=2", "checkpoint.save_interval=3"]
    with pytest.raises(FloatingPointError, match="not finite in 2 steps in a row, up to iteration 5"):
        job(config, overrides)
    assert [record["nan"] for record in records(tmp_path).values()] == [0, 1, 1, 2, 3]
    assert ["lm_loss" in record for record in records(tmp_path).values()] == [True, False, True, False, False]
    assert [path.name for path in (tmp_path / "checkpoints").glob("iter_*")] == ["iter_0000003"]


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
