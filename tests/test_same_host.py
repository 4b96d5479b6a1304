from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacp import same_host
from megacp.config import ParallelConfig
from megacp.grid import Grid
from megacp.same_host import Readable, find_readable, read
from tests.packs import needs_reading
from tests.spawn import run


@needs_reading
def test_reads_its_own_memory() -> None:
    source, found = torch.randn(1000), torch.zeros(990)
    read(os.getpid(), source[10:].data_ptr(), found)
    assert torch.equal(found, source[10:])


@needs_reading
def test_says_what_cannot_be_read() -> None:
    with pytest.raises(OSError, match=f"cannot read the memory of process {os.getpid()}: Bad address"):
        read(os.getpid(), 8, torch.zeros(4))
    with pytest.raises(OSError, match="No such process"):
        read(2**22 + 1, torch.zeros(4).data_ptr(), torch.zeros(4))


def found_by_all() -> tuple[int, Readable]:
    return os.getpid(), find_readable()


@needs_reading
def test_all_ranks_of_a_host_read_each_other() -> None:
    answers = run(found_by_all, 3)
    pids = tuple(pid for pid, _ in answers)
    assert all(readable == answers[0][1] and readable.pids == pids for _, readable in answers)
    assert answers[0][1].among((2, 0)) == (pids[2], pids[0])


def test_some_that_do_not() -> None:
    some = Readable((7, 8, 9), ((True, True, False), (True, True, True), (False, True, True)))
    assert some.among((0, 1)) == (7, 8) and some.among((2, 1)) == (9, 8)
    assert some.among((0, 2)) == some.among((0, 1, 2)) == ()
    assert Readable().among((0, 1)) == ()


def groups_of(fault: str) -> list[Any]:
    """Process ids in the groups of a grid where rank 1 has a `fault`."""
    original, asked = (same_host.read, same_host.BOOT_ID, same_host._kernel_call), []
    if dist.get_rank() == 1 and fault == "elsewhere":
        same_host.BOOT_ID = same_host.BOOT_ID.with_name("uuid")  # another one each time
    if dist.get_rank() == 1 and fault == "a stranger":
        same_host.read = lambda pid, address, into: into.fill_(3)
    if fault == "until asked":

        def read(pid: int, address: int, into: torch.Tensor) -> None:
            if not asked:
                raise PermissionError
            original[0](pid, address, into)

        def kernel_call(name: str) -> Any:
            return (
                (lambda *words: asked.append([word.value for word in words])) if name == "prctl" else original[2](name)
            )

        same_host.read, same_host._kernel_call = read, kernel_call
    if dist.get_rank() == 1 and fault == "no such call":
        same_host._kernel_call = lambda name: None
    try:
        grid = Grid.create(ParallelConfig(context_parallel_size=2, hierarchical_context_parallel_sizes=[2, 1]))
    finally:
        same_host.read, same_host.BOOT_ID, same_host._kernel_call = original
    assert fault != "until asked" or asked == [[0x59616D61, os.getppid(), 0, 0, 0]]
    return [grid.cp.pids, grid.cp.levels[0].pids, grid.dp.pids]


@needs_reading
@pytest.mark.parametrize("fault", ["elsewhere", "a stranger", "no such call"])
def test_a_group_reads_only_if_all_can(fault: str) -> None:
    answers = run(groups_of, 4, fault)
    assert answers[0][:2] == answers[1][:2] == [(), ()], "ranks 0 and 1"
    assert answers[2] == answers[3][:2] + answers[2][2:] and len(answers[2][0]) == len(answers[2][1]) == 2
    assert len(answers[0][2]) == 2 and not answers[1][2], "ranks 0 and 2, and 1 and 3"


@needs_reading
def test_siblings_are_let_in_where_only_ancestors_may_read() -> None:
    assert all(len(pids) == 2 for answer in run(groups_of, 4, "until asked") for pids in answer)


def switched_off() -> tuple[int, ...]:
    return Grid.create(ParallelConfig(context_parallel_size=2, read_peer_memory=False)).cp.pids


def test_can_be_switched_off() -> None:
    assert run(switched_off, 2) == [(), ()]
