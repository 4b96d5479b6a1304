"""The loop over microbatches, with a stage and a loss of one weight each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacp.pipeline import run


class Steps:
    """weight * x as the stage, its sum as the loss; notes the order of what happens."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.log: list[str] = []
        self.weight.register_hook(lambda grad: self.log.append("backward"))

    def stage(self, batch: Any) -> Tensor:
        self.log.append("forward")
        return self.weight * batch

    def loss(self, hidden: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        return hidden.sum(), torch.tensor(float(len(batch)))

    def before_last(self) -> None:
        self.log.append("last")


BATCHES: list[Any] = [torch.tensor([1.0, 2.0]), torch.tensor([3.0]), torch.tensor([4.0, 5.0, 6.0])]


def test_totals_and_gradients_are_sums() -> None:
    steps = Steps()
    total, tokens = run(steps.stage, BATCHES, steps.loss).tolist()
    assert (total, tokens) == (42, 6)
    assert steps.weight.grad is not None and steps.weight.grad == 21


@pytest.mark.parametrize("count", [1, 2, 3])
def test_before_last_comes_once_and_before_the_last_backward(count: int) -> None:
    steps = Steps()
    run(steps.stage, BATCHES[:count], steps.loss, steps.before_last)
    assert steps.log == ["forward", "backward"] * (count - 1) + ["forward", "last", "backward"]


def test_without_gradients_it_only_goes_forward() -> None:
    steps = Steps()
    with torch.no_grad():
        totals = run(steps.stage, BATCHES, steps.loss, steps.before_last)
    assert totals.tolist() == [42, 6]
    assert steps.log == ["forward"] * 3 and steps.weight.grad is None


def test_no_microbatches() -> None:
    """A rank may have none: it adds nothing."""
    steps = Steps()
    totals = run(steps.stage, [], steps.loss, steps.before_last)
    assert totals.tolist() == [0, 0] and totals.dtype == torch.float64
    assert steps.log == []


def test_totals_are_added_in_float64() -> None:
    steps = Steps()
    large: list[Any] = [torch.tensor([float(2**23)]), torch.tensor([0.25])]
    assert run(steps.stage, large, steps.loss)[0] == 2**24 + 0.5


def test_totals_hold_no_graph() -> None:
    steps = Steps()
    assert not run(steps.stage, BATCHES, steps.loss).requires_grad
