"""Reading the memory of other processes of the same host: one copy instead of a way through sockets.

gloo talks TCP between all processes, also where they share a memory; a large message then takes four times as long
as this. MPI libraries do the same and call it cross-memory attach. Linux only, and only where the kernel
allows it: a container may not. Who can read whom is tried out once, at the start, and gloo does the rest.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Stretch(ctypes.Structure):
    """struct iovec of <sys/uio.h>."""

    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _kernel_call(name: str) -> Any:
    """A function of the C library; None where there is none such."""
    call = getattr(ctypes.CDLL(None, use_errno=True), name, None) if os.name == "posix" else None
    if call is not None:
        call.restype = ctypes.c_ssize_t
    return call


def read(pid: int, address: int, into: Tensor) -> None:
    """Fill `into`, contiguous in host memory, from `address` of another process. OSError if that cannot be read."""
    call, done, size = _kernel_call("process_vm_readv"), 0, into.nbytes
    if call is None:
        raise OSError("the C library has no process_vm_readv")
    while done < size:  # the kernel copies at most 2 GiB at a time
        here, there = (_Stretch(start + done, size - done) for start in (into.data_ptr(), address))
        one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
        count = call(ctypes.c_int(pid), ctypes.byref(here), one, ctypes.byref(there), one, none)
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot read the memory of process {pid}: {os.strerror(code)}")
        done += count


def _let_siblings_read() -> None:
    """Allow what else the parent of this process started to trace it, and so to read it, where the Yama module of Linux
    reserves that to ancestors. Nobody gets a right that he would not have without the module."""
    set_ptracer, parent = 0x59616D61, os.getppid()
    if parent > 1 and (call := _kernel_call("prctl")) is not None:
        call(ctypes.c_int(set_ptracer), *(ctypes.c_ulong(word) for word in (parent, 0, 0, 0)))


@dataclass(frozen=True)
class Readable:
    """Process ids of all ranks of the world, and bool [W, W], which of them read each other."""

    pids: tuple[int, ...] = ()
    mutual: tuple[tuple[bool, ...], ...] = ()

    def among(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Process ids of `ranks` if each reads all others, else nothing."""
        if not self.pids or not all(self.mutual[a][b] for a in ranks for b in ranks):
            return ()
        return tuple(self.pids[rank] for rank in ranks)


def find_readable() -> Readable:
    """Who reads whom, tried out. A collective of the whole world; gloo only."""
    word = torch.tensor([secrets.randbits(62)], device="cpu")
    host = (
        int.from_bytes(sha256(BOOT_ID.read_bytes()).digest()[:7], "big") if BOOT_ID.exists() else secrets.randbits(62)
    )
    about = _all_gather([host, os.getpid(), word.data_ptr(), int(word)])
    matrix, neighbours = _try_all(about, host), about[:, :1] == about[:, 0]
    if not matrix[neighbours].all():
        _let_siblings_read()
        _all_gather([0])  # nobody tries again before all have done so
        matrix = _try_all(about, host)
    mutual = (matrix & matrix.t()).tolist()
    return Readable(tuple(about[:, 1].tolist()), tuple(map(tuple, mutual)))


def _try_all(about: Tensor, host: int) -> Tensor:
    """bool [W, W]: which rank reads which, of rows (host, process id, address of a word, the word)."""
    # Nobody goes on, and lets go of the word, before all have read.
    return _all_gather([int(there[0] == host and _reads(*there[1:])) for there in about.tolist()]).bool()


def _all_gather(numbers: list[int]) -> Tensor:
    """int64 [W, ..]: the numbers of every rank."""
    row = torch.tensor(numbers, device="cpu")
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def _reads(pid: int, address: int, expected: int) -> bool:
    """Is what lies there what its owner says? In another namespace the number may be that of a stranger."""
    found = torch.zeros(1, dtype=torch.int64, device="cpu")
    try:
        read(pid, address, found)
    except OSError:
        return False
    return int(found) == expected
