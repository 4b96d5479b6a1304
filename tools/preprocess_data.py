"""Text to token files: JSONL (also .gz and .zst), text files and folders of them.

    python tools/preprocess_data.py --input corpus.jsonl.gz --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/corpus.model --append-eod

writes data/corpus_text_document.bin and .idx, one pair for each of --json-keys, in the order of the input whatever the
number of workers. The names appear only when all is written.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacp.data.command import Command, add_input_arguments, add_tokenizer_arguments, at_least, sources_of
from megacp.data.documents import BadDocument, RawDocument, batches, parse
from megacp.data.tokenizer import Tokenizer, build_tokenizer
from megacp.data.tokens import TokenFileWriter, best_dtype
from megacp.data.workers import in_order, progress

_BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Task:
    """What is done with every document; the same in all workers."""

    tokenizer_type: str
    tokenizer_model: str | None
    keys: tuple[str, ...]
    append_eod: bool
    skip_bad: bool


@dataclass
class Tokens:
    """Documents of one batch: for each key all ids back to back, and the length of each document."""

    ids: list[np.ndarray]
    lengths: list[list[int]]
    bad: list[str] = field(default_factory=list)


@functools.cache
def _tokenizer(tokenizer_type: str, tokenizer_model: str | None) -> Tokenizer:
    return build_tokenizer(tokenizer_type, tokenizer_model)


def tokenize(task: Task, batch: list[RawDocument]) -> Tokens:
    """Raises BadDocument unless bad ones are skipped. An empty text gets no end-of-document, as in Megatron-LM."""
    tokenizer = _tokenizer(task.tokenizer_type, task.tokenizer_model)
    end = [tokenizer.eod] if task.append_eod else []
    dtype = best_dtype(tokenizer.vocab_size)
    parts: list[list[np.ndarray]] = [[np.empty(0, dtype)] for _ in task.keys]
    tokens = Tokens([], [[] for _ in task.keys])
    for document in batch:
        try:
            texts = parse(document, task.keys)
        except BadDocument as error:
            if not task.skip_bad:
                raise
            tokens.bad.append(str(error))
            continue
        for k, text in enumerate(texts):
            ids = tokenizer.encode(text) + end if text else []
            parts[k].append(np.array(ids, dtype))
            tokens.lengths[k].append(len(ids))
    tokens.ids = [np.concatenate(part) for part in parts]
    return tokens


def tokenized(task: Task, work: Iterable[tuple[list[RawDocument], int]], workers: int) -> Iterator[tuple[Tokens, int]]:
    """Batches through the worker processes, in order, each with its bytes on disk; few at a time in memory."""
    return in_order(functools.partial(tokenize, task), work, workers)


def preprocess(arguments: Namespace) -> int:
    sources = sources_of(arguments)
    keys = tuple(arguments.json_keys)
    task = Task(arguments.tokenizer_type, arguments.tokenizer_model, keys, arguments.append_eod, arguments.skip_bad)
    tokenizer = _tokenizer(task.tokenizer_type, task.tokenizer_model)
    if task.append_eod:
        _ = tokenizer.eod
    dtype = best_dtype(tokenizer.vocab_size)
    prefixes = [f"{arguments.output_prefix}_{key}_document" for key in keys]
    documents, empty, bad = 0, 0, []
    totals = [0] * len(keys)
    with ExitStack() as stack:
        writers = [stack.enter_context(TokenFileWriter(prefix, dtype)) for prefix in prefixes]
        advance = stack.enter_context(progress(max(1, sum(source.size for source in sources))))
        for tokens, consumed in tokenized(task, batches(sources, _BATCH_BYTES), arguments.workers):
            for k, writer in enumerate(writers):
                writer.add_documents(tokens.ids[k], tokens.lengths[k])
                totals[k] += len(tokens.ids[k])
                empty += tokens.lengths[k].count(0)
            documents += len(tokens.lengths[0])
            bad += tokens.bad
            advance(consumed, sum(len(ids) for ids in tokens.ids))
        if not sum(totals):
            raise ValueError(f"no text in {len(sources)} files: {documents} documents, all empty, {len(bad)} bad")
    for prefix, total in zip(prefixes, totals, strict=True):
        print(f"{prefix}: {documents:,} documents, {total:,} tokens, {dtype}, vocabulary {tokenizer.vocab_size:,}")
    _tell_left_out(empty, bad)
    return 0


def _tell_left_out(empty: int, bad: Sequence[str]) -> None:
    if empty:
        print(f"{empty:,} texts were empty and have no tokens")
    if bad:
        print(f"{len(bad):,} bad documents skipped, the first: {bad[0]}")


def main() -> int:
    # As an exception, so that files half written are removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = Command(description=__doc__.split("\n")[0] if __doc__ else None)
    add_input_arguments(parser)
    add_tokenizer_arguments(parser, required=True)
    parser.add_argument("--append-eod", action="store_true", help="end each document by the tokenizer's eod")
    parser.add_argument("--output-prefix", required=True, help="files are PREFIX_KEY_document.bin and .idx")
    available = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=at_least(1), default=available, help="processes (one a core)")
    return parser.run(preprocess)


if __name__ == "__main__":
    sys.exit(main())
