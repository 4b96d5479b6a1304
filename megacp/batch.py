"""The door: where a whole sample becomes one rank's batch.

Left of this file samples are whole and live on the host; right of it every tensor belongs to one context-parallel rank.
Pretraining, fine-tuning and hybrid context parallelism all pass through `shard`, so there is one cut.

Legend: S tokens of the whole pack, T = S / cp tokens of one rank, b sequences in the pack.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from megacp.grid import CPGroup


@dataclass(frozen=True)
class Sample:
    """One microbatch before the cut, padding already laid.

    tokens, labels  int64 [S]
    loss_mask       float32 [S]: weight of each label, 0 on padding
    cu_seqlens      int32 [b+1]: real lengths, cumulated
    cu_seqlens_padded int32 [b+1]: where each sequence lies in `tokens`; last entry S; the same object as
                    `cu_seqlens` where nothing is padded
    ids             global numbers of the dataset samples inside (they seed dropout and name a sample in errors)
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class PackedSeqParams:
    """Layout of the whole pack, in Megatron-LM's field names (megatron/core/packed_seq_params.py).

    Offsets are int32 [b+1] and describe the pack before it is cut; they are never divided by cp. `max_seqlen_*` is the
    longest padded length. With cp > 1 padded offsets are always given, and are the *same tensor object* as the real
    ones where nothing is padded: TransformerEngine decides by identity whether there are gaps.
    `lengths` and `padded_lengths` are the same facts as Python numbers, so that no kernel launch waits for the device.
    """

    qkv_format: str
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    max_seqlen_q: int
    max_seqlen_kv: int
    local_cp_size: int | None = None
    cp_group: object | None = None
    total_tokens: int | None = None
    lengths: tuple[int, ...] = field(default=(), repr=False)
    padded_lengths: tuple[int, ...] = field(default=(), repr=False)

    @cached_property
    def seq_idx(self) -> Tensor | None:
        """int32 [1, total_tokens]: the number of the sequence each token of the pack lies in, None without a total.

        Tokens after the last offset form one more sequence; differences are clamped at 0. The reference returns another
        length where offsets and total disagree; here it is total_tokens always.
        """
        if self.total_tokens is None:
            return None
        offsets = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        ends = torch.cat([offsets, offsets.new_tensor([self.total_tokens])])
        counts = (ends[1:] - ends[:-1]).clamp(min=0)
        index = torch.repeat_interleave(torch.arange(len(counts), device=offsets.device), counts)
        missing = max(0, self.total_tokens - len(index))
        index = torch.cat([index[: self.total_tokens], index.new_full((missing,), len(counts) - 1)])
        return index.to(torch.int32)[None]


@dataclass(frozen=True)
class Batch:
    """One rank's share of a microbatch.

    tokens, labels int64 [T], loss_mask float32 [T] (None on pipeline stages that do not need them);
    position_ids int64 [T], restarting at every sequence; `packed`, `cp`: the layout and the ranks that share it.
    `ids` are those of the sample.
    """

    tokens: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor | None
    position_ids: Tensor
    packed: PackedSeqParams
    cp: CPGroup
    ids: tuple[int, ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        """Every tensor on `device`; identity of real and padded offsets is kept."""
        moved: dict[int, Tensor] = {}

        def move(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(device, non_blocking=True)
            return moved[id(tensor)]

        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        packed = replace(self.packed, **{name: move(getattr(self.packed, name)) for name in names})
        own = {name: move(getattr(self, name)) for name in ("tokens", "labels", "loss_mask", "position_ids")}
        return replace(self, packed=packed, **own)


def _check_boundaries(offsets: list[int], size: int) -> None:
    multiple = 2 * size
    if not offsets or offsets[0] != 0:
        raise ValueError(f"offsets must start at 0, got {offsets[:1]}")
    for number, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        if end < begin:
            raise ValueError(f"sequence {number} ends at {end}, before its start {begin}")
        if end % multiple:
            length = end - begin
            padded = -(-length // multiple) * multiple
            raise ValueError(
                f"sequence {number} ends at offset {end}, not a multiple of 2*cp = {multiple}: "
                f"pad its {length} tokens to {padded}"
            )


def token_index(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Positions in the pack that context-parallel rank `rank` of `size` holds, int64 [T], in its own order.

    Every sequence is split in 2*size equal chunks; the rank takes chunks `rank` and `2*size - 1 - rank`, one light and
    one heavy under a causal mask. This is TransformerEngine's thd_get_partitioned_indices and, for one sequence per
    row, Megatron-LM's get_batch_on_this_cp_rank. ValueError names a sequence whose boundary is not divisible by 2*size.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a context-parallel group of {size}")
    offsets = torch.as_tensor(cu_seqlens).to("cpu", torch.int64)
    _check_boundaries(offsets.tolist(), size)
    starts, lengths = offsets[:-1], offsets.diff()
    chunk = lengths // (2 * size)
    chunk_starts = torch.stack([starts + rank * chunk, starts + (2 * size - 1 - rank) * chunk], dim=1).flatten()
    return _ranges(chunk_starts, chunk.repeat_interleave(2))


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """[start, start+1, .. start+length-1] for every pair, concatenated."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    within = torch.arange(total) - (ends - lengths).repeat_interleave(lengths)
    return starts.repeat_interleave(lengths) + within


def _check(sample: Sample) -> None:
    """ValueError naming the sequence if offsets and tensors of `sample` do not describe one pack."""
    total = len(sample.tokens)
    real, padded = sample.cu_seqlens, sample.cu_seqlens_padded
    if len(sample.labels) != total or len(sample.loss_mask) != total:
        raise ValueError(
            f"sample {sample.ids}: {total} tokens, {len(sample.labels)} labels, {len(sample.loss_mask)} weights"
        )
    if len(real) != len(padded) or int(padded[-1]) != total:
        raise ValueError(
            f"sample {sample.ids}: {len(real)} real and {len(padded)} padded offsets, the last {int(padded[-1])}, "
            f"for {total} tokens"
        )
    lengths, room = real.diff(), padded.diff()
    wrong = ((lengths > room) | (lengths < 0)).nonzero().flatten()
    if len(wrong):
        number = int(wrong[0])
        raise ValueError(
            f"sample {sample.ids}: sequence {number} has real length {int(lengths[number])} in room for "
            f"{int(room[number])} tokens"
        )


def _pack(sample: Sample, cp: CPGroup) -> PackedSeqParams:
    real = sample.cu_seqlens.to(torch.int32)
    same = sample.cu_seqlens_padded is sample.cu_seqlens or torch.equal(sample.cu_seqlens, sample.cu_seqlens_padded)
    padded = real if same else sample.cu_seqlens_padded.to(torch.int32)
    lengths, room = tuple(real.diff().tolist()), tuple(padded.diff().tolist())
    longest = max(room, default=0)
    dense = same and len(set(room)) == 1
    given = None if same and cp.size == 1 else padded
    return PackedSeqParams(
        qkv_format="sbhd" if dense else "thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=given,
        cu_seqlens_kv_padded=given,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=cp.size,
        cp_group=cp.process_group,
        total_tokens=len(sample.tokens),
        lengths=lengths,
        padded_lengths=room,
    )


def shard(sample: Sample, cp: CPGroup) -> Batch:
    """The part of `sample` that this process holds among the ranks of `cp`.

    The sample must be padded already (each boundary a multiple of 2*cp): data/ lays padding once the ranks are known,
    this only checks, and raises ValueError naming the sequence.
    """
    _check(sample)
    try:
        index = token_index(sample.cu_seqlens_padded, cp.rank, cp.size)
    except ValueError as error:
        raise ValueError(f"sample {sample.ids}: {error}") from None
    starts = sample.cu_seqlens_padded[:-1].long()
    sequence = torch.searchsorted(sample.cu_seqlens_padded[1:].long(), index, right=True)
    return Batch(
        tokens=sample.tokens[index],
        labels=sample.labels[index],
        loss_mask=sample.loss_mask[index],
        position_ids=index - starts[sequence],
        packed=_pack(sample, cp),
        cp=cp,
        ids=sample.ids,
    )
