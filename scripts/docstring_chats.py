"""Chats from Python's own standard library: a function's source is asked about, its docstring is the answer.

    python scripts/docstring_chats.py --output chats.jsonl

A line is {"messages": [system, user, assistant]}, as tools/prepare_sft.py reads it. The same Python gives the same
file. Modules come in an order that has nothing to do with their names, each in one piece: the end of the file is a fair
sample, and holding it out keeps neighbours of its functions out of training.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

REQUEST = "Write the docstring of this Python function."
# Tests, other packages, and programs that are no library.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
MOST_SOURCE, LEAST_ANSWER, MOST_ANSWER = 1200, 30, 400  # characters

Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_files(root: Path) -> list[Path]:
    """Python files below `root` in the order of a hash of their place in it."""
    files = [path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts)]
    return sorted(files, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())


def functions(text: str) -> Iterator[tuple[str, str]]:
    """(source without its docstring, docstring) of the functions of a module that have something to tell."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function) and (answer := ast.get_docstring(node)) and does_something(node):
            source = without_docstring(node, lines)
            if source and len(source) <= MOST_SOURCE and LEAST_ANSWER <= len(answer) <= MOST_ANSWER:
                yield source, inspect.cleandoc(answer).strip()


def does_something(node: Function) -> bool:
    """Whether the body is more than a docstring and pass, ... or raise: what is not there cannot be described."""
    return not all(isinstance(statement, ast.Expr | ast.Pass | ast.Raise) for statement in node.body)


def without_docstring(node: Function, lines: list[str]) -> str:
    """Its lines, decorators included, moved to the left margin; nothing where the docstring shares a line with code."""
    docstring = node.body[0]
    assert docstring.end_lineno and docstring.end_col_offset is not None and node.end_lineno
    # Columns count bytes of UTF-8.
    before = lines[docstring.lineno - 1].encode()[: docstring.col_offset]
    after = lines[docstring.end_lineno - 1].encode()[docstring.end_col_offset :]
    if before.strip() or after.strip():
        return ""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    head, body = lines[first - 1 : docstring.lineno - 1], lines[docstring.end_lineno : node.end_lineno]
    while body and not body[0].strip():
        body.pop(0)
    return textwrap.dedent("".join(head + body)).strip()


def chats(files: Iterable[Path]) -> Iterator[dict[str, list[dict[str, str]]]]:
    """A conversation for every function; of those with the same source or the same docstring the first alone."""
    seen: set[str] = set()
    for path in files:
        try:
            with warnings.catch_warnings(action="ignore"):  # old escapes in strings are not this script's business
                found = sorted(functions(path.read_text("utf-8")))
        except (SyntaxError, ValueError, OSError):
            continue
        for source, answer in found:
            if source not in seen and answer not in seen:
                seen |= {source, answer}
                turns = {"system": REQUEST, "user": source, "assistant": answer}
                yield {"messages": [{"role": role, "content": content} for role, content in turns.items()]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSONL file to write")
    parser.add_argument(
        "--source", type=Path, default=Path(sysconfig.get_path("stdlib")), metavar="FOLDER",
        help="folder of Python files (the standard library)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    lines = [json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats(source_files(options.source))]
    if not lines:
        print(f"error: no function with a docstring in {options.source}", file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    part = options.output.with_name(options.output.name + ".tmp")
    part.write_text("".join(lines), "utf-8")
    part.replace(options.output)
    print(f"{options.output}: {len(lines):,} conversations from {options.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
