"""What is in a token file.

python tools/inspect_data.py data/corpus_text_document --check
python tools/inspect_data.py data/corpus_text_document --decode 3 --tokenizer-type ByteLevelTokenizer
python tools/inspect_data.py data/corpus_text_document --seq-length 8192 --cp 4
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacp.data.command import Command, add_tokenizer_arguments, at_least, tokenizer_of
from megacp.data.tokens import TokenFile

_BAR = 40


def document_lengths(file: TokenFile) -> np.ndarray:
    """Tokens of each document, int64."""
    ends = np.concatenate([[0], np.cumsum(file.lengths, dtype=np.int64)])
    return np.diff(ends[file.document_indices])


def most_in_file_order(lengths: np.ndarray, window: int) -> int:
    """The largest number of sequences that `window` consecutive tokens touch; `lengths` all positive."""
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    # The fullest windows begin with the last token of a sequence.
    after = np.searchsorted(starts, ends - 1 + window, side="left")
    return int((after - np.arange(len(lengths))).max(initial=0))


def most_in_any_order(lengths: np.ndarray, window: int) -> int:
    """The same over all orders: the shortest sequences whole, one token of another one at each end.

    An epoch's end and the next one's beginning may hold the same short sequences, so each counts twice.
    """
    twice = np.repeat(np.sort(lengths), 2)
    whole = int(np.searchsorted(np.cumsum(twice, dtype=np.int64), max(window - 2, 0), side="right"))
    return min(len(twice), whole + min(window, 2))


def print_counts(file: TokenFile, lengths: np.ndarray) -> None:
    print(f"{file.prefix}: {len(lengths):,} documents, {len(file):,} sequences, {lengths.sum():,} tokens", end="")
    print(f", {file.dtype}, {Path(file.prefix + '.bin').stat().st_size:,} bytes")
    if len(lengths):
        at = [int(q) for q in np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1], method="lower")]
        print(f"tokens of a document: mean {lengths.mean():.1f}, least {at[0]:,}, median {at[1]:,}", end="")
        print(f", 90 % {at[2]:,}, 99 % {at[3]:,}, most {at[4]:,}")


def print_histogram(lengths: np.ndarray) -> None:
    """Documents by length, each line twice as long as the one before, and their share of all tokens."""
    # frexp is exact: the exponent of L is the number of its binary digits.
    digits = np.frexp(lengths.astype(np.float64))[1]
    counts, tokens = np.bincount(digits), np.bincount(digits, weights=lengths)
    print(f"{'length':>24}  {'documents':>12}  {'tokens':>7}")
    for k in range(int(digits.min()), len(counts)):
        span = "0" if k == 0 else f"{1 << (k - 1):,} .. {(1 << k) - 1:,}"
        bar = "#" * round(_BAR * counts[k] / counts.max())
        print(f"{span:>24}  {counts[k]:>12,}  {100 * tokens[k] / max(1, lengths.sum()):>5.1f} %  {bar}".rstrip())


def print_padding(file: TokenFile, seq_length: int, cp: int) -> None:
    """How far data.mask_between_documents may lengthen a pack: 2*cp - 1 tokens for each sequence in its window."""
    lengths = file.lengths[file.lengths > 0]
    print(f"data.mask_between_documents at seq_length {seq_length:,}, cp {cp}: up to {2 * cp - 1} tokens a document")
    for order, most in (
        ("in the file's order", most_in_file_order(lengths, seq_length)),
        ("in any shuffled order", most_in_any_order(lengths, seq_length)),
    ):
        excess = most * (2 * cp - 1)
        print(f"  {order}: at most {most:,} documents a sample", end="")
        print(f", a pack exceeds seq_length by up to {excess:,} tokens, {seq_length + excess:,} in all")


def print_document(file: TokenFile, i: int, arguments: Namespace) -> None:
    count = len(file.document_indices) - 1
    if not -count <= i < count:
        raise ValueError(f"{file.prefix}: document {i} of {count:,}")
    begin, end = file.document_indices[i % count : i % count + 2]
    ids = [int(token) for part in file[begin:end] for token in part]
    if arguments.tokenizer_type:
        print(tokenizer_of(arguments).decode(ids))
    else:
        print(*ids)


def inspect(arguments: Namespace) -> int:
    file = TokenFile(arguments.prefix)
    if arguments.decode is not None:
        print_document(file, arguments.decode, arguments)
        return 0
    if arguments.check and (damage := list(file.index_problems())):
        print(*damage, sep="\n")
        return 1
    lengths = document_lengths(file)
    print_counts(file, lengths)
    if len(lengths):
        print_histogram(lengths)
    if arguments.seq_length:
        print_padding(file, arguments.seq_length, arguments.cp)
    if not arguments.check:
        return 0
    vocab_size = tokenizer_of(arguments).vocab_size if arguments.tokenizer_type else arguments.vocab_size
    problems = list(file.problems(vocab_size))
    print(*problems or [f"checked: whole{', all ids below ' + str(vocab_size) if vocab_size else ''}"], sep="\n")
    return 1 if problems else 0


def main() -> int:
    parser = Command(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("prefix", metavar="PREFIX", help="the name without .bin and .idx")
    parser.add_argument("--check", action="store_true", help="look at every entry; exit code 1 where one is wrong")
    parser.add_argument("--vocab-size", type=at_least(1), help="for --check: ids must be smaller")
    parser.add_argument("--decode", type=int, metavar="I", help="print document I: text, or ids without tokenizer")
    parser.add_argument("--seq-length", type=at_least(1), help="print how much document masking may pad")
    parser.add_argument("--cp", type=at_least(1), default=1, help="context_parallel_size for --seq-length (1)")
    add_tokenizer_arguments(parser, required=False)
    return parser.run(inspect)


if __name__ == "__main__":
    sys.exit(main())
