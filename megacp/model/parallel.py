"""Linear layers and embedding cut over tensor-parallel ranks.

Column layers hold rows of W (outputs), row layers columns of W (inputs), so a column layer followed by a row layer
needs one sum (Shoeybi et al. 2019, Megatron-LM). With sequence parallelism (Korthikanti et al. 2022) that sum becomes
a reduce-scatter along tokens, undone by an all-gather before the next column layer, so norms and dropout between them
work on T/tp tokens.

Legend: T tokens, H inputs, F outputs of this rank. Activations are [T, H], outside of the linear layers [T/tp, H] under
sequence parallelism.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from megacp.blocks import Piece, Shard, describe
from megacp.collectives import all_gather, all_reduce, reduce_scatter, start_all_reduce
from megacp.grid import Group


@dataclass(frozen=True)
class Layout:
    """How this process holds the weights of its model: all that a layer needs to know to build them.

    Without `draw` initial weights are left zero, where a checkpoint is to replace them.
    """

    tp: Group
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    seed: int = 1234
    draw: bool = True


def whole_weight(name: str, shape: Sequence[int], std: float, seed: int) -> Tensor:
    """The initial weight `name`, float32 on the CPU: normal(0, std) from a generator of its own.

    It depends on the seed and the name alone, so every layout starts from the same model.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(*shape).normal_(0.0, std, generator=generator)


def build_parameter(
    pieces: Sequence[Piece], columns: tuple[int, ...], std: float, layout: Layout, **shard: Any
) -> nn.Parameter:
    """A parameter whose rows are `pieces`, each drawn whole and cut; `columns` is its shape past dim 0.

    `shard` are further fields of blocks.Shard.
    """
    rows = sum(piece.rows for piece in pieces)
    local = torch.zeros(rows, *columns, dtype=layout.dtype, device=layout.device)
    start = 0
    for piece in pieces if std and layout.draw else ():
        whole = whole_weight(piece.name, piece.global_shape, std, layout.seed)
        for dim, offset in enumerate(piece.offsets):
            length = min((piece.rows, *columns)[dim], max(0, whole.shape[dim] - offset))
            whole = whole.narrow(dim, min(offset, whole.shape[dim]), length)
        local[start : start + whole.shape[0]] = whole.to(layout.dtype)
        start += piece.rows
    return describe(nn.Parameter(local), Shard(tuple(pieces), **shard))


class _ColumnProduct(Function):
    """x W^T with x gathered along tokens first (sequence parallel) or its gradient summed over tp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Group, gather: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.gather, ctx.has_bias = tp, gather, bias is not None
        return F.linear(all_gather(x, tp) if gather else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        # x is gathered again rather than kept: that is what sequence parallelism saves.
        full = all_gather(x, ctx.tp) if ctx.gather else x
        dx = grad @ weight
        work = None if ctx.gather else start_all_reduce(dx, ctx.tp)
        dweight = grad.t() @ full
        dbias = grad.sum(0) if ctx.has_bias else None
        if ctx.gather:
            dx = reduce_scatter(dx, ctx.tp)
        elif work is not None:
            work.wait()
        return dx, dweight, dbias, None, None


class _RowSum(Function):
    """Sum of partial products over tp: whole on every rank, or this rank's tokens (sequence parallel)."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp: Group, scatter: bool) -> Tensor:
        ctx.tp, ctx.scatter = tp, scatter
        if scatter:
            return reduce_scatter(partial, tp)
        ctx.mark_dirty(partial)
        return all_reduce(partial, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return (all_gather(grad, ctx.tp) if ctx.scatter else grad), None, None


def sum_over_tensor_parallel(partial: Tensor, layout: Layout) -> Tensor:
    """[T, H] partial on each tp rank -> sum [T, H], or [T/tp, H] under sequence parallelism."""
    if layout.tp.size == 1:
        return partial
    return _RowSum.apply(partial, layout.tp, layout.sequence_parallel)  # type: ignore[return-value]


class ColumnLinear(nn.Module):
    """Several projections of one input as a single product; the outputs of each are cut over tp.

    `outputs` gives the global name and width of each; rows lie in that order: [q; k; v] or [gate; up].
    """

    def __init__(self, outputs: dict[str, int], inputs: int, std: float, layout: Layout, bias: bool):
        super().__init__()
        self.layout = layout
        tp = layout.tp

        def pieces(suffix: str, columns: tuple[int, ...]) -> list[Piece]:
            return [
                Piece(
                    f"{name}.{suffix}",
                    width // tp.size,
                    (width, *columns),
                    (tp.rank * (width // tp.size), *(0,) * len(columns)),
                )
                for name, width in outputs.items()
            ]

        self.weight = build_parameter(pieces("weight", (inputs,)), (inputs,), std, layout)
        self.bias = build_parameter(pieces("bias", ()), (), 0.0, layout, weight_decay=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] (or [T/tp, H]) -> [T, F]."""
        if self.layout.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        return _ColumnProduct.apply(x, self.weight, self.bias, self.layout.tp, self.layout.sequence_parallel)  # type: ignore[return-value]


class RowLinear(nn.Module):
    """A projection whose inputs are cut over tp; the bias is added once, after the sum."""

    def __init__(self, name: str, inputs: int, outputs: int, std: float, layout: Layout, bias: bool):
        super().__init__()
        self.layout = layout
        width = inputs // layout.tp.size
        piece = Piece(f"{name}.weight", outputs, (outputs, inputs), (0, layout.tp.rank * width))
        self.weight = build_parameter([piece], (width,), std, layout)
        self.bias = replicated_parameter(f"{name}.bias", (outputs,), layout) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, H/tp] -> [T, F] (or [T/tp, F])."""
        if self.layout.tp.size == 1:
            return F.linear(x, self.weight, self.bias)
        y = sum_over_tensor_parallel(F.linear(x, self.weight), self.layout)
        return y if self.bias is None else y + self.bias


def replicated_parameter(
    name: str,
    shape: tuple[int, ...],
    layout: Layout,
    *,
    std: float = 0.0,
    value: float = 0.0,
    own_heads: bool = False,
) -> nn.Parameter:
    """A weight that every tp rank holds: norms, biases of row layers, learned positions. normal(0, std) + value.

    Where a rank sees T/tp tokens (sequence parallelism) or its own heads alone, its gradient is a part of the sum.
    """
    piece = Piece(name, shape[0], shape, (0,) * len(shape))
    partial = (layout.sequence_parallel or own_heads) and layout.tp.size > 1
    parameter = build_parameter(
        [piece], shape[1:], std, layout, replicated=True, partial_grad=partial, weight_decay=len(shape) > 1
    )
    parameter.data.add_(value)
    return parameter


class VocabEmbedding(nn.Module):
    """Rows of the padded vocabulary cut over tp; a token outside this rank's rows contributes zeros to the sum."""

    def __init__(self, name: str, vocab_size: int, padded_size: int, width: int, std: float, layout: Layout):
        super().__init__()
        self.layout = layout
        rows = padded_size // layout.tp.size
        self.first = layout.tp.rank * rows
        piece = Piece(f"{name}.weight", rows, (vocab_size, width), (self.first, 0))
        self.weight = build_parameter([piece], (width,), std, layout)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [T] -> [T, H] (or [T/tp, H])."""
        if self.layout.tp.size == 1:
            return look_up(tokens, self.weight)
        local = tokens - self.first
        outside = (local < 0) | (local >= self.weight.shape[0])
        embedded = look_up(local.masked_fill(outside, 0), self.weight)
        return sum_over_tensor_parallel(embedded.masked_fill(outside[:, None], 0.0), self.layout)


def look_up(rows: Tensor, table: Tensor) -> Tensor:
    """Rows int64 [T] of a table [V, H] -> [T, H].

    On a CPU the gradient of a bfloat16 table would be summed in bfloat16, where that of a frequent token soon stops
    growing; it is summed in float32.
    """
    if table.is_cuda or table.dtype != torch.bfloat16:
        return F.embedding(rows, table)
    return F.embedding(rows, table.float()).to(table.dtype)
