"""Gradient buckets: sums of gradients, reduced over the data-parallel ranks while backward still runs.

A bucket is a matrix. It stacks the rows of parameters whose rows are equally wide, last parameter of the model first
(the order of backward), and is cut into one equal band of rows per rank. So every cut falls between two rows of a
parameter, each rank's share lies in one piece, and neither the reduction nor the gathering of the weights, which use
the same layout, copies anything:

    rank 0's band | w3 rows 0..7                 |
    rank 1's band | w3 rows 8..9, w2 rows 0..5   |     [rows * ranks, width]
    rank 2's band | w2 row 6, w1 rows 0..3, unused |

All gradients are sums; the one division by the number of tokens is the optimizer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from math import gcd, prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megacp.blocks import shard_of
from megacp.collectives import start_reduce
from megacp.grid import Grid, Group

# Parameters start at multiples of so many elements: kernels read aligned vectors, and cuBLAS wants aligned biases.
ALIGNMENT = 32


class Bucket:
    """Parameters with rows of one width in a matrix [group.size * rows, width]; rank r owns band r of `rows` rows.

    sums    fp32 (float64 for float64 parameters) matrix of gradient sums. None where parameter.grad itself is the sum:
            one rank and the same dtype. There autograd accumulates at no cost and nothing is held between steps.
    """

    def __init__(self, parameters: list[Parameter], group: Group, sum_group: Group) -> None:
        first = parameters[0]
        self.parameters = parameters
        self.group = group
        self.sum_group = sum_group
        self.width = _width(first)
        self.starts: list[int] = []
        step = ALIGNMENT // gcd(self.width, ALIGNMENT)
        end = 0
        for parameter in parameters:
            self.starts.append(end)
            end += _round_up(parameter.shape[0], step)
        self.rows = _round_up(-(-end // group.size), step)
        self.dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        keep = group.size == 1 and sum_group.size == 1 and first.dtype == self.dtype
        self.sums = None if keep else self.matrix(self.dtype)
        self.summed: set[int] = set()
        self.ready: set[int] = set()
        self.launched = False
        self.work: dist.Work | None = None

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Zeros [group.size * rows, width]."""
        shape = (self.group.size * self.rows, self.width)
        return torch.zeros(shape, dtype=dtype, device=self.parameters[0].device)

    def band(self, matrix: Tensor) -> Tensor:
        """The rows [rows, width] that this rank owns."""
        return matrix[self.group.rank * self.rows : (self.group.rank + 1) * self.rows]

    def place(self, matrix: Tensor, index: int) -> Tensor:
        """Parameter `index` in the whole matrix, in its own shape."""
        parameter = self.parameters[index]
        return matrix[self.starts[index] :][: parameter.shape[0]].view(parameter.shape)

    def owned(self, index: int) -> tuple[int, int]:
        """First and one past the last row of parameter `index` that this rank owns."""
        offset = self.group.rank * self.rows - self.starts[index]
        rows = self.parameters[index].shape[0]
        return min(max(offset, 0), rows), min(max(offset + self.rows, 0), rows)

    def split(self, band: Tensor) -> list[Tensor]:
        """The owned rows of each parameter (some of none) as views of a band [rows, width]."""
        views = []
        for index, parameter in enumerate(self.parameters):
            first, last = self.owned(index)
            start = max(0, self.starts[index] + first - self.group.rank * self.rows)
            views.append(band[start:][: last - first].view(last - first, *parameter.shape[1:]))
        return views

    def gradients(self) -> list[Tensor]:
        """The owned rows of each parameter's gradient sum; complete after GradientBuckets.finish."""
        if self.sums is not None:
            return self.split(self.band(self.sums))
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def add(self, index: int, parameter: Parameter) -> None:
        """Move parameter.grad into the sums. The first one of a step is copied, so that nothing has to be zeroed."""
        assert self.sums is not None and parameter.grad is not None
        if self.launched:
            raise RuntimeError(f"a gradient of {shard_of(parameter).pieces[0].name} came after its reduction had begun")
        target = self.place(self.sums, index)
        if index in self.summed:
            target.add_(parameter.grad)
        else:
            target.copy_(parameter.grad)
        self.summed.add(index)
        parameter.grad = None

    def launch(self) -> None:
        """Start the sum over the group; parameters without a gradient on this rank give zeros."""
        for index, parameter in enumerate(self.parameters):
            if self.sums is None:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            elif index not in self.summed:
                self.place(self.sums, index).zero_()
        if self.sums is not None:
            self.work = start_reduce(self.sums, self.band(self.sums), self.group)
        self.launched = True

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = None


class GradientBuckets:
    """Gradient sums of `parameters` (each described by a Shard) over microbatches and ranks.

    Experts are reduced over grid.expert_dp, all else over grid.dp_cp. Gradients that sequence parallelism leaves
    partial are then summed over tp, only the band that this rank owns. A step is

        zero(); all but the last microbatch; overlap_next_backward(); last microbatch; finish()

    `overlap_next_backward` only where all ranks of the group run the same microbatches. Buckets are launched in one
    fixed order everywhere, whatever order their gradients come in. `bucket_size` is in elements.
    """

    def __init__(self, parameters: Iterable[Parameter], grid: Grid, bucket_size: int) -> None:
        self.buckets = list(_buckets(list(parameters), grid, bucket_size))
        self.overlap = self.finished = False
        for bucket in self.buckets:
            if bucket.sums is not None:
                for index, parameter in enumerate(bucket.parameters):
                    parameter.register_post_accumulate_grad_hook(partial(self._receive, bucket, index))

    def zero(self) -> None:
        """Begin a step."""
        self.overlap = self.finished = False
        for bucket in self.buckets:
            bucket.launched = False
            bucket.summed.clear()
            bucket.ready.clear()
            for parameter in bucket.parameters:
                parameter.grad = None

    def overlap_next_backward(self) -> None:
        """The next backward is the last of the step: reduce each bucket once all its gradients have come."""
        self.overlap = True

    def finish(self) -> None:
        """Launch what has not been launched and wait for all; then each bucket's gradients() are the global sums.

        Once a step: further calls do nothing.
        """
        if self.finished:
            return
        self.finished = True
        for bucket in self.buckets:
            if not bucket.launched:
                bucket.launch()
        for bucket in self.buckets:
            bucket.wait()
            if bucket.sums is not None and bucket.sum_group.size > 1:
                band = bucket.band(bucket.sums)
                bucket.work = dist.all_reduce(band, group=bucket.sum_group.process_group, async_op=True)
        for bucket in self.buckets:
            bucket.wait()

    def _receive(self, bucket: Bucket, index: int, parameter: Parameter) -> None:
        bucket.add(index, parameter)
        if not self.overlap:
            return
        bucket.ready.add(index)
        for following in self.buckets:
            if len(following.ready) < len(following.parameters):
                return
            if not following.launched:
                following.launch()


def _buckets(parameters: list[Parameter], grid: Grid, bucket_size: int) -> Iterator[Bucket]:
    """Buckets in order of their last gradient in backward, which runs through the parameters from the end."""
    filling: dict[tuple, list[Parameter]] = {}
    for parameter in reversed(parameters):
        shard = shard_of(parameter)
        # Fused optimizer kernels walk through memory and do not look at strides.
        if not parameter.is_contiguous():
            raise ValueError(f"parameter of {shard.pieces[0].name} {tuple(parameter.shape)} must be contiguous")
        key = (parameter.dtype, parameter.device, _width(parameter), shard.expert, shard.partial_grad)
        filling.setdefault(key, []).append(parameter)
        if sum(p.numel() for p in filling[key]) >= bucket_size:
            yield _bucket(filling.pop(key), grid)
    position = {parameter: index for index, parameter in enumerate(parameters)}
    for rest in sorted(filling.values(), key=lambda rest: -position[rest[-1]]):
        yield _bucket(rest, grid)


def _bucket(parameters: list[Parameter], grid: Grid) -> Bucket:
    shard = shard_of(parameters[0])
    tp = grid.expert_tp if shard.expert else grid.tp
    alone = Group(ranks=(grid.rank,), rank=0)
    return Bucket(parameters, grid.expert_dp if shard.expert else grid.dp_cp, tp if shard.partial_grad else alone)


def _width(parameter: Tensor) -> int:
    return prod(parameter.shape[1:])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
