from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from megacp.collectives import Exchange, all_gather, others_of, reduce_scatter, start_gather_of_others, start_trade
from megacp.grid import Group
from megacp.same_host import find_readable
from tests.packs import needs_reading, reading_from
from tests.spawn import run


def world(by_reading: bool = False) -> Group:
    """All ranks, that read each other's memory or do not."""
    pids = find_readable().among(range(dist.get_world_size())) if by_reading else ()
    return Group(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD, pids=pids)


def own(group: Group, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[size, 2]: block i of rank r holds 10r + i, and minus that."""
    blocks = torch.arange(group.size) + 10 * group.rank
    return torch.stack((blocks, -blocks), dim=1).to(dtype)


def every_collective(by_reading: bool) -> tuple[list, list, list, list]:
    group = world(by_reading)
    assert bool(group.pids) == by_reading
    with reading_from(0):
        dealt = [traded(own(group, dtype), group) for dtype in (torch.float32, torch.bfloat16)]
        assert dealt[0] == dealt[1]
        sums = reduce_scatter(own(group), group)
        # Columns, not rows: what is sent must not depend on how the tensor lies in memory.
        turned = all_gather(own(group).t().contiguous().t(), group)
        return dealt[0], turned.flatten().tolist(), all_gather(own(group)[:1], group)[:, 0].tolist(), sums[0].tolist()


def traded(blocks: torch.Tensor, group: Group) -> list[float]:
    """First number of what came from each rank, its own block at its own place."""
    others = others_of(group)
    received = torch.empty_like(blocks[others])
    start_trade(blocks[others], received, group).wait()
    blocks[others] = received
    return blocks[:, 0].tolist()


@pytest.mark.parametrize("by_reading", [False, pytest.param(True, marks=needs_reading)])
def test_collectives(by_reading: bool) -> None:
    for rank, (dealt, turned, gathered, sums) in enumerate(run(every_collective, 3, by_reading)):
        assert dealt == [10 * source + rank for source in range(3)]
        assert turned == [sign * (10 * source + i) for source in range(3) for i in range(3) for sign in (1, -1)]
        assert gathered == [0, 10, 20]
        assert sums == [30 + 3 * rank, -30 - 3 * rank]


def exchanged(least_read: int | None) -> list[list[float]]:
    """Two tensors to the next rank, one to the one before, in a subgroup whose order is not that of the world."""
    ranks = (2, 0, 3)
    process_group, readable = dist.new_group(list(ranks)), find_readable()
    if dist.get_rank() not in ranks:
        return []
    pids = readable.among(ranks) if least_read is not None else ()
    group = Group(ranks, ranks.index(dist.get_rank()), process_group, pids=pids)
    following, before = (group.rank + 1) % 3, (group.rank - 1) % 3
    sent = [torch.full((2 + number % 2,), float(10 * group.rank + number)) for number in range(3)]
    received = [torch.empty(2 + number % 2) for number in range(3)]
    exchange = Exchange(group)
    with reading_from(least_read or 0):
        for _ in range(2):
            exchange.start(
                [(sent[0], following), (sent[1], following), (sent[2], before)],
                [(received[0], before), (received[1], before), (received[2], following)],
            )
            exchange.wait()
        exchange.start([], [])
        exchange.wait()
    return [x.tolist() for x in received]


@pytest.mark.parametrize("least_read", [None, 0, 12])  # with 12 some are read and some are sent
def test_exchange(least_read: int | None) -> None:
    results = run(exchanged, 4, least_read)
    assert results[1] == []
    for place, rank in enumerate((2, 0, 3)):
        before, following = (place - 1) % 3, (place + 1) % 3
        assert results[rank] == [[10 * before + 0.0] * 2, [10 * before + 1.0] * 3, [10 * following + 2.0] * 2]


def with_gaps() -> None:
    group = world()
    Exchange(group).start([(torch.zeros(4, 2)[:, 0], 1 - group.rank)], [])


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[4\] that is not contiguous cannot be exchanged"):
        run(with_gaps, 2)


def of_two_sizes() -> str:
    """Rank 1 expects more than rank 0 sends: both hear of it, and can go on."""
    group = world(by_reading=True)
    exchange, other = Exchange(group), 1 - group.rank
    with reading_from(0):
        exchange.start([(torch.zeros(3), other)], [(torch.zeros(3 + group.rank), other)])
        with pytest.raises(RuntimeError) as failed:
            exchange.wait()
        exchange.start([(torch.ones(3), other)], [(received := torch.zeros(3), other)])
        exchange.wait()
    assert received.tolist() == [1.0] * 3
    return str(failed.value)


@needs_reading
def test_another_size_than_expected_is_an_error_on_both_sides() -> None:
    assert run(of_two_sizes, 2) == ["rank 1 could not read", "rank 0 sends 12 bytes, not 16"]


def started_twice() -> None:
    group = world()
    exchange, other = Exchange(group), 1 - group.rank
    exchange.start([(torch.zeros(3), other)], [(torch.zeros(3), other)])
    try:
        exchange.start([], [])
    finally:
        exchange.wait()


def test_a_second_start_before_the_wait_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="started anew before it was received"):
        run(started_twice, 2)


def slowly_read() -> list[float]:
    """What arrives is what was there at the start, though its owner lets go of it, or changes it as soon as it may."""
    group, found = world(by_reading=True), []
    exchange, other = Exchange(group), 1 - group.rank
    mine, theirs = torch.empty(2**17), torch.empty(2**17)
    for turn in range(3):
        mine.fill_(turn)
        # A temporary tensor, of which nobody but the exchange knows.
        temporary = torch.full((2**17,), 10.0 + turn)
        address = temporary.data_ptr()
        exchange.start([(mine, other), (temporary, other)], [(theirs, other), (second := torch.empty(2**17), other)])
        del temporary
        again = torch.full((2**17,), -1.0)
        assert again.data_ptr() != address
        if group.rank == turn % 2:
            time.sleep(0.2)
        exchange.wait()
        mine.fill_(-1.0)
        found += [theirs.unique().tolist(), second.unique().tolist()]
    return found


def received_before_read() -> list[list[float]]:
    """Rank 1 reads only when rank 0 has received and gone on; what was sent is kept meanwhile."""
    group, found = world(by_reading=True), []
    exchange, other, word = Exchange(group), 1 - group.rank, torch.zeros(1)
    for turn in range(4):
        sent, received = torch.full((2**17,), 10.0 * group.rank + turn), torch.empty(2**17)
        exchange.start([(sent, other)], [(received, other)])
        del sent
        if turn == 0 and group.rank == 1:
            dist.recv(word, 0, tag=7)
        exchange.receive()
        # It would take the place of what was let go of.
        spoiling = [torch.full((2**17,), -1.0) for _ in range(3)]
        if turn == 0 and group.rank == 0:
            dist.send(word, 1, tag=7)
        found.append(received.unique().tolist())
        del spoiling
    exchange.wait()
    return found


@needs_reading
def test_who_has_received_goes_on() -> None:
    assert run(received_before_read, 2) == [[[10.0], [11.0], [12.0], [13.0]], [[0.0], [1.0], [2.0], [3.0]]]


@needs_reading
def test_nothing_changes_before_it_has_been_read() -> None:
    assert run(slowly_read, 2) == [[[0.0], [10.0], [1.0], [11.0], [2.0], [12.0]]] * 2


def gathered_of_others(by_reading: bool) -> list[list[float]]:
    group = world(by_reading)
    with reading_from(0):
        gathered, fetch = start_gather_of_others(own(group), group)
        fetch.wait()
    return gathered[..., 0].tolist()


@pytest.mark.parametrize("by_reading", [False, pytest.param(True, marks=needs_reading)])
def test_gather_of_others(by_reading: bool) -> None:
    blocks = [[10.0 * rank + i for i in range(3)] for rank in range(3)]
    for rank, others in enumerate(run(gathered_of_others, 3, by_reading)):
        assert others == blocks[:rank] + blocks[rank + 1 :]


def test_alone_nothing_is_sent() -> None:
    alone, tensor = Group((0,), 0), torch.ones(3, 2)
    assert all_gather(tensor, alone) is tensor
    assert reduce_scatter(tensor, alone) is tensor
