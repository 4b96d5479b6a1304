from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp import log
from tests.jobs import job, keeps, losses
from tests.tiny import setup, write_config, write_data


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    kinds = {"global_batch_size": 4, "train_iters": 8, "device": "cpu", "num_threads": 1}
    return write_config(folder, write_data(folder), train=kinds)


def test_tensorboard_shows_every_iteration_once(config: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for stop in (6, 8):
        # Nothing is saved at 6: the second run begins anew.
        job(config, [f"logging.run_dir={tmp_path}", f"train.train_iters={stop}"])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = events.Scalars("train/lm_loss")
    assert [scalar.step for scalar in scalars] == list(range(1, 9))
    assert [scalar.value for scalar in scalars] == pytest.approx(list(losses(tmp_path).values()))


def test_wandb_offline(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    names = ["logging.wandb_project=tiny", "logging.wandb_mode=offline", "logging.wandb_exp_name=one"]
    job(config, [f"logging.run_dir={tmp_path}", *names, "train.train_iters=3"])
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


def test_only_rank_zero_writes(config: Path, tmp_path: Path) -> None:
    silent = log.Log(setup(config, keeps(tmp_path))[0], active=False)
    silent.record("train", 1, {"lm_loss": 1.0})
    silent.close()
    assert list(tmp_path.iterdir()) == []


def dense_flops(model: Any, length: int) -> int:
    """Products of one sequence counted one by one, and three times: forward, gradient of inputs, of weights."""
    h, n, k, d, f = (
        model.hidden_size,
        model.num_attention_heads,
        model.kv_heads,
        model.head_dim,
        model.ffn_size,
    )
    linear = [(h, n * d), (h, k * d), (h, k * d), (n * d, h), (h, f), (h, f), (f, h)]
    layer = sum(2 * length * a * b for a, b in linear) + 2 * 2 * length * length * n * d // 2
    return 3 * (model.num_layers * layer + 2 * length * h * model.vocab_size)


def test_flops(config: Path) -> None:
    model = setup(config, [])[0].model
    lengths = np.array([64, 32])
    work = log.Work(float(lengths.sum()), float((lengths**2).sum()))
    assert log.model_flops(work, model) == sum(dense_flops(model, int(length)) for length in lengths)
