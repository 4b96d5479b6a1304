from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megacp.attention import kernels, reference
from megacp.attention.kernels import Gradients, attend
from megacp.attention.spans import Mask, Span, Spans, self_spans
from tests.spawn import run

GOLDEN = Path(__file__).parent / "golden"
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def inputs(
    rows: int, keys: int, heads: tuple[int, int], width: int, dtype: torch.dtype, device: str = "cpu"
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]), (rows, heads[0]))
    return [torch.randn(*shape, width, generator=generator).to(device, dtype) for shape in shapes]


def near(a: Tensor, b: Tensor, bound: float) -> bool:
    return bool((a.double() - b.double()).norm() <= bound * (b.double().norm() + 1))


def visible(spans: Spans, rows: int, keys: int) -> Tensor:
    """bool [rows, keys]"""
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for q, q_length, k, k_length, low, high in spans.spans:
        for i in range(q_length):
            begin, end = (
                0 if low is None else max(i + low, 0),
                k_length if high is None else min(i + high + 1, k_length),
            )
            seen[q + i, k + begin : k + end] = True
    return seen


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Exact out [T, N, D] and log-sum-exp [N, T], rows that see nothing 0 and -inf."""
    q, k, v = (x.double().transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q, k, v))
    scores = (scale * q @ k.transpose(1, 2)).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(2)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return (weights @ v).transpose(0, 1), lse


def of(*spans: tuple[int | None, ...]) -> Spans:
    """Spans from (q, q_length, k, k_length[, low, high])."""
    return Spans(tuple(Span(*each) for each in spans))  # pyright: ignore[reportArgumentType]


def whole(*lengths: int, mask: Mask) -> Spans:
    return self_spans(lengths, lengths, mask)


CAUSAL = Mask(None, 0)
SPANS = {
    "dense": whole(64, 64, mask=Mask()),
    "dense causal": whole(64, 64, mask=CAUSAL),
    "halved": whole(512, mask=CAUSAL),
    "halved rows": whole(256, 256, 256, mask=CAUSAL),
    "halved once": whole(5, 258, mask=CAUSAL),
    "second halves": of((8, 8, 0, 16), (24, 8, 16, 16)),
    "first half of keys": of((0, 16, 0, 8), (16, 16, 16, 8)),
    "equal neighbours": whole(4, 4, 4, 7, 7, mask=CAUSAL),
    "gaps apart": of((2, 3, 0, 5), (10, 9, 20, 2), (30, 1, 31, 9)),
    "uneven gaps": of((0, 4, 0, 5), (6, 4, 6, 5), (20, 4, 12, 5)),
    "no keys": of((0, 3, 0, 4), (3, 6, 4, 0), (9, 2, 4, 5)),
    "ones": whole(*[1] * 40, mask=CAUSAL),
    # Bands: windows, chunks against others, keys that several spans see.
    "narrow window": whole(600, 3, mask=Mask(150, 0)),
    "wide window": whole(700, mask=Mask(300, 0)),
    "window both ways": whole(450, 450, mask=Mask(20, 70)),
    "window of one": whole(70, 5, mask=Mask(0, 0)),
    "window of all": whole(70, 30, mask=Mask(100, 0)),
    "only later keys": whole(200, mask=Mask(0, None)),
    "few later keys": whole(200, 9, mask=Mask(None, 3)),
    "windowed rows": whole(*[24] * 30, mask=Mask(5, 1)),
    "cut keys": self_spans((3, 9, 40), (10, 12, 40), Mask(4, 1)),
    "prefix": of((0, 300, 0, 1000, None, 700), (300, 8, 0, 1000)),
    "short prefixes": of(*((8 * i, 8, 40 * i, 8 + 8 * i, None, 8 * i) for i in range(1, 5))),
    "earlier chunk": of((4, 260, 0, 260, 0), (264, 100, 160, 130, 30)),
    "earlier chunks": of((0, 27, 5, 27, 0), (32, 27, 69, 27, 0), (64, 20, 20, 20, -7)),
    "shared keys": of((0, 16, 0, 40), (16, 16, 0, 40), (32, 16, 20, 40), (48, 5, 4, 9)),
    "shared keys and others": of((0, 2, 0, 4), (2, 2, 2, 4)),
    "keys in other order": of((0, 10, 12, 12), (10, 10, 0, 12)),
    "more queries than keys": of((0, 40, 0, 12, None, 2), (40, 30, 12, 6, -24), (70, 3, 18, 2, None, 0)),
}


def extent(spans: Spans) -> tuple[int, int]:
    """Rows and keys that hold the spans."""
    return max(map(sum, zip(spans.q_starts, spans.q_lengths, strict=True))), max(
        map(sum, zip(spans.k_starts, spans.k_lengths, strict=True))
    )


@pytest.mark.parametrize("spans", SPANS.values(), ids=list(SPANS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward(spans: Spans, dtype: torch.dtype) -> None:
    check(spans, dtype, "cpu")


def check(spans: Spans, dtype: torch.dtype, device: str) -> None:
    bound, size = BOUNDS[dtype], extent(spans)
    for heads, spare in (((4, 4), (0, 0)), ((4, 2), (3, 0)), ((3, 1), (0, 2))):
        rows, keys = size[0] + spare[0], size[1] + spare[1]
        seen = visible(spans, rows, keys)
        q, k, v, dout = inputs(rows, keys, heads, 16, dtype, device)
        leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
        wanted, wanted_lse = dense(leaves[0], leaves[1], leaves[2], seen, 0.3)
        grads = torch.autograd.grad(wanted, leaves, dout.cpu().double())
        covered = spans.queries.index(torch.device("cpu"))

        part, part_lse = (x.cpu() for x in kernels.forward(q, k, v, spans, 0.3))
        assert part_lse.dtype == kernels.statistics_dtype(dtype)
        assert part.dtype == (dtype if device == "cuda" else part_lse.dtype)
        assert near(part, wanted[covered], bound)
        torch.testing.assert_close(part_lse.double(), wanted_lse[:, covered], atol=max(bound, 1e-6), rtol=1e-6)

        out, lse = wanted.detach().to(device, dtype), wanted_lse.detach().to(device, part_lse.dtype)
        got = kernels.backward(dout, q, k, v, out, lse, spans, 0.3)
        into = Gradients(*(torch.ones(x.shape, dtype=part_lse.dtype, device=device) for x in (q, k, v)))
        assert kernels.backward(dout, q, k, v, out, lse, spans, 0.3, into) is into
        wide = kernels.backward(dout, q, k, v, out, lse, spans, 0.3, dtype=torch.float64)
        for mine, added, precise, exact in zip(got, into, wide, grads, strict=True):
            assert mine.dtype == dtype and near(mine.cpu(), exact, bound)
            assert near(added.cpu() - 1, exact, bound)
            # Rounded once, at the end.
            assert precise.dtype == torch.float64 and torch.equal(precise.to(dtype), mine)


@pytest.mark.parametrize("mask", [CAUSAL, Mask(200, 0), Mask(70, None)], ids=str)
def test_cutting_changes_no_number(mask: Mask) -> None:
    """Attention in tiles and halves, joined by log-sum-exps, is that of one kernel call to the last digits."""
    q, k, v, _ = inputs(1024, 1024, (2, 1), 16, torch.float64)
    spans = self_spans((512, 512), (512, 512), mask)
    assert len(spans.passes[0] + spans.passes[1]) > 2
    out, lse = kernels.forward(q, k, v, spans, 0.2)
    wanted = dense(q, k, v, visible(spans, 1024, 1024), 0.2)
    torch.testing.assert_close((out, lse), wanted, atol=1e-13, rtol=1e-13)


def test_rows_without_spans() -> None:
    """Attention of chosen rows: elsewhere 0, and no gradient comes from there."""
    q, k, v, dout = inputs(30, 30, (4, 2), 8, torch.float32)
    spans = of((4, 6, 0, 9), (20, 5, 12, 8, None, 3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(leaves[0], leaves[1], leaves[2], spans, 0.3)
    grads = torch.autograd.grad(out, leaves, dout)
    inside = [*range(4, 10), *range(20, 25)]
    outside = [row for row in range(30) if row not in inside]
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wanted, _ = dense(exact[0], exact[1], exact[2], visible(spans, 30, 30), 0.3)
    assert (out[outside] == 0).all() and (grads[0][outside] == 0).all()
    assert near(out, wanted, 1e-6)
    for mine, correct in zip(grads, torch.autograd.grad(wanted, exact, dout.double()), strict=True):
        assert near(mine, correct, 1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_shares_of_common_keys_are_summed_in_fp32(device: str) -> None:
    """64 sets of queries see the same bf16 keys: a running sum in bf16 would lose what is small beside it."""
    spans = of(*((4 * i, 4, 0, 16) for i in range(64)))
    q, k, v, dout = inputs(256, 16, (2, 2), 16, torch.bfloat16, device)
    leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    wanted, lse = dense(leaves[0], leaves[1], leaves[2], visible(spans, 256, 16), 0.3)
    exact = torch.autograd.grad(wanted, leaves, dout.cpu().double())
    final = wanted.detach().to(device, torch.bfloat16), lse.detach().to(device, torch.float32)
    grads = kernels.backward(dout, q, k, v, *final, spans, 0.3)
    assert grads.v.dtype == torch.bfloat16
    assert (grads.v.cpu().double() - exact[2]).norm() < 4e-3 * exact[2].norm()


def test_views_are_read_in_place() -> None:
    """Slices of a fused projection, by their strides; a transposed head width is copied, not misread."""
    fused = torch.randn(64, 8, 16)
    q, k, v = fused.split([4, 2, 2], dim=1)
    spans = self_spans((30, 34), (30, 34), CAUSAL)
    expected = kernels.forward(q.contiguous(), k.contiguous(), v.contiguous(), spans, 0.25)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    for query in (q, turned):
        torch.testing.assert_close(kernels.forward(query, k, v, spans, 0.25), expected, atol=0, rtol=0)
    leaf = fused.clone().requires_grad_()
    q, k, v = leaf.split([4, 2, 2], dim=1)
    out = attend(q, k, v, spans, 0.25)
    # The gradient of a sum is one number expanded: every stride is 0.
    (grad,) = torch.autograd.grad(out.sum(), leaf, retain_graph=True)
    (again,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    assert torch.equal(grad, again)


def empty_inputs() -> list[list[int]]:
    """Shapes of results without queries, without keys, and without either; run apart, as the bare kernel would die."""
    shapes = []
    for spans, rows, keys in (
        (of(), 0, 5),
        (of((0, 4, 0, 0)), 4, 0),
        (self_spans((), (), CAUSAL), 0, 0),
    ):
        q, k, v, dout = inputs(rows, keys, (4, 2), 8, torch.float32)
        out, lse = kernels.forward(q, k, v, spans, 1.0)
        assert (out == 0).all() and (lse == -torch.inf).all()
        grads = kernels.backward(dout, q, k, v, out, lse, spans, 1.0)
        assert all((grad == 0).all() for grad in grads)
        shapes.append([*out.shape, *lse.shape, *(len(grad) for grad in grads)])
    return shapes


def test_empty_input_does_not_reach_the_kernel() -> None:
    (shapes,) = run(empty_inputs, 1)
    assert shapes == [[0, 4, 8, 4, 0, 0, 5, 5], [4, 4, 8, 4, 4, 4, 0, 0], [0, 4, 8, 4, 0, 0, 0, 0]]


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_merge_equals_golden(name: str) -> None:
    arrays = {
        key.split("/")[1]: torch.from_numpy(array)
        for key, array in np.load(GOLDEN / "te_ring_merge.npz").items()
        if key.startswith(name)
    }
    # TE keeps log-sum-exps as [b, N, S] and out as [b, S, N, D].
    out, lse = arrays["out_a"].clone(), arrays["lse_a"].transpose(1, 2).clone()
    kernels.merge_(out, lse, arrays["out_b"], arrays["lse_b"].transpose(1, 2))
    bound = 1e-5 if name == "float32" else 1e-12
    torch.testing.assert_close(lse, arrays["lse_merged"].transpose(1, 2), atol=bound, rtol=bound)
    torch.testing.assert_close(out, arrays["out_merged"], atol=bound, rtol=bound)


def test_merge_of_rows_without_keys() -> None:
    nothing, something = torch.full((1, 2), -torch.inf), torch.tensor([[0.5, -3.0]])
    zero, value = torch.zeros(1, 2, 4), torch.randn(1, 2, 4)
    for first, second in product(((zero, nothing), (value, something)), repeat=2):
        out, lse = first[0].clone(), first[1].clone()
        kernels.merge_(out, lse, *second)
        known = [x for x in (first, second) if x[1] is something]
        assert torch.equal(out, value if known else zero) or len(known) == 2
        assert torch.equal(lse, something if known else nothing) or len(known) == 2
        assert out.isfinite().all()
    # What is wrong must stay visible.
    out, lse = value.clone(), something.clone()
    kernels.merge_(out, lse, torch.full_like(value, torch.nan), torch.full_like(lse, torch.nan))
    assert out.isnan().all() and lse.isnan().all()


def test_padding_alone_is_finite() -> None:
    q, k, v, dout = inputs(24, 24, (2, 2), 8, torch.float32)
    for mask in (CAUSAL, Mask(), Mask(2, 0), Mask(1, 2), Mask(None, 1), Mask(0, 0)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(leaves[0], leaves[1], leaves[2], self_spans((3, 0, 9), (8, 4, 12), mask), 1.0)
        grads = torch.autograd.grad(out, leaves, dout)
        assert all(x.isfinite().all() for x in (out, *grads))
        window = [-1 if limit is None else limit for limit in mask]
        exact = reference.attention(
            q, k, v, (3, 0, 9), (8, 4, 12), causal=mask.right == 0, window=window, softmax_scale=1.0
        )
        real = [0, 1, 2, *range(12, 21)]
        torch.testing.assert_close(out[real].double(), exact[real], atol=1e-5, rtol=0)


class VariableLengthFlash:
    """What the CUDA kernels promise, on the CPU: offsets, log-sum-exp [N, T], +inf without keys, and their windows.

    A query sees `left` keys before and `right` after it where the last query and the last key of a sequence meet.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, scale: float, **limits: int
    ) -> tuple[Tensor, ...]:
        *shapes, dropout, causal, debug = arguments
        assert (dropout, debug) == (0.0, False) and q.is_contiguous()
        out, lse = dense(q, k, v, self.visible(q, k, *shapes, causal=causal, **limits), scale)
        lse = lse.float().masked_fill(lse == -torch.inf, torch.inf)
        return out.to(q.dtype), lse, torch.empty(2), torch.empty(0), torch.empty(0)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *arguments: Any,
        scale: float,
        **limits: int,
    ) -> tuple[Tensor, ...]:
        *shapes, dropout, causal, _, _ = arguments
        assert dropout == 0.0 and lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
        seen = self.visible(q, k, *shapes, causal=causal, **limits)
        groups = q.shape[1] // k.shape[1]
        heads = [
            x.double().transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (dout, q, k, v, out)
        ]
        dout, query, key, value, final = heads
        weights = (scale * query @ key.transpose(1, 2) - lse.double()[..., None]).exp().masked_fill(~seen, 0.0)
        dscores = scale * weights * (dout @ value.transpose(1, 2) - (dout * final).sum(-1, keepdim=True))
        shares = dscores @ key, dscores.transpose(1, 2) @ query, weights.transpose(1, 2) @ dout
        summed = [shares[0], *(share.unflatten(0, (-1, groups)).sum(1) for share in shares[1:])]
        return tuple(share.transpose(0, 1).to(q.dtype) for share in summed)

    def visible(
        self,
        q: Tensor,
        k: Tensor,
        q_offsets: Tensor,
        k_offsets: Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
    ) -> Tensor:
        lengths = [offsets.diff().tolist() for offsets in (q_offsets, k_offsets)]
        assert q_offsets.dtype == k_offsets.dtype == torch.int32
        assert max_q == max(lengths[0]) and max_k >= max(lengths[1])
        assert (int(q_offsets[-1]), int(k_offsets[-1])) == (len(q), len(k))
        left, right = window_size_left, 0 if causal else window_size_right
        # As flash_api.cpp does: limits past max_k are none, and one without the other is completed by max_k.
        left, right = (-1 if limit >= max_k else limit for limit in (left, right))
        if left < 0 <= right:
            left = max_k
        if right < 0 <= left:
            right = max_k
        seen = torch.zeros(len(q), len(k), dtype=torch.bool)
        for first_q, first_k, m, n in zip(q_offsets.tolist(), k_offsets.tolist(), *lengths, strict=False):
            for i in range(m):
                own = i + n - m
                begin, end = (0, n) if left < 0 else (max(own - left, 0), max(min(own + right + 1, n), 0))
                seen[first_q + i, first_k + begin : first_k + end] = True
        return seen


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("spans", SPANS.values(), ids=list(SPANS))
def test_cuda_arguments(spans: Spans, spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA path around its kernels: windows counted their way, gaps taken out, gradients put back."""
    flash = VariableLengthFlash()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash.backward)
    rows, keys = (size + spare for size in extent(spans))
    q, k, v, dout = inputs(rows, keys, (4, 2), 16, torch.bfloat16)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = dense(leaves[0], leaves[1], leaves[2], visible(spans, rows, keys), 0.3)
    exact = torch.autograd.grad(wanted, leaves, dout.double())
    covered = spans.queries.index(torch.device("cpu"))

    part, part_lse = kernels._cuda_forward(q, k, v, spans, 0.3)
    assert near(part, wanted[covered], 1e-2) and part_lse.dtype == torch.float32
    torch.testing.assert_close(part_lse.double(), wanted_lse[:, covered], atol=1e-5, rtol=1e-6)

    given = dout, q, k, v, wanted.detach().bfloat16(), wanted_lse.detach().float(), spans, 0.3
    sums = Gradients(*(torch.zeros(x.shape) for x in (q, k, v)))
    for into, dtype in ((None, torch.bfloat16), (None, torch.float32), (sums, torch.float32)):
        monkeypatch.setattr(kernels, "_cpu_backward", partial(kernels._cuda_backward, dtype=dtype))
        got = kernels.backward(*given, into, dtype)
        assert into is None or got is into
        for mine, correct in zip(got, exact, strict=True):
            assert mine.dtype == dtype and near(mine, correct, 1e-2)


def test_cuda_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real CUDA operators accept the arguments: under fake tensors they check them and give shapes."""
    # These methods ask for a build for CUDA even then; their operators do not.
    monkeypatch.setattr(Tensor, "copy_", lambda total, part: torch.ops.aten.copy_(total, part))
    monkeypatch.setattr(Tensor, "contiguous", lambda x: torch.ops.aten.contiguous(x))
    with FakeTensorMode():
        q, k = (torch.empty(24, n, 64, dtype=torch.bfloat16, device="cuda") for n in (4, 2))
        windows = of((0, 10, 0, 10, -3, 0), (10, 6, 2, 20), (16, 8, 16, 8, None, 0))
        assert len(windows.by_window) == 3
        for spans in (self_spans((10, 14), (10, 14), CAUSAL), self_spans((9, 14), (10, 14), Mask(3, 1)), windows):
            out, lse = kernels.forward(q, k, k, spans, 0.125)
            assert out.shape == q.shape and lse.shape == (4, 24) and lse.dtype == torch.float32
            grads = kernels.backward(out, q, k, k, out, lse, spans, 0.125)
            assert [x.shape for x in grads] == [q.shape, k.shape, k.shape] and grads[0].dtype == torch.bfloat16
        wide = torch.empty(24, 4, 20, device="cuda")
        with pytest.raises(
            ValueError, match="bfloat16 or float16 and a head width divisible by 8 up to 256, got torch.float32 and 20"
        ):
            kernels.forward(wide, wide, wide, spans, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("spans", SPANS.values(), ids=list(SPANS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward_on_gpu(spans: Spans, dtype: torch.dtype) -> None:
    check(spans, dtype, "cuda")
