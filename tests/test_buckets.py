from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from megacp.blocks import Piece, Shard, describe
from megacp.config import ParallelConfig
from megacp.grid import Grid, Group
from megacp.optim.buckets import ALIGNMENT, Bucket, GradientBuckets
from tests.spawn import run

SHAPES = [(5, 4), (7,), (1, 4), (2, 4), (1,), (6, 3, 2), (64, 32)]
ALONE = Group((0,), 0)


def parameters(dtype: torch.dtype = torch.float32, partial: tuple[int, ...] = ()) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for index, shape in enumerate(SHAPES):
        weight = Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        piece = Piece(f"w{index}", shape[0], shape, (0,) * len(shape))
        made.append(describe(weight, Shard((piece,), partial_grad=index in partial)))
    return made


def coefficient(index: int, rank: int, microbatch: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * index + 10 * rank + microbatch)
    return torch.randn(SHAPES[index], generator=generator, dtype=torch.float64).to(dtype)


def loss(weights: list[Parameter], rank: int, microbatch: int) -> Tensor:
    terms = [(w * coefficient(i, rank, microbatch, w.dtype)).sum() for i, w in enumerate(weights)]
    return torch.stack(terms).sum()


def expected(index: int, ranks: list[int], microbatches: int, dtype: torch.dtype = torch.float64) -> Tensor:
    pairs = [(rank, k) for rank in ranks for k in range(microbatches)]
    zero = torch.zeros(SHAPES[index], dtype=torch.float64)
    return sum((coefficient(index, rank, k, dtype).double() for rank, k in pairs), zero)


def assert_owned_sums(buckets: GradientBuckets, weights: list[Parameter], sums: list[Tensor], rtol: float) -> None:
    seen = 0
    for bucket in buckets.buckets:
        gradients = bucket.gradients()
        for index, (parameter, gradient) in enumerate(zip(bucket.parameters, gradients, strict=True)):
            number = next(i for i, weight in enumerate(weights) if weight is parameter)
            first, last = bucket.owned(index)
            assert gradient.dtype == bucket.dtype
            torch.testing.assert_close(gradient.double(), sums[number][first:last], rtol=rtol, atol=rtol)
            seen += 1
    assert seen == len(weights)


def reduce_on_ranks(dtype: torch.dtype, bucket_size: int, overlap: bool, rtol: float) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = parameters(dtype)
    buckets = GradientBuckets(weights, Grid.create(ParallelConfig()), bucket_size)
    for _ in range(2):
        buckets.zero()
        for microbatch in range(3):
            if overlap and microbatch == 2:
                buckets.overlap_next_backward()
            loss(weights, rank, microbatch).backward()
        assert all(bucket.launched for bucket in buckets.buckets) == overlap
        assert all(weight.grad is None for weight in weights)
        buckets.finish()
        assert_owned_sums(
            buckets, weights, [expected(i, list(range(size)), 3, dtype) for i in range(len(SHAPES))], rtol
        )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bucket_size", [1, 30, 10**6])
def test_sums_over_ranks_and_microbatches(bucket_size: int, overlap: bool) -> None:
    run(reduce_on_ranks, 3, torch.float32, bucket_size, overlap, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_are_at_least_fp32(dtype: torch.dtype) -> None:
    run(reduce_on_ranks, 2, dtype, 30, True, 1e-14 if dtype == torch.float64 else 1e-5)


def reduce_with_gaps() -> None:
    """Rank 1 runs nothing, rank 0 uses only some parameters, in another order than rank 2."""
    rank = dist.get_rank()
    weights = parameters(torch.float64)
    buckets = GradientBuckets(weights, Grid.create(ParallelConfig()), 20)
    used = {0: [6, 1, 0], 1: [], 2: list(range(len(SHAPES)))}
    for _ in range(2):
        buckets.zero()
        buckets.overlap_next_backward()
        for index in used[rank]:
            (weights[index] * coefficient(index, rank, 0, torch.float64)).sum().backward()
        buckets.finish()
        sums = [expected(i, [r for r in used if i in used[r]], 1) for i in range(len(SHAPES))]
        assert_owned_sums(buckets, weights, sums, 1e-14)


def test_missing_gradients_are_zeros_and_order_is_fixed() -> None:
    run(reduce_with_gaps, 3)


def reduce_partial(dp: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = parameters(torch.float64, partial=(1, 3))
    grid = Grid.create(ParallelConfig(tensor_model_parallel_size=size // dp))
    buckets = GradientBuckets(weights, grid, 10**6)
    loss(weights, rank, 0).backward()
    buckets.finish()
    sums = [expected(i, list(range(size) if i in (1, 3) else grid.dp_cp.ranks), 1) for i in range(len(SHAPES))]
    assert_owned_sums(buckets, weights, sums, 1e-14)


@pytest.mark.parametrize("dp", [1, 2])
def test_partial_gradients_are_summed_over_tp(dp: int) -> None:
    run(reduce_partial, 2 * dp, dp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_rank_holds_no_second_gradient(dtype: torch.dtype) -> None:
    weights = parameters(dtype)
    buckets = GradientBuckets(weights, Grid.create(ParallelConfig()), 30)
    loss(weights, 0, 0).backward()
    loss(weights, 0, 1).backward()
    buckets.finish()
    assert all(bucket.sums is None for bucket in buckets.buckets)
    held = {gradient.data_ptr() for bucket in buckets.buckets for gradient in bucket.gradients()}
    assert held == {weight.grad.data_ptr() for weight in weights if weight.grad is not None}
    assert_owned_sums(buckets, weights, [expected(i, [0], 2, dtype) for i in range(len(SHAPES))], 1e-6)
    buckets.zero()
    assert all(weight.grad is None for weight in weights)


def test_one_rank_bf16_sums_in_fp32() -> None:
    weights = parameters(torch.bfloat16)
    buckets = GradientBuckets(weights, Grid.create(ParallelConfig()), 30)
    for microbatch in range(4):
        loss(weights, 0, microbatch).backward()
    buckets.finish()
    sums = [expected(i, [0], 4, torch.bfloat16) for i in range(len(SHAPES))]
    assert_owned_sums(buckets, weights, sums, 1e-6)


def test_gradient_after_the_reduction_is_an_error() -> None:
    weights = parameters(torch.bfloat16)
    buckets = GradientBuckets(weights, Grid.create(ParallelConfig()), 30)
    buckets.overlap_next_backward()
    loss(weights, 0, 0).backward()
    with pytest.raises(RuntimeError, match="gradient of w6 came after its reduction had begun"):
        weights[6].sum().backward()


def test_strided_parameter_is_refused() -> None:
    weight = describe(Parameter(torch.zeros(3, 2).t()), Shard((Piece("w", 2, (2, 3), (0, 0)),)))
    with pytest.raises(ValueError, match=r"parameter of w \(2, 3\) must be contiguous"):
        GradientBuckets([weight], Grid.create(ParallelConfig()), 1)


def test_order_follows_backward() -> None:
    weights = parameters()
    buckets = GradientBuckets(weights, Grid.create(ParallelConfig()), 10**6).buckets
    last = [min(next(i for i, w in enumerate(weights) if w is p) for p in b.parameters) for b in buckets]
    assert last == sorted(last, reverse=True)


@settings(max_examples=100, deadline=None)
@given(
    heights=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    width=st.sampled_from([(), (1,), (3,), (32,), (2, 5)]),
    size=st.integers(1, 5),
)
def test_every_row_has_one_owner(heights: list[int], width: tuple[int, ...], size: int) -> None:
    weights = [Parameter(torch.rand(rows, *width) + 1) for rows in heights]
    group = SimpleNamespace(size=size, rank=0)
    bucket = Bucket(weights, group, ALONE)  # type: ignore[arg-type]
    matrix = bucket.matrix(torch.float32)
    for index, weight in enumerate(weights):
        bucket.place(matrix, index).copy_(weight.detach())
        assert bucket.place(matrix, index).storage_offset() % ALIGNMENT == 0
    parts: list[list[Tensor]] = [[] for _ in weights]
    for group.rank in range(size):
        for index, part in enumerate(bucket.split(bucket.band(matrix))):
            first, last = bucket.owned(index)
            assert part.shape[0] == last - first and first == sum(len(p) for p in parts[index])
            parts[index].append(part)
    for weight, rows in zip(weights, parts, strict=True):
        assert torch.equal(torch.cat(rows), weight)
