"""How far attention on several ranks is from the dense formula in float64, and at which token, head and rank.

What tools/verify_attention.py computes. A pack of random sequences is the same on all ranks; every rank compares a part
of it, some pairs of a sequence and a KV head, since the dense formula is by far the longest work.

Legend: L tokens of a sequence, N query heads, K KV heads, G = N/K query heads of a KV head, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf, isfinite
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megacp.attention.core import build_attention
from megacp.batch import PackedSeqParams, Sample, shard
from megacp.collectives import all_gather, all_reduce
from megacp.config import Config
from megacp.grid import CPGroup, Grid

TENSORS = ("out", "dq", "dk", "dv")
# Scores of the dense formula that exist at once: 32 MiB of each of a handful of float64 tensors.
SCORES = 2**22


class Results(NamedTuple):
    """Output and gradients: out and dq [rows, N, D], dk and dv [rows, K, D]."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Share(NamedTuple):
    """Rows of the pack where a sequence lies, how many of them are real, and a KV head: what is compared at a time."""

    rows: slice
    length: int
    kv_head: int

    def of(self, tensor: Tensor, kv_heads: int) -> Tensor:
        """The share's rows and heads, with padding, of a tensor that has query heads or KV heads."""
        group = tensor.shape[1] // kv_heads
        return tensor[self.rows, self.kv_head * group : (self.kv_head + 1) * group]


class Error(NamedTuple):
    """How far one tensor is off, and where: a row of the pack and a head.

    largest   absolute error of a number
    relative  norm of the error over norm of the exact tensor
    worst     norm of the error of one token's D numbers of a head over sqrt(their norm^2 + mean norm^2 of a row)
    """

    largest: float
    relative: float
    worst: float
    row: int
    head: int


class Pack(NamedTuple):
    """A sample whose tokens are numbered by their rows, so that its shards tell who holds which row; q, k, v, dout."""

    sample: Sample
    inputs: tuple[Tensor, ...]

    def shares(self, grid: Grid) -> list[Share]:
        """What this rank compares."""
        starts, lengths = self.sample.cu_seqlens_padded.tolist(), self.sample.cu_seqlens.diff().tolist()
        places = [slice(*ends) for ends in zip(starts[:-1], starts[1:], strict=True)]
        heads = range(self.inputs[1].shape[1])
        every = [Share(rows, real, head) for rows, real in zip(places, lengths, strict=True) for head in heads]
        return every[grid.rank :: grid.world_size]


def sample_of(lengths: Sequence[int], room: Sequence[int]) -> Sample:
    """Sequences of real `lengths` that lie `room` apart."""
    offsets, padded = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (lengths, room))
    rows = torch.arange(sum(room))
    return Sample(rows, rows, torch.ones(len(rows)), offsets, padded if list(lengths) != list(room) else offsets)


def draw(config: Config, lengths: Sequence[int], device: torch.device) -> Pack:
    """A random pack, each sequence on a multiple of 2*cp. Its real rows are the same for every cp.

    Padding holds large numbers, which must not be seen, and has no gradient.
    """
    model, multiple = config.model, 2 * config.parallel.context_parallel_size
    room = [-(-max(length, 1) // multiple) * multiple for length in lengths]
    real = torch.cat([torch.arange(most) < length for length, most in zip(lengths, room, strict=True)])
    random = torch.Generator().manual_seed(config.train.seed)
    inputs = []
    for heads in (model.num_attention_heads, model.kv_heads, model.kv_heads, model.num_attention_heads):
        values = torch.empty(len(real), heads, model.head_dim)
        values[real] = torch.randn(int(real.sum()), heads, model.head_dim, generator=random)
        values[~real] = 100.0
        inputs.append(values)
    inputs[3][~real] = 0.0
    dtype = getattr(torch, config.train.params_dtype)
    return Pack(sample_of(lengths, room), tuple(x.to(device, dtype) for x in inputs))


# --- results


def exact(share: Share, pack: Pack, config: Config) -> Results:
    """The dense formula on the share, with rows of zeros for padding."""
    model = config.model
    left, right = (inf if n < 0 else n for n in model.window_size or (-1, -1))
    q, k, v, dout = (share.of(x, model.kv_heads)[: share.length].double() for x in pack.inputs)
    scale = model.softmax_scale or model.head_dim**-0.5
    results = dense(q, k, v, dout, scale=scale, left=left, right=0 if model.attn_mask_type == "causal" else right)
    missing = share.rows.stop - share.rows.start - share.length
    return Results(*(torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) for x in results))


def dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, scale: float, left: float, right: float) -> Results:
    """Attention of one sequence and KV head, and its gradients: q, dout [L, G, D], k, v [L, 1, D].

    The formula of attention/reference.py and its derivative, some query rows at a time: memory grows with L, not L^2.
    A query sees from `left` keys before its own place to `right` after it.
    """
    q, dout, k, v = q.transpose(0, 1), dout.transpose(0, 1), k[:, 0], v[:, 0]  # [G, L, D], [L, D]
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    length, step = len(k), max(1, SCORES // max(1, q.shape[0] * len(k)))
    place = torch.arange(length, device=k.device)
    for begin in range(0, length, step):
        end = min(begin + step, length)
        rows, seen = slice(begin, end), slice(int(max(0, begin - left)), int(min(length, end + right)))
        ahead = place[seen] - place[rows, None]
        scores = scale * q[:, rows] @ k[seen].T
        weights = scores.masked_fill_((ahead < -left) | (ahead > right), -inf).softmax(-1)
        out[:, rows] = weights @ v[seen]
        dv[seen] += (weights.transpose(1, 2) @ dout[:, rows]).sum(0)
        # Derivative of the softmax: each weight's own gradient less their mean.
        mean = (dout[:, rows] * out[:, rows]).sum(-1, keepdim=True)
        dscores = scale * weights * (dout[:, rows] @ v[seen].T - mean)
        dq[:, rows] = dscores @ k[seen]
        dk[seen] += (dscores.transpose(1, 2) @ q[:, rows]).sum(0)
    return Results(out.transpose(0, 1), dq.transpose(0, 1), dk[:, None], dv[:, None])


def compute(config: Config, grid: Grid, inputs: Sequence[Tensor], packed: PackedSeqParams, cp: CPGroup) -> Results:
    """What the attention of a layer makes of this rank's rows."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = build_attention(config.model, config.parallel, 1, grid)(q, k, v, packed, cp)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs[3])
    return Results(out.detach(), dq, dk, dv)


def alone(share: Share, pack: Pack, config: Config, grid: Grid) -> Results:
    """What one rank computes that holds the share's sequence whole."""
    parts = [share.of(x, config.model.kv_heads) for x in pack.inputs]
    model = config.model.model_copy(update={"num_attention_heads": parts[0].shape[1], "num_query_groups": 1})
    cp = CPGroup((grid.rank,), 0)
    packed = shard(sample_of([share.length], [len(parts[0])]), cp).to(parts[0].device).packed
    nobody = {"context_parallel_size": 1, "cp_comm_type": "p2p", "hierarchical_context_parallel_sizes": None}
    parallel = config.parallel.model_copy(update=nobody)
    return compute(config.model_copy(update={"model": model, "parallel": parallel}), grid, parts, packed, cp)


def together(pack: Pack, config: Config, grid: Grid) -> tuple[Results, Tensor]:
    """What all ranks compute, float64 in the pack's own order, and which rank held each row.

    ValueError if their shards are not the pack.
    """
    batch = shard(pack.sample, grid.cp).to(pack.inputs[0].device)
    assert batch.tokens is not None
    order = all_gather(batch.tokens, grid.cp)
    place = torch.arange(len(order), device=order.device)
    if not torch.equal(order.sort().values, place):
        raise ValueError("the shards of all ranks together are not the pack: batch.shard is broken")
    ours = compute(config, grid, [x[batch.tokens] for x in pack.inputs], batch.packed, grid.cp)
    whole = [
        torch.empty_like(rows).index_copy_(0, order, rows) for rows in (all_gather(x.double(), grid.cp) for x in ours)
    ]
    return Results(*whole), torch.empty_like(place).index_copy_(0, order, place // len(batch.tokens))


# --- how they differ


def differ(own: Sequence[Share], wanted: Sequence[Results], got: Sequence[Results], grid: Grid) -> dict[str, Error]:
    """Errors over the shares of all ranks, by tensor. Outputs of padding do not count: nobody reads them."""
    found = {}
    for number, name in enumerate(TENSORS):
        rows = []
        for share, exact_part, part in zip(own, wanted, got, strict=True):
            off = (part[number].double() - exact_part[number]).abs().nan_to_num(nan=inf)
            if name == "out":
                off[share.length :] = 0
            rows.append((share, off, exact_part[number].square().sum(-1)))
        found[name] = combined(rows, grid)
    return found


def combined(rows: Sequence[tuple[Share, Tensor, Tensor]], grid: Grid) -> Error:
    """One tensor's error from each share's absolute errors [rows, heads, D] and squared norms of rows [rows, heads]."""
    ours = [(0.0, 0.0, 0.0)]
    for share, off, norms in rows:
        ours.append((off.square().sum().item(), norms.sum().item(), float(off[: share.length].numel())))
    error, norm, count = all_reduce(numbers(ours).sum(0), grid.cp).tolist()
    # Gradients are 0 where every query sees itself alone: rounding is then measured against inputs, numbers of about 1.
    norm = norm if norm > 1e-12 * count else count
    worst, largest = (-1.0, 0.0, 0.0), 0.0
    for share, off, norms in rows:
        ratios = off.square().sum(-1) / (norms + off.shape[2] * norm / count)
        row, head = divmod(int(ratios.argmax()), off.shape[1])
        at = (float(share.rows.start + row), float(share.kv_head * off.shape[1] + head))
        worst, largest = max(worst, (ratios.max().item() ** 0.5, *at)), max(largest, off.max().item())
    everyone = all_gather(numbers([(*worst, largest)]), grid.cp).tolist()
    ratio, row, head, _ = max(everyone)
    return Error(max(large for *_, large in everyone), (error / norm) ** 0.5, ratio, int(row), int(head))


def numbers(values: Sequence[tuple[float, ...]]) -> Tensor:
    """float64, where the ranks can exchange it: gloo knows host memory only."""
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.tensor(values, dtype=torch.float64, device="cuda" if nccl else "cpu")


def faults(name: str, error: Error, one_rank: Error, dtype: str) -> list[str]:
    """Which bounds the error of tensor `name` breaks."""
    digit = torch.finfo(torch.bfloat16).eps
    most = {
        "float64": Error(1e-10 if name == "out" else inf, 1e-10, 1e-10, 0, 0),
        "float32": Error(1e-5 if name == "out" else inf, 1e-4, 1e-4, 0, 0),
        # Parts that a kernel rounds to bfloat16 before they are merged cost a second rounding of the same size, at any
        # cp: a factor of sqrt(2). Where one rank is exact (a token that sees itself alone), a last digit may differ.
        "bfloat16": Error(inf, max(1.5 * one_rank.relative, digit / 4), max(2 * one_rank.worst, digit), 0, 0),
    }[dtype]
    over = [
        f"{kind} above {getattr(most, kind):.1e}"
        for kind in Error._fields[:3]
        if getattr(error, kind) > getattr(most, kind)
    ]
    return over if isfinite(error.largest) else ["not finite"]
