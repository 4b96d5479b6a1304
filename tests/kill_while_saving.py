"""Saves checkpoints in forked processes and kills them; run by test_checkpoint.py.

    python -m tests.kill_while_saving ROOT random     20 times at a random moment of an endless run of saves
    python -m tests.kill_while_saving ROOT each       before each system call that changes the disk, one after the other

After each kill the newest checkpoint must be whole, be all of one iteration, and not be older than the last save
that had returned. One line per kill: the iteration found.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megacp import checkpoint
from megacp.blocks import Block

SHAPES = {"embedding": (64, 256), "layers.0.weight": (128, 128), "norm": (1,)}
CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def blocks_of(iteration: float) -> list[Block]:
    zeros = (0, 0)
    return [Block(name, shape, zeros[: len(shape)], torch.full(shape, iteration)) for name, shape in SHAPES.items()]


def save(root: Path, iteration: int) -> None:
    checkpoint.save(root, iteration, blocks_of(iteration), {"iteration": iteration}, keep_last=2)


def found(root: Path) -> int:
    blocks = blocks_of(-1)
    iteration = checkpoint.load(root, blocks)["iteration"]
    for block in blocks:
        assert (block.tensor == iteration).all(), f"{block.name} is not of iteration {iteration}"
    return iteration


def start(work: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return child


def kill_at_random(root: Path) -> None:
    generator = random.Random(0)
    save(root, 1)
    for _ in range(20):
        first = found(root)
        reader, writer = os.pipe()

        def work(first: int = first, writer: int = writer) -> None:
            iteration = first
            while True:
                # Every iteration twice: the second save replaces a checkpoint that is there.
                iteration += 1
                for _ in range(2):
                    save(root, iteration)
                    os.write(writer, iteration.to_bytes(4, "little"))

        child = start(work)
        os.close(writer)
        time.sleep(generator.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the saving process failed by itself"
        reported = os.read(reader, 1 << 16)
        os.close(reader)
        least = int.from_bytes(reported[-4:], "little") if reported else first
        assert found(root) >= least, f"{found(root)} came after {least} had been saved"
        print(found(root), flush=True)


def die_before(call: int) -> None:
    """Make this process kill itself instead of its next-but-`call` call that changes the disk."""
    left = iter(range(call, -1, -1))

    def deadly(function: Callable) -> Callable:
        def counted(*args, **kwargs):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))


def kill_at_call(root: Path, iteration: int, call: int) -> bool:
    """Save 1 and 2, then `iteration`, killed before a call that changes the disk; False if there are no so many."""
    shutil.rmtree(root, ignore_errors=True)
    save(root, 1)
    save(root, 2)

    def work() -> None:
        die_before(call)
        save(root, iteration)

    status = os.waitpid(start(work), 0)[1]
    assert status == 0 or os.WIFSIGNALED(status), "the saving process failed by itself"
    assert found(root) in (2, iteration), f"{found(root)} after 2, killed before call {call} of saving {iteration}"
    print(found(root), flush=True)
    save(root, 4)
    assert found(root) == 4
    return status != 0


def kill_at_each_call(root: Path) -> None:
    # A killed process loses nothing that it had written; only a dying machine does. Do not wait for the disk.
    os.fsync = lambda _: None
    for iteration in (3, 2):
        call = 0
        while kill_at_call(root, iteration, call):
            call += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"random": kill_at_random, "each": kill_at_each_call}[sys.argv[2]](Path(sys.argv[1]))
