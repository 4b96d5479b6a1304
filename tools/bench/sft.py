"""Fine-tuning on packed conversations against a loop of transformers, and how fast and full packs are planned.

    python tools/bench/sft.py             both parts
    python tools/bench/sft.py step        some of them
    python tools/bench/sft.py plan

step: tokens per second of a training step of a 10 M Llama, padding not counted. Conversations are of lognormal lengths
(median 200, at most 2048), packed into 2048 tokens; all contenders begin with the same weights and take the same packs
in the same order, pack by pack, with AdamW (fused), clipping at 1, fp32 and two threads, so their losses must agree.

  megacp        a training step, from reading the packs on
  mask          LlamaForCausalLM on whole packs: a block-diagonal 4D mask, made ahead and not counted, and position ids
                that begin anew in each conversation
  one by one    LlamaForCausalLM on one conversation after the other, causal, gradients added up

Each lives in a process of its own; they are started first and then take turns, a step each, so that a noisy machine is
noisy for all. Reported are medians of tokens/s, of the ratios within a turn to the faster way of transformers (aim:
1.2), and peak memory as in step.py.

plan: seconds to pack a million conversations (aim: 5) and to draw an epoch of packs, the share of the packs' room that
conversations fill, each rounded up to the multiple (aim: 98 %), and how much of that is lost by rounding. Lengths are
lognormal with a deviation of 1.2, drawn anew where they are longer than a pack.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megacp.data.plan_packs import epoch_packs, plan  # noqa: E402
from tools.bench.step import SIZES, Contender, resident  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from megacp.config import Config
    from megacp.data.pack import Row

PARTS = ("step", "plan")
KINDS = ("megacp", "mask", "one by one")
AIM = 1.2
SEQ_LENGTH, MEDIAN = 2048, 200
MULTIPLE = 16
CONVERSATIONS = 2000
# (seq_length, median length) of what is planned; the mean is about twice the median.
PLANS = [(4096, 400), (131072, 400), (131072, 6500)]
SEED = 1234
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--turns", type=int, default=9, help="steps of each contender that count; plans of each kind")
    parser.add_argument("--packs", type=int, default=2, help="packs of a step")
    parser.add_argument("--conversations", type=int, default=1_000_000, help="how many are planned")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    parts = options.parts or PARTS
    if "step" in parts:
        with tempfile.TemporaryDirectory() as folder:
            compare_steps(Path(folder), options.packs, options.turns)
    if "plan" in parts:
        compare_plans(options.conversations, min(3, options.turns))


def long_tailed(count: int, median: int, longest: int) -> np.ndarray:
    """int32 [count]: lognormal lengths, drawn anew where longer than `longest`."""
    random = np.random.default_rng(SEED)
    lengths = random.lognormal(np.log(median), 1.2, count)
    while (long := lengths > longest).any():
        lengths[long] = random.lognormal(np.log(median), 1.2, np.count_nonzero(long))
    return np.maximum(lengths, 4).astype(np.int32)


# --- a training step


def compare_steps(folder: Path, packs: int, turns: int) -> None:
    write_files(folder, packs)
    rows = islice(rows_of(read_config(folder)), (turns + WARM_UP) * packs)
    counts = [(len(row.tokens) - 1, taught(row).sum(), len(row.starts)) for row in rows]
    tokens, supervised, conversations = np.array(counts).T
    print(
        f"packs of {SEQ_LENGTH} tokens, {packs} a step: {tokens.mean() / SEQ_LENGTH:.1%} tokens of conversations, "
        f"{conversations.mean():.1f} conversations, {supervised.sum() / tokens.sum():.0%} of tokens supervised"
    )
    print(f"{'contender':12} {'tokens/s':>10} {'ratio':>7} {'peak MiB':>9}   loss")
    running = [Trainer(kind, folder) for kind in KINDS]
    seconds: list[list[float]] = [[] for _ in running]
    for _ in range(turns + WARM_UP):
        for contender, times in zip(running, seconds, strict=True):
            # The threads of the one before spin for a while before they sleep.
            time.sleep(0.3)
            times.append(contender.step())
    of_steps = tokens.reshape(-1, packs).sum(1)[WARM_UP:]
    rates = of_steps / np.array(seconds)[:, WARM_UP:]  # [contender, turn]
    best = 1 + int(np.argmax(np.median(rates[1:], 1)))
    for kind, contender, rate in zip(KINDS, running, rates, strict=True):
        losses, memory = contender.close()
        print(
            f"{kind:12} {np.median(rate):10.0f} {np.median(rate / rates[best]):7.3f} {memory:9.0f}   {losses}",
            flush=True,
        )
    ratio = float(np.median(rates[0] / rates[best]))
    print(f"megacp is {ratio:.2f} times as fast as '{KINDS[best]}' (aim: {AIM})")


class Trainer(Contender):
    """One process with two threads that takes a step each time it is told to."""

    def __init__(self, kind: str, folder: Path) -> None:
        job = json.dumps({"kind": kind, "folder": str(folder)})
        env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        command, pipe = [sys.executable, __file__, "--worker", job], subprocess.PIPE
        self.processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)]
        self._answers()


def work(kind: str, folder: str) -> None:
    """A contender's process: a step for every line read, then what it cost."""
    build = megacp_step if kind == "megacp" else transformers_step
    step, before = build(Path(folder), kind)
    losses = []
    print("> ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        if line.strip() == "step":
            seconds, loss = step()
            losses.append(loss)
            print(f"> {seconds}", flush=True)
        else:
            answer = {"losses": f"{losses[0]:.4f} -> {losses[-1]:.4f}", "peak": resident("VmHWM") - before}
            print("> " + json.dumps(answer), flush=True)
            return


def write_files(folder: Path, packs: int) -> None:
    """Conversations, a model of transformers and the configuration to fine-tune it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from megacp.convert.hf_config import model_config
    from megacp.data.sft import MASK_SUFFIX
    from megacp.data.tokens import TokenFileWriter

    size, random = SIZES["10m"], np.random.default_rng(SEED)
    chats = folder / "chats"
    with TokenFileWriter(chats, np.uint16) as tokens, TokenFileWriter(f"{chats}{MASK_SUFFIX}", np.uint8) as mask:
        for length in long_tailed(CONVERSATIONS, MEDIAN, SEQ_LENGTH).tolist():
            tokens.add_document(random.integers(0, size["vocab_size"], length))
            # A question, and an answer twice as long.
            mask.add_document((np.arange(length) >= length // 3).astype(np.uint8))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocab_size"],
        hidden_size=size["hidden_size"],
        intermediate_size=size["ffn_hidden_size"],
        num_hidden_layers=size["num_layers"],
        num_attention_heads=size["num_attention_heads"],
        num_key_value_heads=size["num_query_groups"],
        max_position_embeddings=SEQ_LENGTH,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    settings = {
        "model": model_config(folder / "model").model_dump(),
        "data": {"data_path": str(chats), "seq_length": SEQ_LENGTH, "pack_multiple": MULTIPLE, "split": "1"},
        "optimizer": {"lr": 1e-3, "lr_decay_style": "constant"},
        "train": {"global_batch_size": packs, "train_iters": 1000, "device": "cpu", "num_threads": 2},
    }
    settings["data"]["sft"] = True
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings))


def read_config(folder: Path) -> Config:
    from megacp.config import load_config

    return load_config(folder / "sft.yaml", world_size=1)


def rows_of(config: Config) -> Iterator[Row]:
    """Packs in the order of training."""
    from megacp import train

    data = train.read_data(config)[0]
    return (data.row(i) for i in range(len(data)))


def taught(row: Row) -> np.ndarray:
    """bool [S]"""
    assert row.weights is not None
    return (row.weights > 0) & (np.arange(len(row.weights)) < row.labels)


Timed = Callable[[], tuple[float, float]]  # (seconds, loss)


def megacp_step(folder: Path, kind: str) -> tuple[Timed, float]:
    import torch

    from megacp import train
    from megacp.convert import hf

    config, device = read_config(folder), torch.device("cpu")
    with train.process_group(config, device):
        before = resident("VmRSS")
    run = train.build(config, device, *train.read_data(config), draw=False)
    hf.fill(folder / "model", [b for b in run.optimizer.blocks() if not b.name.startswith("exp_avg")])
    run.optimizer.sync_parameters()
    loader = train.make_loader(run, run.train_data, 0)

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        loss = train.train_step(run, loader).loss
        return time.perf_counter() - start, loss

    return step, before


def transformers_step(folder: Path, kind: str) -> tuple[Timed, float]:
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(2)
    config = read_config(folder)
    rows, number = rows_of(config), config.train.global_batch_size
    inputs_of = masked_pack if kind == "mask" else one_by_one
    before = resident("VmRSS")
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa").train()
    model.config.use_cache = False
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)

    def step() -> tuple[float, float]:
        batch = [next(rows) for _ in range(number)]
        supervised = int(sum(taught(row).sum() for row in batch))
        inputs = [each for row in batch for each in inputs_of(row)]
        start = time.perf_counter()
        total = 0.0
        for each in inputs:
            loss = model(**each, num_items_in_batch=supervised).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start, total

    return step, before


def masked_pack(row: Row) -> list[dict[str, Tensor]]:
    """A whole pack at once: whom each token sees, added to the scores."""
    import torch

    cuts = torch.from_numpy(np.append(0, row.starts))
    number, place = torch.arange(len(cuts) - 1).repeat_interleave(cuts.diff()), torch.arange(int(cuts[-1]))
    seen = (number[:, None] == number) & (place[:, None] >= place)
    mask = torch.zeros(seen.shape).masked_fill_(~seen, torch.finfo(torch.float32).min)
    positions = place - cuts[number]
    return [{**causal(row, slice(None)), "position_ids": positions[None], "attention_mask": mask[None, None]}]


def one_by_one(row: Row) -> list[dict[str, Tensor]]:
    return [causal(row, slice(begin, end)) for begin, end in pairwise([0, *row.starts.tolist()])]


def causal(row: Row, part: slice) -> dict[str, Tensor]:
    import torch

    tokens, labels = torch.from_numpy(row.tokens[:-1][part]), torch.from_numpy(row.tokens[1:][part])
    labels = labels.where(torch.from_numpy(taught(row)[part]), -100)[None]
    # shift_labels: those of the pack, which need no shift.
    return {"input_ids": tokens[None], "labels": labels, "shift_labels": labels}


# --- planning


class Planned(NamedTuple):
    seconds: float
    epoch_seconds: float
    fill: float
    rounding_loss: float
    packs: int
    peak_mib: float


def compare_plans(conversations: int, repeat: int) -> None:
    print(f"{conversations:,} conversations in multiples of {MULTIPLE} tokens")
    columns = f"{'plan s':>8} {'epoch s':>8} {'fill':>8} {'lost by rounding':>17} {'packs':>9} {'peak MiB':>9}"
    print(f"{'seq_length':>10} {'median':>7} {columns}")
    context = multiprocessing.get_context("spawn")
    for seq_length, median in PLANS:
        runs = []
        for _ in range(repeat):
            # A process of its own: the peak is that of this plan.
            with context.Pool(1) as pool:
                runs.append(pool.apply(measure_plan, (conversations, seq_length, median)))
        taken, drawn, fill, lost, packs, peak = (statistics.median(column) for column in zip(*runs, strict=True))
        print(
            f"{seq_length:10} {median:7} {taken:8.2f} {drawn:8.2f} {fill:8.2%} {lost:17.2%} {packs:9,.0f} {peak:9,.0f}",
            flush=True,
        )


def measure_plan(conversations: int, seq_length: int, median: int) -> Planned:
    """ValueError where a conversation is lost or comes twice, or a pack is too long."""
    before = resident("VmRSS")
    lengths = long_tailed(conversations, median, seq_length)
    start = time.perf_counter()
    pattern = plan(lengths, seq_length, MULTIPLE)
    planned = time.perf_counter()
    members, offsets = epoch_packs(pattern, SEED, 0)
    drawn = time.perf_counter()
    peak = resident("VmHWM") - before
    rounded = -(-lengths[members].astype(np.int64) // MULTIPLE) * MULTIPLE
    if (np.bincount(members, minlength=conversations) != 1).any():
        raise ValueError("a conversation is lost or comes twice")
    if np.add.reduceat(rounded, offsets[:-1]).max() > seq_length:
        raise ValueError(f"a pack holds more than {seq_length} tokens")
    return Planned(planned - start, drawn - planned, pattern.fill, pattern.rounding_loss, pattern.packs, peak)


if __name__ == "__main__":
    main()
