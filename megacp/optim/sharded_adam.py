"""AdamW whose fp32 master weights and moments are spread over the data-parallel ranks (ZeRO stage 1).

Rank r of dp-cp owns band r of every bucket (buckets.py): it receives the sum of its gradients, updates its rows, and
all ranks gather the new rows. Gradients, master weights and moments all share that one layout. Where the parameters
are fp32 they are their own masters: 16 bytes a parameter on one rank (weight, gradient, two moments).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from megacp.blocks import Block, Shard, row_blocks, shard_of
from megacp.collectives import start_gather
from megacp.config import OptimizerConfig
from megacp.grid import Grid
from megacp.optim.buckets import Bucket, GradientBuckets
from megacp.optim.clip import clip_factor, global_norm


@dataclass(frozen=True)
class StepResult:
    """grad_norm: of the gradient per token, before clipping. skipped: nothing was changed."""

    grad_norm: float
    skipped: bool


@dataclass(frozen=True)
class Rows:
    """The rows of one parameter that this rank owns, from `first_row` on.

    local is a view of the parameter's own memory; weight, the master, is `local` itself unless the dtypes differ.
    """

    shard: Shard
    first_row: int
    local: Tensor
    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class ShardedAdam:
    """Owns the gradient buckets and the optimizer state of `parameters`, each described by a Shard.

    Where several ranks share the work, parameters are moved into the buckets' layout (`parameter.data` changes, the
    Parameter objects stay), so build this after the model has its weights, dtype and device.
    """

    def __init__(self, parameters: Iterable[Parameter], config: OptimizerConfig, grid: Grid) -> None:
        self.config = config
        self.grid = grid
        self.buckets = GradientBuckets(parameters, grid, config.bucket_size)
        self.weights: list[Tensor | None] = []
        self.rows: list[Rows] = []
        for bucket in self.buckets.buckets:
            matrix = _move_weights(bucket) if bucket.group.size > 1 else None
            self.weights.append(matrix)
            self.rows += _rows(bucket, matrix)

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, tokens: float) -> StepResult:
        """Finish the reduction, divide by `tokens` (of the global batch), clip, update, gather.

        Without tokens, or with a non-finite norm, no weight, moment or step count changes, on any rank.
        """
        self.buckets.finish()
        gradients = [gradient for bucket in self.buckets.buckets for gradient in bucket.gradients()]
        norm = global_norm(((rows.shard, g) for rows, g in zip(self.rows, gradients, strict=True)), self.grid)
        norm = norm / tokens if tokens else norm
        if not tokens or not math.isfinite(norm):
            return StepResult(norm, skipped=True)
        self._update(gradients, lr, weight_decay, divisor=tokens / clip_factor(norm, self.config.clip_grad))
        self.sync_parameters()
        return StepResult(norm, skipped=False)

    @torch.no_grad()
    def sync_parameters(self) -> None:
        """Copy the master weights to the parameters of all ranks; also to be called after loading."""
        for rows in self.rows:
            if rows.weight is not rows.local:
                rows.local.copy_(rows.weight)
        works = [
            work
            for bucket, matrix in zip(self.buckets.buckets, self.weights, strict=True)
            if matrix is not None
            for work in start_gather(matrix, bucket.group)
        ]
        for work in works:
            if work is not None:
                work.wait()

    def blocks(self) -> list[Block]:
        """Master weights and moments of this rank's rows by global name, as views: loading writes into them."""
        blocks = []
        for rows in self.rows:
            for prefix, tensor in (("", rows.weight), ("exp_avg.", rows.exp_avg), ("exp_avg_sq.", rows.exp_avg_sq)):
                blocks += row_blocks(rows.shard, tensor, rows.first_row, prefix)
        return blocks

    def state(self) -> dict[str, int]:
        """What is not a tensor, for the checkpoint's meta data."""
        return {"step": int(self.rows[0].step) if self.rows else 0}

    def load_state(self, state: dict[str, int]) -> None:
        for rows in self.rows:
            rows.step.fill_(state["step"])

    def _update(self, gradients: list[Tensor], lr: float, weight_decay: float, divisor: float) -> None:
        alike: dict[tuple, list[tuple[Rows, Tensor]]] = defaultdict(list)
        for rows, gradient in zip(self.rows, gradients, strict=True):
            alike[rows.shard.weight_decay, rows.weight.dtype, rows.weight.device].append((rows, gradient))
        for (decays, dtype, device), members in alike.items():
            own, grads = [rows for rows, _ in members], [gradient for _, gradient in members]
            scale = torch.tensor(divisor, dtype=torch.float32, device=device)
            # The fused kernel divides on the way, but by an fp32 number.
            if dtype == torch.float64:
                scale = None
                for gradient in grads:
                    gradient.div_(divisor)
            adamw(
                [rows.weight for rows in own],
                grads,
                [rows.exp_avg for rows in own],
                [rows.exp_avg_sq for rows in own],
                [],
                [rows.step for rows in own],
                fused=True,
                grad_scale=scale,
                amsgrad=False,
                beta1=self.config.adam_beta1,
                beta2=self.config.adam_beta2,
                lr=lr,
                weight_decay=weight_decay if decays else 0.0,
                eps=self.config.adam_eps,
                maximize=False,
            )


@torch.no_grad()
def _move_weights(bucket: Bucket) -> Tensor:
    """Move the bucket's parameters into one matrix of its layout, so that gathering them needs no copy."""
    matrix = bucket.matrix(bucket.parameters[0].dtype)
    for index, parameter in enumerate(bucket.parameters):
        parameter.data = bucket.place(matrix, index).copy_(parameter)
    return matrix


@torch.no_grad()
def _rows(bucket: Bucket, matrix: Tensor | None) -> list[Rows]:
    if matrix is None:
        local = [parameter.detach() for parameter in bucket.parameters]
    else:
        local = bucket.split(bucket.band(matrix))
    steps = torch.zeros(len(local), device=local[0].device).unbind()
    return [
        Rows(
            shard=shard_of(parameter),
            first_row=bucket.owned(index)[0],
            local=own,
            weight=own if own.dtype == bucket.dtype else own.to(bucket.dtype),
            exp_avg=torch.zeros_like(own, dtype=bucket.dtype),
            exp_avg_sq=torch.zeros_like(own, dtype=bucket.dtype),
            step=step,
        )
        for index, (parameter, own, step) in enumerate(zip(bucket.parameters, local, steps, strict=True))
    ]
