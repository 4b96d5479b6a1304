"""Which part of a global tensor a local tensor is.

Tensor parallelism cuts a weight along one dimension and fuses several of them (q, k, v; gate, up) into one parameter.
The optimizer cuts that parameter once more, by whole rows. Both remain rectangular blocks of tensors with global names
and shapes, so a checkpoint written on one grid can be read on any other. This file holds that description and nothing
else: the model writes it, the optimizer and the checkpoint read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Piece:
    """`rows` consecutive rows (dim 0) of a local parameter: a block of the global tensor `name`.

    `global_shape` is the shape that is saved (vocabulary unpadded); `offsets` is where the block starts in it. Rows
    past `global_shape[0]` are padding: they are trained as zeros and never saved.
    """

    name: str
    rows: int
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """What the optimizer and the checkpoint must know of a parameter.

    pieces          global tensors behind it, in order of its rows
    replicated      every tensor-parallel rank holds the same values: counted once in norms
    partial_grad    its gradient is a sum over tensor-parallel ranks not yet taken (sequence-parallel regions)
    weight_decay    whether decay applies (matrices yes; norms and biases no)
    expert          reduced over the expert grid instead of dp-cp
    """

    pieces: tuple[Piece, ...]
    replicated: bool = False
    partial_grad: bool = False
    weight_decay: bool = True
    expert: bool = False


@dataclass(frozen=True)
class Block:
    """A local tensor and its place in a global one. `tensor` is a view: loading writes into it."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor


def describe(parameter: Parameter, shard: Shard) -> Parameter:
    """Attach `shard` to a parameter. ValueError if the pieces do not add up to its rows."""
    rows = sum(piece.rows for piece in shard.pieces)
    if rows != parameter.shape[0]:
        raise ValueError(f"pieces of {shard.pieces[0].name} have {rows} rows, the parameter {parameter.shape[0]}")
    parameter.shard = shard  # type: ignore[attr-defined]
    return parameter


def shard_of(parameter: Parameter) -> Shard:
    return parameter.shard  # type: ignore[attr-defined]


def row_blocks(shard: Shard, tensor: Tensor, first_row: int, prefix: str = "") -> list[Block]:
    """Blocks of a tensor that holds rows `first_row ...` of a parameter, padding rows left out.

    tensor [rows, ...]: any slice by whole rows of the parameter, or of a tensor shaped like it (a moment). The result
    has one block for each piece that the slice touches; each is a view of `tensor`.
    """
    blocks = []
    start = 0
    end_row = first_row + tensor.shape[0]
    for piece in shard.pieces:
        begin = max(first_row, start)
        saved_rows = min(piece.rows, max(0, piece.global_shape[0] - piece.offsets[0]))
        end = min(end_row, start + saved_rows)
        if begin < end:
            offsets = (piece.offsets[0] + begin - start, *piece.offsets[1:])
            view = tensor[begin - first_row : end - first_row]
            blocks.append(Block(prefix + piece.name, piece.global_shape, offsets, view))
        start += piece.rows
    return blocks
