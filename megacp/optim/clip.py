"""The true global norm of a gradient that is spread over all ranks, and the factor that clips it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megacp.blocks import Shard
from megacp.grid import Grid


def global_norm(owned: Iterable[tuple[Shard, Tensor]], grid: Grid) -> float:
    """L2 norm of the whole gradient, the same number on every rank of the world.

    owned: the rows of each parameter's gradient that this rank owns, all partial sums taken. What tensor-parallel ranks
    hold alike is counted on the first of them. Squares are added up in float64. inf and nan survive.
    """
    # On CPU the fp32 norm of a long vector is off by 5e-4 (its sums run too long), and a cast to float64 costs ten
    # times as much; norms of single rows are right to 1e-6 and cost no more than the former.
    counted = [tensor if _counts(shard, grid) else tensor[:0] for shard, tensor in owned]
    norms = torch.cat([torch.linalg.vector_norm(tensor, dim=-1).view(-1) for tensor in counted])
    total = norms.double().square().sum()
    # dp_cp x model is the whole world, and no two ranks own the same rows.
    for group in (grid.dp_cp, grid.model):
        if group.size > 1:
            dist.all_reduce(total, group=group.process_group)
    return total.sqrt().item()


def clip_factor(norm: float, max_norm: float) -> float:
    """What to multiply a gradient of this norm by, so that its norm is at most `max_norm` (0: no limit).

    As torch.nn.utils.clip_grad_norm_, its 1e-6 against a zero norm included.
    """
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def _counts(shard: Shard, grid: Grid) -> bool:
    return not shard.replicated or (grid.expert_tp if shard.expert else grid.tp).rank == 0
