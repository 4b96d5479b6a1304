"""What is in a token file, and in one of conversations for fine-tuning.

python tools/inspect_data.py data/corpus_text_document --check
python tools/inspect_data.py data/corpus_text_document --decode 3 --tokenizer-type ByteLevelTokenizer
python tools/inspect_data.py data/corpus_text_document --seq-length 8192 --cp 4
python tools/inspect_data.py data/chats --sft --seq-length 8192 --cp 4
python tools/inspect_data.py data/chats --sft --decode 3 --tokenizer-type HuggingFaceTokenizer --tokenizer-model MODEL
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacp.data.command import Command, add_tokenizer_arguments, at_least, tokenizer_of
from megacp.data.plan_packs import plan
from megacp.data.tokens import TokenFile

_BAR = 40
_MOST_NAMED = 8
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


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


def check_number(file: TokenFile, i: int, count: int) -> None:
    if not -count <= i < count:
        raise ValueError(f"{file.prefix} has no document {i}: it has {count:,}, counted from 0")


def print_document(file: TokenFile, i: int, arguments: Namespace) -> None:
    count = len(file.document_indices) - 1
    check_number(file, i, count)
    begin, end = file.document_indices[i % count : i % count + 2]
    ids = [int(token) for part in file[begin:end] for token in part]
    if arguments.tokenizer_type:
        print(tokenizer_of(arguments).decode(ids))
    else:
        print(*ids)


def supervised_counts(mask: TokenFile) -> np.ndarray:
    """Supervised tokens of each conversation, int64. Reads the mask through a map."""
    counts = np.zeros(len(mask), np.int64)
    # Of an empty stretch reduceat gives the entry that follows; the others alone lie back to back just as well.
    filled = np.flatnonzero(mask.lengths)
    if len(filled):
        bits = np.memmap(f"{mask.prefix}.bin", np.uint8, mode="r")
        counts[filled] = np.add.reduceat(bits, mask.pointers[filled], dtype=np.int64)
    return counts


def print_supervision(lengths: np.ndarray, supervised: np.ndarray) -> None:
    share = 100 * supervised.sum() / max(1, lengths.sum())
    least, median, most = np.quantile(supervised, [0, 0.5, 1], method="lower")
    print(f"supervised: {supervised.sum():,} tokens, {share:.1f} %", end="")
    print(f"; of a conversation least {least:,}, median {median:,}, most {most:,}")
    without = np.flatnonzero(supervised == 0)
    named = ", ".join(map(str, without[:_MOST_NAMED])) + (", .." if len(without) > _MOST_NAMED else "")
    print(f"without a supervised token: {len(without):,}" + (f" (documents {named})" if len(without) else ""))


def print_report(prefix: str) -> None:
    """What PREFIX_report.json tells of the conversations that are not there, or not whole."""
    path = Path(f"{prefix}_report.json")
    if not path.is_file():
        print(f"{path}: no such file, so what was dropped or truncated is not known")
        return
    try:
        report = json.loads(path.read_text("utf-8"))
        print(f"prepared: {report['read']:,} read, {report['bad']:,} bad and skipped", end="")
        if not_nested := report.get("not_nested"):
            print(f", {not_nested:,} that do not nest left out", end="")
        print(f", {report['dropped']:,} dropped ({report['dropped_tokens']:,} tokens)", end="")
        print(f", {report['truncated']:,} truncated (by {report['truncated_tokens']:,} tokens)", end="")
        print(f"; max_length {report['max_length']}, {report['long_conversations']}", end="")
        print(f"; template {report['chat_template']}, turns {report['turns']}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a report of prepare_sft.py: {error!r}") from error


def print_packs(lengths: np.ndarray, seq_length: int, multiple: int, cp: int) -> None:
    """How conversations share packs of `seq_length`, and what is padding there and on the ranks of a cp group."""
    chunks = 2 * cp
    if multiple % chunks:
        nearest = -(-multiple // chunks) * chunks
        raise ValueError(f"--pack-multiple {multiple} is no multiple of 2*cp = {chunks}; take {nearest}")
    pattern = plan(lengths, seq_length, multiple)
    padded = int((-(-lengths // chunks) * chunks).sum())
    print(f"packs of {seq_length:,} tokens, each conversation rounded up to a multiple of {multiple}: ", end="")
    print(f"{pattern.packs:,} packs, {len(lengths) / pattern.packs:.1f} conversations each")
    print(f"  fill {100 * pattern.fill:.2f} % with rounding", end="")
    print(f", of which {100 * pattern.rounding_loss:.2f} % is the rounding", end="")
    print(f"; {100 * pattern.tokens / (pattern.packs * seq_length):.2f} % are tokens of conversations")
    print(f"  padding at cp {cp}, each conversation to a multiple of {chunks}: ", end="")
    print(f"{100 * (1 - pattern.tokens / padded):.2f} % of {padded:,} tokens computed")


def pieces(ids: np.ndarray, learned: np.ndarray, decode: Callable[[Sequence[int]], str]) -> list[tuple[str, bool]]:
    """Text in runs that are supervised or not, by turns."""
    cuts = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
    runs, before = [], ""
    for begin, end in zip(cuts[:-1], cuts[1:], strict=True):
        # From its beginning: some tokenizers write the same token with a space or without, by what comes before.
        text = decode(ids[:end].tolist())
        run = text[len(before) :] if text.startswith(before) else decode(ids[begin:end].tolist())
        runs.append((run, bool(learned[begin])))
        before = text
    return runs


def print_conversation(file: TokenFile, mask: TokenFile, i: int, arguments: Namespace) -> None:
    check_number(file, i, len(file))
    numbers = not arguments.tokenizer_type
    decode = (lambda ids: " ".join(map(str, ids))) if numbers else tokenizer_of(arguments).decode
    opening, closing = (_GREEN, _PLAIN) if arguments.color or sys.stdout.isatty() else ("[[", "]]")
    print(*(f"{opening}{text}{closing}" if on else text for text, on in pieces(file[i], mask[i], decode)), sep="")


def inspect_sft(arguments: Namespace) -> int:
    from megacp.data.sft import open_conversations  # brings torch, for which the rest need not wait

    conversations = open_conversations(arguments.prefix)
    file, mask = conversations.tokens, conversations.mask
    if arguments.decode is not None:
        print_conversation(file, mask, arguments.decode, arguments)
        return 0
    lengths = document_lengths(file)
    print_counts(file, lengths)
    if len(lengths):
        print_histogram(lengths)
        print_supervision(lengths, supervised_counts(mask))
    print_report(file.prefix)
    if arguments.seq_length and len(lengths):
        print_packs(lengths, arguments.seq_length, arguments.pack_multiple, arguments.cp)
    return check(arguments, file, mask) if arguments.check else 0


def inspect(arguments: Namespace) -> int:
    if arguments.sft:
        return inspect_sft(arguments)
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
    return check(arguments, file) if arguments.check else 0


def check(arguments: Namespace, file: TokenFile, mask: TokenFile | None = None) -> int:
    """Looks at every entry of the files; 1 where one is wrong."""
    vocab_size = tokenizer_of(arguments).vocab_size if arguments.tokenizer_type else arguments.vocab_size
    problems = [*file.problems(vocab_size), *(mask.problems(2) if mask else ())]
    print(*problems or [f"checked: whole{', all ids below ' + str(vocab_size) if vocab_size else ''}"], sep="\n")
    return 1 if problems else 0


def main() -> int:
    parser = Command(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("prefix", metavar="PREFIX", help="the name without .bin and .idx")
    parser.add_argument("--check", action="store_true", help="look at every entry; exit code 1 where one is wrong")
    parser.add_argument("--vocab-size", type=at_least(1), help="for --check: ids must be smaller")
    parser.add_argument("--decode", type=int, metavar="I", help="print document I: text, or ids without tokenizer")
    parser.add_argument("--seq-length", type=at_least(1), help="print what is padding at this seq_length")
    parser.add_argument("--cp", type=at_least(1), default=1, help="context_parallel_size for --seq-length (1)")
    add_tokenizer_arguments(parser, required=False)
    group = parser.add_argument_group("conversations for fine-tuning")
    group.add_argument("--sft", action="store_true", help="the file is one of tools/prepare_sft.py")
    group.add_argument("--pack-multiple", type=at_least(1), default=16, help="data.pack_multiple for --seq-length (16)")
    group.add_argument(
        "--color", action="store_true", help="colour supervised text of --decode even where no terminal shows it"
    )
    return parser.run(inspect)


if __name__ == "__main__":
    sys.exit(main())
