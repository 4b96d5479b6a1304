"""Whole runs as pretrain_gpt.py does them, and what they leave on disk."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megacp import checkpoint, train
from megacp.blocks import Block
from megacp.config import load_config


def job(path: Path, overrides: Sequence[str]) -> None:
    """All of a run but the command line, in the world that exists; to be given to spawn.run or called alone."""
    live = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if live else (0, 1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        train.run_job(load_config(path, overrides, world_size), rank, time.monotonic())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def keeps(folder: Path) -> list[str]:
    """Overrides: checkpoints and metrics of a run in `folder`."""
    return [f"checkpoint.save={folder}/checkpoints", f"logging.run_dir={folder}", "logging.tensorboard=false"]


def records(folder: Path, kind: str = "train") -> dict[int, dict[str, float]]:
    """iteration -> record that counts: a start makes what follows its iteration void."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        iteration, its_kind = record.pop("iteration"), record.pop("kind")
        if its_kind == "start":
            found = {number: values for number, values in found.items() if number <= iteration}
        elif its_kind == kind:
            assert iteration not in found, f"iteration {iteration} twice"
            found[iteration] = record
    return found


def losses(folder: Path) -> dict[int, float]:
    return {iteration: record["lm_loss"] for iteration, record in records(folder).items()}


def tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint (its folder or a root), whole."""
    kinds = checkpoint.contents(path)
    whole = {name: torch.full(shape, torch.nan, dtype=dtype) for name, (shape, dtype) in kinds.items()}
    checkpoint.load(path, [Block(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in whole.items()])
    return whole


def assert_same(a: Path, b: Path) -> None:
    """Two checkpoints agree in every bit, progress included."""
    ours, theirs = tensors(a), tensors(b)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    for key in ("progress", "optimizer", "sample_order"):
        assert checkpoint.read_meta(a)[key] == checkpoint.read_meta(b)[key]
