"""Attention over the keys at hand, with the log-sum-exp that lets partial results be merged, forward and backward.

`Spans` say which rows see which; `forward` and `backward` compute, `merge_` joins results over different keys, `attend`
is the differentiable whole. Tensors are flat over sequences and read in place, by stride: no sequence is copied first.

Legend: T query rows, S key rows, N query heads, K key/value heads (K divides N), D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

_cpu_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# The CPU kernel computes whole blocks of 512 keys along the diagonal. Halving a sequence skips most of what is masked
# there; beyond 1024 rows that is worth no more than its extra passes over memory, below 128 the products get too small.
SHORTEST_HALF, LONGEST_HALVED = 128, 1024


class Gradients(NamedTuple):
    """Of q [T, N, D], k and v [S, K, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


class Run(NamedTuple):
    """`count` spans of one shape, `q_step` and `k_step` rows apart: one call of a dense kernel.

    Its results belong at row `part`, `part + part_step`, .. of the result of all spans.
    """

    count: int
    q: int
    q_length: int
    q_step: int
    k: int
    k_length: int
    k_step: int
    part: int
    part_step: int
    causal: bool

    def below_diagonal(self, half: int) -> Run:
        """Second halves against first halves, once every sequence has been cut in stretches of `half` rows."""
        return Run(
            self.count * self.q_length // (2 * half),
            *(self.q + half, half, 2 * half),
            *(self.k, half, 2 * half),
            *(self.part + half, 2 * half),
            causal=False,
        )

    def halved(self) -> list[Run]:
        """The same attention with less of the masked triangle computed: the diagonal, then what lies below it."""
        half, below = self.q_length, []
        together = self.count == 1 or (self.q_step == self.q_length and self.k_step == self.k_length)
        if not (self.causal and together and self.q_length == self.k_length <= LONGEST_HALVED):
            return [self]
        while half % 2 == 0 and half // 2 >= SHORTEST_HALF:
            half //= 2
            below.append(self.below_diagonal(half))
        count = self.count * self.q_length // half
        diagonal = Run(count, self.q, half, half, self.k, half, half, self.part, half, True)
        return [diagonal, *below[::-1]] if below else [self]


@dataclass(frozen=True)
class Spans:
    """Queries [q_starts[i], q_starts[i] + q_lengths[i]) see the keys given likewise, and no others.

    With `causal`, query j of a span sees its keys 0..j, and a span has as many keys as queries. Spans do not overlap,
    neither in queries nor in keys. None has length 0 in queries; one without keys gives 0 and log-sum-exp -inf.
    """

    q_starts: tuple[int, ...]
    q_lengths: tuple[int, ...]
    k_starts: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool = False

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Neighbours of one shape at one distance, joined."""
        runs: list[Run] = []
        parts = accumulate(self.q_lengths, initial=0)
        spans = zip(self.q_starts, self.q_lengths, self.k_starts, self.k_lengths, parts, strict=False)
        for q, q_length, k, k_length, part in spans:
            last = runs[-1] if runs else None
            if last and (last.q_length, last.k_length) == (q_length, k_length):
                joined = last._replace(count=last.count + 1)
                if last.count == 1:
                    joined = joined._replace(q_step=q - last.q, k_step=k - last.k, part_step=q_length)
                if (joined.q + last.count * joined.q_step, joined.k + last.count * joined.k_step) == (q, k):
                    runs[-1] = joined
                    continue
            runs.append(Run(1, q, q_length, q_length, k, k_length, k_length, part, q_length, self.causal))
        return tuple(runs)

    @cached_property
    def halved_runs(self) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        """Runs that touch each query row once, and those that add to them."""
        halved = [run.halved() for run in self.runs]
        return tuple(runs[0] for runs in halved), tuple(run for runs in halved for run in runs[1:])


@lru_cache(maxsize=256)
def self_spans(lengths: tuple[int, ...], padded_lengths: tuple[int, ...], causal: bool) -> Spans:
    """Every sequence of a whole pack attends to itself.

    Padding ends a sequence: under a causal mask no real token sees it anyway; else its keys are cut off. A sequence of
    padding alone sees itself, so that every row has a finite result.
    """
    starts = tuple(accumulate(padded_lengths, initial=0))
    pack = [
        (start, real, padded) for start, real, padded in zip(starts, lengths, padded_lengths, strict=False) if padded
    ]
    begin, room = tuple(start for start, _, _ in pack), tuple(padded for _, _, padded in pack)
    keys = room if causal else tuple(real or padded for _, real, padded in pack)
    return Spans(begin, room, begin, keys, causal)


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join attention over further keys into `out` [.., T, N, D] and `lse` [.., T, N], in place, in their dtype.

    Their weights are the softmax of their log-sum-exps (Milakov & Gimelshein 2018; Ring Attention, Liu et al. 2023).
    Rows without keys on one side or on both (-inf) stay exact.
    """
    weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
    out.lerp_(part.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """What log-sum-exps and partial sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q [T, N, D] over k, v [S, K, D] -> out [rows, N, D], log-sum-exp [N, rows] (fp32; fp64 for fp64).

    The results are those of the queries of `spans`, one span after the other; rows between spans are left out.
    """
    if not any(spans.k_lengths):
        rows, heads, width = sum(spans.q_lengths), q.shape[1], q.shape[2]
        return q.new_zeros(rows, heads, width), q.new_full((heads, rows), -torch.inf, dtype=statistics_dtype(q.dtype))
    q, k, v = _readable(q), _readable(k), _readable(v)
    return _cuda_forward(q, k, v, spans, scale) if q.is_cuda else _cpu_forward(q, k, v, spans, scale)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Spans,
    scale: float,
    into: Gradients | None = None,
) -> Gradients:
    """Gradients of q, k, v through the attention of `spans`, from the *final* out [T, N, D] and log-sum-exp [N, T].

    Where a query has keys elsewhere too, the final statistics make this the exact share of the keys at hand
    (FlashAttention-2, Dao 2023). It is added to `into` if given, in its dtype; else rows outside the spans are 0.
    """
    if not any(spans.k_lengths):
        return into or Gradients(*map(torch.zeros_like, (q, k, v)))
    q, k, v, dout = _readable(q), _readable(k), _readable(v), dout.contiguous()
    compute = _cuda_backward if q.is_cuda else _cpu_backward
    return compute(dout, q, k, v, out, lse.t(), spans, scale, into)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Tensor:
        out, lse = forward(q, k, v, spans, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(dout, q, k, v, out, lse, ctx.spans, ctx.scale), None, None


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Tensor:
    """Differentiable attention over whole sequences at hand, [T, N, D]; `spans` must hold every row of q, in order."""
    return _Attend.apply(q, k, v, spans, scale)


def _readable(x: Tensor) -> Tensor:
    """Heads may be strided slices of a larger projection; only the width of a head must lie in one piece."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _stretches(x: Tensor, count: int, start: int, length: int, step: int) -> Tensor:
    """[count, length, ...] view of `count` stretches of rows of x."""
    row = x.stride(0)
    size, stride = (count, length, *x.shape[1:]), (step * row, *x.stride())
    return x.as_strided(size, stride, x.storage_offset() + start * row)


def query_rows(run: Run, x: Tensor) -> Tensor:
    """[count, q_length, ..] view of the run's rows of x [T, ..]."""
    return _stretches(x, run.count, run.q, run.q_length, run.q_step)


def key_rows(run: Run, x: Tensor) -> Tensor:
    """[count, k_length, ..] view of the run's rows of x [S, ..]."""
    return _stretches(x, run.count, run.k, run.k_length, run.k_step)


def _cpu_run(q: Tensor, k: Tensor, v: Tensor, run: Run, scale: float) -> tuple[Tensor, Tensor]:
    """One run -> out [count, q_length, N, D], log-sum-exp [count, q_length, N]."""
    if not run.k_length:
        # The kernel divides by the number of key blocks: without keys it would kill the process.
        shape = (run.count, run.q_length, q.shape[1])
        return q.new_zeros(*shape, q.shape[2]), q.new_full(shape, -torch.inf, dtype=statistics_dtype(q.dtype))
    operands = (query_rows(run, q), key_rows(run, k), key_rows(run, v))
    out, lse = _cpu_forward_kernel(*(x.transpose(1, 2) for x in operands), 0.0, run.causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    # Partial results below fp32 are not merged: rounding would grow with the number of parts.
    first, further = spans.halved_runs if q.dtype.itemsize >= 4 else (spans.runs, ())
    outs, statistics = zip(*(_cpu_run(q, k, v, run, scale) for run in first), strict=True)
    out, lse = _joined(outs), _joined(statistics)
    for run in further:
        place = (run.count, run.part, run.q_length, run.part_step)
        merge_(_stretches(out, *place), _stretches(lse, *place), *_cpu_run(q, k, v, run, scale))
    return out, lse.t()


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    flat = [part.flatten(0, 1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Spans,
    scale: float,
    into: Gradients | None,
) -> Gradients:
    first, further = spans.halved_runs if q.dtype.itemsize >= 4 else (spans.runs, ())
    for run in (*first, *further):
        if not run.k_length:
            continue
        views = (query_rows, query_rows, key_rows, key_rows, query_rows, query_rows)
        rows = [view(run, x).transpose(1, 2) for view, x in zip(views, (dout, q, k, v, out, lse), strict=True)]
        shares = [share.transpose(1, 2) for share in _cpu_backward_kernel(*rows, 0.0, run.causal, scale=scale)]
        if into is None and (run.count * run.q_length, run.count * run.k_length) == (len(q), len(k)):
            into = Gradients(*(share.flatten(0, 1) for share in shares))
            continue
        into = into or Gradients(*map(torch.zeros_like, (q, k, v)))
        for total, share, view in zip(into, shares, views[1:4], strict=True):
            view(run, total).add_(share)
    assert into is not None
    return into


@lru_cache(maxsize=16)
def _offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [b+1] cumulated lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@lru_cache(maxsize=16)
def row_index(starts: tuple[int, ...], lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 row numbers of all stretches, one after the other."""
    stretches = [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    return torch.cat(stretches).to(device)


def _compact(starts: tuple[int, ...], lengths: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
    """The stretches alone; the tensors themselves where nothing lies between them."""
    if sum(lengths) == len(tensors[0]) and all(map(int.__eq__, starts, accumulate(lengths, initial=0))):
        return tensors
    index = row_index(starts, lengths, tensors[0].device)
    return tuple(x.index_select(0, index) for x in tensors)


def _cuda_arguments(q: Tensor, spans: Spans) -> tuple[Any, ...]:
    """cum_seq_q, cum_seq_k, max_q, max_k, dropout, causal of the variable-length flash kernels."""
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] % 8 or q.shape[2] > 256:
        raise ValueError(
            f"flash attention on CUDA takes bfloat16 or float16 and a head width divisible by 8 up to 256, "
            f"got {q.dtype} and {q.shape[2]}"
        )
    q_offsets, k_offsets = _offsets(spans.q_lengths, q.device), _offsets(spans.k_lengths, q.device)
    return q_offsets, k_offsets, max(spans.q_lengths), max(spans.k_lengths), 0.0, spans.causal


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    arguments = _cuda_arguments(q, spans)
    (q,) = _compact(spans.q_starts, spans.q_lengths, q)
    k, v = _compact(spans.k_starts, spans.k_lengths, k, v)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *arguments, False, scale=scale)
    if 0 in spans.k_lengths:
        lse.masked_fill_(lse == torch.inf, -torch.inf)  # the kernel's sign for a row without keys
    return out, lse


def _cuda_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Spans,
    scale: float,
    into: Gradients | None,
) -> Gradients:
    arguments = _cuda_arguments(q, spans)
    queries, keys = (spans.q_starts, spans.q_lengths), (spans.k_starts, spans.k_lengths)
    whole = Gradients(q, k, v)
    dout, q, out, lse = _compact(*queries, dout, q, out, lse)
    k, v = _compact(*keys, k, v)
    # Without dropout the random state, of these shapes, is not read.
    state = [torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ())]
    shares = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse.t().contiguous(), *arguments, *state, scale=scale
    )
    if into is None and all(share.shape == x.shape for share, x in zip(shares, whole, strict=True)):
        return Gradients(*shares)
    into = into or Gradients(*map(torch.zeros_like, whole))
    for total, share, rows in zip(into, shares, (queries, keys, keys), strict=True):
        if len(share) == len(total):
            total.add_(share)
        else:
            total.index_add_(0, row_index(*rows, total.device), share.to(total.dtype))
    return into
