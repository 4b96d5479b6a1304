"""Checkpoints that any grid can read: save, load, resume.

    root/latest               name of the checkpoint to resume from, moved last
    root/iter_0000010/        a whole checkpoint
    root/.old-iter_0000010/   a whole one being replaced by another save of the same iteration
    root/.tmp-iter_0000020/   being written, or left by a killed save; the next save removes it
    root/.trash-*/            being removed

A process may die at any moment: every step is a rename, and before and after each there is a whole
checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from megacp import block_files
from megacp.blocks import Block

LATEST = "latest"

Result = TypeVar("Result")


def save(
    root: str | Path,
    iteration: int,
    blocks: Sequence[Block],
    meta: dict[str, Any],
    process_group: dist.ProcessGroup | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write the blocks of all ranks as root/iter_<iteration> and point `latest` to it; that folder's path.

    The blocks of one name must make up the whole global tensor; what several ranks hold is written once.
    `meta` (JSON, the first rank's) comes back from `load`. `keep_last` is how many checkpoints up to this
    iteration stay; later ones, of a run that was rolled back, are left alone. A failure on one rank is raised
    on all of them (ValueError, OSError, else RuntimeError), and the checkpoints that were there stay as they
    were.
    """
    root = Path(root)
    folder = root / f"iter_{iteration:07d}"
    temporary = root / f".tmp-{folder.name}"
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, not {keep_last}")
    _on_first_rank(lambda: _prepare(temporary, meta), process_group)
    try:
        block_files.write(temporary, blocks, meta, process_group)
    except Exception:
        # No rank writes any more. The disk may be full: give the space back.
        if _is_first(process_group):
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    _on_first_rank(lambda: _publish(temporary, folder, keep_last), process_group)
    return folder


def load(path: str | Path, blocks: Sequence[Block], process_group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Fill the tensors of `blocks` from a checkpoint's folder, or the one `find` picks in a root; its `meta`.

    The cut may differ from the saved one, and each rank may ask for names of its own, or none. Values take
    the dtype of their destination; only between integers and floating point nothing is converted. ValueError
    names a tensor that is missing or has another global shape.
    """
    folder, metadata = _on_first_rank(lambda: _open(Path(path)), process_group)
    block_files.read(folder, metadata, blocks, process_group)
    return metadata.planner_data


def find(root: str | Path, process_group: dist.ProcessGroup | None = None) -> Path:
    """The folder to resume from, the same on all ranks: the one `latest` names.

    If that is not whole, a warning says why, and the newest whole one before it is taken, else one after it.
    FileNotFoundError if there is none at all, ValueError with the reasons if none is whole.
    """
    return _on_first_rank(lambda: _open(Path(root))[0], process_group)


def read_meta(path: str | Path) -> dict[str, Any]:
    """The `meta` of a checkpoint (its folder or a root), read by this process alone."""
    return _open(Path(path))[1].planner_data


def contents(path: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """name -> (global shape, dtype) of a checkpoint (its folder or a root), read by this process alone."""
    tensors = block_files.tensors_of(_open(Path(path))[1])
    return {name: (tuple(tensor.size), tensor.properties.dtype) for name, tensor in tensors.items()}


def _prepare(temporary: Path, meta: dict[str, Any]) -> None:
    try:
        json.dumps(meta)
    except TypeError as error:
        raise ValueError(f"meta cannot be written as JSON: {error}") from error
    root = temporary.parent
    for leftover in [*root.glob(".tmp-iter_*"), *root.glob(".trash-*")]:
        shutil.rmtree(leftover)
    temporary.mkdir(parents=True)


def _publish(temporary: Path, folder: Path, keep_last: int | None) -> None:
    """Move a finished checkpoint into place, point `latest` to it, remove what is no longer wanted."""
    root = folder.parent
    old = root / f".old-{folder.name}"
    if folder.exists():
        _remove(old)
        folder.rename(old)
    temporary.rename(folder)
    block_files.sync_folder(root)
    block_files.write_text(root / f".{LATEST}", folder.name + "\n")
    os.replace(root / f".{LATEST}", root / LATEST)
    block_files.sync_folder(root)
    for unwanted in [*root.glob(".old-iter_*"), *_beyond(folder, keep_last)]:
        _remove(unwanted)


def _beyond(folder: Path, keep_last: int | None) -> list[Path]:
    """The checkpoints older than the last `keep_last` up to the one in `folder`."""
    older = [path for path in folder.parent.glob("iter_*") if _iteration(path) <= _iteration(folder)]
    return sorted(older, key=_iteration)[:-keep_last] if keep_last else []


def _remove(folder: Path) -> None:
    """Delete a checkpoint, under another name first: half of one must never look like a whole one."""
    if folder.exists():
        trash = Path(tempfile.mkdtemp(prefix=".trash-", dir=folder.parent))
        folder.rename(trash / folder.name)
        shutil.rmtree(trash, ignore_errors=True)


def _open(path: Path) -> tuple[Path, Metadata]:
    """The checkpoint in `path`, or the one to resume from in the root `path`. See `find` for errors."""
    if (path / block_files.INDEX).exists():
        return path, block_files.read_index(path)
    reasons = []
    for folder in _candidates(path):
        try:
            metadata = block_files.read_index(folder)
        except ValueError as error:
            reasons.append(str(error))
            continue
        if reasons:
            warnings.warn(f"{'; '.join(reasons)}. Reading {folder} instead", stacklevel=2)
        return folder, metadata
    if reasons:
        raise ValueError(f"no whole checkpoint in {path}: {'; '.join(reasons)}")
    raise FileNotFoundError(f"no checkpoint in {path}")


def _candidates(root: Path) -> list[Path]:
    """Where to look, in order: what `latest` names, those before it from new to old, then those after."""
    folders = {path for path in root.glob("*iter_*") if _iteration(path) < inf}
    pointed, last = root, inf
    if (root / LATEST).exists():
        # Looked into even if there is no such folder: that is what to warn of.
        pointed = root / Path((root / LATEST).read_text(errors="replace").strip()).name
        last = _iteration(pointed)
        folders.add(pointed)

    def order(path: Path) -> tuple[bool, bool, float, str]:
        return path == pointed, _iteration(path) <= last, _iteration(path), path.name

    return sorted(folders, key=order, reverse=True)


def _iteration(folder: Path) -> float:
    """The iteration a folder is named after, infinity if it has no checkpoint's name."""
    match = re.fullmatch(r"(?:\.old-)?iter_(\d+)", folder.name)
    return int(match[1]) if match else inf


def _is_first(process_group: dist.ProcessGroup | None) -> bool:
    return not dist.is_initialized() or dist.get_rank(process_group) == 0


def _on_first_rank(function: Callable[[], Result], process_group: dist.ProcessGroup | None) -> Result:
    """The result of `function` on the first rank of the group, or its OSError or ValueError, on all ranks."""
    if not dist.is_initialized():
        return function()
    answer: list[Any] = [None]
    if _is_first(process_group):
        try:
            answer = [function()]
        except (OSError, ValueError) as error:
            answer = [error]
    dist.broadcast_object_list(answer, group=process_group, group_src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]
