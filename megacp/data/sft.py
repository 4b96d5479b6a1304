"""Fine-tuning samples: packs of whole conversations, each with the weight of every label.

A prefix names two token files of the same documents, one a conversation: PREFIX holds the tokens, PREFIX_loss_mask a 1
for each token whose prediction is taught and a 0 for the others. Packs are made when the data is opened
(plan_packs.py), so the files know nothing of seq_length.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from megacp.config import DataConfig
from megacp.data.blend import parse_blend
from megacp.data.index import cached
from megacp.data.pack import Row
from megacp.data.plan_packs import PackPattern, epoch_packs, plan, plan_unpacked
from megacp.data.pretrain import Dataset, Wanted, wanted_splits
from megacp.data.tokens import TokenFile

MASK_SUFFIX = "_loss_mask"
# Most bytes of a prefix's masks that a hash of them reads, in this many pieces.
_HASHED, _PIECES = 1 << 24, 256
_ANEW = "write both anew with tools/prepare_sft.py"


@dataclass(frozen=True)
class Conversations:
    """`count` conversations of a pair of token files, from number `first` on."""

    tokens: TokenFile
    mask: TokenFile
    first: int
    count: int

    @property
    def lengths(self) -> np.ndarray:
        """int32 [count]; a copy, since the view of a file's index is not aligned and slow in arithmetic."""
        return self.tokens.lengths[self.first : self.first + self.count].copy()

    def mask_hash(self) -> str:
        """A hash of the loss masks: of all of them up to 16 MiB, beyond that of their size and pieces spread evenly."""
        begin = int(self.mask.pointers[self.first]) if self.count else 0
        size = int(self.lengths.sum(dtype=np.int64))
        digest = hashlib.sha256(str(size).encode())
        piece = _HASHED // _PIECES
        places = range(1) if size <= _HASHED else [i * (size - piece) // (_PIECES - 1) for i in range(_PIECES)]
        with open(f"{self.mask.prefix}.bin", "rb") as file:
            for place in places:
                file.seek(begin + place)
                digest.update(file.read(size if size <= _HASHED else piece))
        return digest.hexdigest()

    def read(self, i: int, read: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int64 [L], weight of the label of each, float32 [L]) of conversation i; zeros for tokens not `read`.

        The label of a token is the next one. The last has none, and its weight is 0.
        """
        mask = self.mask.read(self.first + i)
        if mask.max(initial=0) > 1:
            raise ValueError(f"{self.mask.prefix}: conversation {self.first + i} holds {mask.max()}; a mask is 0 and 1")
        weights = np.zeros(len(mask), np.float32)
        weights[:-1] = mask[1:]
        tokens = self.tokens.read(self.first + i) if read else np.zeros(len(mask))
        return tokens.astype(np.int64), weights


class SFTDataset:
    """Row i is pack i % p of epoch i // p, of the p packs of `pattern` over the conversations of all sources.

    Without `repeats` there is one epoch, and packs beyond it are empty: every rank then has as many as the others. In
    memory are the orders of two epochs, 4 bytes a conversation each.
    """

    def __init__(
        self, sources: Sequence[Conversations], pattern: PackPattern, seed: int, size: int, *, repeats: bool = True
    ) -> None:
        self.sources = sources
        self.pattern = pattern
        self.seed = seed
        self.size = size
        self.repeats = repeats
        self._firsts = [0, *accumulate(source.count for source in sources)]
        self._epoch = lru_cache(maxsize=2)(partial(epoch_packs, pattern, seed))

    def __len__(self) -> int:
        return max(self.size, self.pattern.packs)

    def conversations(self, i: int) -> list[int]:
        """Numbers, over all sources, of the conversations in pack i."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.sources[0].tokens.prefix}: pack {i} of {len(self)}")
        epoch, number = divmod(i, self.pattern.packs)
        if epoch and not self.repeats:
            return []
        conversations, offsets = self._epoch(epoch)
        return conversations[offsets[number] : offsets[number + 1]].tolist()

    def row(self, i: int, read: bool = True) -> Row:
        parts = [self._conversation(number, read) for number in self.conversations(i)]
        ends = np.cumsum([0, *(len(tokens) for tokens, _ in parts)])
        if not ends[-1]:
            # One token that nobody learns from: a pack without any is no batch.
            return Row(np.zeros(2, np.int64), np.ones(1, np.int64), 0)
        # The last input needs a label, if one of weight 0.
        tokens = np.concatenate([*(tokens for tokens, _ in parts), [0]])
        return Row(tokens, np.unique(ends[ends > 0]), int(ends[-1]) - 1, np.concatenate([w for _, w in parts]))

    def order(self) -> str:
        """A hash of all that the order of the packs follows from, except epochs, and of the loss masks."""
        key = {
            "sources": [(source.first, _hash(source.lengths.tobytes()), source.mask_hash()) for source in self.sources],
            "seq_length": self.pattern.seq_length,
            "multiple": self.pattern.multiple,
            "packs": self.pattern.packs,
            "seed": self.seed,
        }
        return _hash(json.dumps(key).encode())

    def _conversation(self, number: int, read: bool) -> tuple[np.ndarray, np.ndarray]:
        source = bisect_right(self._firsts, number) - 1
        return self.sources[source].read(number - self._firsts[source], read)


def build_sft_datasets(data: DataConfig, sizes: Sequence[int | None], seed: int) -> list[Dataset | None]:
    """The train, valid and test dataset of at least `sizes` packs each, as `pretrain.build_datasets` does.

    All prefixes of a split are packed together. Training goes on into further epochs; validation and test are one,
    with empty packs behind it. ValueError or OSError for files that do not belong together or cannot be packed.
    """
    return [None if wanted is None else _build(wanted, data, seed) for wanted in wanted_splits(data, sizes)]


def open_conversations(prefix: str, share: tuple[float, float] = (0.0, 1.0)) -> Conversations:
    """The share [from, to) of the conversations of a prefix. ValueError where its two files do not fit together."""
    tokens, mask = TokenFile(prefix), TokenFile(prefix + MASK_SUFFIX)
    for file in (tokens, mask):
        for problem in file.index_problems():
            raise ValueError(problem)
    if mask.dtype != np.uint8:
        raise ValueError(f"{mask.prefix}: stores {mask.dtype}, but a loss mask is uint8; {_ANEW}")
    if len(tokens) != len(mask):
        raise ValueError(f"{prefix} has {len(tokens)} conversations, {mask.prefix} {len(mask)}; {_ANEW}")
    differ = np.flatnonzero(tokens.lengths != mask.lengths)
    if len(differ):
        i = int(differ[0])
        raise ValueError(
            f"conversation {i} has {tokens.lengths[i]} tokens in {prefix}, but {mask.lengths[i]} in {mask.prefix} "
            f"({len(differ)} of {len(tokens)} differ); {_ANEW}"
        )
    first, end = (round(border * float(len(tokens))) for border in share)
    return Conversations(tokens, mask, first, end - first)


def _build(wanted: Wanted, data: DataConfig, seed: int) -> SFTDataset:
    prefixes, weights = parse_blend(wanted.paths)
    if weights is not None:
        raise ValueError(f"{wanted.name}: with data.sft a list holds prefixes only, no weights: {wanted.paths}")
    sources = [open_conversations(prefix, wanted.share) for prefix in prefixes]
    if not any(source.count for source in sources):
        held = sum(len(source.tokens) for source in sources)
        raise ValueError(
            f"{', '.join(prefixes)}: {wanted.name} has none of the {held} conversations; "
            f"one of them is a share of {1 / max(1, held):.2g} in data.split"
        )
    try:
        pattern = _pattern(sources, data, wanted.name)
    except ValueError as error:
        raise ValueError(f"{', '.join(prefixes)}, {wanted.name}: {error}") from None
    return SFTDataset(sources, pattern, seed, wanted.size or 0, repeats=wanted.name == "train")


def _pattern(sources: Sequence[Conversations], data: DataConfig, split: str) -> PackPattern:
    lengths = np.concatenate([source.lengths for source in sources])
    make = plan if data.sft_packing else plan_unpacked

    def build() -> dict[str, np.ndarray]:
        pattern = make(lengths, data.seq_length, data.pack_multiple)
        return {"classes": pattern.classes, "places": pattern.places, "offsets": pattern.offsets}

    key = {
        "lengths": _hash(lengths.tobytes()),
        "seq_length": data.seq_length,
        "multiple": data.pack_multiple,
        "packing": data.sft_packing,
    }
    prefix = Path(sources[0].tokens.prefix)
    folder = Path(data.data_cache_path) if data.data_cache_path else prefix.parent / "index_cache"
    arrays = cached(folder, f"{prefix.name}-packs-{split}", key, build)
    tokens = int(lengths.sum(dtype=np.int64))
    return PackPattern(**arrays, seq_length=data.seq_length, multiple=data.pack_multiple, tokens=tokens)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
