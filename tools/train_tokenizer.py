"""Trains a sentencepiece BPE model that gives text back exactly, white space and line breaks included.

    python tools/train_tokenizer.py --input src --suffix .py --vocab-size 4096 --output-prefix data/code

writes data/code.model. Same input and arguments, same model. Characters without a piece become bytes. Exact means
decode(encode(x)) == x for any text without U+2581, the sign that sentencepiece itself uses for a space.
"""

from __future__ import annotations

import io
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacp.data.command import Command, add_input_arguments, at_least, sources_of
from megacp.data.documents import BadDocument, Source, parse, read

_PIECE_CHARACTERS = 2000
_LEAST_PER_FILE = 1 << 16


def sample(sources: list[Source], keys: list[str], max_bytes: int, skip_bad: bool) -> Iterator[str]:
    """Texts of about `max_bytes` in all: files in an order drawn by a fixed seed, of a long one only the beginning."""
    order = random.Random(1234).sample(sources, len(sources))
    all_fits = sum(source.size for source in sources) <= max_bytes
    share = max_bytes if all_fits else max(max_bytes // len(sources), _LEAST_PER_FILE)
    left = max_bytes
    for source in order:
        from_this = min(share, left)
        for document, _ in read(source):
            try:
                texts = parse(document, keys)
            except BadDocument:
                if not skip_bad:
                    raise
                continue
            for text in texts:
                yield text[:from_this]
            taken = sum(len(text.encode("utf-8")) for text in texts)
            from_this, left = from_this - taken, left - taken
            if from_this <= 0:
                break
        if left <= 0:
            return


def passages(texts: Iterable[str]) -> Iterator[str]:
    """Whole lines up to some 2,000 characters: the trainer takes short sentences, and must see line breaks inside."""
    for text in texts:
        passage = ""
        for line in text.splitlines(keepends=True):
            if passage and len(passage) + len(line) > _PIECE_CHARACTERS:
                yield passage
                passage = ""
            passage += line
        if passage:
            yield passage


def train(arguments: Namespace) -> int:
    begin = time.monotonic()
    sources = sources_of(arguments)
    texts = sample(sources, arguments.json_keys, arguments.max_bytes, arguments.skip_bad)
    pieces = list(passages(texts))
    if not pieces:
        raise ValueError(f"no text in {len(sources)} files")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=iter(pieces),
            model_writer=model,
            vocab_size=arguments.vocab_size,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=1 << 24,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split("]")[-1].split())
        raise ValueError(f"vocab_size {arguments.vocab_size} on this text: {reason}") from error
    target = Path(f"{arguments.output_prefix}.model")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.tmp")
    part.write_bytes(model.getvalue())
    part.replace(target)
    characters = sum(map(len, pieces))
    seconds = time.monotonic() - begin
    print(f"{target}: {arguments.vocab_size} pieces from {characters / 1e6:.1f} M characters in {seconds:.1f} s")
    return 0


def main() -> int:
    parser = Command(description=__doc__.split("\n")[0] if __doc__ else None)
    add_input_arguments(parser)
    parser.add_argument("--vocab-size", type=at_least(1), required=True, help="pieces, bytes and eos included")
    parser.add_argument("--output-prefix", required=True, help="the model is PREFIX.model")
    parser.add_argument(
        "--max-bytes", type=at_least(1), default=20_000_000, help="text to learn from, at most (20,000,000)"
    )
    return parser.run(train)


if __name__ == "__main__":
    sys.exit(main())
