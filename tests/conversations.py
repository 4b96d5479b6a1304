"""Conversations as token files with loss masks, of very uneven lengths, made directly: no tokenizer, no template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megacp.data.sft import MASK_SUFFIX
from megacp.data.tokens import TokenFileWriter

Masked = tuple[np.ndarray, np.ndarray]


def write_conversations(prefix: Path, conversations: Sequence[Masked]) -> str:
    """A prefix of (tokens, mask) pairs."""
    with TokenFileWriter(prefix, np.uint16) as tokens, TokenFileWriter(f"{prefix}{MASK_SUFFIX}", np.uint8) as mask:
        for part, taught in conversations:
            tokens.add_document(part, [len(part)])
            mask.add_document(taught, [len(taught)])
    return str(prefix)


def numbered(lengths: Sequence[int]) -> list[Masked]:
    """Conversation i holds tokens 100 i + 1, 100 i + 2, ...; every third token is not taught."""
    return [(100 * i + 1 + np.arange(n), (np.arange(n) % 3 > 0).astype(np.uint8)) for i, n in enumerate(lengths)]


def uneven(count: int, longest: int, vocab_size: int, seed: int = 0) -> list[Masked]:
    """Repeated random words, a few long and many short: taught in turns, the first label, the last two, or nothing."""
    random = np.random.default_rng(seed)
    conversations = []
    for i in range(count):
        length = int(np.clip(random.lognormal(np.log(longest / 8), 1.0), 2, longest))
        place = np.arange(length)
        masks = [place % 9 > 4, place == 1, place > length - 3, place < 0]
        tokens = np.resize(random.integers(1, vocab_size, 5), length)
        conversations.append((tokens, masks[i % 4].astype(np.uint8)))
    return conversations
