"""Is context-parallel attention exact here? Every type against float64, on the ranks and devices at hand.

    python tools/verify_attention.py --comm-type all --cp 4 --hierarchy 2 2 --lengths 1000 37 1 --heads 8 --kv-heads 2
    torchrun --nnodes 2 --nproc-per-node 8 ... tools/verify_attention.py --comm-type p2p --lengths 16384

Alone it starts --cp ranks on this machine; under torchrun, also over nodes, it takes the ranks it is given. A random
pack (q, k, v and the gradient of the output, normal, equal on all ranks) is cut by the door, batch.shard, and goes
forward and backward through the attention of a layer. Outputs and gradients are gathered in the pack's order and
compared with the dense formula in float64 on the same values. Padding must get a gradient of exactly 0, too.

largest    absolute error of any number
relative   norm of the error over norm of the exact tensor
one rank   the same of one rank that holds each sequence whole, in this dtype: what the dtype costs
worst row  the D numbers of one token and head that are furthest off: norm of their error over sqrt(their exact
           norm^2 + mean norm^2 of a row), so that a single wrong token is seen in a long pack; then where that is:
           sequence, position in it, head, and the rank that held the token

PASS means: float32 within 1e-5 in every number of the output, 1e-4 relative, 1e-4 in every row; float64 1e-10 in each;
bfloat16 at most 1.5 times the relative error of one rank (rounding the parts that are merged makes 1.41 of it, at any
cp) and twice its worst row. Exit code 0 where all types pass, 1 where one fails or a rank dies, 2 for a mistake in the
arguments.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacp import support
from megacp.config import Config
from megacp.data.command import Command, at_least
from megacp.grid import Grid
from megacp.support_attention import COMM_TYPES
from megacp.support_backend import backend_for
from tools.attention_errors import Error, Pack, Results, alone, differ, draw, exact, faults, together

# Queries times keys times heads of the dense formula: 64K tokens of 8 heads, half an hour on two cores.
MOST_PAIRS = 2**35
# Seconds that the other ranks get once one has failed.
GRACE = 2.0


# --- what is to be checked


def parser() -> Command:
    command = Command(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole, types = at_least(1), [*COMM_TYPES, "all"]
    command.add_argument("--comm-type", action="extend", nargs="+", choices=types, help="cp_comm_type to check (all)")
    command.add_argument("--cp", type=whole, help="ranks that share the pack (2; under torchrun all)")
    command.add_argument("--hierarchy", type=whole, nargs="+", metavar="N", help="a2a+p2p: sizes, inner to outer")
    command.add_argument("--lengths", type=at_least(0), nargs="+", default=[1000, 37, 1], metavar="L")
    command.add_argument("--heads", type=whole, default=8, help="query heads (8)")
    command.add_argument("--kv-heads", type=whole, help="key/value heads (as many as --heads)")
    command.add_argument("--head-dim", type=whole, default=64, help="width of a head (64)")
    command.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="neighbours seen; -1: no limit")
    command.add_argument("--mask", choices=["causal", "no_mask"], default="causal")
    command.add_argument("--softmax-scale", type=float, help="scale of the scores (1/sqrt(head dim))")
    command.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], help="(float32; on GPUs bfloat16)")
    command.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    command.add_argument("--backend", choices=["auto", "native", "transformer_engine"], default="auto")
    command.add_argument("--seed", type=at_least(0), default=1)
    command.add_argument("--timeout", type=whole, default=300, help="seconds a rank waits for the others (300)")
    return command


def complete(options: Namespace) -> None:
    """Fill in what was left to us. ValueError where it cannot be."""
    world = int(os.environ.get("WORLD_SIZE", "0"))
    options.cp = options.cp or world or 2
    if world and options.cp != world:
        raise ValueError(f"--cp {options.cp}, but there are {world} ranks: leave --cp out, or start {options.cp}")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    elif options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but this machine has no CUDA device: use cpu or auto")
    options.dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    types = options.comm_type or ["all"]
    options.comm_type = [name for name in COMM_TYPES if name in types or "all" in types]
    if options.hierarchy and "a2a+p2p" not in options.comm_type:
        raise ValueError(f"--hierarchy {options.hierarchy} does nothing without --comm-type a2a+p2p: leave it out")
    pairs = options.heads * sum(length * length for length in options.lengths)
    if not 0 < pairs <= MOST_PAIRS:
        longest = int((MOST_PAIRS / options.heads / len(options.lengths)) ** 0.5)
        raise ValueError(
            f"{len(options.lengths)} --lengths up to {max(options.lengths)} and {options.heads} --heads make {pairs:,} "
            f"pairs of query and key, the float64 reference takes 1 to {MOST_PAIRS:,}: use lengths of 1 to {longest:,}"
        )


def config_of(options: Namespace, comm_type: str) -> Config:
    """A whole configuration, so that the rules of every run hold here. ValueError with the first that is broken."""
    packed = len(set(options.lengths)) > 1 or bool(options.lengths[0] % (2 * options.cp))
    model = {
        "num_layers": 1,
        "hidden_size": options.heads * options.head_dim,
        "num_attention_heads": options.heads,
        "num_query_groups": options.kv_heads,
        "kv_channels": options.head_dim,
        "vocab_size": 1,
        "position_embedding_type": "none",
        "attn_mask_type": options.mask,
        "window_size": options.window,
        "softmax_scale": options.softmax_scale,
        "attention_backend": options.backend,
    }
    parallel = {
        "context_parallel_size": options.cp,
        "cp_comm_type": comm_type,
        "hierarchical_context_parallel_sizes": options.hierarchy if comm_type == "a2a+p2p" else None,
        "distributed_timeout_minutes": options.timeout / 60,
    }
    loop = {"params_dtype": options.dtype, "device": options.device, "seed": options.seed}
    tree: dict[str, Any] = {
        "model": model,
        "parallel": parallel,
        "data": {"data_path": "none", "seq_length": sum(options.lengths), "mask_between_documents": packed},
        "optimizer": {"lr": 1.0},
        "train": {"global_batch_size": 1, "train_iters": 1, **loop},
    }
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))} = {first['input']}: {first['msg']}") from None
    problem = support.first_problem(config, options.cp, check_files=False)
    if problem:
        raise ValueError(problem)
    backend = backend_for(config, options.device != "cpu" and torch.cuda.is_available())
    return config.model_copy(update={"model": config.model.model_copy(update={"attention_backend": backend})})


def allowed(options: Namespace) -> tuple[dict[str, Config], dict[str, str]]:
    """Configurations by type, and why the other types are refused."""
    configs, refused = {}, {}
    for name in options.comm_type:
        try:
            configs[name] = config_of(options, name)
        except ValueError as error:
            refused[name] = str(error)
    return configs, refused


# --- the ranks


def launch(count: int, arguments: Sequence[str]) -> int:
    """Run this command on `count` ranks of this machine, as torchrun would; the exit code."""
    # The store lives here, on a port the system chose: no race for a port, and no rank takes it down.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    if "GLOO_SOCKET_IFNAME" not in os.environ and "lo" in [name for _, name in socket.if_nameindex()]:
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = []
    try:
        for rank in range(count):
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen([sys.executable, sys.argv[0], *arguments], env=env))
        return wait(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """The exit code: 0 where every rank's is. The others get a little time once one has failed."""
    deadline = float("inf")
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
        if any(codes):
            deadline = min(deadline, time.monotonic() + GRACE)
        time.sleep(0.05)
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            print(f"rank {rank} died of signal {-code}", file=sys.stderr)
            return 1
    return max(code or 0 for code in codes)


def device_and_backend(options: Namespace) -> tuple[torch.device, str]:
    """nccl where each rank of this machine has a GPU of its own, else gloo."""
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if options.device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // ranks))
        return torch.device("cpu"), "gloo"
    devices = torch.cuda.device_count()
    device = torch.device("cuda", local % devices)
    torch.cuda.set_device(device)
    return device, "nccl" if ranks <= devices else "gloo"


def take_part(options: Namespace, configs: dict[str, Config], refused: dict[str, str]) -> int:
    """The life of one rank; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who started the ranks tells of an interruption
    device, backend = device_and_backend(options)
    limit = timedelta(seconds=options.timeout)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("ranks", store),
            rank=rank,
            world_size=size,
            timeout=limit,
            device_id=device if backend == "nccl" else None,
        )
        failed = verify(options, configs, refused, device)
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        tell(error, store, rank)
        # Not sys.exit: destroying the groups may wait for peers that wait for this rank.
        os._exit(1)
    return 1 if failed else 0


def tell(error: Exception, store: Store, rank: int) -> None:
    """One line for the first rank that fails: the others' errors, that it is gone, say nothing new."""
    line = f"rank {rank} on {socket.gethostname()}: {type(error).__name__}: {' '.join(str(error).split())}"
    try:
        first = store.compare_set("failed", "", line).decode() == line
    except RuntimeError:  # the store is gone, and with it who hosted it
        first = False
    if first:
        print(line, file=sys.stderr, flush=True)


# --- the report


def verify(options: Namespace, configs: dict[str, Config], refused: dict[str, str], device: torch.device) -> list[str]:
    """Compare every type on the ranks of the default process group; rank 0 reports. Returns the lines that say FAIL."""
    first = next(iter(configs.values()))
    grid = Grid.create(first.parallel)
    pack = draw(first, options.lengths, device)
    say = print if grid.rank == 0 else lambda *_, **__: None
    say(
        title(options, pack, first.model.attention_backend),
        *(f"{name} skipped: {why}" for name, why in refused.items()),
        sep="\n",
    )
    own = pack.shares(grid)
    wanted = [exact(share, pack, first) for share in own]
    one_rank = differ(own, wanted, [alone(share, pack, first, grid) for share in own], grid)
    say(f"{'type':10} {'tensor':6} {'largest':>9} {'relative':>9} {'one rank':>9} {'worst row':>9}  where", flush=True)
    failed = []
    for name, config in configs.items():
        grid = Grid.create(config.parallel)
        whole, held = together(pack, config, grid)
        got = [Results(*(share.of(x, config.model.kv_heads) for x in whole)) for share in own]
        for tensor, error in differ(own, wanted, got, grid).items():
            broken = faults(tensor, error, one_rank[tensor], options.dtype)
            numbers = (error.largest, error.relative, one_rank[tensor].relative, error.worst)
            line = f"{name:10} {tensor:6} " + " ".join(f"{number:9.1e}" for number in numbers)
            line += (
                f"  {place(pack, error)}, rank {held[error.row]}: {'FAIL, ' + ', '.join(broken) if broken else 'PASS'}"
            )
            failed += [line] if broken else []
            say(line, flush=True)
    say(f"FAIL: {len(failed)} lines" if failed else f"PASS: {', '.join(configs)}")
    return failed


def title(options: Namespace, pack: Pack, backend: str) -> str:
    window = f", window {options.window}" if options.window else ""
    rows, heads = pack.inputs[0].shape[:2]
    return (
        f"cp {options.cp}, {dist.get_backend()}, {options.device}, backend {backend}, {options.dtype}, seed "
        f"{options.seed}; {heads} heads, {pack.inputs[1].shape[1]} KV heads of {options.head_dim}, {options.mask}"
        f"{window}; {sum(options.lengths):,} tokens in {len(options.lengths)} sequences, padded to {rows:,}"
    )


def place(pack: Pack, error: Error) -> str:
    """Where a row of the pack lies, in words."""
    starts = pack.sample.cu_seqlens_padded.tolist()
    sequence = max(number for number, start in enumerate(starts[:-1]) if start <= error.row)
    token, length = error.row - starts[sequence], int(pack.sample.cu_seqlens.diff()[sequence])
    padding = " (padding)" if token >= length else ""
    return f"sequence {sequence}, token {token} of {length}{padding}, head {error.head}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)

    def work(options: Namespace) -> int:
        try:
            complete(options)
            configs, refused = allowed(options)
            if not configs:
                raise ValueError(next(iter(refused.values())))
        except ValueError:
            if os.environ.get("RANK", "0") == "0":
                raise
            time.sleep(GRACE)  # rank 0 tells, before torchrun ends all of them
            return 2
        if "RANK" in os.environ:
            return take_part(options, configs, refused)
        return launch(options.cp, given)

    return parser().run(work, given)


if __name__ == "__main__":
    sys.exit(main())
