"""The fused, chunked, vocabulary-parallel loss against torch's cross-entropy on all logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megacp.config import ParallelConfig
from megacp.grid import Grid, Group
from megacp.loss import linear_cross_entropy
from tests.spawn import run

ALONE = Group((0,), 0)


def problem(tokens: int, width: int, vocab: int, padded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width, dtype=torch.float64), torch.randn(padded, width, dtype=torch.float64)
    return hidden, weight, torch.randint(vocab, (tokens,)), torch.randint(0, 2, (tokens,)).double()


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, vocab: int) -> tuple[Tensor, ...]:
    """(sum of losses, dhidden, dweight) from whole logits."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = (F.cross_entropy(hidden @ weight[:vocab].t(), labels, reduction="none") * mask).sum()
    total.backward()
    assert hidden.grad is not None and weight.grad is not None
    return total.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_size", [1, 7, 32, 100])
def test_equals_cross_entropy_of_whole_logits(chunk_size: int) -> None:
    hidden, weight, labels, mask = problem(32, 8, 50, 64)
    expected, dhidden, dweight = reference(hidden, weight, labels, mask, 50)
    hidden.requires_grad_()
    weight.requires_grad_()
    total, count = linear_cross_entropy(hidden, weight, labels, mask, ALONE, vocab_size=50, chunk_size=chunk_size)
    (3 * total).backward()
    torch.testing.assert_close(total.detach(), expected)
    assert count == mask.sum()
    torch.testing.assert_close(hidden.grad, 3 * dhidden)
    torch.testing.assert_close(weight.grad, 3 * dweight)
    assert weight.grad is not None and not weight.grad[50:].any()


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    total, _ = linear_cross_entropy(hidden, weight, torch.tensor([1, 0, 2]), torch.ones(3), ALONE, vocab_size=3)
    total.backward()
    assert total.item() == pytest.approx(4e4 + 1.0986, rel=1e-6)
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()


def test_masked_tokens_and_empty_input_give_zero() -> None:
    hidden, weight, labels, _ = problem(6, 4, 10, 10)
    hidden.requires_grad_()
    weight.requires_grad_()
    total, count = linear_cross_entropy(hidden, weight, labels, torch.zeros(6), ALONE, vocab_size=10)
    total.backward()
    assert total == 0 and count == 0
    assert hidden.grad is not None and not hidden.grad.any()
    total, count = linear_cross_entropy(hidden[:0], weight, labels[:0], torch.zeros(0), ALONE, vocab_size=10)
    assert total == 0 and count == 0


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight, labels, mask = problem(6, 4, 10, 10)
    with torch.no_grad():
        total, _ = linear_cross_entropy(hidden, weight.requires_grad_(), labels, mask, ALONE, vocab_size=10)
    assert not total.requires_grad


def test_a_second_backward_is_refused() -> None:
    hidden, weight, labels, mask = problem(6, 4, 10, 10)
    total, _ = linear_cross_entropy(hidden.requires_grad_(), weight, labels, mask, ALONE, vocab_size=10)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        total.backward()


def test_bfloat16_gradient_is_summed_in_float32() -> None:
    hidden, weight, labels, mask = problem(512, 16, 40, 40)
    _, _, exact = reference(hidden, weight, labels, mask, 40)
    low = weight.bfloat16().requires_grad_()
    total, _ = linear_cross_entropy(hidden.bfloat16(), low, labels, mask, ALONE, vocab_size=40, chunk_size=8)
    total.backward()
    assert total.dtype == torch.float32 and low.grad is not None and low.grad.dtype == torch.bfloat16
    assert (low.grad.double() - exact).norm() < 0.02 * exact.norm()


def on_rank(vocab: int, padded: int, sequence_parallel: bool) -> tuple[Tensor, ...]:
    """(total, count, dhidden, dweight) of this tp rank."""
    tp = Grid.create(ParallelConfig(tensor_model_parallel_size=torch.distributed.get_world_size())).tp
    hidden, weight, labels, mask = problem(24, 8, vocab, padded)
    own = hidden.chunk(tp.size)[tp.rank] if sequence_parallel else hidden
    own, weight = own.clone().requires_grad_(), weight.chunk(tp.size)[tp.rank].clone().requires_grad_()
    total, count = linear_cross_entropy(
        own, weight, labels, mask, tp, vocab_size=vocab, sequence_parallel=sequence_parallel, chunk_size=5
    )
    total.backward()
    assert own.grad is not None and weight.grad is not None
    return total.detach(), count, own.grad, weight.grad


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("ranks", "vocab"), [(2, 50), (4, 33)])
def test_tensor_parallel_equals_one_rank(ranks: int, vocab: int, sequence_parallel: bool) -> None:
    """33 of 64 rows over 4 ranks: the third has one row, the last none at all."""
    expected, dhidden, dweight = reference(*problem(24, 8, vocab, 64), vocab)
    results = run(on_rank, ranks, vocab, 64, sequence_parallel)
    for total, _, _, _ in results:
        torch.testing.assert_close(total, expected)
    parts = [result[2] for result in results]
    whole = torch.cat(parts) if sequence_parallel else parts[-1]
    torch.testing.assert_close(whole, dhidden)
    torch.testing.assert_close(torch.cat([result[3] for result in results]), dweight)
