"""The whole model against one written down plainly, against transformers, and against itself on other layouts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import accumulate, combinations
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacp.batch import Batch, Sample, shard
from megacp.blocks import row_blocks, shard_of
from megacp.config import ModelConfig, ParallelConfig, RopeScaling, TrainConfig
from megacp.data.pack import PackLayout, Row, pack
from megacp.grid import Grid
from megacp.loss import linear_cross_entropy
from megacp.model.gpt import GPT
from megacp.model.rope import inverse_frequencies
from tests.spawn import run
from tests.test_layer import bytes_kept
from tests.test_parallel import check_gradients, fill, gradient_blocks, joined, saved
from tests.tiny import whole

SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 29,
    "make_vocab_size_divisible_by": 16,
}
GPT2 = {
    "num_query_groups": 8,
    "normalization": "LayerNorm",
    "swiglu": False,
    "openai_gelu": True,
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 24,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
}
TASTES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": RopeScaling(type="llama3", factor=8.0, original_max_position_embeddings=8)},
    "llama-qk-norm-tied": {"qk_layernorm": True, "untie_embeddings_and_output_weights": False},
    "llama-wide-heads-qkv-bias": {"kv_channels": 6, "add_qkv_bias": True, "rotary_percent": 2 / 3},
    "llama-yarn": {"rope_scaling": RopeScaling(type="yarn", factor=4.0, original_max_position_embeddings=16)},
    "gpt2": GPT2,
    "gpt2-qk-norm-gelu": {**GPT2, "qk_layernorm": True, "openai_gelu": False},
    "no-positions": {"position_embedding_type": "none", "softmax_scale": 0.7},
}
LENGTHS, ROOM = (13, 8), (16, 8)


def config(taste: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig(**{**SIZES, **TASTES[taste], **changes})


def build(model: ModelConfig, parallel: ParallelConfig | None = None, dtype: str = "float64", **train: Any) -> GPT:
    parallel = parallel or ParallelConfig()
    settings = TrainConfig(global_batch_size=1, train_iters=1, params_dtype=dtype, **train)  # type: ignore[arg-type]
    return GPT(model, parallel, settings, Grid.create(parallel), "cpu")


def sample(ids: tuple[int, ...] = (7,), lengths: tuple[int, ...] = LENGTHS, room: tuple[int, ...] = ROOM) -> Sample:
    """Two sequences, the first padded by three tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(29, (sum(room),), generator=generator) for _ in range(2))
    offsets = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (lengths, room)]
    mask = torch.cat([(torch.arange(n) < real).float() for n, real in zip(room, lengths, strict=True)])
    return Sample(tokens, labels, mask, *offsets, ids=ids)


def alone(ids: tuple[int, ...] = (7,)) -> Batch:
    return shard(sample(ids), Grid.create(ParallelConfig()).cp)


def loss_of(model: GPT, hidden: Tensor, batch: Batch) -> Tensor:
    """Mean over supervised tokens."""
    assert batch.labels is not None and batch.loss_mask is not None
    total, count = linear_cross_entropy(
        hidden,
        model.output_weight,
        batch.labels,
        batch.loss_mask,
        model.layout.tp,
        vocab_size=model.config.vocab_size,
        sequence_parallel=model.layout.sequence_parallel,
    )
    return total / count


def backward(model: GPT, batch: Batch) -> list[Tensor]:
    """Loss and all gradients."""
    model.zero_grad()
    loss = loss_of(model, model(batch), batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


# --- a plain model


class Plain:
    """One sequence at a time, one head at a time, every formula written out; weights by their global names."""

    def __init__(self, model: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.config = model
        self.weights = weights

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].t()
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        if self.config.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + self.config.norm_epsilon).sqrt() * self.weights[f"{name}.weight"]
        return x + self.weights[f"{name}.bias"] if self.config.normalization == "LayerNorm" else x

    def rotated(self, head: Tensor) -> Tensor:
        """head [S, D]: pair (i, i + R/2) turned by position * frequency, as a complex number."""
        if self.config.position_embedding_type != "rope":
            return head
        frequencies = inverse_frequencies(self.config)
        half, scale = len(frequencies), self.config.rope_scaling
        length = 0.1 * torch.tensor(scale.factor).double().log() + 1 if scale.type == "yarn" else torch.tensor(1.0)
        turn = torch.polar(length.expand(len(head), half).double(), torch.arange(len(head))[:, None] * frequencies)
        pairs = torch.complex(head[:, :half], head[:, half : 2 * half]) * turn
        return torch.cat([pairs.real, pairs.imag, head[:, 2 * half :]], dim=1)

    def attention(self, x: Tensor, name: str) -> Tensor:
        dim, heads = self.config.head_dim, []
        q, k, v = (self.linear(x, f"{name}.{part}").split(dim, dim=1) for part in "qkv")
        for number, query in enumerate(q):
            group = number * len(k) // len(q)
            key = k[group]
            if self.config.qk_layernorm:
                query, key = self.norm(query, f"{name}.q_norm"), self.norm(key, f"{name}.k_norm")
            scores = self.rotated(query) @ self.rotated(key).t() * (self.config.softmax_scale or dim**-0.5)
            future = torch.ones(len(x), len(x)).triu(1).bool()
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[group])
        return self.linear(torch.cat(heads, dim=1), f"{name}.o")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        up = self.linear(x, f"{name}.up")
        if self.config.swiglu:
            gate = self.linear(x, f"{name}.gate")
            return self.linear(gate * gate.sigmoid() * up, f"{name}.down")
        return self.linear(F.gelu(up, approximate="tanh" if self.config.openai_gelu else "none"), f"{name}.down")

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.weights["embedding.word.weight"][tokens]
        if self.config.position_embedding_type == "learned_absolute":
            x = x + self.weights["embedding.position.weight"][: len(tokens)]
        for number in range(self.config.num_layers):
            name = f"layers.{number}"
            x = x + self.attention(self.norm(x, f"{name}.attention_norm"), f"{name}.attention")
            x = x + self.mlp(self.norm(x, f"{name}.mlp_norm"), f"{name}.mlp")
        return self.norm(x, "final_norm")

    def logits(self, tokens: Tensor) -> Tensor:
        return self.hidden(tokens) @ self.weights.get("head.weight", self.weights["embedding.word.weight"]).t()


def real(packed: Tensor) -> tuple[Tensor, ...]:
    """The tokens of each sequence, padding left out."""
    return tuple(part[:n] for part, n in zip(packed.split(ROOM), LENGTHS, strict=True))


def plain(model: ModelConfig) -> tuple[list[Tensor], list[Tensor], Tensor, dict[str, Tensor]]:
    """Hidden states and logits of both sequences, loss, weights with gradients: of the weights that `filled` gives."""
    tensors = whole([saved(filled(build(model)))])
    weights = {name: torch.from_numpy(tensor).requires_grad_() for name, tensor in tensors.items()}
    reference, whole_sample = Plain(model, weights), sample()
    hidden = [reference.hidden(tokens) for tokens in real(whole_sample.tokens)]
    logits = [reference.logits(tokens) for tokens in real(whole_sample.tokens)]
    loss = F.cross_entropy(torch.cat(logits), torch.cat(real(whole_sample.labels)))
    loss.backward()
    return [h.detach() for h in hidden], [x.detach() for x in logits], loss.detach(), weights


def filled(model: GPT) -> GPT:
    fill(model, 0.3)
    return model


def model_on_rank(model_config: ModelConfig, parallel: ParallelConfig, train: dict[str, Any]) -> tuple:
    model = filled(build(model_config, parallel, **train))
    batch = shard(sample(), Grid.create(parallel).cp)
    hidden = model(batch)
    loss = loss_of(model, hidden, batch)
    loss.backward()
    with torch.no_grad():
        logits = model.logits(hidden)
    return (
        joined(hidden.detach(), model.layout),
        logits,
        loss.detach(),
        gradient_blocks(model, model.layout.tp),
    )


def check_against_plain(model: ModelConfig, results: list[tuple]) -> None:
    hidden, logits, loss, weights = plain(model)
    for our_hidden, our_logits, our_loss, _ in results:
        torch.testing.assert_close(list(real(our_hidden)), hidden)
        torch.testing.assert_close(list(real(our_logits)), logits)
        torch.testing.assert_close(our_loss, loss)
    check_gradients([result[3] for result in results], weights)


@pytest.mark.parametrize("taste", TASTES)
def test_one_rank_equals_a_plain_model(taste: str) -> None:
    check_against_plain(config(taste), [model_on_rank(config(taste), ParallelConfig(), {})])


@pytest.mark.parametrize("taste", ["llama", "llama-qk-norm-tied", "gpt2-qk-norm-gelu"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_equal_a_plain_model(ranks: int, sequence_parallel: bool, taste: str) -> None:
    """Hidden states, logits, loss, and gradients: those of q and k norms are sums over ranks, of each its heads."""
    parallel = ParallelConfig(tensor_model_parallel_size=ranks, sequence_parallel=sequence_parallel)
    check_against_plain(config(taste), run(model_on_rank, ranks, config(taste), parallel, {}))


def learned_on_rank(length: int, parallel: ParallelConfig) -> tuple[Tensor, list[tuple]]:
    """Loss and gradients of one row as long as the table of positions."""
    grid = Grid.create(parallel)
    row = Row(np.arange(length + 1), np.empty(0, np.int64), length)
    packed = pack([row], [0], PackLayout(tp=grid.tp.size, sequence_parallel=parallel.sequence_parallel))
    assert int(shard(packed, grid.cp).position_ids.max()) >= length
    model, batch = filled(build(config("gpt2", max_position_embeddings=length), parallel)), shard(packed, grid.cp)
    loss = loss_of(model, model(batch), batch)
    loss.backward()
    return loss.detach(), gradient_blocks(model, grid.tp)


@pytest.mark.parametrize(("length", "ranks"), [(7, 1), (5, 2), (2, 4)])
def test_padding_past_the_learned_positions_changes_nothing(length: int, ranks: int) -> None:
    """An odd length is padded by one, and sequence-parallel ranks fill a pack: 2 tokens become 8 of 4 ranks."""
    parallel = ParallelConfig(tensor_model_parallel_size=ranks, sequence_parallel=ranks > 1)
    results = run(learned_on_rank, ranks, length, parallel)
    model, tokens = config("gpt2", max_position_embeddings=length), torch.arange(length + 1)
    tensors = whole([saved(filled(build(model)))])
    weights = {name: torch.from_numpy(tensor).requires_grad_() for name, tensor in tensors.items()}
    expected = F.cross_entropy(Plain(model, weights).logits(tokens[:-1]), tokens[1:])
    expected.backward()
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach())
    check_gradients([gradients for _, gradients in results], weights)


def test_logits_of_tensor_parallel_ranks_are_one() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True)
    first, *others = [result[1] for result in run(model_on_rank, 4, config(), parallel, {})]
    assert first.shape == (sum(ROOM), 29)
    assert all(torch.equal(first, other) for other in others)


def test_a_tied_gradient_is_that_of_both_uses() -> None:
    tied = filled(build(config(untie_embeddings_and_output_weights=False)))
    untied = filled(build(config()))
    assert tied.head is None and tied.output_weight is tied.embedding.word.weight and untied.head is not None
    untied.head.weight.data.copy_(untied.embedding.word.weight.data)
    loss, *_ = backward(tied, alone())
    torch.testing.assert_close(loss, backward(untied, alone())[0])
    assert untied.embedding.word.weight.grad is not None and untied.head.weight.grad is not None
    both = untied.embedding.word.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.word.weight.grad, both)


def test_bfloat16_is_near() -> None:
    for taste in ("llama", "gpt2"):
        loss, *gradients = backward(filled(build(config(taste))), alone())
        low_loss, *low_gradients = backward(filled(build(config(taste), dtype="bfloat16")), alone())
        assert low_loss.item() == pytest.approx(loss.item(), rel=0.02)
        for low, gradient in zip(low_gradients, gradients, strict=True):
            assert low.dtype == torch.bfloat16
            assert (low.double() - gradient).norm() < 0.1 * gradient.norm()


# --- transformers

LLAMA_NAMES = {
    "embedding.word.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"attention.{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def of_llama(name: str, theirs: Callable[[str], Tensor]) -> Tensor:
    """Our tensor `name` among theirs."""
    if not name.startswith("layers."):
        return theirs(LLAMA_NAMES[name])
    _, number, place = name.split(".", 2)
    module, _, kind = place.rpartition(".")
    return theirs(f"model.layers.{number}.{LLAMA_NAMES[module]}.{kind}")


GPT2_NAMES = {
    "embedding.word.weight": "wte.weight",
    "embedding.position.weight": "wpe.weight",
    "final_norm.weight": "ln_f.weight",
    "final_norm.bias": "ln_f.bias",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.o": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def of_gpt2(name: str, theirs: Callable[[str], Tensor]) -> Tensor:
    """Their matrices are transposed, and q, k, v one of them."""
    if not name.startswith("layers."):
        return theirs(f"transformer.{GPT2_NAMES[name]}")
    _, number, place = name.split(".", 2)
    module, _, kind = place.rpartition(".")
    part = "qkv".find(module[-1]) if module[:-1] == "attention." and module[-1] in "qkv" else None
    found = theirs(f"transformer.h.{number}.{'attn.c_attn' if part is not None else GPT2_NAMES[module]}.{kind}")
    found = found.t() if found.ndim == 2 else found
    return found if part is None else found.chunk(3)[part]


def transformers_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return LlamaForCausalLM(LlamaConfig(**hf_sizes(), rms_norm_eps=1e-5, rope_parameters=rope))


def transformers_qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return Qwen3ForCausalLM(Qwen3Config(**hf_sizes(), head_dim=6, rms_norm_eps=1e-5, rope_parameters=rope))


def hf_sizes() -> dict[str, Any]:
    sizes = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}


def transformers_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 29, "n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout))


@pytest.mark.parametrize(
    ("make", "theirs_of", "model"),
    [
        (transformers_llama, of_llama, config("llama")),
        (transformers_qwen3, of_llama, config("llama", rope_scaling=RopeScaling(), kv_channels=6, qk_layernorm=True)),
        (transformers_gpt2, of_gpt2, config("gpt2", ffn_hidden_size=128)),
    ],
)
def test_equals_the_model_of_transformers(
    make: Callable[[], nn.Module], theirs_of: Callable[[str, Callable[[str], Tensor]], Tensor], model: ModelConfig
) -> None:
    """Logits, loss and all gradients from the same random weights, in float32."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = make()
    for parameter in theirs.parameters():
        parameter.data.normal_(0.3 if parameter.ndim == 1 else 0.0, 0.3)
    ours = build(model, dtype="float32")
    blocks = [b for p in ours.parameters() for b in row_blocks(shard_of(p), p.data, 0)]
    for block in blocks:
        block.tensor.copy_(theirs_of(block.name, theirs.get_parameter).detach())
    tokens = torch.randint(29, (2, 12))
    offsets = torch.tensor([0, 12, 24], dtype=torch.int32)
    labels, mask = tokens.roll(-1, dims=1), torch.ones(2, 12)
    mask[:, -1] = 0
    batch = shard(
        Sample(tokens.flatten(), labels.flatten(), mask.flatten(), offsets, offsets), Grid.create(ParallelConfig()).cp
    )
    hidden = ours(batch)
    loss = loss_of(ours, hidden, batch)
    loss.backward()
    expected = theirs(input_ids=tokens, labels=tokens)
    expected.loss.backward()
    torch.testing.assert_close(ours.logits(hidden), expected.logits.flatten(0, 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)

    def gradient(name: str) -> Tensor:
        found = theirs.get_parameter(name).grad
        assert found is not None
        return found

    for parameter in ours.parameters():
        assert parameter.grad is not None
        for block in row_blocks(shard_of(parameter), parameter.grad, 0):
            torch.testing.assert_close(block.tensor, theirs_of(block.name, gradient), rtol=1e-3, atol=1e-5)


# --- recomputation and compilation

RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {"recompute_granularity": "full"},
    "full-of-one-layer": {"recompute_granularity": "full", "recompute_num_layers": 1},
    "core_attn": {"recompute_granularity": "selective"},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "both": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}


@pytest.mark.parametrize("taste", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", RECOMPUTE)
def test_recomputation_gives_the_same_with_dropout(kind: str, taste: str) -> None:
    model = config(taste, hidden_dropout=0.2)
    expected = backward(filled(build(model)), alone())
    ours = backward(filled(build(model, **RECOMPUTE[kind])), alone())
    assert len(ours) == len(expected)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(ours, expected, strict=True))


def test_recomputation_on_sequence_parallel_ranks() -> None:
    """The repeated forward pass communicates too, in the same order on all ranks."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    check_against_plain(config(), run(model_on_rank, 2, config(), parallel, RECOMPUTE["full"]))


def test_recomputation_keeps_less() -> None:
    def kept(kind: str | None) -> int:
        model = build(config(num_layers=4), **(RECOMPUTE[kind] if kind else {}))
        return bytes_kept(lambda: model(alone()), model)

    none, attention, mlp, both = kept(None), kept("core_attn"), kept("mlp"), kept("both")
    one, full = kept("full-of-one-layer"), kept("full")
    assert full < both < min(attention, mlp) and max(attention, mlp) < none
    assert full < one < none


def test_recomputation_is_for_training_alone() -> None:
    model = filled(build(config(hidden_dropout=0.2), **RECOMPUTE["full"])).eval()
    torch.testing.assert_close(model(alone()), filled(build(config()))(alone()))


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="torch.compile needs a C++ compiler")
def test_compiled_gives_the_same() -> None:
    """And compiles once: packs of other lengths, of other samples, and further layers bring nothing new."""
    import torch._dynamo

    torch.compiler.reset()
    model = config(hidden_dropout=0.2, num_query_groups=8, num_layers=3)
    eager, compiled = (filled(build(model, dtype="float32", compile=on)) for on in (False, True))
    for number, room in enumerate([(16, 8), (6, 6, 18), (24,), (2, 20)]):
        batch = shard(sample((number,), room, room), Grid.create(ParallelConfig()).cp)
        # The second length of a pack makes its size symbolic.
        with torch._dynamo.config.patch(error_on_recompile=number != 1):
            ours = backward(compiled, batch)
        for got, wanted in zip(ours, backward(eager, batch), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


# --- dropout


def dropped(model: GPT, batch: Batch) -> list[Tensor]:
    """What dropout kept after the embedding of ones, and the output of the model."""
    nn.init.ones_(model.embedding.word.weight)
    seen: list[Tensor] = []
    hook = model.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach() != 0))
    out = model(batch).detach()
    hook.remove()
    return [seen[0], out]


def dropped_on_rank(parallel: ParallelConfig) -> tuple[Tensor, ...]:
    model = filled(build(config(hidden_dropout=0.3), parallel))
    kept, _ = dropped(model, shard(sample(), Grid.create(parallel).cp))
    return kept, model(shard(sample(), Grid.create(parallel).cp)).detach()


def agreement(one: Tensor, other: Tensor) -> float:
    return (one == other).float().mean().item()


def test_dropout_is_shared_where_tokens_are() -> None:
    """Tensor-parallel ranks without sequence parallelism drop the same, as one rank does."""
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    expected, out = dropped_on_rank(ParallelConfig())
    assert expected.float().mean().item() == pytest.approx(0.7, abs=0.05)
    for kept, hidden in run(dropped_on_rank, 2, parallel):
        assert torch.equal(kept, expected)
        torch.testing.assert_close(hidden, out)


def test_dropout_differs_where_tokens_do() -> None:
    """Context-parallel and sequence-parallel ranks: independent masks agree on 0.7^2 + 0.3^2 of the values."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2)
    masks = [kept for kept, _ in run(dropped_on_rank, 4, parallel)]
    assert all(mask.shape == (sum(ROOM) // 4, 32) for mask in masks)
    for one, other in combinations(masks, 2):
        assert agreement(one, other) == pytest.approx(0.58, abs=0.13)


def test_dropout_follows_the_samples() -> None:
    """The same for the same ones in a new model, as after resume; another for others; none in evaluation."""
    kept, out = dropped(filled(build(config(hidden_dropout=0.3))), alone())
    model = filled(build(config(hidden_dropout=0.3)))
    other, _ = dropped(model, alone((8,)))
    assert agreement(kept, other) == pytest.approx(0.58, abs=0.08)
    again, same = dropped(model, alone())
    assert torch.equal(kept, again) and torch.equal(out, same)
    everything, clean = dropped(model.eval(), alone())
    assert everything.all()
    assert torch.equal(clean, dropped(filled(build(config())), alone())[1])


def test_every_place_drops_for_itself() -> None:
    """Embedding, and both branches of each layer."""
    places: list[str] = []

    class Noise:
        def __init__(self, *key: Any) -> None: ...

        def dropout(self, x: Tensor, probability: float, place: str) -> Tensor:
            places.append(place)
            return x

    model = build(config(hidden_dropout=0.3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megacp.model.gpt.Noise", Noise)
        model(alone())
    branches: Iterator[str] = (f"layers.{n}.{branch}" for n in range(2) for branch in ("attention", "mlp"))
    assert places == ["embedding", *branches]
