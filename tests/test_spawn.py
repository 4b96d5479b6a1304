from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import spawn


def total_of_ranks(offset: int) -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def fail_on(failing: int) -> None:
    if dist.get_rank() == failing:
        raise KeyError("wanted")
    dist.barrier()


def fail_everywhere() -> None:
    raise ValueError(f"on {dist.get_rank()}")


def hang_on(hanging: int) -> None:
    if dist.get_rank() == hanging:
        time.sleep(600)


def die_on(dying: int) -> None:
    if dist.get_rank() == dying:
        os.kill(os.getpid(), signal.SIGFPE)
    dist.barrier()


def process_id() -> int:
    return os.getpid()


def unpicklable() -> object:
    return lambda: None


@pytest.mark.parametrize("n", [2, 1, 3])
def test_results_come_in_rank_order(n: int) -> None:
    assert spawn.run(total_of_ranks, n, 10) == [(rank, n, float(sum(range(n)) + 10 * n)) for rank in range(n)]


def test_workers_are_kept() -> None:
    assert spawn.run(process_id, 2) == spawn.run(process_id, 2)


def test_exception_is_raised_again_without_waiting_for_the_timeout() -> None:
    begin = time.monotonic()
    with pytest.raises(KeyError, match="wanted") as caught:
        spawn.run(fail_on, 2, 1, timeout=60.0)
    assert time.monotonic() - begin < 30
    cause = str(caught.value.__cause__)
    assert "rank 1 of 2 failed in tests.test_spawn.fail_on" in cause and "in fail_on" in cause
    assert spawn.run(total_of_ranks, 2, 0)[1] == (1, 2, 1.0)


def test_workers_survive_an_exception_on_all_ranks() -> None:
    before = spawn.run(process_id, 2)
    with pytest.raises(ValueError, match="on [01]"):
        spawn.run(fail_everywhere, 2)
    assert spawn.run(process_id, 2) == before


def test_hang_names_rank_function_and_line() -> None:
    with pytest.raises(TimeoutError, match=r"rank\(s\) \[1\] of 2 hung in tests.test_spawn.hang_on") as caught:
        spawn.run(hang_on, 2, 1, timeout=2.0)
    assert "in hang_on" in str(caught.value)
    assert spawn.run(total_of_ranks, 2, 0)[0] == (0, 2, 1.0)


def test_death_of_a_worker_is_told_from_a_failure_of_its_peers() -> None:
    with pytest.raises(spawn.RankError, match="rank 1 of 2 died in tests.test_spawn.die_on: exit code -8"):
        spawn.run(die_on, 2, 1, timeout=60.0)


def test_result_that_cannot_be_pickled() -> None:
    with pytest.raises(Exception, match="(?i)pickle"):
        spawn.run(unpicklable, 1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit()"])
def test_workers_die_with_the_parent(end: str) -> None:
    code = (
        "import os, sys; from tests import spawn, test_spawn; "
        f"print(*spawn.run(test_spawn.process_id, 2), flush=True); {end}"
    )
    root = Path(__file__).parents[1]
    child = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pids = [int(pid) for pid in child.stdout.readline().split()]
    child.wait(60)
    child.stdout.close()
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_alive, pids))
