"""Processes that a check runs in: one for most, several ranks over gloo for communication.

Each part has processes of its own, so that one that hangs or breaks the device's context costs no other part. They are
forked from a server that has imported torch, which is the slow half of their start.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

_context = multiprocessing.get_context("forkserver")


class WorldError(RuntimeError):
    """A rank failed: which one, and why."""


class WorldTimeout(WorldError):
    """Ranks were not done in time: which ones."""


def start_server(modules: list[str]) -> None:
    """Begin to import what the processes will need."""
    from multiprocessing.forkserver import ensure_running

    _context.set_forkserver_preload(modules)
    ensure_running()


def run_world(function: str, size: int, arguments: tuple[Any, ...], seconds: float) -> Iterator[tuple[int, Any]]:
    """(rank, message) for what the generator `function`, "module:name", yields on `size` ranks, as it comes.

    WorldError names the first rank that raised or died, and why; WorldTimeout those that are not done after `seconds`.
    Whatever happens no process is left.
    """
    with TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = _context.Pipe(duplex=False)
            place = (rank, size, str(Path(folder) / "store"), seconds)
            process = _context.Process(target=_serve, args=(theirs, function, arguments, place))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            yield from _messages(pipes, seconds)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _messages(pipes: list[Connection], seconds: float) -> Iterator[tuple[int, Any]]:
    size, deadline = len(pipes), time.monotonic() + seconds
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorldTimeout(f"rank {', '.join(map(str, waiting.values()))} of {size} not done after {seconds:.0f} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                kind, message = pipe.recv()
            except (EOFError, ConnectionError):
                raise WorldError(f"rank {rank} of {size} died") from None
            if kind == "error":
                raise WorldError(f"rank {rank} of {size}: {message}")
            if kind == "end":
                del waiting[pipe]
            else:
                yield rank, message


def _serve(pipe: Connection, function: str, arguments: tuple[Any, ...], place: tuple[int, int, str, float]) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    rank, size, store, seconds = place
    try:
        if size > 1:
            _join(rank, size, store, seconds)
        module, name = function.split(":")
        for message in getattr(import_module(module), name)(*arguments):
            pipe.send(("message", message))
        pipe.send(("end", None))
    except BaseException as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        pipe.send(("error", f"{type(error).__name__}: {lines[0][:300]}"))
    # Until it is killed: a slower rank may still be reading from this one's connections.
    time.sleep(seconds)


def _join(rank: int, size: int, store: str, seconds: float) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    # gloo, for NCCL refuses two ranks on one device. Longer than the caller waits: a hang is reported there.
    limit = timedelta(seconds=2 * seconds + 60)
    dist.init_process_group("gloo", store=FileStore(store, size), rank=rank, world_size=size, timeout=limit)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
