"""Where a run begins and what it leaves: the checkpoint to go on from, resuming, saving."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megacp import checkpoint
from megacp.blocks import shard_of
from megacp.config import CheckpointConfig, Config, ConfigError, DataConfig, ModelConfig
from megacp.convert import hf, hf_config
from megacp.data.pretrain import Dataset
from megacp.data.sft import SFTDataset
from megacp.log import Log
from megacp.step import Progress, Run

# What gives the weights of a checkpoint their meaning; the rest of a model's configuration may change on resume.
ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_heads",
    "head_dim",
    "ffn_size",
    "vocab_size",
    "position_embedding_type",
    "normalization",
    "qk_layernorm",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
)


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    folder        a checkpoint's, or a Hugging Face model's; None for the very beginning
    progress      what is done by then
    weights_only  the folder gives nothing else: the optimizer's state is new too
    converts      the folder is a Hugging Face model's
    hf_config     the config.json that the weights came with, if any; every checkpoint of the run keeps it
    """

    folder: Path | None = None
    progress: Progress = field(default_factory=Progress)
    weights_only: bool = False
    converts: bool = False
    hf_config: dict[str, Any] | None = None


def find_start(config: Config) -> Start:
    """The checkpoint to go on from.

    A run that was stopped goes on from `checkpoint.save`. Only where that holds nothing it begins at `checkpoint.load`,
    so the same command can be started again and again. A checkpoint inside `save` that `load` names is a wish to roll
    back, and comes first until it is granted. Without any, the weights are those of `train.init_from`. ConfigError
    where what is named is not there, not whole, or of another model.
    """
    c = config.checkpoint
    rolls_back = is_rollback(c)
    places = {"load": c.load} if rolls_back else {"save": c.save, "load": c.load}
    for key, place in places.items():
        if place is None:
            continue
        anew = key == "load" and c.finetune and not rolls_back
        try:
            return read_start(place, config, anew)
        except FileNotFoundError as error:
            if key == "load" and c.load != c.save:
                raise ConfigError(f"checkpoint.load: {error}") from None
            continue
        except (ValueError, OSError) as error:
            raise ConfigError(f"checkpoint.{key}: {error}") from None
    return Start() if config.train.init_from is None else convert_start(config.train.init_from, config.model)


def is_rollback(c: CheckpointConfig) -> bool:
    """Whether `load` lies in `save` and the newest checkpoint there is not yet of a run that began at it."""
    if c.load is None or c.save is None or Path(c.save).resolve() not in Path(c.load).resolve().parents:
        return False
    try:
        before = checkpoint.read_meta(c.save)["config"]["checkpoint"]["load"]
    except (KeyError, TypeError, ValueError, OSError):
        return True
    return before is None or Path(before).resolve() != Path(c.load).resolve()


def read_start(place: str, config: Config, anew: bool = False) -> Start:
    """The checkpoint in `place`, of which a run that begins `anew` takes the weights alone.

    ValueError if it is of another model, of samples that do not go on, or of weights alone to go on from.
    """
    model = config.model
    folder = checkpoint.find(place)
    meta = checkpoint.read_meta(folder)
    try:
        progress, saved = Progress(**meta["progress"]), ModelConfig.model_validate(meta["config"]["model"])
        data = dict(meta["config"].get("data", {}))
        counts = [*asdict(progress).values(), meta["optimizer"]["step"]]
        if not isinstance(meta["sample_order"], str) or any(type(n) is not int or n < 0 for n in counts):
            raise ValueError(f"its counts are {counts}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} was not saved by this trainer ({error!r})") from None
    if meta.get("weights_only") and not anew:
        raise ValueError(
            f"{folder} holds weights alone: set checkpoint.finetune=true, with this as checkpoint.load and another "
            "folder as checkpoint.save"
        )
    learned = model.position_embedding_type == "learned_absolute"
    for name in (*ARCHITECTURE, *(["max_position_embeddings"] if learned else [])):
        theirs, ours = getattr(saved, name), getattr(model, name)
        if theirs != ours:
            raise ValueError(f"{folder} is of another model: {name} is {theirs} there, {ours} in the configuration")
    if anew:
        return Start(folder, weights_only=True, hf_config=meta.get("hf_config"))
    check_samples(folder, data, config.data)
    return Start(folder, progress, hf_config=meta.get("hf_config"))


def convert_start(folder: str, model: ModelConfig) -> Start:
    """The weights of a Hugging Face folder. ConfigError if it is not whole or, naming the fields, another model's."""
    try:
        config = hf_config.read_config(folder)
        differ = hf_config.differences(hf_config.model_config(folder), model)
        if not differ:
            hf.open_folder(folder)
    except (ValueError, OSError) as error:
        raise ConfigError(f"train.init_from: {error}") from None
    if differ:
        fields = [f"{name} is {theirs} there, {ours} in the configuration" for name, (theirs, ours) in differ.items()]
        raise ConfigError(
            f"train.init_from: {folder} is of another model: {', '.join(fields)}; take the model part that "
            f"tools/convert_hf.py config {folder} prints"
        )
    return Start(Path(folder), weights_only=True, converts=True, hf_config=config)


def check_samples(folder: Path, saved: dict, data: DataConfig) -> None:
    """ValueError where a sample was something else, a pack by another plan: the number of those done means nothing."""
    plan = ("pack_multiple", "sft_packing", "seq_length") if data.sft else ()
    for name in ("sft", *plan):
        theirs, ours = (str(value).lower() for value in (saved.get(name, False), getattr(data, name)))
        if theirs != ours:
            raise ValueError(
                f"{folder} was trained on samples with data.{name} = {theirs}, not {ours}: set it to {theirs} to go "
                "on, or begin anew with its weights by checkpoint.load and checkpoint.finetune=true"
            )


def agree(start: Start) -> None:
    """ConfigError, on all ranks, where they do not begin at the same place: some would wait for others for ever."""
    if not dist.is_initialized():
        return
    starts = [start] * dist.get_world_size()
    dist.all_gather_object(starts, start)
    ranks_at: dict[str, list[int]] = {}
    for rank, its in enumerate(starts):
        place = f"{its.folder} (iteration {its.progress.iteration})" if its.folder else "the very beginning"
        ranks_at.setdefault(place, []).append(rank)
    if len(ranks_at) > 1:
        seen = "; ".join(f"ranks {ranks} at {place}" for place, ranks in ranks_at.items())
        raise ConfigError(
            f"ranks would begin at different checkpoints: {seen}. checkpoint.save and checkpoint.load must name "
            "folders that all nodes share"
        )


def resume(run: Run, start: Start, writer: Log) -> None:
    """What `start` gives, on any layout: weights, and unless it is weights_only moments and progress."""
    run.hf_config = start.hf_config
    if start.folder is None:
        return
    blocks = run.optimizer.blocks()
    if start.weights_only:
        weights = {piece.name for parameter in run.model.parameters() for piece in shard_of(parameter).pieces}
        blocks = [block for block in blocks if block.name in weights]
    meta = {}
    try:
        if start.converts:
            hf.fill(start.folder, blocks)
        else:
            meta = checkpoint.load(start.folder, blocks)
    except (ValueError, OSError) as error:
        way = "begun with" if start.converts else "resumed from"
        raise ConfigError(f"{start.folder} cannot be {way}: {error}") from error
    run.optimizer.sync_parameters()
    if start.weights_only:
        writer.say(f"fine-tuning the weights of {start.folder}: iterations and optimizer state start anew")
        return
    run.progress = Progress(**meta["progress"])
    run.optimizer.load_state(meta["optimizer"])
    writer.say(f"resuming from {start.folder} at iteration {run.progress.iteration}")
    if meta["sample_order"] != sample_order(run.train_data):
        writer.say(
            "warning: the samples have another order or loss mask than before the checkpoint, some may come again"
        )


def save(run: Run, writer: Log) -> None:
    """A checkpoint of all ranks, where checkpoint.save says so; ConfigError where it cannot be written."""
    c, iteration = run.config.checkpoint, run.progress.iteration
    if c.save is None:
        return
    meta = {
        "progress": asdict(run.progress),
        "optimizer": run.optimizer.state(),
        "config": run.config.model_dump(),
        "sample_order": sample_order(run.train_data),
    }
    if run.hf_config is not None:
        meta["hf_config"] = run.hf_config
    try:
        folder = checkpoint.save(c.save, iteration, run.optimizer.blocks(), meta, keep_last=c.keep_last)
    except (ValueError, OSError) as error:
        raise ConfigError(f"checkpoint.save: iteration {iteration} was not saved: {error}") from error
    writer.say(f"saved {folder}")


def sample_order(data: Dataset) -> str:
    """A hash of the first samples. Seed, files and split change it; train_iters where it changes the epochs.

    Packs of another plan may begin alike, but that plan has a hash of its own.
    """
    if isinstance(data, SFTDataset):
        return data.order()[:16]
    digest = hashlib.sha256()
    for i in range(min(8, len(data))):
        digest.update(data.row(i).tokens.tobytes())
    return digest.hexdigest()[:16]
