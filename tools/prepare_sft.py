"""Chats to token files for fine-tuning: JSONL (also .gz and .zst) through a chat template.

    python tools/prepare_sft.py --input chats.jsonl --output-prefix data/chats \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model SmolLM2-135M-Instruct --max-length 8192

A line is {"messages": [..]}, {"prompt": .., "completion": ..} or {"instruction": .., "input": .., "output": ..}. It
writes the pair data/chats.bin and .idx, a document a conversation; data/chats_loss_mask.bin and .idx, 1 for the tokens
to be learned; and data/chats_report.json. All are the same for any number of workers. data/chats.idx, without which
nothing can be read, gets its name last.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megacp.data.chat import parse_conversation
from megacp.data.command import Command, add_tokenizer_arguments, at_least
from megacp.data.documents import BadDocument, RawDocument, Source, batches, find_sources
from megacp.data.render import (
    CONTROL_TOKENS_IN_TEXT,
    END_OF_TURN_UNMARKED,
    TOOL_CALLS_IGNORED,
    TOOLS_IGNORED,
    NotNested,
    Renderer,
    build_template,
)
from megacp.data.templates import BUILT_IN
from megacp.data.tokenizer import Tokenizer, build_tokenizer
from megacp.data.tokens import TokenFileWriter, best_dtype
from megacp.data.workers import in_order, progress

_BATCH_BYTES = 1 << 20
# Of a folder not .json: an earlier run may have left its report there.
_JSONL = tuple(end + squeezed for end in (".jsonl", ".ndjson") for squeezed in ("", ".gz", ".zst"))
_ODD = {
    TOOLS_IGNORED: "define tools, which the template does not write down",
    TOOL_CALLS_IGNORED: "call tools, which the template does not write down",
    CONTROL_TOKENS_IN_TEXT: "hold the text of a control token in a message, which becomes that token",
    END_OF_TURN_UNMARKED: "have answers whose end of turn the template does not count as theirs, so it is not learned",
}


@dataclass(frozen=True)
class Task:
    """What is done with every conversation; the same in all workers."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    template: str = "tokenizer"
    template_variables: str = "{}"
    spell_control_tokens: bool = False
    turns: str = "all"
    max_length: int | None = None
    long_conversations: str = "error"
    skip_bad: bool = False


@dataclass
class Prepared:
    """Conversations of one batch, back to back.

    ids, learned  [tokens of the batch], dtype by the vocabulary and uint8
    lengths       tokens of each conversation
    bad           what is wrong with each bad conversation
    not_nested    and with each that does not show which tokens are the assistant's
    counts        of what PREFIX_report.json tells
    """

    ids: np.ndarray
    learned: np.ndarray
    lengths: list[int]
    bad: list[str] = field(default_factory=list)
    not_nested: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@functools.cache
def _tools(task: Task) -> tuple[Tokenizer, Renderer]:
    tokenizer = build_tokenizer(task.tokenizer_type, task.tokenizer_model)
    variables = _object(task.template_variables)
    template = build_template(task.template, tokenizer, variables, task.spell_control_tokens)
    return tokenizer, Renderer(tokenizer, template, last_only=task.turns == "last")


def _object(text: str) -> dict[str, Any]:
    try:
        variables = json.loads(text)
        json.dumps(variables, ensure_ascii=False).encode("utf-8")  # no lone surrogates
    except ValueError as error:
        raise ValueError(f"--template-variables {text!r} is not JSON: {error}") from error
    if not isinstance(variables, dict):
        raise ValueError(f"--template-variables {text!r} is not a JSON object")
    return variables


def fit(length: int, task: Task, where: str) -> slice | None:
    """The tokens of a conversation that are kept; None drops it. ValueError where too long ones stop the work."""
    if task.max_length is None or length <= task.max_length:
        return slice(0, length)
    if task.long_conversations == "error":
        raise ValueError(
            f"{where}: {length:,} tokens are more than --max-length {task.max_length:,}: raise it, or say "
            "--long-conversations drop, truncate_left or truncate_right"
        )
    kept = {"truncate_left": slice(length - task.max_length, length), "truncate_right": slice(0, task.max_length)}
    return kept.get(task.long_conversations)


def prepare(task: Task, batch: list[RawDocument]) -> Prepared:
    """Raises BadDocument or NotNested unless bad ones are skipped, and ValueError where no skipping helps."""
    tokenizer, render = _tools(task)
    ids, learned = [np.empty(0, best_dtype(tokenizer.vocab_size))], [np.empty(0, np.uint8)]
    prepared = Prepared(ids[0], learned[0], [])
    for document in batch:
        try:
            conversation = parse_conversation(document)
            rendered = render(conversation)
        except BadDocument as error:
            if not task.skip_bad:
                raise
            prepared.bad.append(str(error))
            continue
        except NotNested as error:
            if not task.skip_bad:
                raise NotNested(f"{error}; --skip-bad leaves such conversations out") from error
            prepared.not_nested.append(str(error))
            continue
        length = len(rendered.ids)
        kept = fit(length, task, conversation.where)
        if kept is None:
            prepared.counts.update(dropped=1, dropped_tokens=length)
            continue
        ids.append(rendered.ids[kept].astype(ids[0].dtype))
        learned.append(rendered.learned[kept])
        # Nothing comes before the first token, so nothing predicts it.
        learned[-1][0] = 0
        prepared.lengths.append(len(ids[-1]))
        cut = length - len(ids[-1])
        prepared.counts.update(truncated=cut > 0, truncated_tokens=cut, without_supervision=not learned[-1].any())
        prepared.counts.update(rendered.notes)
    prepared.ids, prepared.learned = np.concatenate(ids), np.concatenate(learned)
    return prepared


def report_of(task: Task, inputs: list[str], counts: Counter[str], vocab_size: int) -> dict[str, Any]:
    numbers = ("read", "bad", "not_nested", "dropped", "dropped_tokens", "written", "tokens", "supervised_tokens")
    return {
        "input": inputs,
        "tokenizer_type": task.tokenizer_type,
        "tokenizer_model": task.tokenizer_model,
        "vocab_size": vocab_size,
        "chat_template": task.template,
        "template_variables": _object(task.template_variables),
        "spell_control_tokens": task.spell_control_tokens,
        "turns": task.turns,
        "max_length": task.max_length,
        "long_conversations": task.long_conversations,
        **{name: counts[name] for name in (*numbers, "without_supervision", "truncated", "truncated_tokens", *_ODD)},
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(report, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def task_of(arguments: Namespace) -> Task:
    if arguments.max_length is None and arguments.long_conversations != "error":
        raise ValueError(f"--long-conversations {arguments.long_conversations} needs --max-length")
    return Task(
        arguments.tokenizer_type,
        arguments.tokenizer_model,
        arguments.chat_template,
        arguments.template_variables,
        arguments.spell_control_tokens,
        arguments.turns,
        arguments.max_length,
        arguments.long_conversations,
        arguments.skip_bad,
    )


def prepare_files(arguments: Namespace) -> int:
    task, prefix = task_of(arguments), arguments.output_prefix
    sources = find_sources(arguments.input, _JSONL, format="json")
    vocab_size = _tools(task)[0].vocab_size
    dtype = best_dtype(vocab_size)
    with TokenFileWriter(prefix, dtype) as tokens:
        with TokenFileWriter(f"{prefix}_loss_mask", np.uint8) as mask:
            counts, left_out = write(task, sources, arguments.workers, tokens, mask)
            if not counts["supervised_tokens"]:
                raise ValueError(_nothing(counts, len(sources), left_out))
            # An older run's index must not make the new mask and report look whole.
            Path(f"{prefix}.idx").unlink(missing_ok=True)
        write_report(Path(f"{prefix}_report.json"), report_of(task, arguments.input, counts, vocab_size))
    tell(prefix, counts, f"{dtype}, vocabulary {vocab_size:,}", left_out)
    return 0


def write(
    task: Task, sources: list[Source], workers: int, tokens: TokenFileWriter, mask: TokenFileWriter
) -> tuple[Counter[str], dict[str, str]]:
    """All conversations in order. Gives the counts of the report, and what is wrong with the first left out.

    Of those that are bad and those that do not nest, by the names of their counts; "" where there is none.
    """
    counts, first = Counter[str](), {"bad": "", "not_nested": ""}
    with progress(max(1, sum(source.size for source in sources))) as advance:
        work = functools.partial(prepare, task)
        for prepared, consumed in in_order(work, batches(sources, _BATCH_BYTES), workers):
            tokens.add_documents(prepared.ids, prepared.lengths)
            mask.add_documents(prepared.learned, prepared.lengths)
            for name, reasons in (("bad", prepared.bad), ("not_nested", prepared.not_nested)):
                first[name] = first[name] or next(iter(reasons), "")
                counts[name] += len(reasons)
            counts.update(prepared.counts)
            counts.update(written=len(prepared.lengths), tokens=len(prepared.ids))
            counts.update(supervised_tokens=int(prepared.learned.sum(dtype=np.int64)))
            advance(consumed, len(prepared.ids))
    counts["read"] = sum(counts[name] for name in ("written", "dropped", "bad", "not_nested"))
    return counts, first


def _nothing(counts: Counter[str], files: int, left_out: dict[str, str]) -> str:
    bad, not_nested = left_out["bad"], left_out["not_nested"]
    return (
        f"no token to learn in {files} files: {counts['written']:,} conversations, all without supervision, "
        f"{counts['dropped']:,} dropped, {counts['bad']:,} bad"
        + (f", the first: {bad}" if bad else "")
        + (f", {counts['not_nested']:,} that do not nest, the first: {not_nested}" if not_nested else "")
    )


def tell(prefix: str, counts: Counter[str], kind: str, left_out: dict[str, str]) -> None:
    share = f"{100 * counts['supervised_tokens'] / counts['tokens']:.1f} % supervised"
    print(f"{prefix}: {counts['written']:,} conversations, {counts['tokens']:,} tokens, {share}, {kind}")
    if counts["dropped"]:
        print(f"{counts['dropped']:,} too long and dropped, with {counts['dropped_tokens']:,} tokens")
    if counts["truncated"]:
        print(f"{counts['truncated']:,} truncated, by {counts['truncated_tokens']:,} tokens in all")
    if counts["without_supervision"]:
        print(f"{counts['without_supervision']:,} without a supervised token")
    for name, what in _ODD.items():
        if counts[name]:
            print(f"warning: {counts[name]:,} conversations {what}")
    for name, what in (("bad", "bad conversations"), ("not_nested", "conversations that do not nest")):
        if left_out[name]:
            print(f"{counts[name]:,} {what} skipped, the first: {left_out[name]}")


def main() -> int:
    # As an exception, so that files half written are removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = Command(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="JSONL files, or folders of .jsonl and .ndjson"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="begin of the names that are written")
    parser.add_argument(
        "--skip-bad", action="store_true", help="count conversations that are bad or do not nest instead of stopping"
    )
    available = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=at_least(1), default=available, help="processes (one a core)")
    add_tokenizer_arguments(parser, required=True)
    group = parser.add_argument_group("chats")
    group.add_argument(
        "--chat-template",
        default="tokenizer",
        metavar="NAME",
        help=f"'tokenizer' for its own (default), {', '.join(BUILT_IN)}, or a file of jinja",
    )
    group.add_argument(
        "--template-variables", default="{}", metavar="JSON", help='for a jinja template: {"enable_thinking": false}'
    )
    group.add_argument(
        "--spell-control-tokens",
        action="store_true",
        help="a built-in template's control tokens that the tokenizer has not become plain text",
    )
    group.add_argument(
        "--turns", choices=["all", "last"], default="all", help="supervise all of the assistant's turns, or the last"
    )
    group.add_argument("--max-length", type=at_least(2), metavar="N", help="most tokens of a conversation")
    group.add_argument(
        "--long-conversations",
        choices=["error", "drop", "truncate_left", "truncate_right"],
        default="error",
        help="what to do with longer ones; truncate_left takes tokens away at the left",
    )
    return parser.run(prepare_files)


if __name__ == "__main__":
    sys.exit(main())
