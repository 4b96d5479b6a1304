"""The order of pretraining samples, and a folder that keeps it.

Documents are shuffled and laid end to end in one stream; sample i is seq_length tokens of it from token
i*seq_length on, plus the next one as the last label; samples are shuffled again. Numbers and order are
Megatron-LM's for a seed (megatron/core/datasets/gpt_dataset.py, helpers.cpp); a document is one sequence of
the token file, as there.

Legend: d documents of the stream (all epochs), n samples.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

# Goes into the key of every cached array: raise it whenever the arrays for the same key change.
FORMAT = 1
# A last epoch of which less than this share is used is shuffled by itself, so that it is not spread over the
# whole run.
FINAL_EPOCH_THRESHOLD = 0.8
_INT32_MAX = np.iinfo(np.int32).max
_MANIFEST = "manifest.json"

logger = logging.getLogger(__name__)


class TooShort(ValueError):
    """The documents are too few for one sample."""


class SampleIndex(NamedTuple):
    """document_index  int32 [d]: the document at each place of the stream
    sample_index    int32 or int64 [n+1, 2]: (place in document_index, offset there) at which samples begin
    shuffle_index   uint32 or int64 [n]: the sample to give as the i-th
    """

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


def build_index(
    lengths: np.ndarray,
    documents: np.ndarray,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    *,
    extra_token: bool = True,
    drop_last: bool = True,
) -> SampleIndex:
    """The index of at least `num_samples` samples (None: one epoch) of `documents` int32 [..].

    lengths      tokens of each document of the file
    extra_token  samples overlap by one token, the label of the last; else that label is missing
    drop_last    a last piece of the stream shorter than a sample is left out; else it is one more sample
    TooShort where no sample can be made.
    """
    extra = int(extra_token)
    epoch_tokens = int(lengths[documents].sum(dtype=np.int64))
    if epoch_tokens == 0:
        raise TooShort(f"no token in its {len(documents)} documents")
    wanted = num_samples or 0
    epochs = max(1, -(-(wanted * seq_length + extra) // epoch_tokens))
    before_final = _count(epoch_tokens * (epochs - 1), seq_length, extra)
    final_epoch_share = int(FINAL_EPOCH_THRESHOLD * _count(epoch_tokens, seq_length, extra))
    separate = epochs > 1 and wanted - before_final < final_epoch_share
    count = _count(epoch_tokens * epochs, seq_length, extra, drop_last)
    if count <= 0:
        raise TooShort(
            f"{epoch_tokens} tokens are fewer than one sample of {seq_length} + {extra}; "
            f"take a seq_length of at most {epoch_tokens - extra} or more documents"
        )
    random = np.random.RandomState(seed)
    document_index = _shuffled_epochs(documents, epochs, random, separate)
    sample_index = _sample_index(lengths[document_index], count, seq_length, extra)
    return SampleIndex(document_index, sample_index, _shuffle_index(count, before_final if separate else count, random))


def _count(tokens: int, seq_length: int, extra: int, drop_last: bool = True) -> int:
    whole, rest = divmod(tokens - extra, seq_length)
    return whole + (rest > 0 and not drop_last)


def _shuffled_epochs(documents: np.ndarray, epochs: int, random: np.random.RandomState, separate: bool) -> np.ndarray:
    parts = [epochs - 1, 1] if separate else [epochs]
    streams = [np.tile(documents.astype(np.int32, copy=False), part) for part in parts]
    for stream in streams:
        random.shuffle(stream)
    return streams[0] if len(streams) == 1 else np.concatenate(streams)


def _sample_index(sizes: np.ndarray, count: int, seq_length: int, extra: int) -> np.ndarray:
    """Where samples 0..count begin in documents of `sizes`.

    The boundary after i samples lies in the first document that reaches token i*seq_length + extra of the
    stream: the one holding the label of the token before it. Counting the boundaries each document reaches
    needs one pass and no search.
    """
    ends = sizes.astype(np.int64)
    np.cumsum(ends, out=ends)
    reached = ends - extra
    reached //= seq_length
    np.maximum(reached, 0, out=reached)
    reached[1:] -= reached[:-1].copy()
    narrow = max(len(sizes), int(sizes.max())) <= _INT32_MAX
    index = np.zeros((count + 1, 2), np.int32 if narrow else np.int64)
    boundaries = np.arange(1, count + 1) * seq_length
    place = np.repeat(np.arange(len(sizes), dtype=index.dtype), reached)
    if len(place) < count:
        # The last sample is a partial one: it ends where the stream does.
        boundaries[-1] = ends[-1] - extra
        place = np.append(place, np.searchsorted(ends, ends[-1]).astype(index.dtype))
    index[1:, 0] = place
    boundaries -= ends[place]
    boundaries += sizes[place]
    index[1:, 1] = boundaries
    return index


def _shuffle_index(count: int, first: int, random: np.random.RandomState) -> np.ndarray:
    """0..first-1 shuffled, then first..count-1 shuffled."""
    index = np.arange(count, dtype=np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64)
    random.shuffle(index[:first])
    if first < count:
        random.shuffle(index[first:])
    return index


def cached(
    folder: Path, name: str, key: dict[str, object], build: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays of `build()`, memory-mapped from `folder`; built if no process has done so for `key`.

    An entry is a folder that appears whole, by a rename. Processes that want it at once queue for a file
    lock, which the kernel drops when its holder dies, so a crash blocks nobody and leaves only a hidden
    folder that the next builder removes. Where nothing can be written the arrays are built in memory, and a
    warning says so.
    """
    text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
    entry = folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    arrays = _load(entry, text)
    if arrays is not None:
        return arrays
    built = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{entry.name}.lock") as alone:
            arrays = _load(entry, text)
            if arrays is None:
                if alone:
                    _remove_remains(entry)
                built = build()
                _store(entry, text, built)
                arrays = _load(entry, text)
    except OSError as error:
        logger.warning(
            "%s: the sample index cannot be kept there (%s), so every process builds and holds its own; "
            "set data.data_cache_path to a folder that can be written",
            folder,
            error.strerror or error,
        )
    if arrays is not None:
        return arrays
    return build() if built is None else built


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Waits for the lock. False where the file system has none: several may build, and one of them wins."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


def _remove_remains(entry: Path) -> None:
    """What a builder that died has left, and an entry that cannot be read."""
    for path in [entry, *entry.parent.glob(f".{entry.name}-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _load(entry: Path, key: str) -> dict[str, np.ndarray] | None:
    try:
        manifest = json.loads((entry / _MANIFEST).read_text())
        if manifest["key"] != key:
            return None
        wanted = manifest["arrays"]
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in wanted}
        return arrays if {name: _kind(array) for name, array in arrays.items()} == wanted else None
    # What json and np.load raise for damaged files.
    except (OSError, ValueError, LookupError, TypeError, EOFError, RecursionError, BadZipFile):
        return None


def _kind(array: np.ndarray) -> list[object]:
    return [array.dtype.str, *array.shape]


def _store(entry: Path, key: str, arrays: dict[str, np.ndarray]) -> None:
    part = entry.with_name(f".{entry.name}-{uuid.uuid4().hex}")
    part.mkdir()
    try:
        for name, array in arrays.items():
            with (part / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        (part / _MANIFEST).write_text(
            json.dumps({"key": key, "arrays": {name: _kind(a) for name, a in arrays.items()}})
        )
        part.rename(entry)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        # Without a lock another process may have been first: its entry is as good.
        if not entry.is_dir():
            raise
