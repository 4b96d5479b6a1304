"""Layers cut over tensor-parallel ranks against the whole layer: outputs, gradients, initial weights, padding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacp.blocks import row_blocks, shard_of
from megacp.collectives import all_gather, all_reduce, reduce_scatter
from megacp.config import ModelConfig, ParallelConfig, TrainConfig
from megacp.grid import Grid, Group
from megacp.model.gpt import GPT
from megacp.model.parallel import ColumnLinear, Layout, RowLinear, VocabEmbedding, replicated_parameter, whole_weight
from tests.spawn import run
from tests.tiny import portable, whole

ALONE = Group((0,), 0)
T, H, F1, F2 = 8, 12, 8, 16
VOCAB, PADDED = 33, 64  # over 4 ranks of 16 rows: the third has one real row, the last none


def layout(sequence_parallel: bool = False, dtype: torch.dtype = torch.float64) -> Layout:
    """All ranks of this world as one tensor-parallel group."""
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    tp = Grid.create(ParallelConfig(tensor_model_parallel_size=size)).tp
    return Layout(tp, sequence_parallel and size > 1, dtype)


def values(name: str, shape: Sequence[int]) -> Tensor:
    """float64, the same on all ranks."""
    return whole_weight(name, shape, 1.0, seed=3).double()


def fill(module: nn.Module, scale: float = 1.0) -> None:
    """Random weights of any layout alike. Biases start at zero, which would hide a bias added twice."""
    for parameter in module.parameters():
        for block in row_blocks(shard_of(parameter), parameter.data, 0):
            place = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.tensor.shape, strict=True))
            block.tensor.copy_(scale * values(block.name, block.global_shape)[place])


def own(x: Tensor, layout: Layout) -> Tensor:
    """This rank's tokens of x between linear layers, as a leaf."""
    part = x.chunk(layout.tp.size)[layout.tp.rank] if layout.sequence_parallel else x
    return part.clone().requires_grad_()


def joined(x: Tensor, layout: Layout) -> Tensor:
    return all_gather(x, layout.tp) if layout.sequence_parallel else x


def gradient_blocks(module: nn.Module, tp: Group) -> list[tuple]:
    """Complete gradients: what a partial one still lacks is added up over tp."""
    blocks = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        shard, gradient = shard_of(parameter), parameter.grad
        if shard.partial_grad:
            gradient = all_reduce(gradient.clone(), tp)
        blocks += portable(row_blocks(shard, gradient, 0))
    return blocks


class Pair(nn.Module):
    """A column layer of two projections, something element-wise, a row layer."""

    def __init__(self, layout: Layout, bias: bool) -> None:
        super().__init__()
        self.first = ColumnLinear({"a": F1, "b": F2}, H, 0.1, layout, bias)
        self.second = RowLinear("c", F1, H, 0.1, layout, bias)
        self.widths = [F1 // layout.tp.size, F2 // layout.tp.size]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.first(x).split(self.widths, dim=-1)
        return self.second(a**2), b


def plain_pair(x: Tensor, bias: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    shapes = {"a.weight": (F1, H), "b.weight": (F2, H), "c.weight": (H, F1), "a.bias": (F1,), "b.bias": (F2,)}
    shapes["c.bias"] = (H,)
    weights = {name: values(name, shape).requires_grad_() for name, shape in shapes.items()}
    biases = {name: weights[f"{name}.bias"] if bias else None for name in "abc"}
    a, b = (F.linear(x, weights[f"{name}.weight"], biases[name]) for name in "ab")
    kept = {name: weight for name, weight in weights.items() if bias or name.endswith("weight")}
    return F.linear(a**2, weights["c.weight"], biases["c"]), b, kept


def pair_on_rank(bias: bool, sequence_parallel: bool) -> tuple:
    here = layout(sequence_parallel)
    module = Pair(here, bias)
    fill(module)
    x = own(values("x", (T, H)), here)
    y, b = module(x)
    weighting = own(values("dy", (T, H)), here)
    ((y * weighting).sum() + (b * values("db", (T, F2)).chunk(here.tp.size, dim=1)[here.tp.rank]).sum()).backward()
    assert x.grad is not None
    outputs = (joined(y.detach(), here), b.detach(), joined(x.grad, here))
    return outputs, gradient_blocks(module, here.tp)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_linear_layers_equal_whole_ones(ranks: int, sequence_parallel: bool, bias: bool) -> None:
    x = values("x", (T, H)).requires_grad_()
    y, b, weights = plain_pair(x, bias)
    ((y * values("dy", (T, H))).sum() + (b * values("db", (T, F2))).sum()).backward()
    results = run(pair_on_rank, ranks, bias, sequence_parallel)
    for (ours, _, dx), _ in results:
        torch.testing.assert_close(ours, y.detach())
        torch.testing.assert_close(dx, x.grad)
    torch.testing.assert_close(torch.cat([outputs[1] for outputs, _ in results], dim=1), b.detach())
    check_gradients([blocks for _, blocks in results], weights)


def check_gradients(ranks: list[list[tuple]], weights: dict[str, Tensor]) -> None:
    """Of every rank: replicated parameters end with the same gradient on all."""
    assert whole(ranks).keys() == weights.keys()
    for blocks in ranks:
        for name, _, offsets, gradient in blocks:
            place = tuple(slice(o, o + n) for o, n in zip(offsets, gradient.shape, strict=True))
            expected = weights[name].grad
            assert expected is not None
            np.testing.assert_allclose(gradient, expected[place].numpy(), rtol=1e-10, atol=1e-10, err_msg=name)
    for name, gradient in whole(ranks).items():
        assert not np.isnan(gradient).any(), name


def embed_on_rank(sequence_parallel: bool) -> tuple:
    here = layout(sequence_parallel)
    module = VocabEmbedding("word", VOCAB, PADDED, H, 0.1, here)
    fill(module)
    hidden = module(tokens())
    (hidden * own(values("dy", (T, H)), here)).sum().backward()
    assert module.weight.grad is not None
    first_padding = max(0, VOCAB - module.first)
    return (
        joined(hidden.detach(), here),
        module.weight.grad[first_padding:].any().item(),
        gradient_blocks(module, here.tp),
    )


def tokens() -> Tensor:
    """Of every rank's rows, some twice, the last of the vocabulary too."""
    return torch.tensor([0, 31, 16, 32, 15, 0, 32, 17])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_embedding_equals_a_whole_one(ranks: int, sequence_parallel: bool) -> None:
    weight = values("word.weight", (VOCAB, H)).requires_grad_()
    expected = weight[tokens()]
    (expected * values("dy", (T, H))).sum().backward()
    results = run(embed_on_rank, ranks, sequence_parallel)
    for hidden, padding_learns, _ in results:
        assert torch.equal(hidden, expected.detach())
        assert not padding_learns
    check_gradients([blocks for _, _, blocks in results], {"word.weight": weight})


def test_gradient_of_a_frequent_token_in_bfloat16() -> None:
    """A sum in bfloat16 stops growing at 256 times its terms."""
    module = VocabEmbedding("word", 4, 4, H, 0.1, Layout(ALONE, dtype=torch.bfloat16))
    module(torch.zeros(2000, dtype=torch.int64)).backward(torch.ones(2000, H).bfloat16())
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.bfloat16
    assert torch.all(module.weight.grad[0] == 2000)


def uneven_on_rank() -> str:
    try:
        reduce_scatter(torch.ones(6, 2), layout().tp)
    except ValueError as error:
        return str(error)
    return "no error"


def test_tokens_that_tp_does_not_divide_are_refused() -> None:
    """Rather than dropped: sequence parallelism cuts a rank's tokens evenly."""
    for message in run(uneven_on_rank, 4):
        assert "6" in message and "4" in message


def collectives_on_rank() -> tuple:
    tp = layout().tp
    mine = torch.arange(4.0).view(4, 1) + 10 * tp.rank
    transposed = (torch.arange(8.0).view(2, 4) + 100 * tp.rank).t()
    return (
        all_gather(mine[:2], tp),
        all_gather(transposed, tp),
        all_reduce(mine.clone(), tp),
        all_reduce(mine.clone(), tp, torch.distributed.ReduceOp.MAX),
        reduce_scatter(mine.clone(), tp),
    )


def test_collectives() -> None:
    for rank, (gathered, transposed, total, highest, scattered) in enumerate(run(collectives_on_rank, 2)):
        assert gathered.flatten().tolist() == [0, 1, 10, 11]
        assert torch.equal(transposed, torch.cat([torch.arange(8.0).view(2, 4).t() + 100 * r for r in (0, 1)]))
        assert total.flatten().tolist() == [10, 12, 14, 16]
        assert highest.flatten().tolist() == [10, 11, 12, 13]
        assert scattered.flatten().tolist() == [[10, 12], [14, 16]][rank]


# --- initial weights

MODEL = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=8,
    num_query_groups=4,
    ffn_hidden_size=64,
    vocab_size=VOCAB,
    make_vocab_size_divisible_by=PADDED,
    position_embedding_type="learned_absolute",
    max_position_embeddings=10,
    qk_layernorm=True,
    add_bias_linear=True,
)


def build(parallel: ParallelConfig, model: ModelConfig = MODEL, seed: int = 5) -> GPT:
    train = TrainConfig(global_batch_size=4, train_iters=1, seed=seed)
    return GPT(model, parallel, train, Grid.create(parallel), "cpu")


def saved(model: nn.Module) -> list[tuple]:
    return portable([b for p in model.parameters() for b in row_blocks(shard_of(p), p, 0)])


def initial_on_rank(tp: int, sequence_parallel: bool) -> tuple[list[tuple], float]:
    """Blocks, and the sum of all padding rows."""
    parallel = ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)
    model = build(parallel)
    assert model.head is not None
    padding = [module.weight[max(0, VOCAB - module.first) :] for module in (model.embedding.word, model.head)]
    return saved(model), sum(part.abs().sum().item() for part in padding)


@pytest.mark.parametrize(("ranks", "tp", "sequence_parallel"), [(2, 2, False), (4, 4, True), (2, 1, False)])
def test_the_start_does_not_depend_on_the_layout(ranks: int, tp: int, sequence_parallel: bool) -> None:
    expected = whole([saved(build(ParallelConfig()))])
    results = run(initial_on_rank, ranks, tp, sequence_parallel)
    assert all(padding == 0 for _, padding in results)
    got = whole([blocks for blocks, _ in results])
    assert got.keys() == expected.keys()
    for name in expected:
        assert np.array_equal(got[name], expected[name]), name
    for blocks, _ in results:  # replicated ones are equal on every rank, not only where the last one wrote
        for name, shape, _, tensor in blocks:
            assert tensor.shape != shape or np.array_equal(tensor, expected[name]), name


def test_padding_rows_are_never_saved() -> None:
    shapes = {name: tensor.shape for name, tensor in whole([saved(build(ParallelConfig()))]).items()}
    assert shapes["embedding.word.weight"] == shapes["head.weight"] == (VOCAB, 32)
    assert build(ParallelConfig()).embedding.word.weight.shape == (PADDED, 32)


def test_names_shapes_and_deviations() -> None:
    """Matrices std, those that write to the residual stream std / sqrt(2 * layers), norms 1, biases 0."""
    tensors = whole([saved(build(ParallelConfig()))])
    layer = {
        "attention.q.weight": ((32, 32), 0.02),
        "attention.k.weight": ((16, 32), 0.02),
        "attention.v.weight": ((16, 32), 0.02),
        "attention.o.weight": ((32, 32), 0.02 / math.sqrt(6)),
        "mlp.gate.weight": ((64, 32), 0.02),
        "mlp.up.weight": ((64, 32), 0.02),
        "mlp.down.weight": ((32, 64), 0.02 / math.sqrt(6)),
    }
    norms = {"attention_norm.weight": 32, "mlp_norm.weight": 32}
    norms |= {"attention.q_norm.weight": 4, "attention.k_norm.weight": 4}
    biases = {f"{name.removesuffix('weight')}bias": (shape[0],) for name, (shape, _) in layer.items()}
    matrices = {f"layers.{n}.{name}": value for n in range(3) for name, value in layer.items()}
    matrices |= dict.fromkeys(("embedding.word.weight", "head.weight"), ((VOCAB, 32), 0.02))
    matrices["embedding.position.weight"] = ((10, 32), 0.02)
    ones = {"final_norm.weight": 32} | {f"layers.{n}.{name}": size for n in range(3) for name, size in norms.items()}
    zeros = {f"layers.{n}.{name}": shape for n in range(3) for name, shape in biases.items()}
    assert tensors.keys() == matrices.keys() | ones.keys() | zeros.keys()
    for name, (shape, std) in matrices.items():
        assert tensors[name].shape == shape
        assert tensors[name].std() == pytest.approx(std, rel=5 / math.sqrt(2 * tensors[name].size)), name
    assert all(np.array_equal(tensors[name], np.ones(size)) for name, size in ones.items())
    assert all(np.array_equal(tensors[name], np.zeros(shape)) for name, shape in zeros.items())


def test_no_two_weights_and_no_two_seeds_are_alike() -> None:
    one, other = (whole([saved(build(ParallelConfig(), seed=seed))]) for seed in (5, 6))
    drawn = [tensors[name].flatten()[:16].tobytes() for tensors in (one, other) for name in one if one[name].ndim > 1]
    assert len(set(drawn)) == len(drawn)


def test_what_decays() -> None:
    model = build(ParallelConfig())
    decays = {p.name: shard.weight_decay for shard in map(shard_of, model.parameters()) for p in shard.pieces}
    assert all(decay == (not name.endswith("bias") and "norm" not in name) for name, decay in decays.items())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_partial_gradients_are_declared(sequence_parallel: bool) -> None:
    """Sequence parallelism makes all replicated ones partial; norms of a rank's own heads are so anyway."""
    tp = Layout(Group((0, 1), 0), sequence_parallel)
    plain, heads = (replicated_parameter("w", (4,), tp, own_heads=own_heads) for own_heads in (False, True))
    assert shard_of(plain).replicated and shard_of(heads).replicated
    assert shard_of(plain).partial_grad == sequence_parallel
    assert shard_of(heads).partial_grad
    assert not shard_of(replicated_parameter("w", (4,), Layout(ALONE), own_heads=True)).partial_grad
