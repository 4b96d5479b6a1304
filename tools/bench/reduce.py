"""What reducing gradients costs: all-reduce against reduce-scatter, and a training step with and without overlap.

    python tools/bench/reduce.py --ranks 2            # gloo on CPU, one thread a rank

The first table times one collective on buckets of several sizes. The second times steps of a 10 M parameter MLP
(forward, backward, reduction, AdamW, gathering) for bucket sizes from a few layers to everything, reduced during
backward or after it; "alone" is the same step without any communication. Times are medians over alternating rounds,
on the slowest rank.

Measured with torch 2.13 and gloo on 2 cores that did other work too (load 6), ms:

    2 ranks    all-reduce  reduce-scatter  reduces  all-to-all, add | all-gather  broadcasts
      1 MiB       0.7           1.3          0.8          0.9       |    0.8         0.5
      4 MiB       3.3           7.9          2.6          3.1       |    2.9         1.8
     16 MiB      21.2          34.5         19.7         18.2       |   15.8         8.1
     64 MiB      81.1         151.3         93.4         69.5       |  119.3        37.1
    4 ranks
      4 MiB      11.2          12.4         12.0          4.9       |    6.3         5.2
     16 MiB      29.8          43.8         21.5         21.2       |   24.2        15.6
     64 MiB     177.4         328.4        153.6        146.4       |  278.2       106.8

So on gloo the sum is an all-reduce (the all-to-all gains little at 2 ranks and needs a second bucket of memory) and
the gathering a broadcast per band. The second table showed nothing beyond that machine's noise (15 % and more): steps
cost the same with buckets of 1 M elements and with one bucket, overlapped or not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from megacp.blocks import Piece, Shard, describe
from megacp.config import OptimizerConfig, ParallelConfig
from megacp.grid import Grid, Group
from megacp.optim.sharded_adam import ShardedAdam

WIDTH, LAYERS, TOKENS = 512, 40, 256
ROUNDS = 9


def medians(actions: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Median milliseconds of each action, the slowest rank counting; actions take turns after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            dist.barrier()
            begin = time.perf_counter()
            action()
            slowest = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:
                times[name].append(1e3 * slowest.item())
    return {name: statistics.median(values) for name, values in times.items()}


def report(title: str, times: dict[str, float]) -> None:
    if dist.get_rank() == 0:
        print(f"{title:24}" + "".join(f"{name} {value:.1f}  " for name, value in times.items()), flush=True)


def wait_for_all(works: Iterable[dist.Work | None]) -> None:
    for work in list(works):
        if work is not None:
            work.wait()


def exchange_and_add(flat: torch.Tensor, received: torch.Tensor, group: Group) -> None:
    dist.all_to_all_single(received, flat, group=group.process_group)
    torch.sum(received.view(group.size, -1), 0, out=flat.chunk(group.size)[group.rank])


def collectives(group: Group) -> None:
    process_group = group.process_group
    for elements in (2**16, 2**18, 2**20, 2**22, 2**24):
        flat = torch.zeros(elements // group.size * group.size)
        bands = list(zip(flat.chunk(group.size), group.ranks, strict=True))
        own = bands[group.rank][0]

        def each(collective: Callable[..., dist.Work | None], bands: list = bands) -> None:
            wait_for_all([collective(band, root, group=process_group, async_op=True) for band, root in bands])

        sums: dict[str, Callable[[], object]] = {
            "all-reduce": partial(dist.all_reduce, flat, group=process_group),
            "reduce-scatter": partial(dist.reduce_scatter_tensor, own, flat, group=process_group),
            "reduces": partial(each, dist.reduce),
            "all-to-all, add": partial(exchange_and_add, flat, torch.empty_like(flat), group),
        }
        gathers: dict[str, Callable[[], object]] = {
            "all-gather": partial(dist.all_gather_into_tensor, flat, own, group=process_group),
            "broadcasts": partial(each, dist.broadcast),
        }
        report(f"{elements * 4 / 2**20:g} MiB", medians(sums | gathers))


def model() -> nn.Sequential:
    layers = nn.Sequential()
    for number in range(LAYERS):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        layer.weight = describe(
            nn.Parameter(layer.weight), Shard((Piece(f"w{number}", WIDTH, (WIDTH, WIDTH), (0, 0)),))
        )
        layers.append(layer).append(nn.ReLU())
    return layers


def step(layers: nn.Sequential, optimizer: ShardedAdam, overlap: bool) -> None:
    optimizer.buckets.zero()
    if overlap:
        optimizer.buckets.overlap_next_backward()
    layers(torch.ones(TOKENS, WIDTH)).square().sum().backward()
    optimizer.step(1e-4, 0.1, TOKENS)


def steps(grid: Grid) -> None:
    alone = Grid.create(ParallelConfig(tensor_model_parallel_size=dist.get_world_size()))
    actions: dict[str, Callable[[], object]] = {}
    for name, where, bucket_size in [
        ("alone", alone, 10**9),
        *[(f"{size / 1e6:g}M", grid, size) for size in (10**6, 25 * 10**5, 5 * 10**6, 10**9)],
    ]:
        layers = model()
        optimizer = ShardedAdam(layers.parameters(), OptimizerConfig(lr=1e-4, bucket_size=bucket_size), where)
        for overlap in (False, True) if where is grid else (False,):
            label = f"{name}{' overlapped' if overlap else ''}"
            actions[label] = partial(step, layers, optimizer, overlap)
    for name, value in medians(actions).items():
        report("step", {name: value})


def main(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    grid = Grid.create(ParallelConfig())
    collectives(grid.dp_cp)
    steps(grid)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=29531)
    arguments = parser.parse_args()
    spawn(main, (arguments.ranks, arguments.port), arguments.ranks)
