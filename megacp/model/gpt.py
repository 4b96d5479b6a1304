"""GPT: embedding, layers, final norm; the head's product belongs to the loss, which never makes all logits at once.

Legend: T tokens of this rank, H hidden, V vocabulary. Under sequence parallelism the hidden state is [T/tp, H].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacp.attention.core import build_attention
from megacp.batch import Batch
from megacp.collectives import all_gather
from megacp.config import ModelConfig, ParallelConfig, TrainConfig
from megacp.grid import Grid
from megacp.model.layer import Layer, Noise, Norm
from megacp.model.parallel import Layout, VocabEmbedding, look_up, replicated_parameter
from megacp.model.rope import attention_factor, inverse_frequencies, rotary_table


class Embedding(nn.Module):
    """Word embedding plus, for GPT-2, learned positions."""

    def __init__(self, config: ModelConfig, layout: Layout):
        super().__init__()
        self.layout = layout
        std = config.init_method_std
        self.word = VocabEmbedding(
            "embedding.word", config.vocab_size, config.padded_vocab_size, config.hidden_size, std, layout
        )
        self.position = None
        if config.position_embedding_type == "learned_absolute":
            shape = (config.max_position_embeddings or 0, config.hidden_size)
            self.position = replicated_parameter("embedding.position.weight", shape, layout, std=std)

    def forward(self, batch: Batch) -> Tensor:
        assert batch.tokens is not None
        hidden = self.word(batch.tokens)
        if self.position is None:
            return hidden
        # Padding may reach past the last row; nobody sees it and its weight is 0.
        positions = own_tokens(batch.position_ids, self.layout).clamp(max=len(self.position) - 1)
        return hidden + look_up(positions, self.position)


def own_tokens(per_token: Tensor, layout: Layout) -> Tensor:
    """[T, ...] -> the rows that this tp rank works on between the linear layers: all, or T/tp of them."""
    if not layout.sequence_parallel or layout.tp.size == 1:
        return per_token
    return per_token.chunk(layout.tp.size)[layout.tp.rank]


class GPT(nn.Module):
    """forward(batch) -> hidden state after the final norm, [T, H] (or [T/tp, H])."""

    frequencies: Tensor | None

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
        grid: Grid,
        device: str,
        draw: bool = True,
    ):
        """`draw=False` leaves the weights zero, for a checkpoint to fill."""
        super().__init__()
        self.config = config
        self.layout = layout = Layout(
            tp=grid.tp,
            sequence_parallel=parallel.sequence_parallel and grid.tp.size > 1,
            dtype=getattr(torch, train.params_dtype),
            device=device,
            seed=train.seed,
            draw=draw,
        )
        self.embedding = Embedding(config, layout)
        self.layers = nn.ModuleList(
            Layer(number, config, layout, build_attention(config, parallel, number + 1, grid))
            for number in range(config.num_layers)
        )
        self.final_norm = Norm("final_norm", config.hidden_size, config, layout)
        self.head = None
        if config.untie_embeddings_and_output_weights:
            size = (config.vocab_size, config.padded_vocab_size, config.hidden_size)
            self.head = VocabEmbedding("head", *size, config.init_method_std, layout)
        self.recomputed_layers = 0
        self._choose_recomputation(train)
        frequencies = inverse_frequencies(config).to(device) if config.position_embedding_type == "rope" else None
        self.register_buffer("frequencies", frequencies, persistent=False)
        if train.compile:
            self._compile()

    @property
    def output_weight(self) -> nn.Parameter:
        """Head [Vp/tp, H]; the embedding's own when tied."""
        return (self.head or self.embedding.word).weight

    def forward(self, batch: Batch) -> Tensor:
        stream = (batch.cp.rank, self.layout.tp.rank if self.layout.sequence_parallel else 0)
        noise = Noise(self.layout.seed, batch.ids, stream)
        turn = self._turn(batch)
        hidden = self.embedding(batch)
        if self.training and self.config.hidden_dropout:
            hidden = noise.dropout(hidden, self.config.hidden_dropout, "embedding")
        for number, layer in enumerate(self.layers):
            if self.training and number < self.recomputed_layers:
                hidden = checkpoint(layer, hidden, turn, batch, noise, use_reentrant=False, preserve_rng_state=False)
            else:
                hidden = layer(hidden, turn, batch, noise)
        return self.final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] (or [T/tp, H]) -> [T, V] on every tp rank, padded vocabulary cut off. For generation, not training."""
        if self.layout.sequence_parallel:
            hidden = all_gather(hidden, self.layout.tp)
        columns = (hidden @ self.output_weight.t()).t()
        return all_gather(columns, self.layout.tp).t()[:, : self.config.vocab_size]

    def _turn(self, batch: Batch) -> Tensor | None:
        if self.frequencies is None:
            return None
        factor = attention_factor(self.config.rope_scaling)
        return rotary_table(batch.position_ids, self.frequencies, factor, self.layout.dtype)

    def _choose_recomputation(self, train: TrainConfig) -> None:
        if train.recompute_granularity == "full":
            self.recomputed_layers = train.recompute_num_layers or len(self.layers)
        elif train.recompute_granularity == "selective":
            for layer in self.layers:
                assert isinstance(layer, Layer)
                layer.attention.recompute_core = "core_attn" in train.recompute_modules
                layer.recompute_mlp = "mlp" in train.recompute_modules

    def _compile(self) -> None:
        """Compile the layers but for what is new in every microbatch, which would be compiled anew each time.

        Attention depends on the lengths of the pack, dropout on the samples (and each layer's on its name).
        """
        for layer in self.layers:
            assert isinstance(layer, Layer)
            core = layer.attention.core
            core.forward = torch.compiler.disable(core.forward)  # type: ignore[method-assign]
            if self.config.hidden_dropout:
                layer.drop = torch.compiler.disable(layer.drop)  # type: ignore[method-assign]
            layer.compile()
