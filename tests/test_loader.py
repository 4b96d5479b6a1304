from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megacp.data.loader import Loader, Pairs, PeerCheck, Sampler
from megacp.data.pack import PackLayout, Row
from tests import spawn


class Counting:
    """Sample i holds tokens 10i .. 10i + 4; a document begins at 1 + i % 4."""

    def __init__(self, size: int = 100, broken: int | None = None) -> None:
        self.size = size
        self.broken = broken
        self.readers: set[str] = set()

    def __len__(self) -> int:
        return self.size

    def row(self, i: int, read: bool = True) -> Row:
        self.readers.add(threading.current_thread().name)
        if i == self.broken:
            raise OSError(f"disk failed at {i}")
        tokens = (10 * i + np.arange(5)) * read
        return Row(tokens.astype(np.int64), np.array([1 + i % 4]), 4)


def ids_of(pairs: Pairs) -> list[tuple[int, ...]]:
    return [sample.ids for sample, _ in pairs]


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_order_is_megatrons(prefetch: bool) -> None:
    sampler = Sampler(micro_batch_size=2, global_batch_size=8, dp_rank=1, dp_size=2)
    loader = Loader(Counting(), sampler, PackLayout(cp=2), (4, 5), prefetch=prefetch)
    for step in range(3):
        pairs = loader.next_step()
        assert ids_of(pairs) == [(8 * step + 2, 8 * step + 3), (8 * step + 6, 8 * step + 7)]
        assert all(ranks == (4, 5) for _, ranks in pairs)
        assert [sample.tokens[0].item() for sample, _ in pairs] == [10 * ids[0] for ids in ids_of(pairs)]
        assert loader.consumed_samples == 8 * (step + 1)


def test_resume_anywhere_at_any_size() -> None:
    def step(consumed: int, dp: int, micro: int) -> list[int]:
        samplers = [Sampler(micro, 12, rank, dp) for rank in range(dp)]
        loaders = [Loader(Counting(), sampler, PackLayout(), consumed_samples=consumed) for sampler in samplers]
        return sorted(i for loader in loaders for ids in ids_of(loader.next_step()) for i in ids)

    for consumed in (0, 7, 24, 88):
        for dp, micro in [(1, 1), (1, 12), (2, 3), (3, 2), (12, 1)]:
            assert step(consumed, dp, micro) == list(range(consumed, consumed + 12))


def test_moving_the_state_discards_what_was_read_ahead() -> None:
    loader = Loader(Counting(), Sampler(1, 4), PackLayout())
    loader.next_step()
    loader.consumed_samples = 40
    assert ids_of(loader.next_step()) == [(40,), (41,), (42,), (43,)]
    assert ids_of(loader.next_step())[0] == (44,)


def test_past_the_end() -> None:
    loader = Loader(Counting(10), Sampler(1, 4), PackLayout())
    loader.next_step()
    loader.next_step()
    for _ in range(2):
        with pytest.raises(IndexError, match="samples 8 to 12, but the dataset has 10"):
            loader.next_step()
    assert loader.consumed_samples == 8


def test_errors_of_the_thread_belong_to_their_step() -> None:
    loader = Loader(Counting(broken=6), Sampler(1, 4), PackLayout())
    assert ids_of(loader.next_step())[0] == (0,)
    for _ in range(2):
        with pytest.raises(OSError, match="disk failed at 6"):
            loader.next_step()
    assert loader.consumed_samples == 4


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_one_thread_reads_ahead_and_goes_with_its_loader() -> None:
    before = set(loader_threads())
    dataset = Counting()
    loader = Loader(dataset, Sampler(1, 4), PackLayout())
    for _ in range(5):
        loader.next_step()
    threads = set(loader_threads()) - before
    assert len(threads) == 1
    assert any(name.startswith("loader") for name in dataset.readers)
    del loader
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_closed_loader_goes_on_alone() -> None:
    dataset = Counting()
    loader = Loader(dataset, Sampler(1, 4), PackLayout())
    loader.next_step()
    loader.close()
    dataset.readers.clear()
    assert ids_of(loader.next_step())[0] == (4,)
    assert dataset.readers == {threading.current_thread().name}


def test_a_stage_without_tokens_has_the_same_layout() -> None:
    layout = PackLayout(cp=1, mask_between_documents=True, eod_mask_loss=True)
    full, blind = (Loader(Counting(), Sampler(2, 4), layout, read_tokens=read).next_step() for read in (True, False))
    for (a, _), (b, _) in zip(full, blind, strict=True):
        assert torch.equal(a.cu_seqlens, b.cu_seqlens)
        assert torch.equal(a.cu_seqlens_padded, b.cu_seqlens_padded)
        assert torch.equal(a.loss_mask, b.loss_mask)
        assert a.tokens.any() and not b.tokens.any()


def test_refuses() -> None:
    with pytest.raises(ValueError, match="10 is no multiple of .* 2 \\* 3; 6 or 12 would be one"):
        Sampler(2, 10, 0, 3)
    with pytest.raises(ValueError, match="rank 3"):
        Sampler(2, 12, 3, 3)
    with pytest.raises(ValueError, match="cp = 2"):
        Loader(Counting(), Sampler(1, 1), PackLayout(cp=2), (0,))


def check_peers(fault: str, rank_with_fault: int) -> None:
    """Ranks 0, 1, 2 are peers of data-parallel rank 0, of which rank 1 reads no tokens; rank 3 is of rank 1."""
    rank = dist.get_rank()
    dp_rank, read = int(rank == 3), rank != 1
    peers = PeerCheck(dp_rank, read_tokens=read)

    def check(pairs: Pairs) -> None:
        peers([(spoil(sample, fault), ranks) for sample, ranks in pairs] if rank == rank_with_fault else pairs)

    sampler = Sampler(1, 4, dp_rank, 2)
    loader = Loader(Counting(), sampler, PackLayout(), (0,), read_tokens=read, check=check)
    loader.next_step()
    loader.next_step()


def spoil(sample: Any, fault: str) -> Any:
    changes = {
        "none": {},
        "ids": {"ids": (sample.ids[0] + 1,)},
        "offsets": {"cu_seqlens": torch.tensor([0, 2, 4], dtype=torch.int32)},
        "weights": {"loss_mask": sample.loss_mask * 0},
        "tokens": {"tokens": sample.tokens + 1},
    }
    return replace(sample, **changes[fault])


def test_peers_that_agree() -> None:
    spawn.run(check_peers, 4, "none", 0)
    # Rank 1 holds no tokens, and rank 3 has no peer: whatever they do there is nothing to compare.
    spawn.run(check_peers, 4, "tokens", 1)
    spawn.run(check_peers, 4, "ids", 3)


@pytest.mark.parametrize(
    ("fault", "rank", "words"),
    [
        (
            "ids",
            1,
            r"rank 0 differ in sample ids: ranks \[0, 2\] hold samples 0..2; ranks \[1\] hold samples 1..3",
        ),
        ("offsets", 1, r"lengths, offsets or weights: ranks \[0, 2\] hold samples 0..2; ranks \[1\]"),
        ("weights", 2, r"lengths, offsets or weights: ranks \[0, 1\] .* ranks \[2\]"),
        ("tokens", 2, r"differ in tokens: ranks \[0\] hold samples 0..2; ranks \[2\]"),
    ],
)
def test_peers_that_differ(fault: str, rank: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spawn.run(check_peers, 4, fault, rank)


def test_one_process_has_no_peers() -> None:
    Loader(Counting(), Sampler(1, 4), PackLayout(), check=PeerCheck(0)).next_step()
