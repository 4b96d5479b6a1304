"""A tiny real run: Python sources as bytes, the real dataset, loader, model and optimizer, on any layout."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from megacp import step, train
from megacp.blocks import Block, row_blocks
from megacp.config import Config, load_config
from megacp.data.pretrain import Dataset
from megacp.data.tokenizer import build_tokenizer
from megacp.data.tokens import TokenFileWriter

CONFIG = {
    "model": {
        "num_layers": 4,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 96,
        "vocab_size": 257,
        "make_vocab_size_divisible_by": 8,
    },
    "data": {"seq_length": 64, "tokenizer_type": "ByteLevelTokenizer", "split": "90,10,0", "verify_peers": True},
    "optimizer": {"lr": 2e-3, "lr_warmup_iters": 2, "clip_grad": 1.0},
    "train": {"global_batch_size": 4, "train_iters": 20, "device": "cpu"},
}

# The other taste: GPT-2's norms, positions, biases and tied head, and norms of q and k.
GPT2 = (
    "model.normalization=LayerNorm",
    "model.swiglu=false",
    "model.position_embedding_type=learned_absolute",
    "model.max_position_embeddings=64",
    "model.add_bias_linear=true",
    "model.untie_embeddings_and_output_weights=false",
    "model.num_query_groups=4",
    "model.qk_layernorm=true",
)


def write_data(target: Path, documents: int = 60) -> Path:
    """Prefix of a token file of the first `documents` short sources of the standard library."""
    tokenizer = build_tokenizer("ByteLevelTokenizer", None)
    prefix = target / "stdlib"
    sources = sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: (path.stat().st_size, path.name)
    )
    with TokenFileWriter(prefix, np.uint16) as writer:
        for path in [source for source in sources if source.stat().st_size > 0][:documents]:
            writer.add_document(np.array([*tokenizer.encode(path.read_text()), tokenizer.eod]))
    return prefix


def write_config(folder: Path, prefix: Path, **parts: dict[str, Any]) -> Path:
    """A YAML file of CONFIG with `parts` laid over it."""
    tree = {part: {**CONFIG.get(part, {}), **parts.get(part, {})} for part in {*CONFIG, *parts}}
    tree["data"]["data_path"] = str(prefix)
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@dataclass
class Result:
    """What one rank saw: losses of all steps; its blocks (name, shape, offsets, values) of gradients and weights."""

    losses: list[float]
    gradients: list[tuple]
    weights: list[tuple]


def setup(path: Path, overrides: Sequence[str]) -> tuple[Config, train.Run]:
    """The run of this process, in a world that exists already."""
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config = load_config(path, overrides, world_size)
    return config, train.build(config, torch.device("cpu"), *train.read_data(config))


def run_steps(
    path: Path, overrides: Sequence[str], steps: int, change: Callable[[Dataset], Dataset] | None = None
) -> Result:
    """Gradient sums of the first global batch, then `steps` training steps from the same start."""
    _, run = setup(path, overrides)
    data = change(run.train_data) if change else run.train_data
    loader = train.make_loader(run, data, 0)
    step.forward_backward(run, loader)
    run.optimizer.buckets.finish()
    gradients = [g for bucket in run.optimizer.buckets.buckets for g in bucket.gradients()]
    blocks = [
        block
        for rows, gradient in zip(run.optimizer.rows, gradients, strict=True)
        for block in row_blocks(rows.shard, gradient, rows.first_row)
    ]
    first = portable(blocks)
    loader.close()
    loader = train.make_loader(run, data, 0)
    losses = [train.train_step(run, loader).loss for _ in range(steps)]
    loader.close()
    return Result(losses, first, portable(run.optimizer.blocks()))


def portable(blocks: Sequence[Block]) -> list[tuple]:
    return [(b.name, b.global_shape, b.offsets, b.tensor.detach().double().numpy().copy()) for b in blocks]


def whole(ranks: Sequence[list[tuple]]) -> dict[str, np.ndarray]:
    """Global tensors put together from the blocks of all ranks; nan where no rank has a value."""
    tensors: dict[str, np.ndarray] = {}
    for blocks in ranks:
        for name, shape, offsets, values in blocks:
            place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            tensors.setdefault(name, np.full(shape, np.nan))[place] = values
    return tensors
