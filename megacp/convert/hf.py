"""The tensors of a Hugging Face folder, read into a model cut in any way.

A folder holds config.json and safetensors: `model.safetensors`, or shards named by `model.safetensors.index.json`.
Files are mapped, so reading a part of a tensor touches that part alone. Pickles (.bin) are never opened.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megacp.block_files import DTYPES
from megacp.blocks import Block
from megacp.config import ModelConfig
from megacp.convert.hf_config import architecture_of, parse, read_config
from megacp.convert.hf_keys import GPT2
from megacp.convert.hf_names import HEAD, Place, places

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Constants that old releases stored: causal masks, rotary frequencies.
_CONSTANT = re.compile(r"h\.\d+\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
_FLOATS = {code: dtype for code, dtype in DTYPES.items() if code in ("F64", "F32", "F16", "BF16")}


class Stored(NamedTuple):
    """A tensor of theirs: its name in the file, which may lack the model's prefix."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Folder:
    """A Hugging Face folder that was found whole. Places are by our names, stored tensors by theirs."""

    path: Path
    config: dict[str, Any]
    model: ModelConfig
    places: dict[str, Place]
    stored: dict[str, Stored]


def open_folder(folder: str | Path) -> Folder:
    """Find every tensor of a Hugging Face folder, reading headers alone.

    OSError, ValueError for a folder that is not whole or not implemented, with the tensor that is missing, unexpected
    or of another shape.
    """
    path = Path(folder)
    config = read_config(path)
    model, _ = parse(config, f"{path}/config.json")
    architecture = architecture_of(config)
    found = places(model, architecture)
    stored = _stored(path, "transformer." if architecture == GPT2 else "model.")
    _check(path, found, stored, not model.untie_embeddings_and_output_weights)
    return Folder(path, config, model, found, stored)


def fill(folder: str | Path, blocks: Sequence[Block]) -> None:
    """Fill the tensors of `blocks` from a Hugging Face folder, file by file, reading no more than they hold.

    Blocks may be any parts of any of its tensors, by our global names; values take the dtype of their destination.
    ValueError, OSError as `open_folder`, or for a block that is not of this model. Every rank reads for itself: nothing
    is communicated, so an error is one of this rank alone.
    """
    source = open_folder(folder)
    wanted: dict[Path, list[Block]] = defaultdict(list)
    for block in blocks:
        if block.name not in source.places:
            raise ValueError(f"{source.path} has no tensor for {block.name}")
        place = source.places[block.name]
        if tuple(block.global_shape) != place.shape:
            raise ValueError(
                f"{source.path} has {place.name} for {block.name} as {list(place.shape)}, asked for as "
                f"{list(block.global_shape)}"
            )
        wanted[source.stored[place.name].file].append(block)
    for path, members in wanted.items():
        with safe_open(path, "pt") as file:
            for block in members:
                place = source.places[block.name]
                part = _part(file, source.stored[place.name], place, block.offsets, block.tensor.shape)
                block.tensor.detach().copy_(part)


def whole_blocks(source: Folder) -> list[Block]:
    """Every tensor of a folder as one block, in its stored dtype: views of the mapped files, read when used."""
    blocks = []
    for path in sorted({stored.file for stored in source.stored.values()}):
        with safe_open(path, "pt") as file:
            for name, place in source.places.items():
                stored, start = source.stored[place.name], (0,) * len(place.shape)
                if stored.file == path:
                    blocks.append(Block(name, place.shape, start, _part(file, stored, place, start, place.shape)))
    return blocks


def _part(file: Any, stored: Stored, place: Place, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A box of a tensor of ours, as a view of the mapped file."""
    starts = (place.first + offsets[0], *offsets[1:])
    box = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    part = file.get_slice(stored.name)[tuple(reversed(box)) if place.turned else tuple(box)]
    return part.t() if place.turned else part


def _stored(folder: Path, prefix: str) -> dict[str, Stored]:
    """Every tensor in the files of a folder but for constants; `prefix` is added where the model's is left out."""
    found: dict[str, Stored] = {}
    for file, promised in _files(folder).items():
        for name, shape, dtype in _header(file):
            if not _CONSTANT.search(name):
                full = name if name.startswith(prefix) or name == HEAD else prefix + name
                if full in found:
                    raise ValueError(f"{file} and {found[full].file.name} both have {full}")
                found[full] = Stored(file, name, shape, dtype)
            promised.discard(name)
        if promised:
            raise ValueError(f"{file} lacks {_some(promised)}, which {INDEX} says it has")
    return found


def _files(folder: Path) -> dict[Path, set[str]]:
    """The weight files of a folder, each with the tensors an index promises in it."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: set()}
    if not (folder / INDEX).is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin*"))
        if pickles:
            raise ValueError(
                f"{folder} has its weights in pickles ({_some(pickles)}), which can run any code and are not read: if "
                f"you trust them, AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(NEW_FOLDER) of "
                "transformers writes them as safetensors"
            )
        raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}")
    try:
        names: dict[str, str] = dict(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"])
        files: dict[Path, set[str]] = defaultdict(set)
        for name, file in names.items():
            if Path(file).name != file:
                raise ValueError(f"{name} lies in {file}, not a file of the folder")
            files[folder / file].add(name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX} cannot be read ({type(error).__name__}: {error})") from None
    for file, promised in files.items():
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing, which has {_some(promised)}")
    return files


def _header(path: Path) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of every tensor of a file. ValueError for a damaged one, or a dtype that needs scales."""
    try:
        with safe_open(path, "pt") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
            entries = [(name, tuple(part.get_shape()), part.get_dtype()) for name, part in slices]
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    for name, _, code in entries:
        if code not in _FLOATS and not _CONSTANT.search(name):
            raise ValueError(f"{path} has {name} as {code}: quantized weights are not implemented")
    return [(name, shape, _FLOATS.get(code, torch.uint8)) for name, shape, code in entries]


def _check(folder: Path, found: dict[str, Place], stored: dict[str, Stored], tied: bool) -> None:
    wanted = {place.name: place.stored_shape for place in found.values()}
    missing, unexpected = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    if tied and HEAD in unexpected and not missing:
        unexpected.discard(HEAD)
        _check_head(folder, stored[found["embedding.word.weight"].name], stored[HEAD])
    if missing or unexpected:
        faults = [f"lacks {_some(missing)}"] if missing else []
        faults += [f"has {_some(unexpected)}, which its config.json leaves no place for"] if unexpected else []
        raise ValueError(f"{folder} {', and '.join(faults)}")
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            file, theirs = stored[name].file, list(stored[name].shape)
            raise ValueError(f"{file} has {name} as {theirs}, by its config.json it is {list(shape)}")


def _check_head(folder: Path, embedding: Stored, head: Stored) -> None:
    """A head stored beside an embedding it is tied to must be its copy; transformers would not tie them else."""
    with safe_open(embedding.file, "pt") as one, safe_open(head.file, "pt") as other:
        ours, theirs = one.get_slice(embedding.name), other.get_slice(head.name)
        step = max(1, (1 << 24) // max(1, embedding.shape[-1]))
        same = embedding.shape == head.shape and all(
            torch.equal(ours[row : row + step], theirs[row : row + step]) for row in range(0, head.shape[0], step)
        )
    if not same:
        raise ValueError(
            f"{folder} ties {HEAD} to {embedding.name}, but stores them with different values: set tie_word_embeddings "
            "to false in its config.json"
        )


def _some(names: Sequence[str] | set[str]) -> str:
    """The first of many names, and how many there are."""
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
