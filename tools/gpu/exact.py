"""Attention against exact float64 references: the kernels span by span, TransformerEngine, and every exchange of ranks.

Legend: T query rows, S key rows, N query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megacp.attention import kernels, reference
from megacp.attention.core import build_attention
from megacp.attention.kernels import Gradients
from megacp.attention.spans import Mask, Span, Spans, self_spans, span
from megacp.batch import Batch, Sample, shard, token_index
from megacp.config import ModelConfig, ParallelConfig
from megacp.grid import CPGroup, Grid
from tools.gpu.comm import Exchanged, exchanges, pad, together
from tools.gpu.device import Device
from tools.gpu.report import Row, checked, failed

# Largest norm of an error over the norm of what is right, and a third of that for the worst row. A bf16 result alone is
# off by 0.002; one wrong key of a thousand would show as 0.03 in its row.
BOUNDS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
LSE_BOUND = 1e-3


class Case(NamedTuple):
    """Rows of q and of k, v [rows, N or K, D], of which `spans` are computed."""

    name: str
    spans: Spans
    rows: int
    keys: int
    heads: tuple[int, int]
    width: int


def cases(cuda: bool) -> list[Case]:
    """Sequences of 8*u tokens, spans at their ends, in their middle and with gaps between."""
    u, wide, narrow = (256, 128, 64) if cuda else (8, 16, 8)
    causal, full, window = Mask(None, 0), Mask(), Mask(u // 2, 0)
    lengths = (1, 3 * u + 5, u - 3, 2)
    room = pad(lengths, 8)
    whole, packed = 8 * u, sum(room)

    def visible(q: int, q_position: int, k: int, k_length: int, mask: Mask) -> Spans:
        """2*u queries against keys from the sequence's beginning on."""
        found = span(q, 2 * u, q_position, k, k_length, 0, mask)
        assert found is not None
        return Spans((found,))

    no_keys = Spans((Span(0, u, 0, 0), Span(u, 2 * u, u, 3 * u), Span(4 * u, 5, u, 0)))
    return [
        Case("dense causal", self_spans((whole,), (whole,), causal), whole, whole, (8, 8), wide),
        Case("dense causal MQA", self_spans((whole,), (whole,), causal), whole, whole, (8, 1), narrow),
        Case("dense full GQA", self_spans((whole,), (whole,), full), whole, whole, (8, 2), wide),
        Case("packed causal GQA", self_spans(lengths, room, causal), packed, packed, (8, 2), wide),
        Case("packed full GQA", self_spans(lengths, room, full), packed, packed, (8, 2), wide),
        Case("dense window", self_spans((whole,), (whole,), window), whole, whole, (8, 2), wide),
        Case("packed window", self_spans(lengths, room, window), packed, packed, (8, 2), wide),
        Case("packed two-sided window", self_spans(lengths, room, Mask(u, u // 4)), packed, packed, (8, 2), narrow),
        Case("prefix", visible(3, 4 * u, 5, 6 * u, causal), 3 * u, 7 * u, (8, 2), wide),
        Case("prefix seen whole", visible(0, 4 * u, u, 4 * u, causal), 2 * u, 6 * u, (8, 2), wide),
        Case("window on earlier keys", visible(7, 4 * u, 0, 4 * u, window), 3 * u, 5 * u, (8, 2), wide),
        Case("spans without keys", no_keys, 5 * u, 5 * u, (8, 2), wide),
    ]


def check_kernels(kind: str, tolerance: float) -> Iterator[Row]:
    device = Device(kind)
    for dtype in device.dtypes:
        for case in cases(device.cuda):
            name = f"{case.name}, {str(dtype).removeprefix('torch.')}"
            try:
                errors, lse = kernel_errors(case, device, dtype)
            except (ValueError, RuntimeError) as error:
                yield broken("kernels", name, error)
                continue
            yield checked("kernels", name, errors, BOUNDS[dtype] * tolerance)
            if not lse < LSE_BOUND * tolerance:
                yield checked("kernels", f"{name}, log-sum-exp", {"lse": lse}, LSE_BOUND * tolerance)


def broken(part: str, check: str, error: Exception) -> Row:
    """A failed row; raises the error again where it leaves nothing in this process that works."""
    if "CUDA error" in str(error):
        raise error
    return failed(part, check, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def kernel_errors(case: Case, device: Device, dtype: torch.dtype) -> tuple[dict[str, float], float]:
    """Errors of out, dq, dk, dv; largest absolute one of the log-sum-exp. Scores are scaled so that weights differ."""
    scale = 2 / math.sqrt(case.width)
    q, k, v, dout = inputs(case.rows, case.keys, case.heads, case.width, device, dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = exact(leaves[0], leaves[1], leaves[2], case.spans, scale)
    grads = torch.autograd.grad(wanted, leaves, dout.double())
    covered = torch.cat([torch.arange(s.q, s.q + s.q_length, device=q.device) for s in case.spans.spans])

    part, part_lse = kernels.forward(q, k, v, case.spans, scale)
    errors = {"out": relative_error(part, wanted.detach()[covered])}
    # Adding to sums that are not zero, as a ring does; the result alone must agree with it.
    out, lse = wanted.detach().to(dtype), wanted_lse.detach().to(part_lse.dtype)
    into = Gradients(*(torch.ones_like(x, dtype=part_lse.dtype) for x in (q, k, v)))
    kernels.backward(dout, q, k, v, out, lse, case.spans, scale, into)
    alone = kernels.backward(dout, q, k, v, out, lse, case.spans, scale)
    for name, summed, single, right in zip(("dq", "dk", "dv"), into, alone, grads, strict=True):
        errors[name] = max(relative_error(summed - 1, right), relative_error(single, right))
    return errors, lse_error(part_lse, wanted_lse.detach()[:, covered])


def inputs(
    rows: int, keys: int, heads: tuple[int, int], width: int, device: Device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [T, N, D], k and v [S, K, D], gradient of the output [T, N, D]; the same numbers on all ranks of a device."""
    generator = torch.Generator(device.kind).manual_seed(rows + keys)
    shapes = ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]), (rows, heads[0]))
    draw = partial(torch.randn, generator=generator, device=device.kind)
    q, k, v, dout = (draw(*shape, width).to(dtype) for shape in shapes)
    return q, k, v, dout


def exact(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """float64 out [T, N, D] and log-sum-exp [N, T]; rows outside the spans are 0 and -inf."""
    seen = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    for i, m, j, n, low, high in spans.spans:
        ahead = torch.arange(n, device=q.device)[None, :] - torch.arange(m, device=q.device)[:, None]
        band = torch.ones_like(ahead, dtype=torch.bool)
        band = band if low is None else band & (ahead >= low)
        seen[i : i + m, j : j + n] |= band if high is None else band & (ahead <= high)
    q, k, v = (x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q, k, v))
    scores = (scale * q @ k.transpose(1, 2)).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(2)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return (weights @ v).transpose(0, 1), lse


def relative_error(mine: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of `right` [rows, ..]; a third of the worst row's, if that is larger.

    A row counts by its own norm or the average row's, whichever is larger: where gradients cancel nothing is exact.
    """
    mine, right = mine.double().flatten(1), right.flatten(1)
    rows, norms = (mine - right).norm(dim=1), right.norm(dim=1)
    average = right.norm() / math.sqrt(len(right))
    worst = (rows / norms.clamp(min=average.item() + 1e-30)).max()
    whole = (rows.norm() / (norms.norm() + 1e-30)).item()
    return max(whole, worst.item() / 3)  # in this order: a nan anywhere is one in `whole`, and stays


def lse_error(mine: Tensor, right: Tensor) -> float:
    """Largest difference; infinite where only one of them is -inf."""
    empty = right == -torch.inf
    if not torch.equal(mine == -torch.inf, empty):
        return math.inf
    return (mine.double() - right).masked_fill(empty, 0.0).abs().max().item()


# --- through the choice of attention, over ranks


def check_te(kind: str, tolerance: float) -> Iterator[Row]:
    """TransformerEngine's attention, alone on one rank."""
    device, parallel = Device(kind), ParallelConfig()
    grid = Grid.create(parallel)
    for case in exchanges(kind, 1):
        try:
            squares = rank_errors(case, device, parallel, grid, "transformer_engine")
        except (ValueError, RuntimeError) as error:
            yield broken("te", case.name, error)
        else:
            yield checked("te", case.name, together([squares]), BOUNDS[device.dtype] * tolerance)


def model_of(heads: Sequence[int], width: int, **fields: Any) -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=width * heads[0],
        num_attention_heads=heads[0],
        num_query_groups=heads[1],
        vocab_size=8,
        **fields,
    )


def empty_batch(lengths: Sequence[int], room: Sequence[int], cp: CPGroup) -> Batch:
    """What the door gives this rank for a pack of these real and padded lengths."""
    real, offsets = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (lengths, room))
    blank = torch.zeros(sum(room))
    return shard(Sample(blank.long(), blank.long(), blank, real, offsets), cp)


def exchanged_errors(kind: str, size: int, todo: Sequence[Exchanged]) -> Iterator[dict[str, list[float]]]:
    """For each case, out and each gradient: squares of this rank's errors, of what is right, its worst row's error."""
    device, grids = Device(kind), {}
    for case in todo:
        levels = [2, size // 2] if case.comm_type == "a2a+p2p" else None
        key = str(levels)
        parallel = ParallelConfig(
            context_parallel_size=size, cp_comm_type=case.comm_type, hierarchical_context_parallel_sizes=levels
        )
        if key not in grids:
            grids[key] = Grid.create(parallel)
        yield rank_errors(case, device, parallel, grids[key])


def rank_errors(
    case: Exchanged, device: Device, parallel: ParallelConfig, grid: Grid, backend: str = "native"
) -> dict[str, list[float]]:
    fields: dict[str, Any] = {"attn_mask_type": case.mask, "window_size": case.window, "attention_backend": backend}
    model = model_of(case.heads, case.width, **fields)
    batch = empty_batch(case.lengths, case.room, grid.cp).to(device.kind)
    total, dtype = sum(case.room), device.dtype
    index = token_index(torch.tensor([0, *accumulate(case.room)]), grid.cp.rank, grid.cp.size).to(device.kind)
    real = torch.cat([torch.arange(b) < a for a, b in zip(case.lengths, case.room, strict=True)]).to(device.kind)
    q, k, v, dout = inputs(total, total, case.heads, case.width, device, dtype)
    dout *= real[:, None, None]

    whole = [x.double().requires_grad_() for x in (q, k, v)]
    with torch.device(device.kind):
        expected = reference.attention(
            *(whole[0], whole[1], whole[2], case.lengths, case.room), causal=case.mask == "causal", window=case.window
        )
    wanted = torch.autograd.grad(expected, whole, dout.double())
    local = [x[index].requires_grad_() for x in (q, k, v)]
    out = build_attention(model, parallel, 1, grid)(local[0], local[1], local[2], batch.packed, grid.cp)
    got = torch.autograd.grad(out, local, dout[index])

    here = real[index]
    pairs = {"out": (out.detach()[here], expected.detach()[index][here])}
    pairs |= {f"d{x}": (a, b[index]) for x, a, b in zip("qkv", got, wanted, strict=True)}
    average = {"out": expected.detach()[real].norm() / math.sqrt(int(real.sum()))}
    average |= {f"d{x}": b.norm() / math.sqrt(len(b)) for x, b in zip("qkv", wanted, strict=True)}
    return {name: _squares(mine, right, average[name]) for name, (mine, right) in pairs.items()}


def _squares(mine: Tensor, right: Tensor, average: Tensor) -> list[float]:
    mine, right = mine.double().flatten(1), right.flatten(1)
    rows, norms = (mine - right).norm(dim=1), right.norm(dim=1)
    worst = (rows / torch.maximum(norms, average)).max().item() if len(rows) else 0.0
    return [rows.square().sum().item(), norms.square().sum().item(), worst]
