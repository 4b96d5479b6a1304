"""A model as a Hugging Face folder that transformers loads: sharded safetensors, config.json, the tokenizer's files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megacp.block_files import sync_folder, write_text
from megacp.blocks import Block
from megacp.config import ModelConfig
from megacp.convert.hf import INDEX, SINGLE
from megacp.convert.hf_config import architecture_of
from megacp.convert.hf_names import Place, places

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("chat_template.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt"),
)


def companions(folder: str | Path) -> list[Path]:
    """The tokenizer's files and generation_config.json of a folder. ValueError if it has no tokenizer."""
    found = [Path(folder) / name for name in TOKENIZER_FILES if (Path(folder) / name).is_file()]
    if not found:
        raise ValueError(f"{folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    return found + [path for path in [Path(folder) / GENERATION] if path.is_file()]


def tokens_of(folder: str | Path) -> int:
    """One more than the largest id of a folder's tokenizer; 0 where neither tokenizer.json nor vocab.json tells it.

    ValueError for a damaged file.
    """
    ids = [-1]
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        path = Path(folder) / name
        try:
            held = json.loads(path.read_text("utf-8")) if path.is_file() else {}
            if name == "tokenizer.json":
                ids += [token["id"] for token in held.get("added_tokens") or []]
                held = (held.get("model") or {}).get("vocab") or {}
            # Unigram models list their pieces, in the order of their ids.
            ids.append(max(held.values(), default=-1) if isinstance(held, dict) else len(held) - 1)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no tokenizer's file ({type(error).__name__}: {error})") from None
    return max(ids) + 1


def generation_fits(path: Path, vocab_size: int) -> bool:
    """Whether the tokens that a generation_config.json names are tokens of the model. ValueError for a damaged one."""
    try:
        named = [value for key, value in json.loads(path.read_text("utf-8")).items() if key.endswith("_token_id")]
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is no generation config ({type(error).__name__}: {error})") from None
    tokens = [token for value in named for token in (value if isinstance(value, list) else [value])]
    return all(token is None or (type(token) is int and token < vocab_size) for token in tokens)


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A hidden folder to write into, which takes its name when all is there; removed if anything fails.

    What a killed process left under the hidden name is removed first. FileExistsError unless `folder` is new or empty.
    """
    target = Path(folder).resolve()  # a rename replaces an empty folder, but no link to one
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{folder} is there already: remove it, or write to another folder")
    temporary = target.parent / f".tmp-{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in temporary.iterdir():
            _sync(path)
        sync_folder(temporary)
        temporary.replace(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(target.parent)


def write(
    folder: str | Path,
    model: ModelConfig,
    config: dict[str, Any],
    dtypes: dict[str, torch.dtype],
    read: Callable[[list[Block]], object],
    *,
    max_shard_bytes: int = 5_000_000_000,
    beside: Sequence[Path] = (),
) -> None:
    """Write `model` with `config` as its config.json (hf_config.hf_config makes one), shard by shard.

    `read` fills blocks of whole tensors, by our global names, in the dtype each has in `dtypes`; it is asked for those
    of one shard at a time, which is all that is held in memory. A shard holds `max_shard_bytes` or one tensor. `beside`
    are files to copy. The folder appears when it is whole. OSError, ValueError, or what `read` raises.
    """
    by_theirs: dict[str, list[tuple[str, Place]]] = {}
    for name, place in places(model, architecture_of(config)).items():
        by_theirs.setdefault(place.name, []).append((name, place))
    kinds = {theirs: dtypes[parts[0][0]] for theirs, parts in by_theirs.items()}
    sizes = {theirs: _elements(parts) * kinds[theirs].itemsize for theirs, parts in by_theirs.items()}
    shards = _shards(sizes, max_shard_bytes)
    with new_folder(folder) as temporary:
        where = {}
        for number, names in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file(
                _filled({name: by_theirs[name] for name in names}, kinds, read), temporary / file, {"format": "pt"}
            )
            where |= dict.fromkeys(names, file)
        if len(shards) > 1:
            total = {"total_size": sum(sizes.values())}
            _write_json(temporary / INDEX, {"metadata": total, "weight_map": dict(sorted(where.items()))})
        _write_json(temporary / "config.json", _with_dtype(config, set(dtypes.values())))
        _write_json(temporary / GENERATION, _generation(config))
        for path in beside:
            shutil.copyfile(path, temporary / path.name)
        for file in {*where.values()}:
            # safetensors writes for the owner alone.
            shutil.copymode(temporary / "config.json", temporary / file)


def _elements(parts: list[tuple[str, Place]]) -> int:
    return torch.Size(parts[0][1].stored_shape).numel()


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in their order, in groups of at most `limit` bytes, or of one tensor."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _filled(
    theirs: dict[str, list[tuple[str, Place]]],
    kinds: dict[str, torch.dtype],
    read: Callable[[list[Block]], object],
) -> dict[str, Tensor]:
    tensors, blocks = {}, []
    for name, parts in theirs.items():
        tensors[name] = torch.empty(parts[0][1].stored_shape, dtype=kinds[name])
        for ours, place in parts:
            turned = tensors[name].t() if place.turned else tensors[name]
            rows = turned[place.first : place.first + place.shape[0]]
            blocks.append(Block(ours, place.shape, (0,) * len(place.shape), rows))
    read(blocks)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float16 and torch.isnan(tensor).any():
            raise ValueError(f"{name} holds nan: the checkpoint does too, no dtype helps")
        if tensor.dtype == torch.float16 and not torch.isfinite(tensor).all():
            raise ValueError(f"{name} has values beyond the 65504 of float16: use --dtype bfloat16 or float32")
    return tensors


def _with_dtype(config: dict[str, Any], kinds: set[torch.dtype]) -> dict[str, Any]:
    """The config with the dtype of the files, where it names one and they have one."""
    names = {str(kind).removeprefix("torch.") for kind in kinds}
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    return config | dict.fromkeys(keys, names.pop()) if len(names) == 1 else config


def _generation(config: dict[str, Any]) -> dict[str, Any]:
    tokens = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"_from_model_config": True, **{key: value for key, value in tokens.items() if value is not None}}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
