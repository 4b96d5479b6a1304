"""What the tests of attention share: packs cut over ranks, attentions of every kind, and their exact results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacp import collectives, same_host
from megacp.attention import reference
from megacp.attention.core import build_attention
from megacp.batch import PackedSeqParams, Sample, shard, token_index
from megacp.config import ModelConfig, ParallelConfig
from megacp.grid import CPGroup, Grid
from tests.spawn import run

HEAD_DIM = 8


class Kind(NamedTuple):
    """A way to exchange; `levels` are the sizes of a2a+p2p's groups, inner first."""

    comm_type: str
    levels: tuple[int, ...] = ()


HIERARCHIES = {1: [(), (1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2)], 8: [(2, 4), (4, 2)]}
KINDS = {
    cp: [*map(Kind, ("p2p", "all_gather", "a2a")), *(Kind("a2a+p2p", levels) for levels in hierarchies)]
    for cp, hierarchies in HIERARCHIES.items()
}

# (query heads, key/value heads). The number of ranks divides the latter, is divided by it, or neither.
HEADS = {"MHA": (8, 8), "GQA": (8, 2), "MQA": (8, 1), "3 KV": (24, 3), "6 KV": (24, 6)}


class View(NamedTuple):
    """Who sees whom, in the words of the configuration."""

    mask: str
    window: tuple[int, int] | None = None

    @property
    def causal(self) -> bool:
        return self.mask == "causal"


VIEWS = {
    "causal": View("causal"),
    "full": View("no_mask"),
    "window": View("causal", (5, 0)),
    "two-sided": View("no_mask", (6, 3)),
}
WINDOWS = {
    "long window": View("causal", (64, 0)),
    "oneself": View("causal", (0, 0)),
    "all earlier": View("causal", (1000, 0)),
    "right of causal": View("causal", (9, 4)),
    "to the right": View("no_mask", (-1, 4)),
    "to the left": View("no_mask", (70, -1)),
    "wide": View("no_mask", (600, 700)),
}


class Case(NamedTuple):
    kind: Kind
    lengths: tuple[int, ...]
    view: View = VIEWS["causal"]
    heads: tuple[int, int] = HEADS["GQA"]
    dtype: str = "float32"
    multiple: int = 1


def _reads() -> bool:
    """May processes of one user read each other's memory here?"""
    scope, found = Path("/proc/sys/kernel/yama/ptrace_scope"), torch.zeros(1)
    try:
        same_host.read(os.getpid(), torch.ones(1).data_ptr(), found)
    except OSError:
        return False
    return not scope.exists() or int(scope.read_text()) < 2


needs_reading = pytest.mark.skipif(not _reads(), reason="processes may not read each other's memory here")


@contextmanager
def reading_from(size: int) -> Iterator[None]:
    """Tensors of so many bytes and more are read from the memory of other ranks, where they can be."""
    original = collectives.LEAST_READ
    collectives.LEAST_READ = size
    try:
        yield
    finally:
        collectives.LEAST_READ = original


def everyone(function: Callable[..., Any], cp: int, *args: Any) -> list[Any]:
    """`function(*args)` on cp ranks; a single one needs no process group."""
    return run(function, cp, *args) if cp > 1 else [function(*args)]


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Grids:
    """Of one world, with all its ranks in one context-parallel group; built once for each hierarchy."""

    def __init__(self) -> None:
        self.built: dict[tuple[int, ...], Grid] = {}

    def __getitem__(self, kind: Kind) -> Grid:
        if kind.levels not in self.built:
            self.built[kind.levels] = Grid.create(parallel_of(kind, world_size()))
        return self.built[kind.levels]


def parallel_of(kind: Kind, cp: int, **fields: Any) -> ParallelConfig:
    return ParallelConfig(
        context_parallel_size=cp,
        cp_comm_type=kind.comm_type,
        hierarchical_context_parallel_sizes=list(kind.levels) or None,
        **fields,
    )


def build(kind: Kind, grid: Grid, view: View = VIEWS["causal"], heads: tuple[int, int] = HEADS["GQA"]) -> Any:
    model = ModelConfig(
        num_layers=1,
        hidden_size=HEAD_DIM * heads[0],
        num_attention_heads=heads[0],
        num_query_groups=heads[1],
        vocab_size=8,
        attn_mask_type=cast(Any, view.mask),
        window_size=list(view.window) if view.window else None,
        attention_backend="native",
    )
    return build_attention(model, parallel_of(kind, grid.cp.size), 1, grid)


def padded(lengths: Sequence[int], cp: int, multiple: int = 1) -> tuple[int, ...]:
    """Each sequence on a multiple of 2*cp. An empty one has no room, but at the end: the framework's trailing piece."""
    unit = max(2 * cp, multiple)
    room = [-(-length // unit) * unit for length in lengths]
    return *room[:-1], room[-1] or unit


class Layout(NamedTuple):
    """The record of the door; which rows of the pack this rank holds, int64 [T]; which rows are real, bool [S]."""

    packed: PackedSeqParams
    index: Tensor
    real: Tensor
    room: tuple[int, ...]


def layout(lengths: Sequence[int], cp: CPGroup, multiple: int = 1) -> Layout:
    room = padded(lengths, cp.size, multiple)
    real, offsets = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (lengths, room))
    blank = torch.zeros(sum(room))
    batch = shard(Sample(blank.long(), blank.long(), blank, real, offsets), cp)
    mask = torch.cat([torch.arange(b) < a for a, b in zip(lengths, room, strict=True)])
    return Layout(batch.packed, token_index(offsets, cp.rank, cp.size), mask, room)


def inputs(rows: int, heads: tuple[int, int], seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of the output, [rows, heads, D]."""
    generator = torch.Generator().manual_seed(seed)
    counts = (heads[0], heads[1], heads[1], heads[0])
    return [torch.randn(rows, n, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype) for n in counts]


class Results(NamedTuple):
    """The output and the gradients of q, k and v."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def results(attention: Callable[..., Tensor], inputs: Sequence[Tensor], *args: Any) -> Results:
    """Of `attention(q, k, v, *args)` for inputs q, k, v, dout."""
    *leaves, dout = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attention(*leaves, *args)
    return Results(out.detach(), *torch.autograd.grad(out, leaves, dout))


@lru_cache(maxsize=1)
def exact(
    lengths: tuple[int, ...], room: tuple[int, ...], view: View, heads: tuple[int, int], dtype: torch.dtype
) -> tuple[list[Tensor], Results]:
    """Inputs of the whole pack in `dtype`, dout 0 on padding, and what they give in float64."""
    given = inputs(sum(room), heads, 1, dtype)
    given[3] *= torch.cat([torch.arange(b) < a for a, b in zip(lengths, room, strict=True)])[:, None, None]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, lengths, room, causal=view.causal, window=view.window)

    return given, results(attention, [x.double() for x in given])


class Error(NamedTuple):
    """One rank's share of an error: its largest entry, and squared norms of it and of the exact tensor."""

    worst: float
    square: float
    exact_square: float


def error(got: Tensor, wanted: Tensor) -> Error:
    off = (got - wanted).abs()
    worst = off.max().item() if len(off) else 0.0
    return Error(worst, off.square().sum().item(), wanted.square().sum().item())


def all_errors(table: Sequence[Case]) -> list[list[Error]]:
    """This rank's errors of every case: of out on real rows, of the gradients of q, k and v on all of them.

    Padded rows of the output, about which the reference has no say, must only be finite. In every other case all
    tensors are read from the memory of other ranks, as large ones are.
    """
    grids, found = Grids(), []
    for number, case in enumerate(table):
        grid, dtype = grids[case.kind], getattr(torch, case.dtype)
        packed, index, real, room = layout(case.lengths, grid.cp, case.multiple)
        given, wanted = exact(case.lengths, room, case.view, case.heads, dtype)
        attention = build(case.kind, grid, case.view, case.heads)
        with reading_from(2**40 if number % 2 else 0):
            got = results(attention, [x[index] for x in given], packed, grid.cp)
        assert all(x.dtype == dtype and x.isfinite().all() for x in got), case
        here = real[index]
        pairs = [(got.out[here], wanted.out[index][here])]
        pairs += [(a, b[index]) for a, b in zip(got[1:], wanted[1:], strict=True)]
        found.append([error(*pair) for pair in pairs])
    return found


def measure(table: Sequence[Case], cp: int) -> list[list[Error]]:
    """For every case the errors of out and of the gradients of q, k, v over all ranks."""

    def joined(shares: Sequence[Error]) -> Error:
        worst, squares, exact_squares = zip(*shares, strict=True)
        return Error(max(worst), sum(squares), sum(exact_squares))

    ranks = everyone(all_errors, cp, table)
    return [[joined(shares) for shares in zip(*case, strict=True)] for case in zip(*ranks, strict=True)]


def assert_equal_to_reference(table: Sequence[Case], cp: int) -> None:
    """fp32: out within 1e-5, gradients within 1e-4 of their Frobenius norm; float64: 1e-10 both.

    Gradients that vanish, as those of q where a token sees itself alone, are measured by 1% of dout's norm instead.
    """
    for case, errors in zip(table, measure(table, cp), strict=True):
        out_bound, grad_bound = (1e-5, 1e-4) if case.dtype == "float32" else (1e-10, 1e-10)
        assert errors[0].worst < out_bound, (case, errors[0])
        floor = 0.01 * (sum(case.lengths) * case.heads[0] * HEAD_DIM) ** 0.5
        for name, gradient in zip("qkv", errors[1:], strict=True):
            assert gradient.square**0.5 <= grad_bound * max(gradient.exact_square**0.5, floor), (case, name, gradient)
