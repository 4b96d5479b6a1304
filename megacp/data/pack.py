"""Rows of tokens -> one Sample, padded for the ranks that will share it.

Legend: S tokens of a row, k sequences of the pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megacp.batch import Sample


@dataclass(frozen=True)
class Row:
    """One dataset sample, before any cut.

    tokens  int64 [S+1]: the inputs are tokens[:S], the labels tokens[1:]
    starts  int64 [..], ascending, in 1..S: where documents begin after the first; S: the last input ends one
    labels  how many labels are real; what follows is filling, of weight 0
    weights float32 [S]: of each label; None: 1
    """

    tokens: np.ndarray
    starts: np.ndarray
    labels: int
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class PackLayout:
    """How rows become a pack, and for how many ranks it is padded."""

    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    mask_between_documents: bool = False
    eod_mask_loss: bool = False

    @property
    def multiple(self) -> int:
        """Every sequence is padded to a multiple of this, so that each rank gets two equal chunks of it."""
        return 2 * self.cp

    @property
    def total_multiple(self) -> int:
        """So is the pack to this: with sequence parallelism tp ranks divide a rank's tokens."""
        return self.multiple * (self.tp if self.sequence_parallel else 1)


def pack(rows: Sequence[Row], ids: Sequence[int], layout: PackLayout) -> Sample:
    """One microbatch of rows, one after the other; they may differ in length.

    Each row is a sequence of the pack, or with `mask_between_documents` each document of each row. Labels are
    those of the whole row, so the last token of a document is taught the first of the next unless the row or
    `eod_mask_loss` gives it weight 0.
    """
    cuts = _offsets(np.array([len(row.tokens) - 1 for row in rows]))
    starts = np.concatenate([begin + row.starts for begin, row in zip(cuts, rows, strict=False)])
    tokens = np.concatenate([row.tokens[:-1] for row in rows])
    labels = np.concatenate([row.tokens[1:] for row in rows])
    weights = np.concatenate([_weights(row) for row in rows])
    if layout.eod_mask_loss:
        weights[starts - 1] = 0
    if layout.mask_between_documents:
        cuts = np.union1d(cuts, starts)
    return lay_out(tokens, labels, weights, cuts, ids, layout)


def _weights(row: Row) -> np.ndarray:
    """float32 [S], an array of its own."""
    weights = np.ones(len(row.tokens) - 1, np.float32) if row.weights is None else row.weights.copy()
    weights[row.labels :] = 0
    return weights


def lay_out(
    tokens: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    cuts: np.ndarray,
    ids: Sequence[int],
    layout: PackLayout,
) -> Sample:
    """A Sample of the sequences between `cuts` int64 [k+1], padded after each and at the end of the pack.

    tokens, labels int64 and weights float32 [cuts[-1]], without padding. Padding is token 0 with weight 0;
    the end of the pack is filled by one more sequence, of real length 0.
    """
    lengths = np.diff(cuts)
    room = -(-lengths // layout.multiple) * layout.multiple
    filling = -int(room.sum()) % layout.total_multiple
    if filling:
        lengths, room = np.append(lengths, 0), np.append(room, filling)
    real, padded = _offsets(lengths), _offsets(room)
    cu_seqlens = torch.from_numpy(real.astype(np.int32))
    cu_padded = cu_seqlens
    if not np.array_equal(real, padded):
        cu_padded = torch.from_numpy(padded.astype(np.int32))
        place = np.arange(len(tokens)) + np.repeat(padded[:-1] - real[:-1], lengths)
        tokens, labels, weights = (_scatter(part, place, int(padded[-1])) for part in (tokens, labels, weights))
    return Sample(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(weights),
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_padded,
        ids=tuple(ids),
    )


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _scatter(values: np.ndarray, place: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros(size, values.dtype)
    out[place] = values
    return out
