"""TransformerEngine's attention behind the protocol of core.py: the only file that imports TE and binds its CP group.

TE is told its ranks before a call: they are bound anew when a microbatch is shared by others than the last one. Which
arguments there are depends on the release, and new ones were put between old ones: all go by keyword.

Legend: T tokens of this rank, N query heads, K key/value heads (both of this tensor-parallel rank), D head width.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import lcm
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megacp.batch import PackedSeqParams, token_index
from megacp.config import ModelConfig, ParallelConfig
from megacp.grid import CPGroup, Grid
from megacp.support_backend import EXCHANGES, FIRST_RELEASE, has, te_version

# Arguments that may be missing: what an older release does without being told.
IMPLIED: dict[str, tuple[Any, ...]] = {"cp_comm_type": ("p2p",), "pad_between_seqs": (True, False)}
NATIVE = "use attention_backend native"


def load() -> tuple[type[nn.Module], str]:
    """TE's DotProductAttention and its release. ValueError where TE is missing, or does not load with this PyTorch."""
    version = te_version()
    if version is None:
        raise ValueError(f"TransformerEngine is not installed: pip install -e '.[te]', or {NATIVE}")
    try:
        from transformer_engine.pytorch import DotProductAttention
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"TransformerEngine {version} cannot be loaded ({reason}): install it anew for this PyTorch, or {NATIVE}"
        ) from error
    return DotProductAttention, version


@lru_cache(maxsize=16)
def real_rows(
    lengths: tuple[int, ...], padded_lengths: tuple[int, ...], rank: int, size: int, device: torch.device
) -> Tensor:
    """bool [T, 1, 1]: which tokens of a rank are no padding."""
    offsets = torch.tensor([0, *accumulate(padded_lengths)])
    pack = [torch.arange(padded) < real for real, padded in zip(lengths, padded_lengths, strict=True)]
    return torch.cat(pack)[token_index(offsets, rank, size)].to(device)[:, None, None]


class TEAttention(nn.Module):
    """Attention of one layer by transformer_engine.pytorch.DotProductAttention.

    That takes only as many key/value heads as it was made for. a2a needs them in a multiple of its ranks, which may
    change from one microbatch to the next, so there is one for each such number; they hold no weights. ValueError for
    what the installed release does not have.
    """

    # TE computes every other ring step on it. One is enough: layers wait for each other anyway.
    cp_stream: ClassVar[Any] = None

    def __init__(self, model_config: ModelConfig, parallel_config: ParallelConfig, layer_number: int, grid: Grid):
        """`layer_number` counts from 1 over the whole model."""
        super().__init__()
        self.make, self.version = load()
        self.config = model_config
        self.layer_number = layer_number
        self.tp = grid.tp
        self.comm_type = parallel_config.layer_comm_types(model_config.num_layers)[layer_number - 1]
        self.attentions = nn.ModuleDict()
        self.bound: dict[str, tuple[int, ...]] = {}
        # A group may exist without being meant: whether sequences are shared is for the configuration to say.
        alone = CPGroup((grid.cp.ranks[grid.cp.rank],), 0)
        self.bind(grid.cp if parallel_config.context_parallel_size > 1 else alone)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, cp: CPGroup) -> Tensor:
        total = sum(packed.padded_lengths)
        if total != len(q) * cp.size or len(k) != len(q):
            raise ValueError(
                f"a pack of {total} tokens over {cp.size} ranks does not lie in {len(q)} queries and {len(k)} keys a "
                "rank"
            )
        if not len(q):
            return q
        attention, copies = self.bind(cp), self.kv_heads(cp) // k.shape[1]
        if copies > 1:
            # Copies of a head lie together: query head n still meets key head n*K//N. Autograd sums their gradients.
            k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        if packed.qkv_format == "sbhd":
            return self._rows(attention, q, k, v, len(packed.lengths))
        return self._packed(attention, q, k, v, packed, cp)

    def _rows(self, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
        """Equal rows without padding, [b*s, n, D] -> [b*s, N, D]: flat tokens are TE's [b, s, n, D] as they lie."""
        query, key, value = (x.unflatten(0, (rows, -1)) for x in (q, k, v))
        out = attention(
            query_layer=query,
            key_layer=key,
            value_layer=value,
            qkv_format="bshd",
            attn_mask_type=self.config.attn_mask_type,
        )
        return out.reshape(q.shape)

    def _packed(
        self, attention: nn.Module, q: Tensor, k: Tensor, v: Tensor, packed: PackedSeqParams, cp: CPGroup
    ) -> Tensor:
        """Offsets stay those of the whole pack: TE divides them by the ranks itself."""
        offsets: dict[str, Any] = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_kv": packed.cu_seqlens_kv}
        if packed.cu_seqlens_q_padded is not None:
            offsets["cu_seqlens_q_padded"] = packed.cu_seqlens_q_padded
            offsets["cu_seqlens_kv_padded"] = packed.cu_seqlens_kv_padded
        padded = packed.lengths != packed.padded_lengths
        real = None
        if padded:
            # TE leaves in rows of padding what memory held before, in results and in gradients.
            real = real_rows(packed.lengths, packed.padded_lengths, cp.rank, cp.size, q.device)
            q, k, v = (torch.where(real, x, 0) for x in (q, k, v))
        out = attention(
            query_layer=q,
            key_layer=k,
            value_layer=v,
            qkv_format="thd",
            attn_mask_type="padding_causal" if self.config.attn_mask_type == "causal" else "padding",
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_kv=packed.max_seqlen_kv,
            **offsets,
            **self._known(pad_between_seqs=padded),
        ).reshape(q.shape)
        return out if real is None else torch.where(real, out, 0)

    def kv_heads(self, cp: CPGroup) -> int:
        """How many key/value heads TE gets over `cp`: K, or copies of them that all-to-alls can deal."""
        comm_type, _ = self._exchange(cp)
        ranks = {"a2a": cp.size, "a2a+p2p": cp.levels[0].size if cp.levels else 1}.get(comm_type, 1)
        heads = self.config.num_attention_heads // self.tp.size
        if heads % ranks:
            raise ValueError(
                f"cp_comm_type {comm_type} cannot deal {heads} query heads (of a tensor-parallel rank) over {ranks} "
                "ranks: use p2p or all_gather"
            )
        return lcm(self.config.kv_heads // self.tp.size, ranks)

    def bind(self, cp: CPGroup) -> nn.Module:
        """TE's module for the ranks of `cp`, which it knows from here on."""
        heads = self.kv_heads(cp)
        name = str(heads)
        if name not in self.attentions:
            self.attentions[name] = self._build(heads, cp).train(self.training)
        elif self.bound[name] != cp.ranks:
            self.attentions[name].set_context_parallel_group(**self._binding(cp))  # type: ignore[operator]
        self.bound[name] = cp.ranks
        return self.attentions[name]

    def _build(self, kv_heads: int, cp: CPGroup) -> nn.Module:
        """A DotProductAttention; TE counts all heads and divides them by tp itself."""
        config, tp = self.config, self.tp
        left, right = config.window_size or (-1, -1)
        asked: dict[str, Any] = {}
        if config.softmax_type != "vanilla":
            asked["softmax_type"] = config.softmax_type
        if config.attn_logit_softcapping is not None:
            asked["softcap"] = config.attn_logit_softcapping
        return self.make(
            num_attention_heads=config.num_attention_heads,
            kv_channels=config.head_dim,
            num_gqa_groups=kv_heads * tp.size,
            attention_dropout=config.attention_dropout,
            qkv_format="bshd",
            attn_mask_type=config.attn_mask_type,
            window_size=(left, 0 if config.attn_mask_type == "causal" else right),
            tp_size=tp.size,
            tp_group=tp.process_group,
            layer_number=self.layer_number,
            softmax_scale=config.softmax_scale,
            **self._known(**asked),
            **(self._binding(cp) if cp.size > 1 else {}),
        )

    def _binding(self, cp: CPGroup) -> dict[str, Any]:
        comm_type, group = self._exchange(cp)
        ranks, stream = None, None
        if cp.size > 1:
            ranks, stream = list(cp.ranks), self.shared_stream()
        return self._known(cp_group=group, cp_global_ranks=ranks, cp_stream=stream, cp_comm_type=comm_type)

    def _exchange(self, cp: CPGroup) -> tuple[str, Any]:
        """TE's cp_comm_type and cp_group: of a hierarchy the list of its groups, inner first."""
        if cp.size == 1:
            return self.comm_type, None
        first = EXCHANGES[self.comm_type].rows
        if not has(self.version, first):
            raise ValueError(self._too_old(f"cp_comm_type {self.comm_type}", first))
        if self.comm_type != "a2a+p2p":
            return self.comm_type, cp.process_group
        if len(cp.levels) != 2:
            raise ValueError(
                f"cp_comm_type a2a+p2p of layer {self.layer_number} needs ranks in two levels, {list(cp.ranks)} have "
                f"{len(cp.levels)}: set hierarchical_context_parallel_sizes, or use p2p"
            )
        inner, outer = cp.levels
        # A level of one rank has no process group, and for TE no group is the whole world.
        if inner.size == 1:
            return "p2p", cp.process_group
        if outer.size == 1:
            return "a2a", cp.process_group
        return "a2a+p2p", [inner.process_group, outer.process_group]

    def _known(self, **arguments: Any) -> dict[str, Any]:
        """Those arguments that the installed release has; ValueError where leaving one out would change the result."""
        known = {}
        for name, value in arguments.items():
            first = FIRST_RELEASE.get(name)
            if first is None or has(self.version, first):
                known[name] = value
            elif value not in IMPLIED.get(name, ()):
                raise ValueError(self._too_old(f"{name} = {value}", first))
        return known

    def _too_old(self, what: str, first: str) -> str:
        return (
            f"{what} of layer {self.layer_number} needs TransformerEngine {first}, {self.version} is installed: "
            f"upgrade it, or {NATIVE}"
        )

    @classmethod
    def shared_stream(cls) -> Any:
        if TEAttention.cp_stream is None:
            TEAttention.cp_stream = torch.cuda.Stream()
        return TEAttention.cp_stream
