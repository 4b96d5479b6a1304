"""The parts of a run and one step of it: read, cut, forward and backward, reduce, update."""

from __future__ import annotations

import math
import warnings
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megacp import pipeline
from megacp.batch import Batch, Sample, shard
from megacp.collectives import all_reduce
from megacp.config import Config, ConfigError
from megacp.data.loader import Loader, PeerCheck, Sampler
from megacp.data.pack import PackLayout
from megacp.data.pretrain import Dataset
from megacp.grid import Grid
from megacp.log import Work
from megacp.loss import linear_cross_entropy
from megacp.model.gpt import GPT
from megacp.optim.lr import LRConfig, learning_rate, weight_decay
from megacp.optim.sharded_adam import ShardedAdam


@dataclass
class Progress:
    """What a checkpoint must remember beside tensors. The data position is a number: the loader has no other state."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    nonfinite: int = 0
    nonfinite_in_a_row: int = 0


@dataclass(frozen=True)
class Step:
    """Numbers of one step, the same on all ranks. loss: sum over supervised tokens / their number, nan without any."""

    loss: float
    tokens: float
    grad_norm: float
    lr: float
    skipped: bool
    work: Work


@dataclass
class Run:
    """The parts of a run; made by `build`. hf_config: the config.json its first weights came with, to be kept."""

    config: Config
    grid: Grid
    device: torch.device
    model: GPT
    optimizer: ShardedAdam
    schedule: LRConfig
    train_data: Dataset
    valid_data: Dataset | None
    test_data: Dataset | None
    progress: Progress = field(default_factory=Progress)
    hf_config: dict[str, Any] | None = None


def build(
    config: Config,
    device: torch.device,
    train_data: Dataset,
    valid_data: Dataset | None = None,
    test_data: Dataset | None = None,
    *,
    draw: bool = True,
) -> Run:
    """Grid, model and optimizer as they stand before the first step; without `draw` the weights are to be loaded."""
    grid = Grid.create(config.parallel)
    if config.model.attention_dropout:
        # TransformerEngine's, the only dropout with a state of its own: by default it is the same on all ranks.
        torch.cuda.manual_seed(config.train.seed + grid.rank)
    model = GPT(config.model, config.parallel, config.train, grid, str(device), draw=draw)
    optimizer = ShardedAdam(model.parameters(), config.optimizer, grid)
    return Run(config, grid, device, model, optimizer, lr_schedule(config), train_data, valid_data, test_data)


def lr_schedule(config: Config) -> LRConfig:
    """The schedule's fields from Megatron-LM's argument names."""
    o, iterations = config.optimizer, config.train.train_iters
    start = o.weight_decay if o.start_weight_decay is None else o.start_weight_decay
    end = o.weight_decay if o.end_weight_decay is None else o.end_weight_decay
    return LRConfig(
        max_lr=o.lr,
        min_lr=o.min_lr,
        init_lr=o.lr_warmup_init,
        lr_warmup_steps=o.lr_warmup_iters,
        lr_decay_steps=o.lr_decay_iters or iterations,
        lr_decay_style=o.lr_decay_style,
        wsd_decay_steps=o.lr_wsd_decay_iters,
        lr_wsd_decay_style=o.lr_wsd_decay_style,
        start_wd=start,
        end_wd=end,
        wd_incr_steps=iterations,
        wd_incr_style=o.weight_decay_incr_style,
    )


def make_loader(run: Run, data: Dataset, consumed_samples: int) -> Loader:
    """This rank's microbatches of `data`, padded for the ranks that will share them."""
    config, grid = run.config, run.grid
    layout = PackLayout(
        cp=grid.cp.size,
        tp=grid.tp.size,
        sequence_parallel=config.parallel.sequence_parallel,
        mask_between_documents=config.data.mask_between_documents or config.data.sft,
        eod_mask_loss=config.data.eod_mask_loss,
    )
    return Loader(
        data,
        Sampler(config.train.micro_batch_size, config.train.global_batch_size, grid.dp.rank, grid.dp.size),
        layout,
        grid.cp.ranks,
        consumed_samples=consumed_samples,
        prefetch=config.data.num_workers > 0,
        check=PeerCheck(grid.dp.rank, device=run.device) if config.data.verify_peers else None,
    )


def train_step(run: Run, loader: Loader) -> Step:
    """One global batch: read, cut, forward and backward, reduce, update."""
    total, tokens, work = forward_backward(run, loader)
    progress, schedule = run.progress, run.schedule
    # A skipped step does not count for the schedules, as in Megatron-LM.
    position = progress.iteration - progress.skipped
    lr = learning_rate(position, schedule)
    # A loss that is not finite makes the norm so, and the optimizer skips the step.
    result = run.optimizer.step(lr, weight_decay(position, schedule), tokens if math.isfinite(total) else math.nan)
    progress.iteration += 1
    progress.consumed_samples = loader.consumed_samples
    finite = math.isfinite(result.grad_norm)
    progress.skipped += result.skipped
    progress.nonfinite += not finite
    progress.nonfinite_in_a_row = 0 if finite else progress.nonfinite_in_a_row + 1
    loss = total / tokens if tokens else math.nan
    return Step(loss, tokens, result.grad_norm, lr, result.skipped, work)


def forward_backward(run: Run, loader: Loader) -> tuple[float, float, Work]:
    """Gradients of one global batch; its (sum of losses, number of supervised tokens, work) over all ranks."""
    batches = next_batches(run, loader)
    if torch.is_grad_enabled():
        run.optimizer.buckets.zero()
    totals = pipeline.run(run.model, batches, loss_of(run), run.optimizer.buckets.overlap_next_backward)
    if torch.is_grad_enabled():
        # Before the totals: they share the gradients' communicator, and ranks may have buckets left to launch.
        run.optimizer.buckets.finish()
    # Ranks of one CP group count the same documents, so each takes its share of them.
    tokens = sum(sum(batch.packed.lengths) / batch.cp.size for batch in batches)
    squares = sum(sum(n * n for n in batch.packed.lengths) / batch.cp.size for batch in batches)
    everything = torch.cat([totals.to(run.device), totals.new_tensor([tokens, squares], device=run.device)])
    loss, supervised, tokens, squares = all_reduce(everything, run.grid.dp_cp).tolist()
    return loss, supervised, Work(tokens, squares)


def next_batches(run: Run, loader: Loader) -> list[Batch]:
    """This rank's microbatches of the next global batch, cut and on its device."""
    try:
        pairs = loader.next_step()
    except ValueError as error:  # damaged files, or others on another node
        raise ConfigError(f"data: {error}") from error
    for sample, _ in pairs:
        check_tokens(sample, run.config.model.vocab_size)
    return [shard(sample, run.grid.cp_group(ranks)).to(run.device) for sample, ranks in pairs]


def check_tokens(sample: Sample, vocab_size: int) -> None:
    """ConfigError for a token that the model lacks: tensor-parallel ranks would take it for nobody's, in silence."""
    for tokens in (sample.tokens, sample.labels):
        for token in torch.stack(torch.aminmax(tokens)).tolist():
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"samples {list(sample.ids)} hold the token {token}, but model.vocab_size = {vocab_size}: "
                    "set it to the size of the tokenizer that the data was made with"
                )


def loss_of(run: Run) -> pipeline.Loss:
    model, config, tp = run.model, run.config, run.grid.tp

    def loss(hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.labels is not None and batch.loss_mask is not None
        return linear_cross_entropy(
            hidden,
            model.output_weight,
            batch.labels,
            batch.loss_mask,
            tp,
            vocab_size=config.model.vocab_size,
            sequence_parallel=config.parallel.sequence_parallel,
            chunk_size=config.train.loss_chunk_size,
        )

    return loss


def evaluate(run: Run, data: Dataset) -> float:
    """Loss over the first eval_iters global batches of `data`: sum over tokens / their number.

    Without a supervised token there is none: nan, and a warning.
    """
    run.model.eval()
    total = count = 0.0
    with torch.no_grad(), closing(make_loader(run, data, 0)) as loader:
        for _ in range(run.config.train.eval_iters):
            loss, tokens, _ = forward_backward(run, loader)
            total, count = total + loss, count + tokens
    run.model.train()
    if count:
        return total / count
    name, train = "test" if data is run.test_data else "valid", run.config.train
    samples = train.eval_iters * train.global_batch_size
    warnings.warn(f"no supervised token in the {samples} samples of the {name} data: they have no loss", stacklevel=2)
    return math.nan
