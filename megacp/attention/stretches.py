"""Stretches of rows: taken out of a tensor, put back into it, added to it.

What a device needs to know of them is copied once, without a wait for the device, and kept with them: plans of a pack
are shared by all layers. Stretches that lie in one block need no more than a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy that is not waited for: from pageable memory it would stop the host until the device has caught up."""
    if device.type == "cuda" and _is_real(host):
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def _is_real(x: Tensor) -> bool:
    """Fake tensors, a subclass, have no memory to pin, and must not be kept for real ones to meet."""
    return type(x) is Tensor


def ranges(starts: Tensor, lengths: Tensor, total: int) -> Tensor:
    """[start, start + 1, .. start + length - 1] of every pair, concatenated: `total` numbers, of their dtype."""
    before = lengths.cumsum(0, dtype=lengths.dtype) - lengths
    # The size of the result, given, need not be fetched from the device.
    numbers = (starts - before).repeat_interleave(lengths, output_size=total)
    return numbers.add_(torch.arange(total, dtype=starts.dtype, device=starts.device))


@dataclass(frozen=True)
class Stretches:
    """Rows [start, start + length) of every pair, one stretch after the other."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @cached_property
    def rows(self) -> int:
        """Of all stretches."""
        return sum(self.lengths)

    @cached_property
    def start(self) -> int:
        return self.starts[0] if self.starts else 0

    @cached_property
    def is_block(self) -> bool:
        """Does each begin where the one before ends?"""
        return all(map(int.__eq__, self.starts, accumulate(self.lengths, initial=self.start)))

    def covers(self, rows: int) -> bool:
        """Are they rows 0..rows-1, each once, in this order?"""
        return self.is_block and self.start == 0 and self.rows == rows

    @cached_property
    def _kept(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    def _keep(self, name: str, made: Tensor, device: torch.device) -> Tensor:
        if _is_real(made):
            self._kept[name, device] = made
        return made

    def index(self, device: torch.device) -> Tensor:
        """int64 [rows]: their numbers."""
        if (known := self._kept.get(("index", device))) is not None:
            return known
        starts, lengths = on_device(torch.tensor((self.starts, self.lengths), dtype=torch.int64), device)
        return self._keep("index", ranges(starts, lengths, self.rows), device)

    def offsets(self, device: torch.device) -> Tensor:
        """int32 [stretches + 1]: cumulated lengths."""
        if (known := self._kept.get(("offsets", device))) is not None:
            return known
        ends = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
        return self._keep("offsets", on_device(ends, device), device)

    def of(self, *tensors: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        """The stretches of each tensor, a view of it if they are a block; rows are dimension `dim`."""
        if self.is_block:
            return tuple(x.narrow(dim, self.start, self.rows) for x in tensors)
        return tuple(x.index_select(dim, self.index(x.device)) for x in tensors)

    def put_(self, total: Tensor, part: Tensor, dim: int = 0) -> None:
        """Overwrite the stretches of `total` with `part`, of the same dtype."""
        if self.is_block:
            total.narrow(dim, self.start, self.rows).copy_(part)
        else:
            total.index_copy_(dim, self.index(total.device), part)

    def add_(self, total: Tensor, share: Tensor) -> None:
        """Add [rows, ..] to the stretches, in the dtype of `total`; rows that are in several get several shares."""
        if self.is_block:
            total.narrow(0, self.start, self.rows).add_(share)
        else:
            total.index_add_(0, self.index(total.device), share.to(total.dtype))
