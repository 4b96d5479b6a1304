"""The samples of a step for one data-parallel rank; the whole state is how many were consumed so far."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megacp.batch import Sample
from megacp.data.pack import PackLayout, pack
from megacp.data.pretrain import Dataset

Pairs = list[tuple[Sample, tuple[int, ...]]]


@dataclass(frozen=True)
class Sampler:
    """Deals each global batch to data-parallel ranks, in Megatron-LM's order (legacy/data/data_samplers.py).

    A step takes the same samples on any number of ranks. ValueError if they cannot be dealt evenly.
    """

    micro_batch_size: int
    global_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"data-parallel rank {self.dp_rank} is not one of {self.dp_size}")
        if self.global_batch_size % self.stride:
            below = self.global_batch_size // self.stride * self.stride
            nearest = f"{below} or {below + self.stride}" if below else str(self.stride)
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is no multiple of micro_batch_size * dp = "
                f"{self.micro_batch_size} * {self.dp_size}; {nearest} would be one"
            )

    @property
    def stride(self) -> int:
        """Samples that all ranks take together in one microbatch."""
        return self.micro_batch_size * self.dp_size

    def microbatches(self, consumed: int) -> list[range]:
        """Sample numbers of each microbatch of this rank, in the step after `consumed` samples."""
        first = consumed + self.dp_rank * self.micro_batch_size
        begins = range(first, first + self.global_batch_size, self.stride)
        return [range(begin, begin + self.micro_batch_size) for begin in begins]


class Loader:
    """The steps of one data-parallel rank, from `consumed_samples` on; nothing else need be kept to resume.

    ranks        the context-parallel ranks that share this rank's samples; `layout` pads for them
    read_tokens  False for a pipeline stage that needs none: offsets and weights are right, tokens are 0
    prefetch     the next step is made in one background thread while the caller computes
    check        called with every step before it is given out, in the caller's thread (see PeerCheck)
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        layout: PackLayout,
        ranks: Sequence[int] = (0,),
        *,
        consumed_samples: int = 0,
        read_tokens: bool = True,
        prefetch: bool = True,
        check: Callable[[Pairs], None] | None = None,
    ) -> None:
        if len(ranks) != layout.cp:
            raise ValueError(f"padding is laid for cp = {layout.cp}, but {len(ranks)} ranks share the samples")
        self.dataset = dataset
        self.sampler = sampler
        self.layout = layout
        self.ranks = tuple(ranks)
        self.consumed_samples = consumed_samples
        self.read_tokens = read_tokens
        self.check = check
        self._thread = ThreadPoolExecutor(1, "loader") if prefetch else None
        self._next: tuple[int, Future[Pairs]] | None = None

    def next_step(self) -> Pairs:
        """(sample, ranks) of each microbatch; moves `consumed_samples` on by a global batch.

        IndexError past the end of the dataset. An error of the background is raised by the step it was for.
        """
        begin, end = self.consumed_samples, self.consumed_samples + self.sampler.global_batch_size
        if end > len(self.dataset):
            raise IndexError(
                f"a step asks for samples {begin} to {end}, but the dataset has {len(self.dataset)}; "
                "build it for train_iters * global_batch_size (evaluation: all its batches)"
            )
        # A step made ahead counts only if nobody has moved `consumed_samples` since.
        ahead, self._next = self._next, None
        pairs = ahead[1].result() if ahead is not None and ahead[0] == begin else self._read(begin)
        if self._thread is not None and end + self.sampler.global_batch_size <= len(self.dataset):
            self._next = (end, self._thread.submit(self._read, end))
        if self.check is not None:
            self.check(pairs)
        self.consumed_samples = end
        return pairs

    def close(self) -> None:
        """Stops the background thread; the loader goes on without it."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = self._next = None

    def _read(self, consumed: int) -> Pairs:
        def sample(ids: range) -> Sample:
            return pack([self.dataset.row(i, self.read_tokens) for i in ids], ids, self.layout)

        return [(sample(ids), self.ranks) for ids in self.sampler.microbatches(consumed)]


class PeerCheck:
    """Makes sure that all ranks of one data-parallel rank hold the same samples.

    Compared are hashes of sample ids, of lengths, offsets and weights, and of tokens among the ranks that
    read them: one all-gather of a few numbers over `process_group` (None: all processes), whose ranks may be
    of several data-parallel ranks. To be called by all of them, in the thread that runs the other
    collectives. On NCCL give the `device`.
    """

    def __init__(
        self,
        dp_rank: int,
        process_group: dist.ProcessGroup | None = None,
        *,
        read_tokens: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dp_rank = dp_rank
        self.process_group = process_group
        self.read_tokens = read_tokens
        self.device = device

    def __call__(self, pairs: Pairs) -> None:
        """ValueError on every rank of the group, naming ranks and samples that differ."""
        if not dist.is_initialized():
            return
        mine = torch.tensor([self.dp_rank, self.read_tokens, *_fingerprint(pairs)], device=self.device)
        table = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.process_group))]
        dist.all_gather(table, mine, group=self.process_group)
        ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        for line in _differences(ranks, torch.stack(table).tolist()):
            raise ValueError(line)


def _fingerprint(pairs: Pairs) -> list[int]:
    """First and last sample id, number of microbatches; hash of ids, of the layout, of tokens and labels."""
    samples = [sample for sample, _ in pairs]
    ids = [i for sample in samples for i in sample.ids]
    layout = [part for s in samples for part in (s.cu_seqlens, s.cu_seqlens_padded, s.loss_mask)]
    tokens = [part for sample in samples for part in (sample.tokens, sample.labels)]
    return [
        ids[0] if ids else -1,
        ids[-1] if ids else -1,
        len(samples),
        _hash([np.array([len(sample.ids) for sample in samples]), np.array(ids)]),
        _hash([part.numpy() for part in layout]),
        _hash([part.numpy() for part in tokens]),
    ]


def _hash(arrays: Sequence[np.ndarray]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.int64(array.size).tobytes())
        digest.update(np.ascontiguousarray(array).data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _differences(ranks: Sequence[int], table: Sequence[Sequence[int]]) -> list[str]:
    """One line for the first thing in which peers differ; `table` is what each of `ranks` sent."""
    what = {"sample ids": slice(2, 6), "lengths, offsets or weights": slice(6, 7), "tokens": slice(7, 8)}
    for dp_rank in sorted({row[0] for row in table}):
        peers = [(rank, row) for rank, row in zip(ranks, table, strict=True) if row[0] == dp_rank]
        for name, part in what.items():
            seen: dict[tuple[int, ...], list[int]] = {}
            for rank, row in peers:
                if name != "tokens" or row[1]:
                    seen.setdefault(tuple(row[part]), []).append(rank)
            if len(seen) > 1:
                ids = {rank: f"{row[2]}..{row[3]}" for rank, row in peers}
                held = "; ".join(f"ranks {group} hold samples {ids[group[0]]}" for group in seen.values())
                return [f"peers of data-parallel rank {dp_rank} differ in {name}: {held}"]
    return []
