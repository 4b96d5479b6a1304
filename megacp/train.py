"""From a configuration to a trained model: config -> grid -> model -> loader -> loop.

The only file that reads torchrun's environment. One step, top to bottom, is step.py. How a run ends:

    exit code 0    train_iters reached, now or before; or asked to stop: the step at hand is finished and saved
    exit code 2    a mistake, told in one line; the same start would end the same way
    exit code 130  Ctrl-C: at once, nothing is saved
    any other      a bug, with its traceback. torchrun then ends the other ranks, those that hang after 30 s

SIGTERM or SIGUSR1 to one rank asks all of them to stop. torchrun passes on a SIGTERM that it gets, ends with code 1
itself and kills its processes after 30 s: where a step and a save take longer, give it --shutdown-timeout or signal the
training processes instead, as scripts/slurm/pretrain.sbatch does. Before the first step the signals end a process.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megacp import log
from megacp.attention import te
from megacp.blocks import shard_of
from megacp.collectives import all_reduce
from megacp.config import Config, ConfigError, load_config
from megacp.data.pretrain import Dataset, build_datasets, parse_split
from megacp.data.sft import build_sft_datasets
from megacp.data.tokenizer import build_tokenizer
from megacp.grid import Grid, world_map
from megacp.start import agree, find_start, resume, save
from megacp.step import Progress, Run, Step, build, evaluate, make_loader, train_step
from megacp.support import oversights
from megacp.support_backend import backend_for, cpu_problems, cuda_problems

MISTAKE = 2
INTERRUPTED = 130
# Seconds in which torchrun ends the other ranks once rank 0 has told a mistake.
PATIENCE = 15.0


# --- before any process group


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says; the exit code."""
    end_with_torchrun()
    started, rank = time.monotonic(), from_torchrun("RANK", 0)
    if rank > 0:
        warnings.simplefilter("ignore")  # rank 0 gives the same ones
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        config = load_config(*parse(arguments), from_torchrun("WORLD_SIZE", 1))
        run_job(config, rank, started)
    except (ConfigError, FloatingPointError) as error:
        tell(error, rank)
        return MISTAKE
    except KeyboardInterrupt:
        if rank == 0:
            print("interrupted: what came after the last checkpoint is lost", file=sys.stderr)
        return INTERRUPTED
    return 0


def from_torchrun(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {' '.join(self.format_usage().split())}")


def parse(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """(config file, overrides)."""
    parser = Parser(prog="pretrain_gpt.py", description="Pretrain a GPT model.")
    parser.add_argument("config", help="YAML file, e.g. configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", default=[], help="part.key=value, e.g. train.train_iters=100")
    options = parser.parse_args(arguments)
    return options.config, options.overrides


def tell(error: Exception, rank: int) -> None:
    """One line on stderr. A mistake of all ranks is told by rank 0: the others first let torchrun end them."""
    if rank > 0:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(MISTAKE))
        time.sleep(PATIENCE)
    where = f" on rank {rank}" if rank > 0 else ""
    print(f"error{where}: {' '.join(str(error).splitlines())}", file=sys.stderr, flush=True)


def run_job(config: Config, rank: int, started: float) -> None:
    """All of a run, in an order that tells mistakes before anything slow or shared begins."""
    device = choose_device(config)
    config = choose_attention(config, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    check_tokenizer(config)
    for oversight in oversights(config):
        warnings.warn(oversight, stacklevel=2)
    start = find_start(config)
    done, wanted = start.progress.iteration, config.train.train_iters
    if done >= wanted:
        with process_group(config, device):
            agree(start)
        if rank == 0:
            print(f"nothing to do: {start.folder} has done {done} iterations, train.train_iters = {wanted}")
        return
    allow_many_files()
    datasets = read_data(config, start.progress)
    with closing(open_log(config, done, rank)) as writer, process_group(config, device):
        agree(start)
        run = build(config, device, *datasets, draw=start.folder is None)
        resume(run, start, writer)
        train(run, writer, started)


def allow_many_files() -> None:
    """Each source of a blend holds five files open; the soft limit is often 1024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def end_with_torchrun() -> None:
    """Where torchrun dies (SIGKILL, SIGUSR1), its processes get SIGTERM: none trains on alone (Linux)."""
    prctl, pr_set_pdeathsig = getattr(ctypes.CDLL(None), "prctl", None), 1
    if prctl is not None and "TORCHELASTIC_RUN_ID" in os.environ:
        prctl(pr_set_pdeathsig, signal.SIGTERM)


def choose_device(config: Config) -> torch.device:
    """This process's device. ConfigError when there is none for it."""
    cuda = torch.cuda.is_available()
    if config.train.device == "cuda" and not cuda:
        raise ConfigError("train.device = cuda, but this machine has no CUDA device: set train.device=cpu or auto")
    if config.train.device == "cpu" or not cuda:
        if config.parallel.distributed_backend == "nccl":
            raise ConfigError("parallel.distributed_backend = nccl, but there is no CUDA device: use gloo or auto")
        return torch.device("cpu")
    processes, devices = from_torchrun("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
    if processes > devices:
        raise ConfigError(f"{processes} processes on a machine with {devices} CUDA devices: start one per device")
    return torch.device("cuda", from_torchrun("LOCAL_RANK", 0))


def choose_attention(config: Config, device: torch.device) -> Config:
    """`config` with attention_backend auto decided, as the device is known. ConfigError for what cannot run there."""
    backend = backend_for(config, device.type == "cuda")
    if backend == "transformer_engine":
        try:
            te.load()
        except ValueError as error:
            if config.model.attention_backend != "auto":
                raise ConfigError(str(error)) from None
            warnings.warn(str(error), stacklevel=2)
            backend = "native"
    config = config.model_copy(update={"model": config.model.model_copy(update={"attention_backend": backend})})
    for problem in cuda_problems(config) if device.type == "cuda" else cpu_problems(config):
        raise ConfigError(problem)
    return config


def check_tokenizer(config: Config) -> None:
    """ConfigError when the tokenizer has more tokens than the model."""
    kind, model = config.data.tokenizer_type, config.data.tokenizer_model
    if model is None and kind != "ByteLevelTokenizer":
        return
    try:
        tokenizer = build_tokenizer(kind, model)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"data.tokenizer_model: {error}") from None
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"{model or kind} has {tokenizer.vocab_size} tokens, more than model.vocab_size = "
            f"{config.model.vocab_size}: set it to {tokenizer.vocab_size} or more"
        )


def read_data(config: Config, progress: Progress | None = None) -> tuple[Dataset, Dataset | None, Dataset | None]:
    """Training, validation and test samples of the whole run; evaluation takes the same ones every time."""
    t, done = config.train, progress or Progress()
    # What was consumed may have come in global batches of another size.
    train_size = done.consumed_samples + (t.train_iters - done.iteration) * t.global_batch_size
    valid_size = t.eval_iters * t.global_batch_size if t.eval_interval else 0
    read = build_sft_datasets if config.data.sft else build_datasets
    try:
        train_data, valid_data, _ = read(config.data, (train_size, valid_size, 0), t.seed)
        assert train_data is not None
        return train_data, valid_data, read_test_data(config)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    except (MemoryError, OverflowError):
        raise ConfigError(
            f"the order of {train_size} training samples of {config.data.seq_length} tokens (train.train_iters = "
            f"{t.train_iters}, train.global_batch_size = {t.global_batch_size}) does not fit into memory: use fewer"
        ) from None


def read_test_data(config: Config) -> Dataset | None:
    """Samples of the evaluation at the end, if there is one. A share of data.split may turn out to hold nothing."""
    data, size = config.data, config.train.eval_iters * config.train.global_batch_size
    shared = data.data_path is not None and parse_split(data.split)[2] is not None
    if not size or not (shared or data.test_data_path):
        return None
    read = build_sft_datasets if data.sft else build_datasets
    try:
        return read(data, (0, 0, size), config.train.seed)[2]
    except ValueError as error:
        if not shared:
            raise
        warnings.warn(f"no evaluation on test data at the end: {error}", stacklevel=2)
        return None


def open_log(config: Config, iteration: int, rank: int) -> log.Log:
    """Makes sure that the run can write what it is to write. ConfigError where it cannot."""
    key, folder = "checkpoint.save", config.checkpoint.save
    try:
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(f"{folder} cannot be written to")
        key = "logging.run_dir"
        return log.Log(config, iteration, active=rank == 0)
    except OSError as error:
        raise ConfigError(f"{key}: {error}") from None
    except (ImportError, ValueError) as error:
        raise ConfigError(f"logging: {error}") from None


@contextmanager
def process_group(config: Config, device: torch.device) -> Iterator[None]:
    """torch.distributed as torchrun set it up, or one process alone; CPU threads shared among local ranks.

    After an error the group is left alone: destroying it may wait for peers that wait for this rank.
    """
    torch.set_num_threads(config.train.num_threads or max(1, usable_cores() // from_torchrun("LOCAL_WORLD_SIZE", 1)))
    if device.type == "cpu":
        keep_freed_memory()
    if "RANK" not in os.environ:
        yield
        return
    backend = config.parallel.distributed_backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        timeout=timedelta(minutes=config.parallel.distributed_timeout_minutes),
        device_id=device if backend == "nccl" else None,
    )
    yield
    dist.destroy_process_group()


def usable_cores() -> int:
    """CPU cores that this process may use: a job's share of a node, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it to the kernel.

    Activations are allocated and freed every step; each return means that the kernel maps and zeroes the pages anew,
    which cost 2 % of a step of 10 M parameters on two cores. Elsewhere than on glibc this does nothing.
    """
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


# --- the loop


def train(run: Run, writer: log.Log, started: float) -> None:
    """Steps until train_iters or a reason to stop; saves at the end, then evaluates on test data if all is done.

    `started`: when exit_duration_in_mins began.
    """
    t, progress = run.config.train, run.progress
    writer.say(opening(run))
    meter = log.Meter(run.config, run.grid.world_size)
    stop = Stop()
    if run.valid_data is not None and t.eval_on_start and not progress.iteration:
        report_evaluation(run, writer, "valid", run.valid_data)
        meter.restart()
    with closing(make_loader(run, run.train_data, progress.consumed_samples)) as loader:
        while progress.iteration < t.train_iters:
            step = train_step(run, loader)
            last = progress.iteration == t.train_iters
            meter.add(step.work)
            if due(run, run.config.logging.log_interval):
                report(run, step, meter, writer)
            check_nonfinite(run, step)
            reason = asked_to_stop(run, stop, started)
            if reason is None and run.valid_data is not None and due(run, t.eval_interval):
                report_evaluation(run, writer, "valid", run.valid_data)
                meter.restart()
            if reason is None and not last and due(run, t.exit_interval):
                reason = f"train.exit_interval = {t.exit_interval}"
            # Weights that went bad must not push whole checkpoints out of keep_last.
            due_and_whole = due(run, run.config.checkpoint.save_interval) and not progress.nonfinite_in_a_row
            if reason or last or due_and_whole:
                if progress.nonfinite_in_a_row:
                    writer.say(
                        f"warning: the last {progress.nonfinite_in_a_row} steps had a loss or gradient that is not "
                        "finite; they have not changed the weights that are saved"
                    )
                save(run, writer)
                meter.restart()
            if reason:
                writer.say(f"stopping after iteration {progress.iteration}: {reason}")
                return
    if run.test_data is not None:
        report_evaluation(run, writer, "test", run.test_data)


def due(run: Run, interval: int | None) -> bool:
    return bool(interval) and run.progress.iteration % interval == 0


def opening(run: Run) -> str:
    """What is about to run: world map, layout, size."""
    grid, config = run.grid, run.config
    sizes = " x ".join(f"{axis}{size}" for axis, size in grid.sizes.items())
    pieces = [piece for parameter in run.model.parameters() for piece in shard_of(parameter).pieces]
    weights = sum({piece.name: math.prod(piece.global_shape) for piece in pieces}.values())
    return (
        f"{world_map(grid.sizes, grid.expert_sizes, grid.order, host_names(grid))}\n"
        f"{sizes} on {run.device.type}, {config.train.params_dtype}, {torch.get_num_threads()} threads a rank; "
        f"{weights / 1e6:.1f} M weights; iterations {run.progress.iteration + 1} to {config.train.train_iters} of "
        f"{config.train.global_batch_size} samples; checkpoints: "
        f"{config.checkpoint.save or 'none, checkpoint.save is not set'}"
    )


def host_names(grid: Grid) -> list[str]:
    """Host of every rank, on every rank."""
    names: list[Any] = [socket.gethostname()] * grid.world_size
    if grid.world_size > 1:
        dist.all_gather_object(names, socket.gethostname())
    return names


def report(run: Run, step: Step, meter: log.Meter, writer: log.Log) -> None:
    """Speed since the last report; loss, norm and rate are those of `step`."""
    progress = run.progress
    values = {
        "lm_loss": step.loss,
        "grad_norm": step.grad_norm,
        "learning_rate": step.lr,
        "consumed_samples": progress.consumed_samples,
        **meter.read(),
        "skipped": progress.skipped,
        "nan": progress.nonfinite,
    }
    writer.record("train", progress.iteration, values)
    writer.say(log.console_line(progress.iteration, run.config.train.train_iters, values))


def check_nonfinite(run: Run, step: Step) -> None:
    """FloatingPointError, on all ranks, once too many steps in a row had a loss or gradient that is not finite."""
    limit = min(run.config.train.max_consecutive_nonfinite, run.config.train.train_iters)
    if run.progress.nonfinite_in_a_row >= limit:
        raise FloatingPointError(
            f"loss or gradient was not finite in {limit} steps in a row, up to iteration {run.progress.iteration} "
            f"(loss {step.loss}, grad norm {step.grad_norm}): none of them changed the weights. Lower optimizer.lr or "
            "clip_grad, or look at the samples of these steps"
        )


class Stop:
    """Set by SIGTERM or SIGUSR1, from when it is made; read after each step.

    Until the process ends: a scheduler signals torchrun and its processes, so the same signal may come twice.
    """

    signal: int = 0

    def __init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        self.signal = number


def asked_to_stop(run: Run, stop: Stop, started: float) -> str | None:
    """Why to save and exit now, by signal or by clock. Both differ between ranks, so they agree on one answer."""
    limit = run.config.train.exit_duration_in_mins
    late = limit is not None and time.monotonic() - started >= 60 * limit
    flags = torch.tensor([stop.signal, late], dtype=torch.int32, device=run.device)
    for group in (run.grid.dp_cp, run.grid.model):  # together the whole world
        all_reduce(flags, group, dist.ReduceOp.MAX)
    number, late = flags.tolist()
    if number:
        return f"received {signal.Signals(number).name}"
    return f"train.exit_duration_in_mins = {limit} has passed" if late else None


def report_evaluation(run: Run, writer: log.Log, kind: str, data: Dataset) -> None:
    loss, iteration = evaluate(run, data), run.progress.iteration
    ppl = math.exp(min(loss, 20.0))
    writer.record(kind, iteration, {"lm_loss": loss, "ppl": ppl})
    name = "validation" if kind == "valid" else kind
    writer.say(f"{name} at iteration {iteration} | lm loss: {loss:.6f} | ppl: {ppl:.3f}")
