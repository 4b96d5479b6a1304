"""Choice of the attention of a layer. Every backend is called alike and reads everything else from the packed record.

Legend: T tokens of this rank, N query heads, K key/value heads (both of this tensor-parallel rank), D head width.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megacp.attention.gather import GatherAttention
from megacp.attention.ring import RingAttention
from megacp.attention.te import TEAttention
from megacp.attention.ulysses import HierarchicalAttention, UlyssesAttention
from megacp.batch import PackedSeqParams
from megacp.config import ModelConfig, ParallelConfig
from megacp.grid import CPGroup, Grid

# cp_comm_type -> the native attention that exchanges keys, values or heads that way.
NATIVE = {
    "p2p": RingAttention,
    "all_gather": GatherAttention,
    "a2a": UlyssesAttention,
    "a2a+p2p": HierarchicalAttention,
}


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
    """The attention of layer `layer_number` (global, from 1, as in Megatron-LM), of its own cp_comm_type.

    The CP group of a microbatch comes with the call, never from here: `grid` is for backends that bind static groups.
    TransformerEngine is what a configuration names: auto is decided where the device and all layers are known
    (support_backend.backend_for), undecided it is native. ValueError for a type or a backend that is not there.
    """
    comm_type = parallel_config.layer_comm_types(model_config.num_layers)[layer_number - 1]
    if comm_type not in NATIVE:
        raise ValueError(f"cp_comm_type {comm_type} of layer {layer_number} is not known: use {', '.join(NATIVE)}")
    if model_config.attention_backend == "transformer_engine":
        return TEAttention(model_config, parallel_config, layer_number, grid)
    return NATIVE[comm_type](model_config)
