"""Training: steps of a model of a billion weights, of a tiny one against the CPU, and the real entry point.

Legend: T tokens of a batch.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml

from megacp.batch import Sample
from megacp.config import Config, load_config
from megacp.data.pack import Row as DataRow
from megacp.data.tokens import TokenFileWriter
from megacp.log import model_flops
from megacp.step import Run, Step, build, train_step
from tools.gpu.device import Device
from tools.gpu.report import FAILED, MEASURED, OK, Row, checked, failed

ROOT = Path(__file__).resolve().parents[2]
# The shape of Llama 3.2 1B: 1.24 billion weights.
BILLION = {
    "num_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 8192,
    "vocab_size": 128256,
    "rotary_base": 500000.0,
    "untie_embeddings_and_output_weights": False,
}
TINY = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 256,
    "vocab_size": 257,
}
# Losses in bf16 against the CPU's in fp32, relative.
LOSS_BOUND = 5e-3


def settings(model: dict[str, Any], length: int, kind: str, dtype: str, **train: Any) -> dict[str, Any]:
    """A whole configuration: one sequence of `length` tokens a step."""
    return {
        "model": model,
        "data": {"data_path": "none", "seq_length": length, "tokenizer_type": "ByteLevelTokenizer"},
        "optimizer": {"lr": 3e-4 if model is BILLION else 2e-3, "lr_decay_style": "constant"},
        "train": {"global_batch_size": 1, "train_iters": 1000, "device": kind, "params_dtype": dtype, **train},
    }


def load(tree: dict[str, Any]) -> Config:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "check.yaml"
        path.write_text(yaml.safe_dump(tree))
        return load_config(path, world_size=1, check_files=False)


class NoData:
    """Every step has the same batch, so nothing is read."""

    def __len__(self) -> int:
        return 0

    def row(self, i: int, read: bool = True) -> DataRow:
        raise IndexError(i)


class SameBatch:
    """A loader whose every step is one sequence of random tokens."""

    consumed_samples = 0

    def __init__(self, run: Run) -> None:
        length, vocabulary = run.config.data.seq_length, run.config.model.vocab_size
        tokens = torch.randint(vocabulary, (length + 1,), generator=torch.Generator().manual_seed(0))
        offsets = torch.tensor([0, length], dtype=torch.int32)
        self.pair = (
            Sample(tokens[:-1].clone(), tokens[1:].clone(), torch.ones(length), offsets, offsets, (0,)),
            run.grid.cp.ranks,
        )

    def next_step(self) -> list:
        return [self.pair]


def steps(config: Config, device: Device, count: int) -> tuple[list[Step], list[float], int]:
    """`count` steps, the seconds that each took, and the most bytes alive since the model was made."""
    run = build(config, torch.device(device.kind), NoData())
    loader: Any = SameBatch(run)
    done, times = [], []

    def all_of_them() -> None:
        for _ in range(count):
            device.synchronize()
            begin = time.perf_counter()
            done.append(train_step(run, loader))
            device.synchronize()
            times.append(time.perf_counter() - begin)

    before, more = device.allocated() or 0, device.peak(all_of_them) or 0
    return done, times, before + more


def losses_fall(part: str, check: str, losses: list[float]) -> Row:
    falls = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    words = " ".join(f"{loss:.3f}" for loss in losses)
    return Row(part, check, words, OK if falls else FAILED, "finite, falling", {"losses": losses})


def check_steps(kind: str, tolerance: float, compiled: bool) -> Iterator[Row]:
    """Speed and memory of the large model's steps; without compilation first the tiny one against the CPU."""
    device, part = Device(kind), "compile" if compiled else "train"
    dtype = str(device.dtype).removeprefix("torch.")
    if not compiled:
        yield agreement(device, dtype, tolerance)
    model, length = (BILLION, 8192) if device.cuda else (TINY, 64)
    config = load(settings(model, length, kind, dtype, compile=compiled, loss_chunk_size=4096))
    warm = 3
    done, times, peak = steps(config, device, warm + (10 if device.cuda else 1))
    yield losses_fall(part, f"loss of {len(done)} steps on one batch", [step.loss for step in done])
    seconds = statistics.median(times[warm:])
    tflops = model_flops(done[-1].work, config.model) / seconds / 1e12
    numbers = {"seconds": seconds, "tokens_per_second": length / seconds, "tflops": tflops, "peak_bytes": peak}
    words = f"{length / seconds:,.0f} tokens/s, {1000 * seconds:.0f} ms, {tflops:.0f} TFLOP/s"
    if device.peak_tflops:
        numbers["mfu"] = tflops / device.peak_tflops
        words += f", MFU {100 * numbers['mfu']:.1f} % of {device.peak_tflops:.0f}"
    words += f", {peak / 2**30:.1f} GiB, first step {times[0]:.1f} s"
    size = "1.24 B weights" if device.cuda else "tiny"
    yield Row(part, f"step of {size}, {length} tokens, {dtype}{', compiled' * compiled}", words, MEASURED, "", numbers)


def agreement(device: Device, dtype: str, tolerance: float) -> Row:
    """The same tiny run here and on the CPU in fp32."""
    here, there = (
        [step.loss for step in steps(load(settings(TINY, 128, kind, name)), Device(kind), 6)[0]]
        for kind, name in ((device.kind, dtype), ("cpu", "float32"))
    )
    error = max(abs(a - b) / b for a, b in zip(here, there, strict=True))
    words = f"{' '.join(f'{loss:.3f}' for loss in here)}; CPU fp32 {' '.join(f'{loss:.3f}' for loss in there)}"
    check = f"losses in {dtype} against the CPU's, relative"
    return checked("train", check, {"loss": error}, LOSS_BOUND * tolerance, f"{error:.1e}: {words}")


# --- the entry point: real data, checkpoint, resume


def check_entry(kind: str, seconds: float) -> Iterator[Row]:
    """`pretrain_gpt.py` as one rank of a job: NCCL on a CUDA device; trains and saves, then resumes from the file."""
    device, deadline = Device(kind), time.monotonic() + seconds
    with TemporaryDirectory() as folder:
        tree = settings(TINY, 64, kind, str(device.dtype).removeprefix("torch."), global_batch_size=4, train_iters=12)
        tree["data"] |= {"data_path": str(write_tokens(Path(folder))), "split": "90,10,0"}
        tree["train"] |= {"eval_interval": 6, "eval_iters": 1, "num_threads": 1}
        tree["checkpoint"] = {"save": f"{folder}/checkpoints"}
        tree["logging"] = {"run_dir": f"{folder}/run", "tensorboard": False}
        config = Path(folder) / "check.yaml"
        config.write_text(yaml.safe_dump(tree))
        for check, last in (("train, evaluate, save", 6), ("resume", 12)):
            error = pretrain(config, [f"train.train_iters={last}", "optimizer.lr_decay_iters=12"], deadline)
            if error:
                yield failed("entry", check, error)
                return
            records = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
            trained = [record for record in records if record["kind"] == "train"]
            if [record["iteration"] for record in trained] != list(range(1, last + 1)):
                yield failed("entry", check, f"iterations {[record['iteration'] for record in trained]}")
                return
            yield losses_fall("entry", check, [record["lm_loss"] for record in trained])


def write_tokens(folder: Path) -> Path:
    """Prefix of a token file of documents that repeat themselves, so that there is something to learn."""
    generator, prefix = np.random.default_rng(0), folder / "tokens"
    with TokenFileWriter(prefix, np.uint16) as writer:
        for length in generator.integers(40, 300, 60):
            writer.add_document(np.append(np.resize(np.arange(97, 97 + length % 13 + 2), length), 256))
    return prefix


def pretrain(config: Path, overrides: list[str], deadline: float) -> str | None:
    """Why the run failed, None if it did not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    environment = {**os.environ, **job, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "pretrain_gpt.py", str(config), *overrides]
    limit = max(1.0, deadline - time.monotonic() - 1)
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"pretrain_gpt.py not done after {limit:.0f} s"
    if done.returncode:
        sys.stderr.write(done.stderr)
        return f"pretrain_gpt.py ended with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:300]}"
    return None
