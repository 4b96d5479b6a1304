"""Memory-mapped token files: the pair PREFIX.bin + PREFIX.idx of Megatron-LM, byte for byte.

The .bin holds the token ids of all sequences, back to back. The .idx holds, little-endian (format of
megatron/core/datasets/indexed_dataset.py):

    9 bytes  magic, uint64 version = 1, uint8 code of the dtype, uint64 n sequences, uint64 d boundaries
    int32 [n]  length of each sequence, in tokens
    int64 [n]  where each sequence begins in the .bin, in bytes
    int64 [d]  document boundaries: document j holds the sequences from document_indices[j] on
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {
    np.dtype(name).newbyteorder("<"): code
    for code, name in enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), start=1)
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LONGEST = np.iinfo(np.int32).max
_CHUNK = 1 << 22


def best_dtype(vocab_size: int) -> np.dtype:
    """uint16 below 65,500 ids, int32 from there on: the rule of Megatron-LM's preprocessing."""
    return np.dtype("uint16") if vocab_size < 65500 else np.dtype("int32")


def check_vocabulary(dtype: DTypeLike, vocab_size: int, name: str = "token file") -> None:
    """Raises ValueError where ids stored as `dtype` cannot stand for a vocabulary of `vocab_size`.

    A dtype serves vocabularies up to its largest number, so 65,536 ids are one too many for uint16.
    """
    dtype = np.dtype(dtype)
    if dtype.kind not in "iu":
        raise ValueError(f"{name}: stores {dtype}, which cannot be token ids")
    largest = int(np.iinfo(dtype).max)
    if vocab_size > largest:
        raise ValueError(
            f"{name}: stored as {dtype}, which serves vocabularies up to {largest:,}, but vocab_size is "
            f"{vocab_size:,}: write it again as {best_dtype(vocab_size)}"
        )


def _pair(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    prefix = os.fspath(prefix)
    return Path(prefix + ".bin"), Path(prefix + ".idx")


def _map(path: Path, prefix: str) -> mmap.mmap | bytes:
    if not path.is_file():
        hint = ""
        if prefix.endswith((".bin", ".idx")) and os.path.isfile(prefix):
            hint = f"; give the prefix without its ending: {prefix[:-4]}"
        raise FileNotFoundError(f"{path}: no such file (a token file is a pair .bin + .idx){hint}")
    with path.open("rb") as file:
        # An empty file cannot be mapped; it is whole where all sequences are empty.
        if os.fstat(file.fileno()).st_size == 0:
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _view(buffer: mmap.mmap | bytes, dtype: np.dtype, count: int, offset: int) -> NDArray[Any]:
    return np.frombuffer(buffer, dtype, count, offset) if count else np.empty(0, dtype)


class TokenFile:
    """Read-only sequences of token ids. Opening costs the same for ten sequences as for ten million.

    lengths          int32 [n], tokens
    pointers         int64 [n], bytes
    document_indices int64 [documents + 1]
    These three are read-only views that keep the map alive, so they may outlive the TokenFile; they are not
    aligned, so copy them before heavy arithmetic. Token arrays are copies.

    Raises FileNotFoundError or ValueError with the file's name and what is wrong for a missing, truncated,
    foreign or mismatching pair; `problems` looks at each entry, which opening does not.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        bin_path, idx_path = _pair(prefix)
        index, self._bin = _map(idx_path, self.prefix), _map(bin_path, self.prefix)
        if index[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{idx_path}: not the index of a token file, it begins with {index[:9]!r}")
        if len(index) < _HEADER.size:
            raise ValueError(f"{idx_path}: truncated, {len(index)} bytes of a header of {_HEADER.size}")
        _, version, code, sequences, boundaries = _HEADER.unpack(index[: _HEADER.size])
        if version != 1 or code not in _DTYPES or boundaries < 1:
            raise ValueError(
                f"{idx_path}: foreign header, version {version} (known: 1), dtype code {code} (known: 1 to "
                f"{len(_DTYPES)}), {boundaries} document boundaries (at least 1)"
            )
        size = _HEADER.size + 12 * sequences + 8 * boundaries
        if len(index) != size:
            raise ValueError(
                f"{idx_path}: {len(index)} bytes, but its header tells of {sequences} sequences and "
                f"{boundaries} document boundaries, {size} bytes: truncated, or multimodal (not read here)"
            )
        self.dtype: np.dtype[Any] = _DTYPES[code]
        at = _HEADER.size
        self.lengths = _view(index, np.dtype("<i4"), sequences, at)
        self.pointers = _view(index, np.dtype("<i8"), sequences, at + 4 * sequences)
        self.document_indices = _view(index, np.dtype("<i8"), boundaries, at + 12 * sequences)
        first, last = int(self.document_indices[0]), int(self.document_indices[-1])
        if (first, last) != (0, sequences):
            raise ValueError(f"{idx_path}: documents span sequences {first} to {last}, not 0 to {sequences}")
        end = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if sequences else 0
        if len(self._bin) != end:
            raise ValueError(
                f"{bin_path}: {len(self._bin)} bytes, but {idx_path} tells of {end}: truncated, or of another pair"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self.read(i) for i in range(len(self)))

    def __reduce__(self) -> tuple[type[TokenFile], tuple[str]]:
        return TokenFile, (self.prefix,)

    @overload
    def __getitem__(self, i: int | np.integer) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, i: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, i: int | np.integer | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(i, slice):
            return [self.read(k) for k in range(*i.indices(len(self)))]
        return self.read(i)

    def read(self, i: int | np.integer, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Tokens offset .. offset + length of sequence i (to its end by default), an array of its own memory.

        Raises IndexError for a sequence that is not there, ValueError for tokens beyond its end.
        """
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.prefix}: sequence {i} of {len(self)}")
        size, begin = int(self.lengths[i]), int(self.pointers[i])
        count = size - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > size:
            raise ValueError(
                f"{self.prefix}: tokens {offset} to {offset + count} asked of sequence {i}, which has {size}"
            )
        if begin < 0 or begin + size * self.dtype.itemsize > len(self._bin):
            raise ValueError(f"{self.prefix}.idx: damaged, sequence {i} lies outside {self.prefix}.bin")
        return _view(self._bin, self.dtype, count, begin + offset * self.dtype.itemsize).copy()

    def problems(self, vocab_size: int | None = None) -> Iterator[str]:
        """Every entry looked at: one line for each kind of damage. Reads the whole pair, memory bounded."""
        if vocab_size is not None:
            try:
                check_vocabulary(self.dtype, vocab_size, self.prefix)
            except ValueError as error:
                yield str(error)
        yield from self.index_problems()
        yield from self._token_problems(vocab_size)

    def index_problems(self) -> Iterator[str]:
        """Damage of the .idx: one line for each kind."""
        expected = 0
        for at in range(0, len(self), _CHUNK):
            lengths = self.lengths[at : at + _CHUNK].astype(np.int64)
            ends = np.cumsum(lengths) * self.dtype.itemsize + expected
            wrong = (self.pointers[at : at + _CHUNK] != np.append(expected, ends[:-1])) | (lengths < 0)
            if wrong.any():
                i = at + int(wrong.argmax())
                yield (
                    f"{self.prefix}.idx: sequence {i} (length {self.lengths[i]}, byte {self.pointers[i]}) "
                    "does not begin where the one before it ends, or is of negative length"
                )
                break
            expected = int(ends[-1])
        steps = np.diff(self.document_indices)  # from 0 to len(self), so rising means inside
        if (steps < 0).any():
            yield f"{self.prefix}.idx: document {int((steps < 0).argmax())} ends before it begins"

    def _token_problems(self, vocab_size: int | None) -> Iterator[str]:
        total = len(self._bin) // self.dtype.itemsize
        for at in range(0, total if self.dtype.kind in "iu" else 0, _CHUNK):
            ids = _view(self._bin, self.dtype, min(_CHUNK, total - at), at * self.dtype.itemsize)
            wrong = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
            if wrong.any():
                k = int(wrong.argmax())
                vocabulary = "" if vocab_size is None else f" of a vocabulary of {vocab_size:,}"
                yield f"{self.prefix}.bin: token {at + k} is {ids[k]}, not an id{vocabulary}"
                return


class TokenFileWriter:
    """Writes a pair; nothing carries its final name before `finalize`, and the .idx gets it last.

        with TokenFileWriter(prefix, best_dtype(vocab_size)) as writer:
            writer.add_document(tokens)

    Leaving the block by an exception removes what was written. An id that does not fit raises ValueError.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODES:
            raise ValueError(f"{prefix}: {self.dtype} cannot be stored, only {', '.join(map(str, _CODES))}")
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._targets = _pair(prefix)
        # Names of one writer alone, so that two at the same prefix cannot mix their bytes.
        self._parts = [Path(f"{path}.{secrets.token_hex(4)}.tmp") for path in self._targets]
        self._targets[0].parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._parts[0].open("wb")

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.finalize()
        finally:
            self.discard()

    def __len__(self) -> int:
        return len(self._lengths)

    def add_item(self, tokens: ArrayLike) -> None:
        """One sequence of the document being written; `end_document` closes it."""
        ids = self._cast(tokens)
        self._append(ids, np.array([len(ids)]), np.empty(0, np.int64))

    def end_document(self) -> None:
        self._document_indices.append(len(self))

    def add_document(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> None:
        """A whole document, cut into sequences of `lengths`; by default one, or none where it is empty."""
        ids = self._cast(tokens)
        cut = [len(ids)] * bool(len(ids)) if lengths is None else lengths
        sizes = np.asarray(cut, np.int64)
        self._append(ids, sizes, np.array([len(sizes)]))

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Many documents of one sequence each, back to back; an empty one has no sequence."""
        sizes = np.asarray(lengths, np.int64)
        self._append(self._cast(tokens), sizes[sizes != 0], np.cumsum(sizes != 0))

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """All documents of another pair of the same dtype."""
        other = TokenFile(prefix)
        if other.dtype != self.dtype:
            raise ValueError(f"{prefix}: stored as {other.dtype}, but {self.prefix} as {self.dtype}")
        with _pair(prefix)[0].open("rb") as source:
            shutil.copyfileobj(source, self._bin, 1 << 24)
        self._extend(other.lengths, other.document_indices[1:])

    def finalize(self) -> None:
        """Puts both files in place, whole and on disk. Raises ValueError where a document is left open."""
        if self._document_indices[-1] != len(self):
            left = len(self) - self._document_indices[-1]
            raise ValueError(f"{self.prefix}: {left} sequences after the last end_document()")
        self._sync(self._bin)
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        sizes = lengths.astype(np.int64) * self.dtype.itemsize
        header = _HEADER.pack(_MAGIC, 1, _CODES[self.dtype], len(self), len(self._document_indices))
        with self._parts[1].open("wb") as index:
            index.write(header)
            index.write(lengths.astype("<i4", copy=False).data)
            index.write((np.cumsum(sizes) - sizes).astype("<i8", copy=False).data)
            index.write(np.frombuffer(self._document_indices, np.int64).astype("<i8", copy=False).data)
            self._sync(index)
        # An older index must not describe the new .bin, not even for a moment.
        self._targets[1].unlink(missing_ok=True)
        for part, target in zip(self._parts, self._targets, strict=True):
            part.replace(target)
        folder = os.open(self._targets[0].parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Removes what is not final; after `finalize` there is nothing to remove."""
        try:
            self._bin.close()  # on a full disk it fails once more
        finally:
            for part in self._parts:
                part.unlink(missing_ok=True)

    @staticmethod
    def _sync(file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def _cast(self, tokens: ArrayLike) -> NDArray[Any]:
        ids = np.asarray(tokens)
        if ids.ndim != 1:
            raise ValueError(f"{self.prefix}: a sequence is one row of token ids, got shape {ids.shape}")
        if ids.size and ids.dtype != self.dtype and self.dtype.kind in "iu":
            if ids.dtype.kind not in "iu":
                raise ValueError(f"{self.prefix}: token ids are whole numbers, got {ids.dtype}")
            allowed = np.iinfo(self.dtype)
            for value in (int(ids.min()), int(ids.max())):
                if not allowed.min <= value <= allowed.max:
                    raise ValueError(
                        f"{self.prefix}: token id {value} does not fit {self.dtype}, "
                        f"which holds {allowed.min} to {allowed.max}"
                    )
        return np.ascontiguousarray(ids, self.dtype)

    def _append(self, ids: NDArray[Any], lengths: NDArray[Any], document_ends: NDArray[Any]) -> None:
        if lengths.size and (lengths.min() < 0 or lengths.max() > _LONGEST):
            raise ValueError(
                f"{self.prefix}: lengths are 0 to {_LONGEST} tokens, got {lengths.min()} to {lengths.max()}"
            )
        if lengths.sum() != len(ids):
            raise ValueError(f"{self.prefix}: lengths add up to {lengths.sum()}, but {len(ids)} tokens came")
        self._bin.write(ids.data)
        self._extend(lengths, document_ends)

    def _extend(self, lengths: NDArray[Any], document_ends: NDArray[Any]) -> None:
        self._document_indices.frombytes((document_ends + len(self)).astype(np.int64).tobytes())
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
