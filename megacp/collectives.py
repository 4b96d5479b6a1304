"""Sums, gathers, scatters and exchanges of tensors over a Group; at size 1 a collective returns its input.

One place knows what differs between backends. gloo's reduce-scatter costs several times its all-reduce (it sends every
block to every rank), so there the sum is taken whole and sliced. gloo sends host memory: for tensors on a GPU, as when
several ranks share one for a check, what attention exchanges is staged there. Where ranks can read each other's memory
(`Group.pids`) large tensors that are exchanged or gathered do not go through gloo: it tells where they lie, and when
they have been read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megacp import same_host
from megacp.grid import Group

# From so many bytes on a tensor is read rather than sent. An estimate: to say where it lies and that it has been read
# takes gloo two messages and 0.2 ms, in which it sends about as much.
LEAST_READ = 2**18
# What passes between two ranks is matched by tag: tensors have 0.
WHERE, DONE = 1, 2

# Named anew in torch 2.13, which warns of the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(tensor: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce in place; returns `tensor`."""
    if group.size > 1:
        dist.all_reduce(tensor, op, group=group.process_group)
    return tensor


def start_all_reduce(tensor: Tensor, group: Group) -> dist.Work | None:
    """Sum in place, in the background; None when there is nothing to wait for."""
    if group.size == 1:
        return None
    return dist.all_reduce(tensor, group=group.process_group, async_op=True)


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """[t, ...] of every rank -> [t*size, ...] in rank order."""
    if group.size == 1:
        return tensor
    sent = _outgoing(tensor.contiguous(), group)
    gathered = sent.new_empty(tensor.shape[0] * group.size, *tensor.shape[1:])
    bands = gathered.chunk(group.size)
    bands[group.rank].copy_(sent)
    if group.pids:
        others = [bands[index] for index in others_of(group)]
        start_trade([sent] * len(others), others, group).wait()
    else:
        for work in start_gather(gathered, group):
            if work is not None:
                work.wait()
    return gathered.to(tensor.device)


def others_of(group: Group) -> list[int]:
    """Indices in the group but one's own, ascending."""
    return [index for index in range(group.size) if index != group.rank]


def start_trade(sent: Iterable[Tensor], received: Iterable[Tensor], group: Group) -> Exchange:
    """One contiguous tensor goes to each of `others_of`, and what comes from there into one like it."""
    exchange, others = Exchange(group), others_of(group)
    exchange.start(list(zip(sent, others, strict=True)), list(zip(received, others, strict=True)))
    return exchange


def start_gather_of_others(tensor: Tensor, group: Group) -> tuple[Tensor, Exchange]:
    """`tensor`, contiguous, of every other rank once the second has received: [size - 1, ...] in order of `others_of`.

    Or [size, ...], one's own included: NCCL's collective among more than two ranks leaves out nobody.
    """
    if group.size == 2 or dist.get_backend(group.process_group) == "gloo":
        gathered = tensor.new_empty(group.size - 1, *tensor.shape)
        return gathered, start_trade([tensor] * len(gathered), gathered, group)
    gathered = tensor.new_empty(group.size, *tensor.shape)
    exchange, work = Exchange(group), _all_gather(gathered, tensor, group=group.process_group, async_op=True)
    assert work is not None
    exchange.pending = [work]
    return gathered, exchange


class Exchange:
    """Sends tensors to some ranks of a group and receives some from others, while the caller computes.

    NCCL does so on a stream of its own, which waits for what the caller has enqueued so far. Its first call on a group
    must be made by all of its ranks. Large tensors of ranks that read each other's memory are copied in `receive`, at
    the speed of memory, and by no thread besides.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        # What is under way; what was sent before, but perhaps not read yet; answers to others.
        self._begin()
        self.unread: list[_Shown] = []
        self.told: list[dist.Work] = []

    def _begin(self) -> None:
        self.pending: list[dist.Work] = []
        self.arriving: list[tuple[Tensor, Tensor]] = []
        self.shown: list[_Shown] = []
        # By index in the group: where to read there, and into what.
        self.read: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def start(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        """Post pairs of a contiguous tensor and an index in the group, whose receiver expects the same bytes.

        What is sent must stay as it is until the end of `wait`, or of the second `receive` from now. Two ranks match
        what passes between them by its order here. ValueError for a tensor with gaps; RuntimeError before what was
        started last has been received.
        """
        if self.pending:
            raise RuntimeError("an exchange was started anew before it was received")
        for tensor, _ in (*sends, *receives):
            if not tensor.is_contiguous():
                raise ValueError(f"a tensor of shape {list(tensor.shape)} that is not contiguous cannot be exchanged")
        operations, shown, read = [], defaultdict(list), defaultdict(list)
        staged = {id(tensor): _outgoing(tensor, self.group) for tensor, _ in sends}
        for tensor, index in sends:
            if self._is_read(tensor):
                shown[index].append(staged[id(tensor)])
            else:
                operations.append(self._operation(dist.isend, staged[id(tensor)], index))
        for tensor, index in receives:
            buffer = torch.empty_like(tensor, device="cpu") if _staged(tensor, self.group) else tensor
            self.arriving.append((tensor, buffer))
            if self._is_read(tensor):
                read[index].append(buffer)
            else:
                operations.append(self._operation(dist.irecv, buffer, index))
        for index, tensors in shown.items():
            where = torch.tensor([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors], device="cpu")
            operations.append(self._operation(dist.isend, where, index, WHERE))
        for index, buffers in read.items():
            where = torch.empty(len(buffers), 2, dtype=torch.int64, device="cpu")
            operations.append(self._operation(dist.irecv, where, index, WHERE))
            self.read[index] = where, buffers
        self.pending = dist.batch_isend_irecv(operations) if operations else []
        self.shown = [self._show(tensors, index) for index, tensors in shown.items()]

    def _is_read(self, tensor: Tensor) -> bool:
        return bool(self.group.pids) and tensor.nbytes >= LEAST_READ

    def _operation(self, kind: Any, tensor: Tensor, index: int, tag: int = 0) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self.group.ranks[index], self.group.process_group, tag)

    def _show(self, tensors: list[Tensor], index: int) -> _Shown:
        answer = torch.zeros(1, device="cpu")
        (work,) = dist.batch_isend_irecv([self._operation(dist.irecv, answer, index, DONE)])
        return _Shown(index, tensors, answer, work)

    def receive(self) -> None:
        """Until all has arrived. RuntimeError if something could not be read, here or of what was sent before."""
        _raise(self._receive())

    def wait(self) -> None:
        """Until all has arrived, and what was sent may change. RuntimeError if something could not be read."""
        _raise(self._receive() + self._until_read())

    def _receive(self) -> list[str]:
        """What went wrong."""
        try:
            for work in self.pending:
                work.wait()
            # Beginning after oneself: at no time do all turn to the same rank.
            order = sorted(self.read, key=lambda index: (index - self.group.rank) % self.group.size)
            faults = [fault for index in order if (fault := self._read(index, *self.read[index]))]
            faults += self._until_read()
            if not faults:
                for tensor, buffer in self.arriving:
                    if buffer is not tensor:
                        tensor.copy_(buffer)
            return faults
        finally:
            self.unread = self.shown
            self._begin()

    def _until_read(self) -> list[str]:
        """Wait for those who were shown something before this exchange; what went wrong there."""
        unread, self.unread = self.unread, []
        for work in (*self.told, *(shown.work for shown in unread)):
            work.wait()
        self.told.clear()
        return [f"rank {self.group.ranks[shown.index]} could not read" for shown in unread if shown.answer]

    def _read(self, index: int, where: Tensor, buffers: list[Tensor]) -> str:
        """Fetch what a rank shows and tell it; what went wrong, if something did, is told too."""
        fault = ""
        try:
            for (address, size), buffer in zip(where.tolist(), buffers, strict=True):
                if size != buffer.nbytes:
                    raise OSError(f"rank {self.group.ranks[index]} sends {size} bytes, not {buffer.nbytes}")
                same_host.read(self.group.pids[index], address, buffer)
        except OSError as error:
            fault = str(error)
        answer = torch.full((1,), float(bool(fault)), device="cpu")
        self.told += dist.batch_isend_irecv([self._operation(dist.isend, answer, index, DONE)])
        return fault


class _Shown(NamedTuple):
    """Tensors that a rank reads here, kept until `work` has brought its answer: 0, or 1 if it could not."""

    index: int
    tensors: list[Tensor]
    answer: Tensor
    work: dist.Work


def _raise(faults: list[str]) -> None:
    if faults:
        raise RuntimeError("; ".join(faults))


def _staged(tensor: Tensor, group: Group) -> bool:
    return tensor.is_cuda and dist.get_backend(group.process_group) == "gloo"


def _outgoing(tensor: Tensor, group: Group) -> Tensor:
    """The tensor where the group's backend can send it from."""
    return tensor.cpu() if _staged(tensor, group) else tensor


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """Sum of [t*size, ...] over ranks -> this rank's rows [t, ...]. `tensor` may be overwritten.

    ValueError if the rows cannot be dealt evenly.
    """
    if group.size == 1:
        return tensor
    device = tensor.device
    rows, left_over = divmod(tensor.shape[0], group.size)
    if left_over:
        raise ValueError(f"{tensor.shape[0]} rows cannot be scattered over {group.size} ranks: pad them to a multiple")
    if dist.get_backend(group.process_group) == "gloo":
        tensor = _outgoing(tensor, group)
        dist.all_reduce(tensor, group=group.process_group)
        return tensor[group.rank * rows : (group.rank + 1) * rows].to(device, copy=True)
    scattered = torch.empty_like(tensor[:rows])
    _reduce_scatter(scattered, tensor.contiguous(), group=group.process_group)
    return scattered


def start_reduce(matrix: Tensor, band: Tensor, group: Group) -> dist.Work | None:
    """Sum `matrix` over the group so that at least `band`, this rank's rows of it, is right; in the background.

    On gloo the all-reduce of everything is the cheaper one (tools/bench/reduce.py, see there for numbers).
    """
    if group.size == 1:
        return None
    if dist.get_backend(group.process_group) == "gloo":
        return dist.all_reduce(matrix, group=group.process_group, async_op=True)
    return _reduce_scatter(band, matrix, group=group.process_group, async_op=True)


def start_gather(matrix: Tensor, group: Group) -> list[dist.Work | None]:
    """Fill `matrix` with the bands of all ranks (each has its own in place); in the background.

    gloo's all-gather goes through buffers of its own: one broadcast per band takes half its time and no memory.
    """
    if group.size == 1:
        return []
    bands = matrix.chunk(group.size)
    if dist.get_backend(group.process_group) != "gloo":
        return [_all_gather(matrix, bands[group.rank], group=group.process_group, async_op=True)]
    return [
        dist.broadcast(band, root, group=group.process_group, async_op=True)
        for band, root in zip(bands, group.ranks, strict=True)
    ]
