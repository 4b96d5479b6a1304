"""What the command lines of the data tools share: one-line refusals, and arguments in Megatron-LM's spelling."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn

from megacp.data.documents import Source, find_sources
from megacp.data.tokenizer import Tokenizer, build_tokenizer


class Command(argparse.ArgumentParser):
    """A parser whose refusals, and those of the work it starts, are one line on stderr and exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help tells more)\n")

    def run(self, work: Callable[[argparse.Namespace], int], argv: Sequence[str] | None = None) -> int:
        """Exit code of `work`; 130 where the user interrupts it."""
        arguments = self.parse_args(argv)
        try:
            return work(arguments)
        except (ValueError, OSError, ImportError, IndexError) as error:
            self.exit(2, f"{self.prog}: {error}\n")
        except KeyboardInterrupt:
            self.exit(130, f"{self.prog}: interrupted\n")


def at_least(smallest: int) -> Callable[[str], int]:
    """A type for whole numbers from `smallest` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        return value

    number.__name__ = "whole number"
    return number


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input")
    group.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, or folders to search")
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the text in JSONL (text)"
    )
    group.add_argument(
        "--suffix", nargs="+", default=[], metavar="END", help="of a folder take files that end so (.txt, .jsonl)"
    )
    group.add_argument("--exclude", nargs="+", default=[], metavar="NAME", help="pass over folders of these names")
    group.add_argument(
        "--format",
        choices=["auto", "json", "text"],
        default="auto",
        help="json: a document a line; text: a document a file; auto: by the file's name",
    )
    group.add_argument(
        "--skip-bad", action="store_true", help="count documents that cannot be read instead of stopping"
    )


def sources_of(arguments: argparse.Namespace) -> list[Source]:
    """Input files of the arguments above. Raises ValueError for text files asked for several keys."""
    sources = find_sources(arguments.input, arguments.suffix, arguments.exclude, arguments.format)
    if len(arguments.json_keys) > 1 and any(not source.json for source in sources):
        plain = next(source.path for source in sources if not source.json)
        raise ValueError(f"{plain}: a text file has one text, but --json-keys has {len(arguments.json_keys)}")
    return sources


def add_tokenizer_arguments(parser: argparse.ArgumentParser, required: bool) -> None:
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        required=required,
        metavar="TYPE",
        help="SentencePieceTokenizer, HuggingFaceTokenizer or ByteLevelTokenizer",
    )
    group.add_argument("--tokenizer-model", metavar="PATH", help=".model file, tokenizer.json or folder")


def tokenizer_of(arguments: argparse.Namespace) -> Tokenizer:
    return build_tokenizer(arguments.tokenizer_type, arguments.tokenizer_model)
