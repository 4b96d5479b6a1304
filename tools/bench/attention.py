"""What context parallelism costs in attention, forward and backward: fp32, causal, 8 heads of 64.

    python tools/bench/attention.py                          everything
    python tools/bench/attention.py 4096 memory --turns 4    some parts

4096, 16384: one sequence of that many tokens. Each type runs at cp 2, on two processes of one thread that talk gloo.
Contenders take turns, a forward and backward each behind a barrier, and seconds are those of the slower process.
Of each launch of the processes the fastest turn of each counts: whatever else a machine does adds time, to one turn
more than to another. Reported are medians over launches, since where their memory happens to lie makes up to a tenth,
of seconds and of ratios within a launch. The types are compared with

  kernels   PyTorch's flash kernels for CPU, called by hand on the blocks of queries and keys that the type gives a
            rank, forward and backward, in both processes at once, and nothing else: no communication, nothing merged,
            added, gathered or put in order. p2p and all_gather: its own tokens among themselves, and what each sees of
            the other rank's. a2a: the whole sequence, half of the heads. What a type takes longer is its overhead.
  sdpa      PyTorch's scaled_dot_product_attention of the whole sequence, one process with two threads.
  torch     context parallelism of torch.distributed (experimental), balanced as for a causal mask. Where
            context_parallel() refuses the CPU, its ring functions run with the CPU's kernels put in and no autograd
            around them, by both ways it has to pass keys and values on.

packs: sequences of long-tailed lengths, 16384 tokens in all: the quantiles of a lognormal distribution with the median
256, and a draw from it that happens to lack the long ones. The ideal is each sequence by itself through sdpa, one after
the other, the sum of their times over two; measured in both processes at once, one thread each. The share reported is
ideal / time.

memory: growth of the resident set (VmHWM) of a process over a forward and backward of 16384 tokens, where q, k, v and
the gradient of the output are there before. glibc is told to return freed memory, so that it is what lives at a time.
The formula counts tensors of U = 4 * tokens / cp * heads * width bytes, the size of a rank's q, at the moment of the
backward pass where most of them live. c is cp; log-sum-exps, U/64 each, and the kernels' buffers are left out. What is
read from another rank's memory takes none here before it is read:

  one rank     6          copies of k and v; out; what the kernel returns, the gradients of q, k, v
  p2p          12.5       at the other rank's keys: own k and v; out; sums of dq, of home dk and dv; k and v at hand and
                          their gradients, 2 each; what the kernel returns, 2.5
               16         from cp 3 on, at a wait: those but the last; k, v, gradients that arrive; gradients passed on
  all_gather   6 c + 1/2  own k and v; out; sums of dq, of home dk and dv; k and v of the others, their gradients and
                          what the kernel returns of the late chunk against all of them, 2 (c - 1) each; its dq, 1/2
  a2a          9          in the kernels: q, k, v, out and its gradient by heads; out; what the kernel returns, 3
               10 - 3/c   from cp 4 on, at the end: out; gradients of q, k, v by heads, received, and by tokens
  a2a+p2p      5 + p2p    what the ring of the outer ranks holds; q, k, v, the gradient of out by heads; out by tokens
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megacp.attention.core import build_attention
from megacp.batch import shard, token_index
from megacp.config import ModelConfig, ParallelConfig
from megacp.grid import Grid
from megacp.train import keep_freed_memory
from tools.attention_errors import sample_of

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("4096", "16384", "packs", "memory")
TYPES = ("p2p", "all_gather", "a2a")
# What a type computes: whose kernels its time is compared with.
KERNELS = {"p2p": "p2p", "all_gather": "p2p", "a2a": "a2a"}
# Most time over that of the kernels alone, and least share of the ideal in packs.
MOST = {"p2p": 1.10, "all_gather": 1.15, "a2a": 1.10}
LEAST = 0.9
HEADS, WIDTH, TOKENS = 8, 64, 16384
MIB = 2**20
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--turns", type=int, default=7, help="turns of each contender that count")
    parser.add_argument("--launches", type=int, default=5, help="launches of all processes")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    for part in options.parts or PARTS:
        if part == "memory":
            memory()
        elif part == "packs":
            packs(options.turns, options.launches)
        else:
            sequence(int(part), options.turns, options.launches)


# --- the reports


def sequence(length: int, turns: int, launches: int) -> None:
    found = []
    for _ in range(launches):
        ranks, alone = Workers("steps", 2, 1, lengths=[length]), Workers("sdpa", 1, 2, lengths=[length])
        names = [name for name in ranks.answers[0]["steps"] if name != "sequences"]
        found.append(take_turns({**dict.fromkeys(names, ranks), "sdpa": alone}, turns))
        refusal = ranks.answers[0]["refusal"]
    print(f"{length} tokens, {HEADS} heads of {WIDTH}; torch's context_parallel() on CPU: {refusal or 'runs'}")
    print(f"{'':18} {'seconds':>8} {'/ kernels':>10} {'/ sdpa':>8}")
    for name in found[0]:
        over = f"{ratio(found, name, f'{KERNELS[name]} kernels'):.3f}" if name in TYPES else ""
        target = f"  at most {MOST[name]:.2f} of its kernels" if name in TYPES else ""
        print(f"{name:18} {middle(found, name):8.3f} {over:>10} {ratio(found, name, 'sdpa'):8.3f}{target}")
    peers = [name for name in found[0] if name.startswith("torch")]
    for name in TYPES:
        slower = min(ratio(found, peer, name) for peer in peers)
        print(f"torch.distributed's takes {slower:.3f} times as long as {name}: target above 1")


def packs(turns: int, launches: int) -> None:
    for lengths in (long_tailed(TOKENS), short(TOKENS)):
        found = []
        for _ in range(launches):
            ranks = Workers("steps", 2, 1, lengths=lengths)
            found.append(take_turns(dict.fromkeys([*TYPES, "sequences"], ranks), turns))
        print(
            f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)}, {TOKENS} tokens, {HEADS} heads of {WIDTH}"
        )
        print(f"{'':18} {'seconds':>8} {'of ideal':>10}")
        for name in found[0]:
            share = f"{ratio(found, 'sequences', name) / 2:10.3f}  at least {LEAST}" if name in TYPES else ""
            print(f"{name:18} {middle(found, name):8.3f} {share}")


def middle(found: list[dict[str, float]], name: str) -> float:
    """Median over launches."""
    return statistics.median(seconds[name] for seconds in found)


def ratio(found: list[dict[str, float]], name: str, other: str) -> float:
    """Median over launches of how many times as long as the other one takes."""
    return statistics.median(seconds[name] / seconds[other] for seconds in found)


def memory() -> None:
    print(f"{TOKENS} tokens, {HEADS} heads of {WIDTH}: MiB of the rank with the most")
    print(f"{'':18} {'measured':>8} {'formula':>10} {'ratio':>8}")
    cases = [("p2p", 1), *((name, cp) for name in TYPES for cp in (2, 4)), ("a2a+p2p", 4)]
    for name, cp in cases:
        measured = max(answer["growth"] for answer in Workers("memory", cp, 1, comm_type=name).close()) / MIB
        unit = 4 * TOKENS // cp * HEADS * WIDTH / MIB
        wanted = tensors(name, cp) * unit
        print(
            f"{f'{name} cp {cp}':18} {measured:8.0f} {wanted:10.0f} {measured / wanted:8.3f}  at most 1.10", flush=True
        )


def tensors(comm_type: str, cp: int) -> float:
    """How many tensors of a rank's size live at most: the formula on top."""
    if cp == 1:
        return 6
    ranks = cp // 2 if comm_type == "a2a+p2p" else cp
    ring = 12.5 if ranks == 2 else 16
    return {"p2p": ring, "all_gather": 6 * cp + 0.5, "a2a": max(9, 10 - 3 / cp), "a2a+p2p": 5 + ring}[comm_type]


def take_turns(contenders: dict[str, Workers], turns: int) -> dict[str, float]:
    """Seconds of the fastest turn, by contender, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):
        for name, workers in contenders.items():
            # The threads of the one before spin for a while before they sleep.
            time.sleep(0.3)
            taken = workers.step(name)
            if turn:
                seconds[name].append(taken)
    for workers in set(contenders.values()):
        workers.close()
    return {name: min(times) for name, times in seconds.items()}


def long_tailed(total: int) -> list[int]:
    """The quantiles of lognormal lengths with the median 256, in an order without meaning: `total` tokens."""
    count = round(total / (256 * math.exp(1.3**2 / 2)))
    normal = statistics.NormalDist()
    lengths = [round(256 * math.exp(1.3 * normal.inv_cdf((i + 0.5) / count))) for i in range(count)]
    lengths[count // 2] += total - sum(lengths)
    return numpy.random.default_rng(0).permutation(lengths).tolist()


def short(total: int) -> list[int]:
    """The same lengths drawn, a draw without very long ones."""
    drawn = numpy.random.default_rng(0).lognormal(numpy.log(256), 1.3, total)
    ends = numpy.minimum(drawn.astype(int).clip(1).cumsum(), total)
    return numpy.diff(ends, prepend=0)[: int(numpy.searchsorted(ends, total)) + 1].tolist()


class Workers:
    """Processes with one job; each answers every line it is told with one of its own."""

    def __init__(self, job: str, count: int, threads: int, **details: Any):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.processes = []
        for rank in range(count):
            env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
            env |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if job == "memory":
                env["MALLOC_MMAP_THRESHOLD_"] = "65536"
            command = [sys.executable, __file__, "--worker", json.dumps({"job": job, "threads": threads, **details})]
            pipe = subprocess.PIPE
            self.processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env))
        self.answers = self._answers()

    def step(self, name: str) -> float:
        """Seconds until the last process is done."""
        return max(answer["seconds"] for answer in self._ask(name))

    def close(self) -> list[dict[str, Any]]:
        """What they said when they were ready."""
        self._ask("end")
        for process in self.processes:
            process.wait()
        return self.answers

    def _ask(self, word: str) -> list[dict[str, Any]]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("> "):
                if not line:
                    raise SystemExit("a contender died")
            answers.append(json.loads(line[2:]))
        return answers


# --- in a worker


def work(job: str, threads: int, **details: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    if job == "memory":
        answer({"growth": growth(**details)})
        steps: dict[str, Step] = {}
    else:
        keep_freed_memory()
        build = sdpa_steps if job == "sdpa" else all_steps
        steps, refusal = build(**details)
        answer({"steps": list(steps), "refusal": refusal})
    while (name := sys.stdin.readline().strip()) in steps:
        dist.barrier()
        start = time.perf_counter()
        steps[name]()
        answer({"seconds": time.perf_counter() - start})
    dist.destroy_process_group()
    answer({})


def answer(value: dict[str, Any]) -> None:
    print("> " + json.dumps(value), flush=True)


def random_rows(rows: int, heads: int = HEADS) -> list[Tensor]:
    """q, k, v and the gradient of the output, [rows, heads, WIDTH]."""
    return [torch.randn(rows, heads, WIDTH) for _ in range(4)]


def ours(comm_type: str, lengths: list[int]) -> Step:
    """Forward and backward of a layer's attention on this rank's rows of a pack."""
    cp = dist.get_world_size()
    levels = [2, cp // 2] if comm_type == "a2a+p2p" else None
    parallel = ParallelConfig(
        context_parallel_size=cp, cp_comm_type=comm_type, hierarchical_context_parallel_sizes=levels
    )
    model = ModelConfig(num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, vocab_size=1)
    grid = Grid.create(parallel)
    attention = build_attention(model, parallel, 1, grid)
    room = [-(-length // (2 * cp)) * 2 * cp for length in lengths]
    batch = shard(sample_of(lengths, room), grid.cp)
    *inputs, dout = random_rows(len(batch.position_ids))
    q, k, v = (x.requires_grad_() for x in inputs)
    return lambda: torch.autograd.grad(attention(q, k, v, batch.packed, grid.cp), (q, k, v), dout)


def all_steps(lengths: list[int]) -> tuple[dict[str, Step], str]:
    """Every contender that runs on two processes, and why torch's context_parallel() does not."""
    steps = {name: ours(name, lengths) for name in TYPES}
    steps["sequences"] = sequences(lengths)
    if len(lengths) > 1:
        return steps, ""
    steps |= {f"{name} kernels": kernels(name, lengths[0]) for name in set(KERNELS.values())}
    peers, refusal = torch_steps(lengths[0])
    return steps | peers, refusal


def sdpa_steps(lengths: list[int]) -> tuple[dict[str, Step], str]:
    return {"sdpa": sequences(lengths)}, ""


def sequences(lengths: list[int]) -> Step:
    """Each sequence by itself, on this process alone."""
    inputs = [[x.transpose(0, 1)[None] for x in random_rows(length)] for length in lengths]

    def step() -> None:
        for q, k, v, dout in inputs:
            leaves = q, k, v = tuple(x.detach().requires_grad_() for x in (q, k, v))
            torch.autograd.grad(functional.scaled_dot_product_attention(q, k, v, is_causal=True), leaves, dout)

    return step


class Block(NamedTuple):
    """Queries [q, q + q_length) against keys [k, k + k_length) of a rank."""

    q: int
    q_length: int
    k: int
    k_length: int
    causal: bool


def blocks(comm_type: str, length: int, rank: int) -> list[Block]:
    """What rank `rank` of two computes of a sequence; its own tokens are chunks `rank` and 3 - rank of four."""
    chunk = length // 4
    if comm_type == "a2a":
        return [Block(0, length, 0, length, True)]
    # Of the other rank's two chunks: rank 0's late one sees both, rank 1's chunks see the early one.
    other = Block(chunk, chunk, 0, 2 * chunk, False) if rank == 0 else Block(0, 2 * chunk, 0, chunk, False)
    return [Block(0, 2 * chunk, 0, 2 * chunk, True), other]


def kernels(comm_type: str, length: int) -> Step:
    """The flash kernels on the blocks of this rank, each forward and backward by itself."""
    heads = HEADS // 2 if comm_type == "a2a" else HEADS
    inputs = [x.transpose(0, 1)[None] for x in random_rows(length, heads)]  # [1, heads, length, WIDTH], by rows
    found = blocks(comm_type, length, dist.get_rank())

    def step() -> None:
        for block in found:
            rows, keys = slice(block.q, block.q + block.q_length), slice(block.k, block.k + block.k_length)
            q, k, v, dout = (x[:, :, part] for x, part in zip(inputs, (rows, keys, keys, rows), strict=True))
            out, lse = FORWARD(q, k, v, 0.0, block.causal)
            BACKWARD(dout, q, k, v, out, lse, 0.0, block.causal)

    return step


def torch_steps(length: int) -> tuple[dict[str, Step], str]:
    """torch.distributed's context parallelism, and why its public function does not run here, if so."""
    place = token_index(torch.tensor([0, length]), dist.get_rank(), 2)
    whole = [x.transpose(0, 1)[None].contiguous() for x in random_rows(length)]
    refusal = ""
    try:
        buffers = [x.clone() for x in whole]
        with context_parallel(init_device_mesh("cpu", (2,)), buffers=buffers, buffer_seq_dims=[2] * 4):
            q, k, v = (x.clone().requires_grad_() for x in buffers[:3])
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    except NotImplementedError as error:
        refusal = f"{type(error).__name__}: {error}"
    inputs = [x[:, :, place].contiguous() for x in whole]
    return {f"torch {way}": partial(torch_ring, way, *inputs) for way in ("allgather", "alltoall")}, refusal


def torch_ring(way: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """The forward and backward that context_parallel() runs for a kernel it knows, with the CPU's."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as peer

    peer.set_rotate_method(way)
    group = dist.distributed_c10d._get_default_group()
    options: dict[str, Any] = {"is_causal": True, "dropout_p": 0.0, "scale": None}
    out, lse = peer._templated_ring_attention(group, 2, FORWARD, query=q, key=k, value=v, **options)
    known = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse, **options}
    peer._templated_ring_attention_backward(group, 2, BACKWARD, grad_out=dout, grad_out_name="grad_out", **known)


def growth(comm_type: str) -> int:
    """Bytes by which this process grows at most in a forward and backward."""
    # What is loaded and set up at first use is not what attention holds.
    ours(comm_type, [256])()
    step = ours(comm_type, [TOKENS])
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is the present one
    step()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """Bytes of this process in memory: now (VmRSS) or at most so far (VmHWM). Linux."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


if __name__ == "__main__":
    main()
