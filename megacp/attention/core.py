"""Choice of the attention of a layer. Every backend is called alike and reads everything else from the packed record.

Legend: T tokens of this rank, N query heads, K key/value heads (both of this tensor-parallel rank), D head width.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megacp.attention.ring import RingAttention
from megacp.batch import PackedSeqParams
from megacp.config import ModelConfig, ParallelConfig
from megacp.grid import CPGroup, Grid

# cp_comm_type -> the native attention that exchanges keys, values or heads that way.
NATIVE = {"p2p": RingAttention}


class CoreAttention(Protocol):
    """A module without weights of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, cp: CPGroup) -> Tensor:
        """q [T, N, D], k and v [T, K, D] -> [T, N, D], each token attending within its sequence over all ranks of `cp`.

        `packed` describes the whole pack; the local tokens are those of `batch.token_index`, in its order. With cp of
        size 1 nothing is communicated. ValueError if the pack does not describe the tensors.
        """
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, cp: CPGroup) -> Tensor: ...


def build_attention(
    model_config: ModelConfig, parallel_config: ParallelConfig, layer_number: int, grid: Grid
) -> CoreAttention:
    """The attention of layer `layer_number` (global, from 1, as in Megatron-LM).

    The CP group of a microbatch comes with the call, never from here: `grid` is for backends that bind static groups.
    """
    comm_type = parallel_config.cp_comm_type
    if not isinstance(comm_type, str):
        comm_type = comm_type[layer_number - 1]
    if model_config.attention_backend == "transformer_engine":
        raise ValueError("attention_backend transformer_engine is not available: use auto or native")
    if comm_type not in NATIVE:
        raise ValueError(f"cp_comm_type {comm_type} of layer {layer_number} is not available: use {', '.join(NATIVE)}")
    return NATIVE[comm_type](model_config)
