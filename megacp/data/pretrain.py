"""Pretraining samples: rows of seq_length tokens over shuffled documents, of one source or of a blend."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from megacp.config import DataConfig
from megacp.data.blend import (
    SURPLUS,
    blend_index,
    exhaustive_blend_index,
    normalized,
    parse_blend,
    source_sizes,
)
from megacp.data.index import SampleIndex, TooShort, build_index, cached
from megacp.data.pack import Row
from megacp.data.tokens import TokenFile

SPLITS = ("train", "valid", "test")

logger = logging.getLogger(__name__)


class Dataset(Protocol):
    """What a loader reads: a list of rows."""

    def __len__(self) -> int: ...

    def row(self, i: int, read: bool = True) -> Row:
        """Row i. Without `read` its tokens are zeros and only the index is looked at."""
        ...


class PretrainDataset:
    """Rows of one token file in the order of a SampleIndex."""

    def __init__(self, tokens: TokenFile, index: SampleIndex, seq_length: int, extra_token: bool = True) -> None:
        self.tokens = tokens
        self.index = index
        self.seq_length = seq_length
        self.extra_token = extra_token

    def __len__(self) -> int:
        return len(self.index.shuffle_index)

    def row(self, i: int, read: bool = True) -> Row:
        if not 0 <= i < len(self):
            raise IndexError(f"{self.tokens.prefix}: sample {i} of {len(self)}")
        sample = int(self.index.shuffle_index[i])
        (first, begin), (last, end) = self.index.sample_index[sample : sample + 2].tolist()
        documents = self.index.document_index[first : last + 1]
        offsets = np.zeros(len(documents), np.int64)
        ends = self.tokens.lengths[documents].astype(np.int64)
        offsets[0], ends[-1] = begin, end + self.extra_token
        borders = np.cumsum(ends - offsets)
        tokens = np.zeros(self.seq_length + 1, np.int64)
        if read:
            pieces = zip(documents.tolist(), offsets.tolist(), (ends - offsets).tolist(), strict=True)
            parts = [self.tokens.read(*piece) for piece in pieces if piece[2]]
            tokens[: borders[-1]] = np.concatenate(parts)
        # A document without tokens begins where the next one does.
        starts = np.unique(borders[:-1])
        return Row(tokens, starts[starts > 0], min(self.seq_length, int(borders[-1]) - 1))


class BlendedDataset:
    """Row i is row sample[i] of source number source[i]."""

    def __init__(self, sources: Sequence[Dataset], source: np.ndarray, sample: np.ndarray) -> None:
        self.sources = sources
        self.source = source
        self.sample = sample

    def __len__(self) -> int:
        return len(self.source)

    def row(self, i: int, read: bool = True) -> Row:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} in a blend of {len(self.sources)} sources")
        return self.sources[self.source[i]].row(int(self.sample[i]), read)


@dataclass(frozen=True)
class _Split:
    """What all sources of one split have in common."""

    name: str
    share: tuple[float, float]
    seq_length: int
    seed: int
    cache_path: str | None

    def folder(self, prefix: str) -> Path:
        return Path(self.cache_path) if self.cache_path else Path(prefix).parent / "index_cache"

    def documents(self, tokens: TokenFile) -> np.ndarray:
        begin, end = (round(border * float(len(tokens))) for border in self.share)
        if begin == end:
            raise ValueError(
                f"{tokens.prefix}: data.split leaves {self.name} none of the {len(tokens)} documents; "
                f"one of them is a share of {1 / max(1, len(tokens)):.2g}"
            )
        return np.arange(begin, end, dtype=np.int32)

    def dataset(self, prefix: str, num_samples: int | None) -> PretrainDataset:
        """At least `num_samples` rows of one source, going through it as often as that takes; None: once."""
        tokens = TokenFile(prefix)
        documents = self.documents(tokens)
        # The view of a file's index is not aligned, and slow in arithmetic.
        lengths = tokens.lengths.copy()
        for problem in tokens.index_problems():
            raise ValueError(problem)
        key = {
            "file": Path(prefix).name,
            "bytes": os.path.getsize(f"{prefix}.bin"),
            "lengths": hashlib.sha256(lengths.data).hexdigest(),
            "documents": [int(documents[0]), int(documents[-1]) + 1],
            "num_samples": num_samples,
            "seq_length": self.seq_length,
            "seed": self.seed,
        }

        def build() -> dict[str, np.ndarray]:
            return build_index(lengths, documents, num_samples, self.seq_length, self.seed)._asdict()

        try:
            arrays = cached(self.folder(prefix), f"{Path(prefix).name}-{self.name}", key, build)
        except TooShort as error:
            raise TooShort(f"{prefix}, {self.name}: {error}") from None
        return PretrainDataset(tokens, SampleIndex(**arrays), self.seq_length)

    def blend(self, prefixes: list[str], weights: Sequence[float], size: int) -> BlendedDataset:
        """Of each source its share by weight, rounded up; one that is too small is gone through again."""
        shares = normalized(weights)
        source, sample = self._blend_index(prefixes[0], shares, sum(source_sizes(shares, size)))
        drawn = np.bincount(source, minlength=len(shares)).tolist()
        built = map(max, source_sizes(shares, size, SURPLUS), drawn)
        sources = [self.dataset(prefix, count) for prefix, count in zip(prefixes, built, strict=True)]
        return BlendedDataset(sources, source, sample)

    def union(self, prefixes: list[str], size: int | None) -> BlendedDataset:
        """All sources in proportion to their size: each once, or more often where `size` rows need it.

        A source without one whole sample is left out. Megatron-LM stops after one epoch even when more samples are
        asked for.
        """
        sources, left_out = [], []
        for prefix in prefixes:
            try:
                sources.append(self.dataset(prefix, None))
            except TooShort as error:
                left_out.append(error)
        if not sources:
            raise left_out[0]
        for error in left_out:
            logger.warning("%s; it is left out of the blend", error)
        prefixes = [source.tokens.prefix for source in sources]
        sizes = [len(source) for source in sources]
        if size is not None and size > sum(sizes):
            return self.blend(prefixes, sizes, size)
        return BlendedDataset(sources, *self._blend_index(prefixes[0], normalized(sizes), size, sizes))

    def _blend_index(
        self, prefix: str, shares: np.ndarray, size: int | None, caps: list[int] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        def build() -> dict[str, np.ndarray]:
            index = exhaustive_blend_index(caps) if size is None and caps else blend_index(shares, size or 0, caps)
            return dict(zip(("source", "sample"), index, strict=True))

        key = {"shares": shares.tolist(), "size": size, "caps": caps}
        arrays = cached(self.folder(prefix), f"blend-{self.name}", key, build)
        return arrays["source"], arrays["sample"]


def parse_split(split: str) -> list[tuple[float, float] | None]:
    """Share of the documents for train, valid and test, e.g. '99,1,0' -> [(0, 0.99), (0.99, 1), None]."""
    try:
        values = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        values = []
    if not 1 <= len(values) <= len(SPLITS) or min(values) < 0 or not 0 < sum(values) < math.inf:
        raise ValueError(f"data.split is {split!r}; it must be one to three numbers, not negative, like '969,30,1'")
    vector = normalized(values + [0.0] * (len(SPLITS) - len(values))).tolist()
    borders = pairwise(accumulate([0.0, *vector]))
    return [border if share else None for share, border in zip(vector, borders, strict=True)]


@dataclass(frozen=True)
class Wanted:
    """A split that is asked for: its paths, the share of them that is its own, and how many samples (None: an epoch).

    own_paths: they are not divided among the splits
    """

    name: str
    paths: str | Sequence[str | float]
    share: tuple[float, float]
    size: int | None
    own_paths: bool


def wanted_splits(data: DataConfig, sizes: Sequence[int | None]) -> list[Wanted | None]:
    """What `sizes` for train, valid and test ask of the data paths; None: no dataset.

    ValueError for a split that is asked for and has no path or no share.
    """
    own_paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if data.data_path is not None and any(path is not None for path in own_paths):
        raise ValueError(
            "data.data_path is divided by data.split: leave it out where splits have data paths of their own"
        )
    shares = parse_split(data.split) if data.data_path is not None else [(0.0, 1.0)] * len(SPLITS)
    wanted: list[Wanted | None] = []
    for name, path, share, size in zip(SPLITS, own_paths, shares, sizes, strict=True):
        paths = data.data_path if path is None else path
        if size == 0 or (size is None and (paths is None or share is None)):
            wanted.append(None)
        elif paths is None:
            raise ValueError(f"{size} {name} samples are asked for: set data.{name}_data_path or data.data_path")
        elif share is None:
            raise ValueError(f"{size} {name} samples are asked for, but data.split '{data.split}' gives {name} nothing")
        else:
            wanted.append(Wanted(name, paths, share, size, own_paths=path is not None))
    return wanted


def build_datasets(data: DataConfig, sizes: Sequence[int | None], seed: int) -> list[Dataset | None]:
    """The train, valid and test dataset of at least `sizes` samples each.

    A size of 0 gives no dataset (None). A size of None is one epoch of the data; None too where the split has
    no data. ValueError for a split that is asked for and has no documents or no tokens.
    """
    datasets: list[Dataset | None] = []
    for wanted in wanted_splits(data, sizes):
        if wanted is None:
            datasets.append(None)
        else:
            split = _Split(wanted.name, wanted.share, data.seq_length, seed, data.data_cache_path)
            datasets.append(_build(split, wanted.paths, wanted.size, alone=wanted.own_paths))
    return datasets


def _build(split: _Split, paths: str | Sequence[str | float], size: int | None, alone: bool) -> Dataset:
    prefixes, weights = parse_blend(paths)
    # As in Megatron-LM the weight of a single prefix counts (by the surplus) in a data_path that is divided,
    # only there.
    if len(prefixes) == 1 and (weights is None or alone):
        return split.dataset(prefixes[0], size)
    if weights is None:
        return split.union(prefixes, size)
    if size is None:
        raise ValueError(
            f"{split.name}: a weighted blend needs a number of samples; leave out the weights for one epoch"
        )
    return split.blend(prefixes, weights, size)
