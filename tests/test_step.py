"""One step: what is skipped, what evaluation sees, what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megacp.config import ConfigError
from megacp.data.pack import Row
from megacp.data.pretrain import Dataset
from megacp.step import Step, evaluate, forward_backward, make_loader, train_step
from tests.spawn import run
from tests.tiny import setup, write_config, write_data

LAYOUTS = {
    "dp2": [],
    "cp2": ["parallel.context_parallel_size=2"],
    "tp2-sp": ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
}
EVALUATION = ["train.eval_interval=2", "train.eval_iters=3"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step")
    kinds = {"global_batch_size": 4, "train_iters": 8, "device": "cpu", "num_threads": 1}
    return write_config(folder, write_data(folder), train=kinds)


def poisoned_steps(path: Path, overrides: Sequence[str], poisoned: Sequence[int]) -> list[tuple[Step, bool, int]]:
    """Eight steps; in those of the numbers `poisoned` the last rank alone gets one gradient that is nan.

    (the step, whether a weight or moment of this rank changed, nonfinite_in_a_row) of each.
    """
    _, one = setup(path, overrides)
    seen = []
    with closing(make_loader(one, one.train_data, 0)) as loader:
        for number in range(8):
            poison = number in poisoned and one.grid.rank == one.grid.world_size - 1
            parameter = next(one.model.parameters())
            hook = parameter.register_hook(lambda grad: grad * math.nan) if poison else None
            before = [block.tensor.clone() for block in one.optimizer.blocks()]
            step = train_step(one, loader)
            after = [block.tensor for block in one.optimizer.blocks()]
            changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
            seen.append((step, changed, one.progress.nonfinite_in_a_row))
            if hook is not None:
                hook.remove()
    assert (one.progress.iteration, one.progress.consumed_samples) == (8, 32)
    assert one.progress.skipped == one.progress.nonfinite == len(poisoned)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_nan_on_one_rank_skips_the_step_on_all(config: Path, layout: str) -> None:
    overrides = [*LAYOUTS[layout], "optimizer.lr_warmup_init=1e-4"]
    for seen in run(poisoned_steps, 2, config, overrides, [2, 4, 5]):
        assert [step.skipped for step, _, _ in seen] == [number in (2, 4, 5) for number in range(8)]
        assert [changed for _, changed, _ in seen] == [number not in (2, 4, 5) for number in range(8)]
        assert [in_a_row for _, _, in_a_row in seen] == [0, 0, 1, 0, 1, 2, 0, 0]
        # A skipped step does not move the schedule.
        rates = [step.lr for step, _, _ in seen]
        assert rates[2] == rates[3] and rates[4] == rates[5] == rates[6] != rates[7]
        assert all(math.isfinite(step.loss) for step, _, _ in seen)


class NoLabels:
    """The dataset without a single supervised token."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def row(self, i: int, read: bool = True) -> Row:
        return replace(self.data.row(i, read), labels=0)


def test_a_step_without_supervised_tokens_is_skipped_and_has_no_loss(config: Path) -> None:
    _, one = setup(config, [])
    with closing(make_loader(one, NoLabels(one.train_data), 0)) as loader:
        step = train_step(one, loader)
    assert math.isnan(step.loss) and (step.tokens, step.grad_norm, step.skipped) == (0.0, 0.0, True)
    assert (one.progress.skipped, one.progress.nonfinite) == (1, 0)


def test_evaluation_without_supervised_tokens_has_no_loss(config: Path) -> None:
    _, one = setup(config, EVALUATION)
    assert one.valid_data is not None
    with pytest.warns(UserWarning, match="no supervised token in the 12 samples of the valid data"):
        assert math.isnan(evaluate(one, NoLabels(one.valid_data)))
    assert one.model.training


def evaluations(path: Path, overrides: Sequence[str]) -> tuple[float, float]:
    """Loss of evaluate(), and of training's own reduction over the same samples."""
    _, one = setup(path, overrides)
    assert one.valid_data is not None
    evaluated = evaluate(one, one.valid_data)
    assert one.model.training
    with closing(make_loader(one, one.valid_data, 0)) as loader:
        parts = [forward_backward(one, loader)[:2] for _ in range(3)]
    total, tokens = (sum(column) for column in zip(*parts, strict=True))
    return evaluated, total / tokens


def test_evaluation_is_trainings_reduction_on_any_layout(config: Path) -> None:
    masked = [*EVALUATION, "data.mask_between_documents=true", "data.eod_mask_loss=true"]
    expected, trained = evaluations(config, masked)
    assert expected == trained
    for layout in LAYOUTS.values():
        for evaluated, trained in run(evaluations, 2, config, [*masked, *layout]):
            assert evaluated == trained == pytest.approx(expected, rel=1e-5)


def test_evaluation_has_no_dropout(config: Path) -> None:
    dropped, plain = (evaluations(config, [*EVALUATION, f"model.hidden_dropout={rate}"]) for rate in (0.2, 0.0))
    assert dropped[0] == plain[0] and dropped[1] != plain[1]


class Strange:
    """The dataset with one token that no vocabulary has, in sample 9."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def row(self, i: int, read: bool = True) -> Row:
        row = self.data.row(i, read)
        row.tokens[17] = 257 if i == 9 else row.tokens[17]
        return row


def strange_steps(path: Path, overrides: Sequence[str]) -> int:
    """How many steps went well."""
    _, one = setup(path, overrides)
    with closing(make_loader(one, Strange(one.train_data), 0)) as loader:
        for number in range(8):
            try:
                train_step(one, loader)
            except ConfigError as error:
                assert "samples [9] hold the token 257, but model.vocab_size = 257" in str(error)
                return number
    return 8


def test_a_token_outside_the_vocabulary_is_refused(config: Path) -> None:
    """Under tensor parallelism it would be nobody's row and embedded as zeros."""
    assert run(strange_steps, 2, config, LAYOUTS["tp2-sp"]) == [2, 2]
