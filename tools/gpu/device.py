"""The device that is checked. What differs between a CUDA device and the CPU stands here and nowhere else."""

from __future__ import annotations

import gc
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Dense bf16 peak in TFLOP/s by the beginning of the device's name (NVIDIA's data sheets, without sparsity).
PEAKS = {"NVIDIA H200": 989.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA H100": 989.0, "NVIDIA A100": 312.0}


@dataclass(frozen=True)
class Device:
    """`kind` is cuda or cpu. On a CPU everything runs at sizes so small that times mean nothing."""

    kind: str

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """What training runs in here."""
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def dtypes(self) -> list[torch.dtype]:
        """What the attention kernels take here."""
        return [torch.bfloat16, torch.float16] if self.cuda else [torch.float32]

    @property
    def peak_tflops(self) -> float | None:
        name = torch.cuda.get_device_name() if self.cuda else ""
        return next((peak for beginning, peak in PEAKS.items() if name.startswith(beginning)), None)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object], repeats: int = 10) -> float:
        """Median time of `action`, after two that do not count."""
        for _ in range(2 if self.cuda else 0):
            action()
        if not self.cuda:
            begin = time.perf_counter()
            action()
            return time.perf_counter() - begin
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            action()
            mark.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)) / 1000

    def allocated(self) -> int | None:
        """Bytes of live tensors; None on a CPU, where nobody counts them."""
        gc.collect()
        self.synchronize()
        return torch.cuda.memory_allocated() if self.cuda else None

    def peak(self, action: Callable[[], object]) -> int | None:
        """Most bytes of tensors alive at once while `action` runs, beyond those alive before."""
        before = self.allocated()
        if before is None:
            action()
            return None
        torch.cuda.reset_peak_memory_stats()
        action()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before


def facts(kind: str) -> Iterator[dict[str, Any]]:
    """What the machine is, and under `lacks` why nothing can run on it; yielded once."""
    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "transformer_engine": importlib.util.find_spec("transformer_engine") is not None,
        "lacks": None,
    }
    if kind == "cuda" and not torch.cuda.is_available():
        found["lacks"] = f"no CUDA device (torch {torch.__version__} sees none)"
    elif kind == "cuda":
        properties, capability = torch.cuda.get_device_properties(0), torch.cuda.get_device_capability()
        found |= {"device": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}
        if capability < (8, 0):
            found["lacks"] = f"{properties.name} has compute capability {capability}: flash attention and bf16 need 8.0"
    yield found
