from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megacp.collectives import Exchange, all_gather, all_to_all, reduce_scatter
from megacp.grid import Group
from tests.spawn import run


def world() -> Group:
    return Group(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)


def own(group: Group, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[size, 2]: block i of rank r holds 10r + i, and minus that."""
    blocks = torch.arange(group.size) + 10 * group.rank
    return torch.stack((blocks, -blocks), dim=1).to(dtype)


def collectives() -> tuple[list, list, list, list]:
    group = world()
    dealt = [all_to_all(own(group, dtype), group)[:, 0].tolist() for dtype in (torch.float32, torch.bfloat16)]
    assert dealt[0] == dealt[1]
    # Columns, not rows: what is sent must not depend on how the tensor lies in memory.
    turned = all_to_all(own(group).t().contiguous().t(), group)
    sums = reduce_scatter(own(group), group)
    return dealt[0], turned[:, 1].tolist(), all_gather(own(group)[:1], group)[:, 0].tolist(), sums[0].tolist()


def test_collectives() -> None:
    for rank, (dealt, turned, gathered, sums) in enumerate(run(collectives, 3)):
        assert dealt == [10 * source + rank for source in range(3)]
        assert turned == [-10 * source - rank for source in range(3)]
        assert gathered == [0, 10, 20]
        assert sums == [30 + 3 * rank, -30 - 3 * rank]


def exchanged() -> list[list[float]]:
    """Two tensors to the next rank, one to the one before, in a subgroup whose order is not that of the world."""
    ranks = (2, 0, 3)
    process_group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return []
    group = Group(ranks, ranks.index(dist.get_rank()), process_group)
    following, before = (group.rank + 1) % 3, (group.rank - 1) % 3
    sent = [torch.full((2,), float(10 * group.rank + number)) for number in range(3)]
    received = [torch.empty(2) for _ in range(3)]
    exchange = Exchange(group)
    for _ in range(2):
        exchange.start(
            [(sent[0], following), (sent[1], following), (sent[2], before)],
            [(received[0], before), (received[1], before), (received[2], following)],
        )
        exchange.wait()
    exchange.start([], [])
    exchange.wait()
    return [x.tolist() for x in received]


def test_exchange() -> None:
    results = run(exchanged, 4)
    assert results[1] == []
    for place, rank in enumerate((2, 0, 3)):
        before, following = (place - 1) % 3, (place + 1) % 3
        assert results[rank] == [[10 * before + 0.0] * 2, [10 * before + 1.0] * 2, [10 * following + 2.0] * 2]


def with_gaps() -> None:
    group = world()
    Exchange(group).start([(torch.zeros(4, 2)[:, 0], 1 - group.rank)], [])


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[4\] that is not contiguous cannot be exchanged"):
        run(with_gaps, 2)


def test_alone_nothing_is_sent() -> None:
    alone, tensor = Group((0,), 0), torch.ones(3, 2)
    assert all_to_all(tensor, alone) is tensor and all_gather(tensor, alone) is tensor
    assert reduce_scatter(tensor, alone) is tensor
