"""What a run says of itself: console line, metrics.jsonl, TensorBoard, Weights & Biases; speed, count of FLOPs."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Work:
    """What one step had to compute.

    tokens          real tokens (padding is no work)
    squares         sum over documents of length^2: what attention grows with
    """

    tokens: float = 0.0
    squares: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.squares + other.squares)


def model_flops(work: Work, model: Any) -> float:
    """FLOPs of forward and backward that the mathematics of the model asks for; recomputation does not count.

    Matrix products: 6 FLOPs a token and weight (2 forward, 4 backward) over the linear layers and the head; embedding
    look-ups are none. Attention: two products of 2*L^2*N*D a document and layer, three times that with the backward
    pass, half of it under a causal mask: 6*L^2*N*D, counted per document since documents that do not see each other
    cost no more together than apart. (Chowdhery et al. 2022, appendix B; Megatron-LM counts the full square.)

    `model` is the model part of the configuration.
    """
    heads = model.num_attention_heads * model.head_dim
    qkv = heads + 2 * model.kv_heads * model.head_dim
    mlp = (3 if model.swiglu else 2) * model.ffn_size
    weights = model.num_layers * model.hidden_size * (qkv + heads + mlp) + model.vocab_size * model.hidden_size
    per_square = 6 if model.attn_mask_type == "causal" else 12
    return 6.0 * weights * work.tokens + per_square * model.num_layers * heads * work.squares


class Meter:
    """Speed of the iterations since the last reading; `config` is the whole configuration."""

    def __init__(self, config: Any, world_size: int):
        self.config = config
        self.world_size = world_size
        self.restart()

    def restart(self) -> None:
        """Begin anew, to leave out what is no training (evaluation, saving)."""
        self.since, self.iterations, self.work = time.perf_counter(), 0, Work()

    def add(self, work: Work) -> None:
        self.iterations += 1
        self.work += work

    def read(self) -> dict[str, float]:
        """Averages over the iterations, of which there must be one; begins anew."""
        seconds, peak = time.perf_counter() - self.since, self.config.logging.peak_tflops
        tflops = model_flops(self.work, self.config.model) / seconds / self.world_size / 1e12
        speed = {
            "iteration_ms": 1000 * seconds / self.iterations,
            "tokens_per_second": self.work.tokens / seconds,
            "tflops_per_rank": tflops,
        }
        self.restart()
        return speed if peak is None else {**speed, "mfu": tflops / peak}


class Log:
    """Writes each record to every place that is on; on other ranks than 0 (not `active`) it does nothing.

    metrics.jsonl is only appended to. A line of kind "start" says after which iteration a run begins: where one was
    resumed from a checkpoint, or begun anew in the same folder, earlier lines of later iterations are void.
    TensorBoard is told the same by its purge_step.

    Raises OSError, ImportError or ValueError with one line where a place cannot be opened.
    """

    def __init__(self, config: Any, iteration: int = 0, active: bool = True):
        self._active = active
        self._file = self._board = self._wandb = None
        logging = config.logging
        if active and logging.run_dir is not None:
            folder = Path(logging.run_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _append_to(folder / "metrics.jsonl")
            self._write("start", iteration, {})
            if logging.tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # slow to import

                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=iteration + 1)
        if active and logging.wandb_project is not None:
            self._wandb = _start_wandb(config)

    def say(self, text: str) -> None:
        if self._active:
            with suppress(OSError):  # the reader of a pipe has gone, or the disk is full: no reason to stop training
                print(text, flush=True)

    def record(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Numbers of one iteration; `kind` is 'train', 'valid' or 'test'."""
        try:
            self._record(kind, iteration, values)
        except OSError as error:
            with suppress(OSError):
                print(f"warning: logging.run_dir: {error}; no more metrics are written", file=sys.stderr, flush=True)
            self._forget()

    def _record(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        self._write(kind, iteration, values)
        named = {f"{kind}/{key}": value for key, value in values.items()}
        if self._board is not None:
            for key, value in named.items():
                self._board.add_scalar(key, value, iteration)
        if self._wandb is not None:
            self._wandb.log(named, step=iteration)

    def _forget(self) -> None:
        """Leave the files as they are: at the end, or after one could not be written."""
        for place in (self._file, self._board):
            with suppress(OSError):
                if place is not None:
                    place.close()
        self._file = self._board = None

    def close(self) -> None:
        self._forget()
        if self._wandb is not None:
            self._wandb.finish()

    def _write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        if self._file is not None:
            # JSON has no word for nan and inf: such a value is left out.
            finite = {key: value for key, value in values.items() if math.isfinite(value)}
            self._file.write(json.dumps({"kind": kind, "iteration": iteration, **finite}) + "\n")
            self._file.flush()


def _append_to(path: Path) -> TextIO:
    """The file, open at its end; a last line that a full disk or a crash cut short is dropped."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def _start_wandb(config: Any) -> Any:
    logging = config.logging
    try:
        import wandb
    except ImportError:
        raise ImportError("logging.wandb_project needs wandb: pip install -e '.[wandb]', or leave it out") from None
    try:
        return wandb.init(
            project=logging.wandb_project,
            name=logging.wandb_exp_name,
            mode=logging.wandb_mode,
            dir=logging.run_dir,
            config=config.model_dump(),
        )
    except Exception as error:  # no login, no network, a bad name: each has a class of its own
        raise ValueError(f"wandb does not start ({error}): log in, or set logging.wandb_mode=offline") from None


def console_line(iteration: int, iterations: int, values: Mapping[str, float]) -> str:
    """One line an iteration, in Megatron-LM's order of fields."""
    mfu = f" | MFU: {100 * values['mfu']:.1f}%" if "mfu" in values else ""
    return (
        f"iteration {iteration:>8}/{iterations:>8} | consumed samples: {values['consumed_samples']:>10.0f} | "
        f"elapsed time per iteration (ms): {values['iteration_ms']:.1f} | "
        f"tokens/s: {values['tokens_per_second']:.0f} | "
        f"TFLOP/s/rank: {values['tflops_per_rank']:.3f}{mfu} | learning rate: {values['learning_rate']:.6e} | "
        f"lm loss: {values['lm_loss']:.6f} | grad norm: {values['grad_norm']:.3f} | "
        f"skipped: {values['skipped']:.0f} | nan: {values['nan']:.0f}"
    )
