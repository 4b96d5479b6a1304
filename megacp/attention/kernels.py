"""Attention over the keys at hand, with the log-sum-exp that lets partial results be merged, forward and backward.

`spans.Spans` say which rows see which; `forward` and `backward` compute, `merge_` joins results over different keys,
`attend` is the differentiable whole. Tensors are flat over sequences and read in place, by stride, without a copy of a
sequence.

Legend: T query rows, S key rows, N query heads, K key/value heads (K divides N), D head width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacp.attention.spans import Mask, Run, Spans

_cpu_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Gradients(NamedTuple):
    """Of q [T, N, D], k and v [S, K, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


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

    The results are those of the queries of `spans`, one span after the other; rows between spans are left out. On a CPU
    out is fp32 for lower precisions too: each part of a result that is rounded before it is merged adds an error. The
    kernels of a GPU return the dtype of the queries.
    """
    if not any(spans.k_lengths):
        shape, dtype = (spans.rows, *q.shape[1:]), statistics_dtype(q.dtype)
        return q.new_zeros(shape, dtype=dtype), q.new_full(shape[1::-1], -torch.inf, dtype=dtype)
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
    dtype: torch.dtype | None = None,
) -> Gradients:
    """Gradients of q, k, v through the attention of `spans`, from the *final* out [T, N, D] and log-sum-exp [N, T].

    Where a query has keys elsewhere too, the final statistics make this the exact share of the keys at hand
    (FlashAttention-2, Dao 2023). It is added to `into` if given, in its dtype; else rows outside the spans are 0, and
    the gradients of `dtype`, or that of the queries.
    """
    dtype = dtype or q.dtype
    if not any(spans.k_lengths):
        return into or Gradients(*(x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v)))
    q, k, v, dout = _readable(q), _readable(k), _readable(v), dout.contiguous()
    if q.is_cuda:
        total = _cuda_backward(dout, q, k, v, out, lse.t(), spans, scale, into, dtype)
    else:
        total = _cpu_backward(dout, q, k, v, out, lse.t(), spans, scale, into)
    return total if total is into else Gradients(*(x.to(dtype) for x in total))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Tensor:
        k, v = by_heads(k), by_heads(v)
        out, lse = forward(q, k, v, spans, scale)
        out = out.to(q.dtype)
        if not spans.covers(len(q)):
            part, part_lse = out, lse
            out, lse = q.new_zeros(q.shape), lse.new_zeros(lse.shape[0], len(q))
            spans.queries.put_(out, part)
            spans.queries.put_(lse, part_lse, dim=1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spans, ctx.scale = spans, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(dout, q, k, v, out, lse, ctx.spans, ctx.scale), None, None


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Tensor:
    """Differentiable attention of q [T, N, D] over k, v [S, K, D]; rows outside the spans give 0."""
    return _Attend.apply(q, k, v, spans, scale)


def by_heads(x: Tensor) -> Tensor:
    """Keys or values [S, K, D] as they are read fastest: on a CPU each head's rows in one piece of memory.

    What is read once or written, as queries and results, may lie by rows.
    """
    if x.is_cuda or x.stride(0) == x.shape[2]:
        return x
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def together(k: Tensor, v: Tensor) -> Tensor:
    """Copies of k and v [S, K, D] in one piece of memory, by heads: [2, K, S, D]."""
    return torch.stack((k.transpose(0, 1), v.transpose(0, 1)))


def rows_of(kv: Tensor) -> tuple[Tensor, Tensor]:
    """k and v [S, K, D], views of what `together` made."""
    k, v = kv.transpose(1, 2)
    return k, v


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


def _of_heads(x: Tensor, count: int, start: int, length: int, step: int) -> Tensor:
    """[count, n, length, ..] view of `count` stretches of rows of x [T, n, ..]: what the CPU kernels take."""
    row, head, *within = x.stride()
    size, stride = (count, x.shape[1], length, *x.shape[2:]), (step * row, head, row, *within)
    return x.as_strided(size, stride, x.storage_offset() + start * row)


def _query_heads(run: Run, x: Tensor) -> Tensor:
    return _of_heads(x, run.count, run.q, run.q_length, run.q_step)


def _key_heads(run: Run, x: Tensor) -> Tensor:
    return _of_heads(x, run.count, run.k, run.k_length, run.k_step)


@lru_cache(maxsize=32)
def _widest_band(rows: int, keys: int, low: int | None, high: int | None, dtype: torch.dtype) -> Tensor:
    """[rows, keys]: 0 where query i sees key j, i + low <= j <= i + high, else -inf."""
    ahead = torch.arange(keys) - torch.arange(rows)[:, None]
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if low is not None:
        seen &= ahead >= low
    if high is not None:
        seen &= ahead <= high
    return torch.zeros(rows, keys, dtype=dtype).masked_fill_(~seen, -torch.inf)


def _band(run: Run, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores of each span of the run, [q_length, k_length]; None where the kernel needs nothing.

    Bands with the same limits are the same but for where they end, so those of many sizes share one. `dtype` is that of
    the queries: an fp32 mask with fp64 queries is taken by the kernel, and misread.
    """
    if run.causal or (run.low is None and run.high is None):
        return None
    rows, keys = -(-run.q_length // 64) * 64, -(-run.k_length // 512) * 512
    return _widest_band(rows, keys, run.low, run.high, dtype)[: run.q_length, : run.k_length]


def _cpu_run(q: Tensor, k: Tensor, v: Tensor, run: Run, scale: float) -> tuple[Tensor, Tensor]:
    """One run -> out [count, q_length, N, D], log-sum-exp [count, q_length, N]."""
    if not run.k_length:
        # The kernel divides by the number of key blocks: without keys it would kill the process.
        shape = (run.count, run.q_length, q.shape[1])
        return q.new_zeros(*shape, q.shape[2]), q.new_full(shape, -torch.inf, dtype=statistics_dtype(q.dtype))
    operands = _query_heads(run, q), _key_heads(run, k), _key_heads(run, v)
    out, lse = _cpu_forward_kernel(*operands, 0.0, run.causal, attn_mask=_band(run, q.dtype), scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(statistics_dtype(q.dtype)) for x in (q, k, v))
    first, further = spans.passes
    outs, statistics = zip(*(_cpu_run(q, k, v, run, scale) for run in first), strict=True)
    out, lse = _joined(outs), _joined(statistics)
    for run in further:
        place = (run.count, run.part, run.q_length, run.part_step)
        merge_(_stretches(out, *place), _stretches(lse, *place), *_cpu_run(q, k, v, run, scale))
    return out, lse.t()


def join_on_cpu_(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> None:
    """Join attention of q [T, N, D] over k, v [S, K, D] into out [T, N, D] and lse [T, N] over other keys, in place."""
    q, k, v = (_readable(x).to(statistics_dtype(q.dtype)) for x in (q, k, v))
    first, further = spans.passes
    for run in (*first, *further):
        if run.k_length:
            merge_(query_rows(run, out), query_rows(run, lse), *_cpu_run(q, k, v, run, scale))


def _joined(parts: tuple[Tensor, ...]) -> Tensor:
    flat = [part.flatten(0, 1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _put_into_queries(run: Run, total: Tensor, share: Tensor, write: bool) -> None:
    """Write [count, q_length, ..] over the queries of a run, or add it."""
    rows = query_rows(run, total)
    rows.copy_(share) if write else rows.add_(share)


def _put_into_keys(run: Run, total: Tensor, share: Tensor, write: bool) -> None:
    """Write [count, k_length, ..] over the keys of a run, or add it.

    Not through a view that has a row twice: it loses shares.
    """
    sets = run.apart()
    for i, keys in enumerate(sets):
        rows, part = (
            _stretches(total, keys.count, keys.k, keys.k_length, keys.k_step),
            share if len(sets) == 1 else share[i :: len(sets)],
        )
        rows.copy_(part) if write else rows.add_(part)


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
    dout, q, k, v, out = (x.to(statistics_dtype(q.dtype)) for x in (dout, q, k, v, out))
    # Rows that the first runs meet once each are written by them, not added to.
    written = into is None and spans.tile(len(q), len(k))
    for at_first, runs in zip((True, False), spans.passes, strict=True):
        for run in (part for whole in runs if whole.k_length for part in whole.groups(2 * len(k))):
            of_keys = _key_heads(run, k), _key_heads(run, v)
            rows = *(_query_heads(run, x) for x in (dout, q)), *of_keys, *(_query_heads(run, x) for x in (out, lse))
            shares = _cpu_backward_kernel(*rows, 0.0, run.causal, attn_mask=_band(run, q.dtype), scale=scale)
            dq, dk, dv = (share.transpose(1, 2) for share in shares)
            write = written and at_first
            if write and (run.count * run.q_length, run.count * run.k_length) == (len(q), len(k)):
                into = Gradients(*(share.flatten(0, 1) for share in (dq, dk, dv)))
                continue
            into = into or Gradients(*((x.new_empty if written else x.new_zeros)(x.shape) for x in (q, k, v)))
            _put_into_queries(run, into.q, dq, write)
            _put_into_keys(run, into.k, dk, write)
            _put_into_keys(run, into.v, dv, write)
    assert into is not None
    return into


def _cuda_arguments(q: Tensor, spans: Spans, window: Mask) -> tuple[tuple[Any, ...], dict[str, int]]:
    """cum_seq_q, cum_seq_k, max_q, max_k, dropout, causal; and the window of the variable-length flash kernels."""
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[2] % 8 or q.shape[2] > 256:
        raise ValueError(
            f"flash attention on CUDA takes bfloat16 or float16 and a head width divisible by 8 up to 256, "
            f"got {q.dtype} and {q.shape[2]}"
        )
    max_q, max_k, limits = max(spans.q_lengths), max(spans.k_lengths), {}
    if window.windowed:
        # The kernel takes a limit of max_k or more for none, and where there is none on the right it puts max_k: wrong
        # for spans with more queries than keys, unless max_k is larger. Nothing but a grid grows with it.
        max_k = max(max_k, max_q)
        left, right = (-1 if limit is None else limit for limit in window)
        limits = {"window_size_left": left, "window_size_right": right}
    offsets = spans.queries.offsets(q.device), spans.keys.offsets(q.device)
    return (*offsets, max_q, max_k, 0.0, window == Mask(None, 0)), limits


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    if len(spans.by_window) == 1:
        return _cuda_window(q, k, v, spans, spans.by_window[0].window, scale)
    out = q.new_empty(spans.rows, *q.shape[1:])
    lse = q.new_empty(q.shape[1], spans.rows, dtype=torch.float32)
    for window, members, parts in spans.by_window:
        part, part_lse = _cuda_window(q, k, v, members, window, scale)
        parts.put_(out, part)
        parts.put_(lse, part_lse, dim=1)
    return out, lse


def _cuda_window(q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """`forward` of spans with one window."""
    arguments, limits = _cuda_arguments(q, spans, window)
    (q,), (k, v) = spans.queries.of(q), spans.keys.of(k, v)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *arguments, False, scale=scale, **limits)
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
    dtype: torch.dtype,
) -> Gradients:
    # Without dropout the random state, of these shapes, is not read.
    state = [torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ())]
    total, several = into, len(spans.by_window) > 1 or spans.keys.rows > len(k)
    for window, members, _ in spans.by_window:
        arguments, limits = _cuda_arguments(q, members, window)
        queries, keys = members.queries, members.keys
        (part_dout, part_q, part_out), (part_k, part_v) = queries.of(dout, q, out), keys.of(k, v)
        (part_lse,) = queries.of(lse.t(), dim=1)
        tensors = (part_dout, part_q, part_k, part_v, part_out, part_lse.contiguous())
        shares = torch.ops.aten._flash_attention_backward(*tensors, *arguments, *state, scale=scale, **limits)
        if total is None and queries.covers(len(q)) and keys.covers(len(k)):
            return Gradients(*shares)
        if total is None:
            # Sums of several shares are kept in fp32.
            total_dtype = statistics_dtype(q.dtype) if several else dtype
            total = Gradients(*(torch.zeros_like(x, dtype=total_dtype) for x in (q, k, v)))
        for rows, x, share in zip((queries, keys, keys), total, shares, strict=True):
            rows.add_(x, share)
    assert total is not None
    return total
