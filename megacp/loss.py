"""Cross-entropy over a vocabulary cut across tensor-parallel ranks, fused with the head's product.

Logits exist for one chunk of tokens at a time and are never gathered; the gradient is computed in the same sweep, while
they are there, so the backward pass holds no logits either. The result is a sum, not a mean: the step divides once by
the number of supervised tokens of the global batch.

Legend: T tokens of this rank, H hidden, V rows of the head on this tp rank (padding cut off), C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megacp.collectives import all_gather, all_reduce, reduce_scatter
from megacp.grid import Group


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    tp: Group,
    *,
    vocab_size: int,
    sequence_parallel: bool = False,
    chunk_size: int = 1024,
) -> tuple[Tensor, Tensor]:
    """(sum over tokens of loss_mask * cross-entropy, number of supervised tokens), equal on all tp ranks.

    hidden [T, H] (or [T/tp, H] under sequence parallelism), weight [Vp/tp, H], labels int64 [T], loss_mask float [T].
    The sum is differentiable in hidden and weight and float32 (float64 for float64 input); the number is the sum of
    loss_mask. Rows of the padded vocabulary take no part: their logits count as -inf.
    """
    first = tp.rank * weight.shape[0]
    rows = min(weight.shape[0], max(0, vocab_size - first))
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    settings = (tp, first, rows, sequence_parallel and tp.size > 1, chunk_size, with_grad)
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, loss_mask, settings)  # type: ignore[assignment]
    return total, loss_mask.sum()


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, settings: tuple) -> Tensor:
        tp, first, rows, scattered, chunk_size, with_grad = settings
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        full = all_gather(hidden, tp) if scattered else hidden
        taught, length = _taught(mask), len(full)
        if taught is not None:
            full, labels, mask = full[taught], labels[taught], mask[taught]
        head = weight[:rows]
        total = torch.zeros((), dtype=exact, device=hidden.device)
        dhidden = torch.empty_like(full) if with_grad else None
        dweight = torch.zeros(weight.shape, dtype=exact, device=weight.device) if with_grad else None
        for start in range(0, full.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            chunk, chunk_mask = full[part], mask[part].to(exact)
            logits = (chunk @ head.t()).to(exact)
            local = labels[part] - first
            sum_exp, losses = _exp_and_loss(logits, local, tp)
            total += (losses * chunk_mask).sum()
            if dhidden is not None and dweight is not None:
                dlogits = _gradient(logits, sum_exp, local, chunk_mask).to(hidden.dtype)
                torch.matmul(dlogits, head, out=dhidden[part])
                _accumulate_product(dweight[:rows], dlogits, chunk)
        if dhidden is not None and dweight is not None:
            if taught is not None:
                dhidden = dhidden.new_zeros(length, *dhidden.shape[1:]).index_copy_(0, taught, dhidden)
            # Each tp rank has the part of dhidden that flows through its rows of the vocabulary.
            dhidden = reduce_scatter(dhidden, tp) if scattered else all_reduce(dhidden, tp)
            ctx.save_for_backward(dhidden, dweight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (grad,) = grads
        dhidden, dweight = ctx.saved_tensors
        # In place: autograd itself refuses a second backward pass over a changed tensor.
        return dhidden.mul_(grad), dweight.mul_(grad), None, None, None


def _taught(mask: Tensor) -> Tensor | None:
    """The tokens with a weight, where leaving the others out saves work: of chats most are only read.

    On a GPU their number would have to be waited for. tp ranks hold the same mask, so their collectives still match.
    """
    if mask.is_cuda or bool(mask.all()):
        return None
    return mask.nonzero()[:, 0]


def _exp_and_loss(logits: Tensor, local: Tensor, tp: Group) -> tuple[Tensor, Tensor]:
    """Turns logits [C, V] into exp(logits - highest of all ranks), in place; (their sums over all ranks, losses) [C].

    `local` are the labels counted from this rank's first row: outside [0, V) they belong to another rank.
    """
    highest = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    highest = all_reduce(highest, tp, dist.ReduceOp.MAX)
    logits.sub_(highest[:, None])
    inside, column = _own_column(local, logits.shape[1])
    target = logits.gather(1, column)[:, 0].where(inside, 0.0) if logits.shape[1] else logits.new_zeros(len(logits))
    sum_exp, target = all_reduce(torch.stack([logits.exp_().sum(-1), target]), tp)
    return sum_exp, sum_exp.log() - target


def _gradient(exp: Tensor, sum_exp: Tensor, local: Tensor, mask: Tensor) -> Tensor:
    """mask * (softmax - one_hot(label)) [C, V] from what `_exp_and_loss` left, in place."""
    gradient = exp.mul_((mask / sum_exp)[:, None])
    if not gradient.shape[1]:
        return gradient
    inside, column = _own_column(local, gradient.shape[1])
    return gradient.scatter_add_(1, column, -(mask * inside)[:, None])


def _own_column(local: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Whether a label is this rank's [C], and its column [C, 1] (0 if not). Row numbers would wait for the device."""
    inside = (local >= 0) & (local < columns)
    return inside, local.where(inside, 0)[:, None]


def _accumulate_product(total: Tensor, dlogits: Tensor, chunk: Tensor) -> None:
    """total [V, H] += dlogits^T [V, C] @ chunk [C, H], in total's precision."""
    if total.dtype == dlogits.dtype:
        total.addmm_(dlogits.t(), chunk)
    else:
        total += dlogits.t() @ chunk
