"""Raw text on disk: which files there are, and the documents inside.

A file whose name ends in .jsonl, .ndjson or .json holds one JSON object a line, each a document; any other file is
one document as it stands. Both may be compressed (.gz, .zst).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

_JSON = (".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".zst")
_CORPUS = tuple(end + squeezed for end in (*_JSON, ".txt") for squeezed in ("", *_COMPRESSED))
_BOM = b"\xef\xbb\xbf"
_READ = 1 << 16


class BadDocument(ValueError):
    """A document that cannot be read; the message begins with its file and line."""


@dataclass(frozen=True)
class Source:
    """An input file; `size` in bytes as it lies on disk."""

    path: str
    json: bool
    size: int


@dataclass(frozen=True)
class RawDocument:
    """Bytes of one document: line `line` (from 1) of a JSONL file, or a whole text file (`line` 0)."""

    path: str
    line: int
    data: bytes


def find_sources(
    inputs: Iterable[str], suffixes: Iterable[str] = (), exclude: Iterable[str] = (), format: str = "auto"
) -> list[Source]:
    """Files named, and files below folders named, each folder in sorted order.

    Of a folder those with one of `suffixes` are taken, by default .txt and JSONL; folders with a name in `exclude`
    are passed over. `format` is 'json', 'text' or 'auto' (by each file's name). Raises FileNotFoundError for a
    missing input, ValueError where nothing is found.
    """
    inputs = list(inputs)
    endings, passed_over = tuple(suffixes) or _CORPUS, frozenset(exclude)
    found: list[Path] = []
    for given in map(Path, inputs):
        if given.is_dir():
            found += _below(given, endings, passed_over)
        elif given.is_file():
            found.append(given)
        else:
            raise FileNotFoundError(f"input {given}: no such file or folder")
    if not found:
        raise ValueError(f"no file ending in {' '.join(endings)} below {', '.join(inputs)}")
    return [Source(str(path), _is_json(path, format), path.stat().st_size) for path in found]


def _below(folder: Path, endings: tuple[str, ...], passed_over: frozenset[str]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            # A link may lead back up, and the walk would not end.
            if path.name not in passed_over and not path.is_symlink():
                yield from _below(path, endings, passed_over)
        elif path.name.endswith(endings) and path.is_file():
            yield path


def _is_json(path: Path, format: str) -> bool:
    name = path.with_suffix("").name if path.suffix in _COMPRESSED else path.name
    return name.endswith(_JSON) if format == "auto" else format == "json"


def read(source: Source) -> Iterator[tuple[RawDocument, int]]:
    """Documents of a file, unparsed, each with the bytes of the file read since the one before.

    Blank lines are no documents. Raises ValueError for a compressed file that is damaged or ends early.
    """
    with open(source.path, "rb") as raw:
        content = _content(source.path, raw)
        if not source.json:
            yield RawDocument(source.path, 0, b"".join(content)), source.size
            return
        at = 0
        for number, line in enumerate(_lines(content), start=1):
            if line.strip():
                position = raw.tell()
                yield RawDocument(source.path, number, line), position - at
                at = position


def batches(sources: Iterable[Source], size: int) -> Iterator[tuple[list[RawDocument], int]]:
    """Documents of all files in order, in lists of about `size` bytes; with the bytes read from disk for each."""
    batch: list[RawDocument] = []
    held = consumed = 0
    for source in sources:
        for document, read_for_it in read(source):
            batch.append(document)
            held += len(document.data)
            consumed += read_for_it
            if held >= size:
                yield batch, consumed
                batch, held, consumed = [], 0, 0
    if batch:
        yield batch, consumed


def parse(document: RawDocument, keys: Sequence[str]) -> list[str]:
    """The text under each key; of a text file its whole text, whatever the one key. Raises BadDocument."""
    if not document.line:
        return [_decoded(document)]
    record = parse_record(document)
    return [_text(record, key, f"{document.path}:{document.line}") for key in keys]


def parse_record(document: RawDocument, strict: bool = False) -> dict[str, Any]:
    """The JSON object of a line; with `strict` one without NaN and Infinity, which JSON has not. Raises BadDocument."""
    text, where = _decoded(document), f"{document.path}:{document.line}"
    if document.line == 1 and text.lstrip().startswith("["):
        raise BadDocument(f"{where}: a JSON array, not JSON lines: jq -c '.[]' FILE > FILE.jsonl")
    try:
        record = json.loads(text, parse_constant=_no_constant if strict else None)
    except json.JSONDecodeError as error:
        raise BadDocument(f"{where}: not JSON: {error.msg} (column {error.colno})") from error
    except (RecursionError, ValueError) as error:
        raise BadDocument(f"{where}: not JSON that can be read: {error}") from error
    if not isinstance(record, dict):
        raise BadDocument(f"{where}: not a JSON object but {type(record).__name__}")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _decoded(document: RawDocument) -> str:
    data = document.data.removeprefix(_BOM) if document.line <= 1 else document.data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = document.line or 1 + data.count(b"\n", 0, error.start)
        byte = f"byte {data[error.start]:#04x}"
        raise BadDocument(f"{document.path}:{line}: not UTF-8: {byte}, {error.reason}") from error


def _text(record: dict[str, Any], key: str, where: str) -> str:
    if key not in record:
        raise BadDocument(f"{where}: no key {key!r}, only {', '.join(map(repr, list(record)[:8])) or 'none'}")
    text = record[key]
    if not isinstance(text, str):
        raise BadDocument(f"{where}: {key!r} is not text but {type(text).__name__}")
    try:
        # JSON may escape half of a surrogate pair, which is no character and has no UTF-8.
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadDocument(f"{where}: {key!r} holds a lone surrogate at character {error.start}") from error
    return text


def _lines(content: Iterable[bytes]) -> Iterator[bytes]:
    pending: list[bytes] = []
    for part in content:
        first, *others = part.split(b"\n")
        pending.append(first)
        for line in others:
            yield b"".join(pending)
            pending = [line]
    yield b"".join(pending)


def _content(path: str, raw: BinaryIO) -> Iterator[bytes]:
    """What the file holds, decompressed, in parts.

    Not by the libraries' readers: that of zstandard takes a file that breaks off for one that ends.
    """
    if not path.endswith(_COMPRESSED):
        yield from iter(lambda: raw.read(_READ), b"")
        return
    start, failures = _decompressor(path)
    stream = None
    try:
        for data in iter(lambda: raw.read(_READ), b""):
            while data:
                stream = stream or start()
                yield stream.decompress(data)
                data = stream.unused_data if stream.eof else b""
                stream = None if stream.eof else stream
    except failures as error:
        raise ValueError(f"{path}: damaged: {error}") from error
    if stream:
        raise ValueError(f"{path}: truncated, its compressed data breaks off")


def _decompressor(path: str) -> tuple[Callable[[], Any], type[Exception]]:
    if path.endswith(".gz"):
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(f"{path}: reading .zst needs zstandard: pip install zstandard") from error
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
