from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from megacp.blocks import Block, Piece, Shard, describe
from megacp.config import OptimizerConfig, ParallelConfig
from megacp.grid import Grid
from megacp.optim.sharded_adam import ShardedAdam
from tests.spawn import run

SHAPES = [(5, 4), (7,), (1, 4), (2, 4), (1,), (16, 8), (40, 32)]
DECAYS = [len(shape) > 1 for shape in SHAPES]
LR, DECAY, BETAS, EPS, CLIP = 1e-2, 0.1, (0.9, 0.95), 1e-8, 1.0
STEPS = 4
MICROBATCHES = 2


def settings(bucket_size: int = 40, clip_grad: float = CLIP) -> OptimizerConfig:
    return OptimizerConfig(lr=LR, clip_grad=clip_grad, bucket_size=bucket_size)


def start(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(SHAPES[index], generator=generator, dtype=torch.float64)


def parameters(dtype: torch.dtype) -> list[Parameter]:
    made = []
    for index, shape in enumerate(SHAPES):
        piece = Piece(f"w{index}", shape[0], shape, (0,) * len(shape))
        made.append(describe(Parameter(start(index).to(dtype)), Shard((piece,), weight_decay=DECAYS[index])))
    return made


def gradient(index: int, step: int, rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * index + 100 * step + 10 * rank + microbatch + 7)
    return torch.randn(SHAPES[index], generator=generator, dtype=torch.float64)


def tokens_of(step: int) -> int:
    """Some steps are clipped and some are not."""
    return 20 if step % 2 else 20_000


def reference(ranks: int, dtype: torch.dtype, steps: int = STEPS) -> tuple[list[Tensor], list[float]]:
    """torch's plain AdamW on the mean gradient of all ranks, in one process; weights and norms."""
    weights = [Parameter(start(index).to(dtype)) for index in range(len(SHAPES))]
    groups = [
        {"params": [w for w, d in zip(weights, DECAYS, strict=True) if d], "weight_decay": DECAY},
        {"params": [w for w, d in zip(weights, DECAYS, strict=True) if not d], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    norms = []
    for step in range(steps):
        for index, weight in enumerate(weights):
            pairs = [(rank, k) for rank in range(ranks) for k in range(MICROBATCHES)]
            total = sum((gradient(index, step, *pair) for pair in pairs), torch.zeros(SHAPES[index]))
            weight.grad = total.div(tokens_of(step)).to(dtype)
        norms.append(float(clip_grad_norm_(weights, CLIP)))
        optimizer.step()
    return [weight.detach() for weight in weights], norms


def backward(weights: list[Parameter], step: int, rank: int, microbatch: int) -> None:
    for index, weight in enumerate(weights):
        (weight * gradient(index, step, rank, microbatch).to(weight.dtype)).sum().backward()


def train(
    weights: list[Parameter], optimizer: ShardedAdam, rank: int, steps: range, overlap: bool = True
) -> list[float]:
    norms = []
    for step in steps:
        optimizer.buckets.zero()
        for microbatch in range(MICROBATCHES):
            if overlap and microbatch == MICROBATCHES - 1:
                optimizer.buckets.overlap_next_backward()
            backward(weights, step, rank, microbatch)
        result = optimizer.step(LR, DECAY, tokens_of(step))
        assert not result.skipped
        norms.append(result.grad_norm)
    return norms


def train_on_ranks(dtype: torch.dtype, bucket_size: int) -> tuple[list[Tensor], list[float], int]:
    weights = parameters(dtype)
    optimizer = ShardedAdam(weights, settings(bucket_size), Grid.create(ParallelConfig()))
    norms = train(weights, optimizer, dist.get_rank(), range(STEPS))
    return [weight.detach().clone() for weight in weights], norms, optimizer.state()["step"]


@pytest.mark.parametrize(("ranks", "bucket_size"), [(1, 40), (2, 40), (3, 1), (3, 10**6)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_equals_plain_adamw(ranks: int, bucket_size: int, dtype: torch.dtype, tolerance: float) -> None:
    wanted, wanted_norms = reference(ranks, dtype)
    for weights, norms, step in run(train_on_ranks, ranks, dtype, bucket_size):
        assert step == STEPS
        assert norms == pytest.approx(wanted_norms, rel=tolerance)
        assert min(wanted_norms) < CLIP < max(wanted_norms)
        for ours, theirs in zip(weights, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_has_fp32_masters(ranks: int) -> None:
    """Steps far below bf16's resolution add up in the masters; all ranks hold their rounding."""
    for weights, masters in run(small_steps_in_bf16, ranks):
        for index, weight in enumerate(weights):
            assert weight.dtype == torch.bfloat16
            change = masters[f"w{index}"] - start(index).to(torch.bfloat16).float()
            assert torch.equal(masters[f"w{index}"].to(torch.bfloat16), weight)
            torch.testing.assert_close(change, torch.full_like(change, -1e-3), rtol=1e-2, atol=0)


def small_steps_in_bf16() -> tuple[list[Tensor], dict[str, Tensor]]:
    weights = parameters(torch.bfloat16)
    optimizer = ShardedAdam(weights, settings(), Grid.create(ParallelConfig()))
    for _ in range(20):
        optimizer.buckets.zero()
        torch.stack([weight.sum() for weight in weights]).sum().backward()
        optimizer.step(5e-5, 0.0, 1)
    return [weight.detach().clone() for weight in weights], assemble(optimizer.blocks())


def assemble(blocks: list[Block]) -> dict[str, Tensor]:
    """Whole tensors from the blocks of all ranks. Every element must be held by exactly one rank."""
    gathered: list[list[Block]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, blocks)
    whole: dict[str, Tensor] = {}
    held: dict[str, Tensor] = {}
    for block in (block for rank_blocks in gathered for block in rank_blocks):
        place = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.tensor.shape, strict=True))
        whole.setdefault(block.name, torch.zeros(block.global_shape, dtype=block.tensor.dtype))[place] = block.tensor
        held.setdefault(block.name, torch.zeros(block.global_shape))[place] += 1
    assert all(bool((count == 1).all()) for count in held.values())
    return whole


def save_after(steps: int, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, int]]:
    weights = parameters(dtype)
    optimizer = ShardedAdam(weights, settings(), Grid.create(ParallelConfig()))
    # All gradients come from rank 0's stream, so the number of ranks does not matter.
    if dist.get_rank() == 0:
        train(weights, optimizer, 0, range(steps), overlap=False)
    else:
        idle(optimizer, range(steps))
    return assemble(optimizer.blocks()), optimizer.state()


def idle(optimizer: ShardedAdam, steps: range) -> None:
    """A rank without any microbatch."""
    for step in steps:
        optimizer.buckets.zero()
        optimizer.step(LR, DECAY, tokens_of(step))


def resume(whole: dict[str, Tensor], state: dict[str, int], dtype: torch.dtype) -> dict[str, Tensor]:
    weights = parameters(dtype)
    with torch.no_grad():
        for weight in weights:
            weight.fill_(7)
    optimizer = ShardedAdam(weights, settings(10**6), Grid.create(ParallelConfig()))
    for block in optimizer.blocks():
        place = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.tensor.shape, strict=True))
        block.tensor.copy_(whole[block.name][place])
    optimizer.load_state(state)
    optimizer.sync_parameters()
    for index, weight in enumerate(weights):
        assert torch.equal(weight, whole[f"w{index}"].to(dtype))
    if dist.get_rank() == 0:
        train(weights, optimizer, 0, range(2, STEPS), overlap=False)
    else:
        idle(optimizer, range(2, STEPS))
    return assemble(optimizer.blocks())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_blocks_resume_on_another_number_of_ranks(before: int, after: int, dtype: torch.dtype) -> None:
    whole, state = run(save_after, before, 2, dtype)[0]
    assert state == {"step": 2}
    assert set(whole) == {prefix + f"w{i}" for prefix in ("", "exp_avg.", "exp_avg_sq.") for i in range(len(SHAPES))}
    straight, _ = run(save_after, 1, STEPS, dtype)[0]
    resumed = run(resume, after, whole, state, dtype)[0]
    for name, tensor in straight.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-6, atol=1e-7)


def skip_on_ranks(value: float, tokens: int) -> None:
    rank = dist.get_rank()
    weights = parameters(torch.float32)
    optimizer = ShardedAdam(weights, settings(), Grid.create(ParallelConfig()))
    train(weights, optimizer, rank, range(1))
    held = [*weights, *(block.tensor for block in optimizer.blocks())]
    before = [tensor.detach().clone() for tensor in held]
    optimizer.buckets.zero()
    backward(weights, 1, rank, 0)
    if rank == 0:
        weights[3].sum().mul(value).backward()
    result = optimizer.step(LR, DECAY, tokens)
    assert result.skipped
    assert math.isfinite(result.grad_norm) == math.isfinite(value)
    assert optimizer.state() == {"step": 1}
    assert all(torch.equal(now, old) for now, old in zip(held, before, strict=True))
    train(weights, optimizer, rank, range(1, 2))
    assert optimizer.state() == {"step": 2}
    assert all(bool(weight.isfinite().all()) for weight in weights)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("value", "tokens"), [(math.inf, 5), (math.nan, 5), (0.0, 0)])
def test_skipped_step_changes_nothing(ranks: int, value: float, tokens: int) -> None:
    run(skip_on_ranks, ranks, value, tokens)


def train_with_tp(dtype: torch.dtype) -> tuple[list[Tensor], list[float]]:
    """tp 2 x dp 2: w5 and w6 cut over tp, the rest replicated; w1 and w3 with partial gradients as under sequence
    parallelism: each tp rank holds a part of their gradient."""
    grid = Grid.create(ParallelConfig(tensor_model_parallel_size=2))
    weights = []
    for index, shape in enumerate(SHAPES):
        cut = index >= 5
        local = start(index).chunk(2)[grid.tp.rank] if cut else start(index)
        offsets = (grid.tp.rank * local.shape[0] if cut else 0, *[0] * (len(shape) - 1))
        piece = Piece(f"w{index}", local.shape[0], shape, offsets)
        shard = Shard((piece,), replicated=not cut, partial_grad=index in (1, 3), weight_decay=DECAYS[index])
        weights.append(describe(Parameter(local.to(dtype).clone()), shard))
    optimizer = ShardedAdam(weights, settings(), grid)
    norms = []
    for step in range(STEPS):
        optimizer.buckets.zero()
        for microbatch in range(MICROBATCHES):
            for index, weight in enumerate(weights):
                part = gradient(index, step, grid.dp.rank, microbatch)
                if index >= 5:
                    part = part.chunk(2)[grid.tp.rank]
                elif index in (1, 3):
                    part = part * (0.25, 0.75)[grid.tp.rank]
                (weight * part.to(dtype)).sum().backward()
        norms.append(optimizer.step(LR, DECAY, tokens_of(step)).grad_norm)
    return [weight.detach().clone() for weight in weights], norms


def test_replicated_and_partial_over_tp() -> None:
    wanted, wanted_norms = reference(2, torch.float64)
    results = run(train_with_tp, 4, torch.float64)
    for rank, (weights, norms) in enumerate(results):
        assert norms == pytest.approx(wanted_norms, rel=1e-12)
        for index, (ours, whole) in enumerate(zip(weights, wanted, strict=True)):
            theirs = whole.chunk(2)[rank % 2] if index >= 5 else whole
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_one_fp32_rank_keeps_the_weights_themselves() -> None:
    weights = parameters(torch.float32)
    places = {weight.data_ptr() for weight in weights}
    optimizer = ShardedAdam(weights, settings(), Grid.create(ParallelConfig()))
    train(weights, optimizer, 0, range(1))
    assert {weight.data_ptr() for weight in weights} == places
    assert {rows.weight.data_ptr() for rows in optimizer.rows} == places


def some_steps(rows: int) -> None:
    shape = (rows, 1024)
    weights = [describe(Parameter(torch.ones(shape)), Shard((Piece(f"w{i}", rows, shape, (0, 0)),))) for i in range(16)]
    optimizer = ShardedAdam(weights, settings(10**6), Grid.create(ParallelConfig()))
    for _ in range(3):
        optimizer.buckets.zero()
        for weight in weights:
            weight.sum().backward()
        optimizer.step(LR, DECAY, 1)


def print_peak(rows: int) -> None:
    """Peak growth of memory over some steps, in units of the weights. Small steps before load the code."""
    some_steps(16)
    before = resident("VmRSS")
    some_steps(rows)
    # Not ru_maxrss: a child starts with its parent's.
    print((resident("VmHWM") - before) / (16 * rows * 1024 * 4))


def resident(name: str) -> int:
    """Bytes of this process in memory: now (VmRSS) or at most so far (VmHWM)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_fp32_rank_takes_16_bytes_a_parameter() -> None:
    code = "from tests.test_sharded_adam import print_peak; print_peak(2048)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    # Weight, gradient and two moments; a copy of one would make it 5. What the allocator keeps varies by machine.
    assert 3.9 < float(done.stdout) < 4.6
