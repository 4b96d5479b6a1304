"""Sums, gathers and scatters of a tensor over a Group; at size 1 each returns its input.

One place knows what differs between backends: gloo's reduce-scatter costs several times its all-reduce (it sends every
block to every rank), so there the sum is taken whole and sliced.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megacp.grid import Group

# Named anew in torch 2.13, which warns of the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce in place; returns `tensor`."""
    if group.size > 1:
        dist.all_reduce(tensor, op, group=group.process_group)
    return tensor


def start_all_reduce(tensor: Tensor, group: Group) -> dist.Work | None:
    """Sum in place, in the background; None when there is nothing to wait for."""
    if group.size == 1:
        return None
    return dist.all_reduce(tensor, group=group.process_group, async_op=True)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """[t, ...] of every rank -> [t*size, ...] in rank order."""
    if group.size == 1:
        return tensor
    gathered = tensor.new_empty(tensor.shape[0] * group.size, *tensor.shape[1:])
    _all_gather(gathered, tensor.contiguous(), group=group.process_group)
    return gathered


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """Sum of [t*size, ...] over ranks -> this rank's rows [t, ...]. `tensor` may be overwritten.

    ValueError if the rows cannot be dealt evenly.
    """
    if group.size == 1:
        return tensor
    rows, left_over = divmod(tensor.shape[0], group.size)
    if left_over:
        raise ValueError(f"{tensor.shape[0]} rows cannot be scattered over {group.size} ranks: pad them to a multiple")
    if dist.get_backend(group.process_group) == "gloo":
        dist.all_reduce(tensor, group=group.process_group)
        return tensor[group.rank * rows : (group.rank + 1) * rows].clone()
    scattered = torch.empty_like(tensor[:rows])
    _reduce_scatter(scattered, tensor.contiguous(), group=group.process_group)
    return scattered


def start_reduce(matrix: Tensor, band: Tensor, group: Group) -> dist.Work | None:
    """Sum `matrix` over the group so that at least `band`, this rank's rows of it, is right; in the background.

    On gloo the all-reduce of everything is the cheaper one (tools/bench/reduce.py, see there for numbers).
    """
    if group.size == 1:
        return None
    if dist.get_backend(group.process_group) == "gloo":
        return dist.all_reduce(matrix, group=group.process_group, async_op=True)
    return _reduce_scatter(band, matrix, group=group.process_group, async_op=True)


def start_gather(matrix: Tensor, group: Group) -> list[dist.Work | None]:
    """Fill `matrix` with the bands of all ranks (each has its own in place); in the background.

    gloo's all-gather goes through buffers of its own: one broadcast per band takes half its time and no memory.
    """
    if group.size == 1:
        return []
    bands = matrix.chunk(group.size)
    if dist.get_backend(group.process_group) != "gloo":
        return [_all_gather(matrix, bands[group.rank], group=group.process_group, async_op=True)]
    return [
        dist.broadcast(band, root, group=group.process_group, async_op=True)
        for band, root in zip(bands, group.ranks, strict=True)
    ]
