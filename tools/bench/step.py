"""Training steps against a peer: ours and transformers' LlamaForCausalLM; two processes and one.

    python tools/bench/step.py                       every comparison
    python tools/bench/step.py 10m-8x512 cp2-1x4096  some of them

fp32, AdamW (fused on both sides), clipping at 1, the same batch of random tokens. Each contender lives in processes of
its own; all of a comparison are started first and then take turns, a step each, so that a noisy machine is noisy for
all. Reported are medians of tokens/s, the median of the ratios within a turn, and peak memory (the highest resident
set of a process, summed over its processes, less what was resident before the model was built).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megacp.data.pack import Row

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "10m": {
        "num_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 704,
        "vocab_size": 8192,
    },
    # The same number of parameters, as small models have them today: a larger vocabulary, tied.
    "10mtied": {
        "num_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 704,
        "vocab_size": 16384,
        "untie_embeddings_and_output_weights": False,
    },
    "135m": {
        "num_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_query_groups": 3,
        "ffn_hidden_size": 1536,
        "vocab_size": 49152,
        "untie_embeddings_and_output_weights": False,
    },
}
# name -> contenders (kind, processes); the first is what the others are compared with.
CASES = {
    "10m-8x512": [("transformers", 1), ("megacp", 1)],
    "10m-2x2048": [("transformers", 1), ("megacp", 1)],
    "10mtied-8x512": [("transformers", 1), ("megacp", 1)],
    "10mtied-2x2048": [("transformers", 1), ("megacp", 1)],
    "135m-1x2048": [("transformers", 1), ("megacp", 1)],
    "10m-1x4096": [("megacp", 1), ("cp", 2), ("tp", 2)],
    "10m-2x2048-dp": [("megacp", 1), ("dp", 2)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}")
    parser.add_argument("--turns", type=int, default=9, help="steps of each contender that count")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    print(f"{'case':16} {'contender':14} {'tokens/s':>10} {'ratio':>7} {'peak MiB':>9}   loss")
    for name in options.cases or CASES:
        compare(name, CASES[name], options.turns)


def compare(name: str, contenders: list[tuple[str, int]], turns: int) -> None:
    size, shape = name.split("-")[:2]
    rows, length = (int(number) for number in shape.split("x"))
    running = [Contender(kind, count, size, rows, length) for kind, count in contenders]
    seconds: list[list[float]] = [[] for _ in running]
    for turn in range(turns + 2):
        for contender, times in zip(running, seconds, strict=True):
            # The threads of the one before spin for a while before they sleep.
            time.sleep(0.3)
            taken = contender.step()
            if turn >= 2:
                times.append(taken)
    for (kind, count), contender, times in zip(contenders, running, seconds, strict=True):
        ratio = statistics.median(first / own for first, own in zip(seconds[0], times, strict=True))
        speed = rows * length / statistics.median(times)
        losses, memory = contender.close()
        print(
            f"{name:16} {kind + ' x' + str(count):14} {speed:10.0f} {ratio:7.3f} {memory:9.0f}   {losses}", flush=True
        )


class Contender:
    """Processes that take a step each time they are told to."""

    def __init__(self, kind: str, count: int, size: str, rows: int, length: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.processes = []
        for rank in range(count):
            job = json.dumps({"kind": kind, "size": size, "rows": rows, "length": length})
            env = {**os.environ, "OMP_NUM_THREADS": str(2 // count), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
            if count > 1:
                env |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
                env |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, __file__, "--worker", job]
            pipe = subprocess.PIPE
            self.processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env))
        self._answers()

    def step(self) -> float:
        """Seconds until the last process is done."""
        self._tell("step")
        return max(float(answer) for answer in self._answers())

    def close(self) -> tuple[str, float]:
        """(first -> last loss, peak MiB over all processes)."""
        self._tell("end")
        answers = [json.loads(answer) for answer in self._answers()]
        for process in self.processes:
            process.wait()
        return answers[0]["losses"], sum(answer["peak"] for answer in answers)

    def _tell(self, word: str) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()

    def _answers(self) -> list[str]:
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("> "):
                if not line:
                    raise SystemExit("a contender died")
            answers.append(line[2:])
        return answers


def work(kind: str, size: str, rows: int, length: int) -> None:
    """A contender's process: a step for every line read, then what it cost."""
    build = transformers_step if kind == "transformers" else megacp_step
    step, before = build(kind, SIZES[size], rows, length)
    losses = []
    print("> ready", flush=True)
    while sys.stdin.readline().strip() == "step":
        start = time.perf_counter()
        losses.append(step())
        print(f"> {time.perf_counter() - start}", flush=True)
    peak = resident("VmHWM") - before
    print("> " + json.dumps({"losses": f"{losses[0]:.3f} -> {losses[-1]:.3f}", "peak": peak}), flush=True)


def resident(name: str) -> float:
    """MiB of this process in memory: now (VmRSS) or at most so far (VmHWM). Linux."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) / 1024


def random_rows(vocabulary: int, rows: int, length: int):  # noqa: ANN201
    import torch

    return torch.randint(vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(0))


def transformers_step(kind: str, size: dict, rows: int, length: int) -> tuple[Callable[[], float], float]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(2)
    before = resident("VmRSS")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocab_size"],
        hidden_size=size["hidden_size"],
        intermediate_size=size["ffn_hidden_size"],
        num_hidden_layers=size["num_layers"],
        num_attention_heads=size["num_attention_heads"],
        num_key_value_heads=size.get("num_query_groups", size["num_attention_heads"]),
        tie_word_embeddings=not size.get("untie_embeddings_and_output_weights", True),
        max_position_embeddings=length,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = random_rows(size["vocab_size"], rows, length)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> float:
        # shift_labels: the batch's own next tokens, so that both sides score every position.
        loss = model(input_ids=inputs, labels=labels, shift_labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, before


class NoData:
    """Every step has the same batch, so nothing is read."""

    def __len__(self) -> int:
        return 0

    def row(self, i: int, read: bool = True) -> Row:
        raise IndexError(i)


def megacp_step(kind: str, size: dict, rows: int, length: int) -> tuple[Callable[[], float], float]:
    import torch
    import yaml

    from megacp import train
    from megacp.batch import Sample
    from megacp.config import load_config

    world = int(os.environ.get("WORLD_SIZE", "1"))
    axes = {"cp": "context_parallel_size", "tp": "tensor_model_parallel_size"}
    settings = {
        "model": {**size, "position_embedding_type": "rope"},
        "parallel": {axes[kind]: world} if kind in axes else {},
        "data": {"data_path": "none", "seq_length": length},
        "optimizer": {"lr": 1e-3, "lr_decay_style": "constant"},
        "train": {
            "micro_batch_size": rows // (world if kind == "dp" else 1),
            "global_batch_size": rows,
            "train_iters": 1000,
            "device": "cpu",
        },
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(settings, file)
        file.flush()
        config = load_config(file.name, world_size=world, check_files=False)
    process = train.process_group(config, torch.device("cpu"))
    process.__enter__()
    before = resident("VmRSS")
    run = train.build(config, torch.device("cpu"), NoData())
    tokens = random_rows(size["vocab_size"], rows, length)
    own = tokens.chunk(run.grid.dp.size)[run.grid.dp.rank]
    offsets = torch.arange(len(own) + 1, dtype=torch.int32) * length
    inputs, labels = own[:, :-1].flatten(), own[:, 1:].flatten()
    sample = Sample(inputs, labels, torch.ones(len(inputs)), offsets, offsets, (0,))

    class SameBatch:
        consumed_samples = 0

        def next_step(self) -> list:
            return [(sample, run.grid.cp.ranks)]

    loader = SameBatch()
    return lambda: train.train_step(run, loader).loss, before  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
