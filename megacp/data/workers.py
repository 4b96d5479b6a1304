"""Batches of documents through worker processes, in order and few at a time, and how far that has come."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from megacp.data.documents import RawDocument

_SECONDS_BETWEEN_LINES = 10.0

Result = TypeVar("Result")
Work = Callable[[list[RawDocument]], Result]


def in_order(
    work: Work[Result], batches: Iterable[tuple[list[RawDocument], int]], workers: int
) -> Iterator[tuple[Result, int]]:
    """`work` of every batch, done in `workers` processes, in the order of the batches; each with its bytes on disk.

    `work` and its results are pickled. Raises what `work` raises, and ValueError where a worker dies.
    """
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
    waiting: deque[tuple[Future[Result], RawDocument, int]] = deque()

    def oldest() -> tuple[Result, int]:
        future, first, consumed = waiting.popleft()
        try:
            return future.result(), consumed
        except BrokenProcessPool as error:
            where = f"{first.path}:{first.line}" if first.line else first.path
            raise ValueError(f"a worker process died at or after {where}: killed, or out of memory") from error

    try:
        for batch, consumed in batches:
            if len(waiting) >= 2 * workers + 2:
                yield oldest()
            waiting.append((_submit(pool, work, batch), batch[0], consumed))
        while waiting:
            yield oldest()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    # The parent alone answers Ctrl-C; and a parent that was killed must not leave workers waiting for ever.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _submit(pool: ProcessPoolExecutor, work: Work[Result], batch: list[RawDocument]) -> Future[Result]:
    try:
        return pool.submit(work, batch)
    except BrokenProcessPool as error:
        broken: Future[Result] = Future()
        broken.set_exception(error)
        return broken


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, else a line now and then; told the bytes read and the tokens made since the last call."""
    console = Console(stderr=True)
    begin = time.monotonic()
    done = made = 0
    said = begin

    def rate() -> str:
        return f"{made / 1e6:.1f} M tokens, {made / 1e3 / (time.monotonic() - begin + 1e-9):.0f} K/s"

    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        line = bar.add_task("tokenizing", total=total, rate="")

        def advance(read: int, tokens: int) -> None:
            nonlocal done, made, said
            done, made = done + read, made + tokens
            bar.update(line, completed=done, rate=rate())
            now = time.monotonic()
            if not console.is_terminal and now - said > _SECONDS_BETWEEN_LINES:
                said = now
                left = (now - begin) * (total / max(done, 1) - 1)
                print(f"{100 * done / total:.0f} %, {rate()}, {left:.0f} s left", file=sys.stderr, flush=True)

        yield advance
