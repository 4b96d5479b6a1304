from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megacp.attention import kernels, reference
from megacp.attention.kernels import Gradients, Spans, attend, self_spans
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


def dense(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """Exact out [T, N, D] and log-sum-exp [N, T], rows outside the spans 0 and -inf."""
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    for i, m, j, n in zip(spans.q_starts, spans.q_lengths, spans.k_starts, spans.k_lengths, strict=True):
        block = torch.ones(m, n, dtype=torch.bool)
        seen[i : i + m, j : j + n] = block.tril() if spans.causal else block
    q, k, v = (x.double().transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q, k, v))
    scores = (scale * q @ k.transpose(1, 2)).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(2)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return (weights @ v).transpose(0, 1), lse


SPANS = {
    "dense": Spans((0, 64), (64, 64), (0, 64), (64, 64)),
    "dense causal": Spans((0, 64), (64, 64), (0, 64), (64, 64), causal=True),
    "halved": Spans((0,), (512,), (0,), (512,), causal=True),
    "halved rows": Spans((0, 256, 512), (256,) * 3, (0, 256, 512), (256,) * 3, causal=True),
    "halved once": Spans((0, 5), (5, 258), (0, 5), (5, 258), causal=True),
    "second halves": Spans((8, 24), (8, 8), (0, 16), (16, 16)),
    "first half of keys": Spans((0, 16), (16, 16), (0, 16), (8, 8)),
    "equal neighbours": Spans((0, 4, 8, 12, 19), (4, 4, 4, 7, 7), (0, 4, 8, 12, 19), (4, 4, 4, 7, 7), causal=True),
    "gaps apart": Spans((2, 10, 30), (3, 9, 1), (0, 20, 31), (5, 2, 9)),
    "uneven gaps": Spans((0, 6, 20), (4, 4, 4), (0, 6, 12), (5, 5, 5)),
    "no keys": Spans((0, 3, 9), (3, 6, 2), (0, 4, 4), (4, 0, 5)),
    "ones": Spans(tuple(range(40)), (1,) * 40, tuple(range(40)), (1,) * 40, causal=True),
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=list(SPANS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward(spans: Spans, dtype: torch.dtype) -> None:
    rows = max(a + b for a, b in zip(spans.q_starts, spans.q_lengths, strict=True)) + 3
    keys = max(a + b for a, b in zip(spans.k_starts, spans.k_lengths, strict=True)) + 2
    check(spans, rows, keys, dtype, "cpu")


def check(spans: Spans, rows: int, keys: int, dtype: torch.dtype, device: str) -> None:
    bound = BOUNDS[dtype]
    for heads in ((4, 4), (4, 2), (3, 1)):
        q, k, v, dout = inputs(rows, keys, heads, 16, dtype, device)
        leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
        wanted, wanted_lse = dense(leaves[0], leaves[1], leaves[2], spans, 0.3)
        grads = torch.autograd.grad(wanted, leaves, dout.cpu().double())
        covered = kernels.row_index(spans.q_starts, spans.q_lengths, torch.device("cpu"))

        part, part_lse = (x.cpu() for x in kernels.forward(q, k, v, spans, 0.3))
        assert part.dtype == dtype and part_lse.dtype == kernels.statistics_dtype(dtype)
        assert near(part, wanted[covered], bound)
        torch.testing.assert_close(part_lse.double(), wanted_lse[:, covered], atol=max(bound, 1e-6), rtol=1e-6)

        out, lse = wanted.detach().to(device, dtype), wanted_lse.detach().to(device, part_lse.dtype)
        got = kernels.backward(dout, q, k, v, out, lse, spans, 0.3)
        into = Gradients(*(torch.ones(x.shape, dtype=part_lse.dtype, device=device) for x in (q, k, v)))
        assert kernels.backward(dout, q, k, v, out, lse, spans, 0.3, into) is into
        for mine, added, exact in zip(got, into, grads, strict=True):
            assert mine.dtype == dtype and near(mine.cpu(), exact, bound)
            assert near(added.cpu() - 1, exact, bound)


def test_runs_are_joined() -> None:
    assert [len(SPANS[name].runs) for name in ("dense", "equal neighbours", "uneven gaps", "ones")] == [1, 2, 2, 1]
    first, further = SPANS["halved"].halved_runs
    assert [(run.count, run.q_length) for run in first] == [(4, 128)]
    assert [(run.count, run.q_length, run.k_length) for run in further] == [(2, 128, 128), (1, 256, 256)]


def test_halving_changes_no_number() -> None:
    """Two ways to the same attention, float64: cut along the diagonal, and in one kernel call."""
    q, k, v, _ = inputs(1024, 1024, (2, 1), 16, torch.float64)
    spans = self_spans((512, 512), (512, 512), True)
    out, lse = kernels.forward(q, k, v, spans, 0.2)
    wanted, wanted_lse = dense(q, k, v, spans, 0.2)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse), atol=1e-13, rtol=1e-13)


def test_views_are_read_in_place() -> None:
    """Slices of a fused projection, by their strides; a transposed head width is copied, not misread."""
    fused = torch.randn(64, 8, 16)
    q, k, v = fused.split([4, 2, 2], dim=1)
    spans = self_spans((30, 34), (30, 34), True)
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
        (Spans((), (), (), ()), 0, 5),
        (Spans((0,), (4,), (0,), (0,)), 4, 0),
        (self_spans((), (), True), 0, 0),
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
    for causal in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(leaves[0], leaves[1], leaves[2], self_spans((3, 0, 9), (8, 4, 12), causal), 1.0)
        grads = torch.autograd.grad(out, leaves, dout)
        assert all(x.isfinite().all() for x in (out, *grads))
        exact = reference.attention(q, k, v, (3, 0, 9), (8, 4, 12), causal=causal, softmax_scale=1.0)
        real = [0, 1, 2, *range(12, 21)]
        torch.testing.assert_close(out[real].double(), exact[real], atol=1e-5, rtol=0)


class VariableLengthFlash:
    """What the CUDA kernels promise, on the CPU: offsets, top to bottom, log-sum-exp [N, T], +inf without keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, scale: float) -> tuple[Tensor, ...]:
        q_offsets, k_offsets, max_q, max_k, dropout, causal, debug = arguments
        assert (dropout, debug) == (0.0, False) and q.is_contiguous()
        spans = self.spans(q, k, q_offsets, k_offsets, max_q, max_k, causal)
        out, lse = dense(q, k, v, spans, scale)
        lse = lse.float().masked_fill(lse == -torch.inf, torch.inf)
        return out.to(q.dtype), lse, torch.empty(2), torch.empty(0), torch.empty(0)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any, scale: float
    ) -> tuple[Tensor, ...]:
        q_offsets, k_offsets, max_q, max_k, dropout, causal, _, _ = arguments
        assert dropout == 0.0 and lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
        spans = self.spans(q, k, q_offsets, k_offsets, max_q, max_k, causal)
        return tuple(kernels._cpu_backward(dout, q, k, v, out, lse.t(), spans, scale, None))

    def spans(
        self, q: Tensor, k: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int, causal: bool
    ) -> Spans:
        lengths = [tuple(offsets.diff().tolist()) for offsets in (q_offsets, k_offsets)]
        assert q_offsets.dtype == k_offsets.dtype == torch.int32
        assert (max_q, max_k) == (max(lengths[0]), max(lengths[1]))
        assert (int(q_offsets[-1]), int(k_offsets[-1])) == (len(q), len(k))
        return Spans(tuple(q_offsets[:-1].tolist()), lengths[0], tuple(k_offsets[:-1].tolist()), lengths[1], causal)


@pytest.mark.parametrize("spans", SPANS.values(), ids=list(SPANS))
def test_cuda_arguments(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA path around its kernels: gaps taken out, gradients put back."""
    flash = VariableLengthFlash()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash.forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash.backward)
    rows = max(a + b for a, b in zip(spans.q_starts, spans.q_lengths, strict=True)) + 3
    keys = max(a + b for a, b in zip(spans.k_starts, spans.k_lengths, strict=True)) + 2
    q, k, v, dout = inputs(rows, keys, (4, 2), 16, torch.bfloat16)
    part, part_lse = kernels._cuda_forward(q, k, v, spans, 0.3)
    monkeypatch.undo()
    expected, expected_lse = kernels.forward(q, k, v, spans, 0.3)
    assert near(part, expected, 2e-2) and part_lse.dtype == torch.float32
    torch.testing.assert_close(part_lse, expected_lse, atol=2e-2, rtol=0)

    out, lse = (x.detach() for x in dense(q, k, v, spans, 0.3))
    arguments = dout, q, k, v, out.bfloat16(), lse.float().t(), spans, 0.3
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash.backward)
    for into in (None, Gradients(*(torch.zeros(x.shape) for x in (q, k, v)))):
        got = kernels._cuda_backward(*arguments, into)
        for a, b in zip(got, kernels._cpu_backward(*arguments, None), strict=True):
            assert near(a, b, 2e-2)


def test_cuda_shapes() -> None:
    """The real CUDA operators accept the arguments: under fake tensors they check them and give shapes."""
    with FakeTensorMode():
        q, k = (torch.empty(24, n, 64, dtype=torch.bfloat16, device="cuda") for n in (4, 2))
        spans = self_spans((10, 14), (10, 14), True)
        out, lse = kernels.forward(q, k, k, spans, 0.125)
        assert out.shape == q.shape and lse.shape == (4, 24) and lse.dtype == torch.float32
        grads = kernels.backward(out, q, k, k, out, lse, spans, 0.125)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape] and grads[0].dtype == torch.bfloat16
        wide = torch.empty(24, 4, 20, device="cuda")
        with pytest.raises(
            ValueError, match="bfloat16 or float16 and a head width divisible by 8 up to 256, got torch.float32 and 20"
        ):
            kernels.forward(wide, wide, wide, spans, 1.0)
    # Fake offsets must not be met again by a test on a real device.
    kernels._offsets.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("spans", SPANS.values(), ids=list(SPANS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_and_backward_on_gpu(spans: Spans, dtype: torch.dtype) -> None:
    rows = max(a + b for a, b in zip(spans.q_starts, spans.q_lengths, strict=True)) + 3
    keys = max(a + b for a, b in zip(spans.k_starts, spans.k_lengths, strict=True)) + 2
    check(spans, rows, keys, dtype, "cuda")
