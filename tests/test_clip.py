from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from megacp.blocks import Shard
from megacp.config import ParallelConfig
from megacp.grid import Grid
from megacp.optim.clip import clip_factor, global_norm
from tests.spawn import run

CUT, REPLICATED = Shard(()), Shard((), replicated=True)


def whole() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in [(8, 6), (8,), (5, 3)]]


def norm_of_spread(value: float, at: int) -> float:
    """tp = 2, dp = 2: the first tensor cut over tp by columns, the others replicated; rows over dp-cp, unevenly."""
    grid = Grid.create(ParallelConfig(tensor_model_parallel_size=2))
    tensors = whole()
    tensors[0] = tensors[0].chunk(2, dim=1)[grid.tp.rank]
    owned = [t[: t.shape[0] // 3] if grid.dp_cp.rank == 0 else t[t.shape[0] // 3 :].clone() for t in tensors]
    if dist.get_rank() == at:
        owned[0].view(-1)[0] = value
    return global_norm(zip([CUT, REPLICATED, REPLICATED], owned, strict=True), grid)


def test_is_the_norm_of_the_whole() -> None:
    norms = run(norm_of_spread, 4, 0.0, -1)
    want = math.sqrt(sum(float(tensor.square().sum()) for tensor in whole()))
    assert norms == [pytest.approx(want, rel=1e-14)] * 4
    assert len(set(norms)) == 1


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_bad_element_is_seen_by_all(value: float) -> None:
    assert not any(math.isfinite(norm) for norm in run(norm_of_spread, 4, value, 2))


def test_nothing_owned() -> None:
    owned = [(CUT, torch.zeros(0, 4)), (CUT, torch.zeros(0))]
    assert global_norm(owned, Grid.create(ParallelConfig())) == 0.0


def test_fp32_norm_of_many() -> None:
    gradient = torch.full((3_000, 1_000), 0.1)
    want = float(gradient.double().norm())
    assert global_norm([(CUT, gradient)], Grid.create(ParallelConfig())) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_factor_is_torchs(max_norm: float) -> None:
    weights = [Parameter(tensor) for tensor in whole()]
    for weight in weights:
        weight.grad = weight.detach().clone()
    norm = float(clip_grad_norm_(weights, max_norm))
    for weight, gradient in zip(weights, whole(), strict=True):
        torch.testing.assert_close(gradient * clip_factor(norm, max_norm), weight.grad, rtol=1e-14, atol=0)


def test_zero_means_no_limit() -> None:
    assert clip_factor(1e30, 0.0) == 1.0
