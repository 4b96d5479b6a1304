"""One pool of gloo worker processes for the whole test run.

`run(function, n, *args)` calls a module-level function on n ranks and returns what each of them returned.
Importing torch costs seconds, so workers are forked from a server that has imported it, and are kept; only
the default process group is made anew for each call.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

# After the first failure the other ranks get this long to end too; otherwise the workers are restarted.
GRACE_SECONDS = 1.0
START_SECONDS = 120.0


class RankError(RuntimeError):
    """A rank failed: which one, in which function, and its traceback."""


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self.pipe, their_pipe = context.Pipe()
        self.stack, their_stack = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(their_pipe, their_stack))
        self.process.start()
        their_pipe.close()
        their_stack.close()

    def dump(self) -> str:
        """The Python stack of every thread of the worker, or nothing if it does not answer at once."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR2)
        text = b""
        while self.stack.poll(0.5) and (part := os.read(self.stack.fileno(), 65536)):
            text += part
        return text.decode(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.stack.close()


class _Pool:
    """Workers started on demand; a pool that is stopped starts anew on the next call."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.store: TCPStore | None = None
        self.calls = count()

    def grow(self, n: int) -> list[_Worker]:
        new = [_Worker() for _ in range(n - len(self.workers))]
        self.workers += new
        for worker in new:
            if not worker.pipe.poll(START_SECONDS):
                raise TimeoutError(f"a worker process did not start within {START_SECONDS:g} s")
            worker.pipe.recv_bytes()
        return self.workers[:n]

    def run(self, name: str, call: bytes, n: int, timeout: float) -> list[Any]:
        try:
            answers = self.ask(call, n, timeout)
            error, cause = self.verdict(answers, name, n, timeout)
        except BaseException:
            self.stop()
            raise
        if len(answers) < n or None in answers.values():
            self.stop()
        for worker in self.workers[:n]:
            worker.pipe.send_bytes(b"release")
        if error is not None:
            raise error from cause
        return [answers[rank][1] for rank in range(n)]

    def ask(self, call: bytes, n: int, timeout: float) -> dict[int, Any]:
        # The store lives here, on a port the system chose: no race for a port, and no rank can take it down.
        self.store = self.store or TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        workers = self.grow(n)
        number = next(self.calls)
        for rank, worker in enumerate(workers):
            worker.pipe.send_bytes(pickle.dumps((rank, n, self.store.port, number, timeout, call)))
        return _collect(workers, timeout)

    def verdict(
        self, answers: dict[int, Any], name: str, n: int, timeout: float
    ) -> tuple[BaseException | None, BaseException | None]:
        """The exception to raise and its cause. A death comes first: it makes the peers fail too."""
        for rank, answer in answers.items():
            if answer is None:
                process = self.workers[rank].process
                process.join()
                return RankError(f"rank {rank} of {n} died in {name}: exit code {process.exitcode}"), None
        for rank, (succeeded, value) in answers.items():
            if not succeeded:
                error, text = value
                report = RankError(f"rank {rank} of {n} failed in {name}:\n{text}")
                return (pickle.loads(error), report) if error else (report, None)
        hung = [rank for rank in range(n) if rank not in answers]
        if hung:
            stacks = "".join(f"\nrank {rank}:\n{self.workers[rank].dump()}" for rank in hung)
            return TimeoutError(f"rank(s) {hung} of {n} hung in {name} after {timeout:g} s{stacks}"), None
        return None, None

    def stop(self) -> None:
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.kill()


def _collect(workers: list[_Worker], timeout: float) -> dict[int, Any]:
    """rank -> (succeeded, value) in order of arrival; None if the rank died, no entry if it hung."""
    answers: dict[int, Any] = {}
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                answers[rank] = None
            if answers[rank] is None or not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return answers


def _serve(pipe: Connection, stack: Connection) -> None:
    """Life of a worker: one call after the other until the parent goes away."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    faulthandler.register(signal.SIGUSR2, file=stack.fileno(), all_threads=True)
    for interface in ("lo", "lo0"):
        if interface in [name for _, name in socket.if_nameindex()]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    environment = dict(os.environ)
    pipe.send_bytes(b"ready")
    while True:
        pipe.send_bytes(_answer(*pickle.loads(pipe.recv_bytes())))
        # Connections stay open until every rank has answered: a slower peer may still be reading from them.
        pipe.recv_bytes()
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _answer(rank: int, size: int, port: int, number: int, timeout: float, call: bytes) -> bytes:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    random.seed(0)
    try:
        function, args = pickle.loads(call)
        store = PrefixStore(str(number), TCPStore("127.0.0.1", port, is_master=False))
        # Longer than the caller waits: a hang is reported once, with the stack, by the parent.
        limit = timedelta(seconds=2 * timeout + 60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        return pickle.dumps((True, function(*args)))
    except BaseException as error:
        return pickle.dumps((False, (_pickled(error), traceback.format_exc())))


def _pickled(error: BaseException) -> bytes | None:
    """The exception as bytes, None if it would not survive the way."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


_pool = _Pool()
stop = _pool.stop
# multiprocessing joins its children at exit; this is registered later, so runs earlier.
atexit.register(stop)


def run(function: Callable[..., Any], n: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """`function(*args)` on n ranks of a fresh gloo default group; what each returned, in rank order.

    The function must be importable by name; arguments and results are pickled. An exception of a rank is
    raised here again, caused by a RankError with the rank and its traceback (RankError alone if the exception
    cannot be pickled or the process died). After `timeout` seconds TimeoutError names the ranks that hung and
    shows where. Ranks left waiting are killed and started anew on the next call.
    """
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"
    call = pickle.dumps((function, args))
    return _pool.run(name, call, n, timeout)
