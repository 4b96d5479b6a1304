"""The files of one checkpoint: blocks of global tensors in a folder, written and read by many ranks at once.

Every rank that has something to write writes one safetensors file. `index.json`, written last, says where
each block of each tensor lies, how long every file must be, what its stretches add up to (CRC-32, looked at
before anything in them is read), and carries the trainer's notes (`meta`). The
planning is that of torch.distributed.checkpoint (DCP): which rank writes what several hold, and which saved
blocks overlap a wanted one. Nothing is pickled into a file or unpickled from one, so a foreign checkpoint
cannot run code.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader, BufferedWriter
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megacp.blocks import Block

FORMAT = "megacp checkpoint 2"
INDEX = "index.json"
READ_BYTES = 16 << 20
# Stretches of a file with a checksum each: a rank that reads a few rows of a tensor looks at little more.
SUMMED_BYTES = 4 << 20
# The names safetensors has for the dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

Result = TypeVar("Result")


class Stored(NamedTuple):
    """Where a saved block lies (`start`: its first byte in the file), what it looks like, the file's checksums."""

    file: str
    start: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    checksums: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return prod(self.sizes[1:]) * self.dtype.itemsize


def write(folder: Path, blocks: Sequence[Block], meta: dict[str, Any], process_group: dist.ProcessGroup | None) -> None:
    """Write the blocks of all ranks into an existing folder, durably; errors of one rank raise on all.

    The blocks of one name must make up the whole global tensor; what several ranks hold is written once.
    """
    with _plain_errors():
        writer, planner = _Writer(folder, meta), _SavePlanner(blocks)
        state_dict_saver.save({}, storage_writer=writer, planner=planner, process_group=process_group)


def read(folder: Path, metadata: Metadata, blocks: Sequence[Block], process_group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `blocks` from a folder that was found whole; errors of one rank raise on all."""
    with _plain_errors():
        reader, planner = _Reader(folder, metadata), _LoadPlanner(blocks, folder)
        state_dict_loader.load({}, storage_reader=reader, planner=planner, process_group=process_group)


def read_index(folder: Path) -> Metadata:
    """What a checkpoint holds, its `meta` as planner_data. ValueError with the reason if it is not whole."""
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder} has no {INDEX}")
    try:
        index = json.loads((folder / INDEX).read_bytes())
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r} instead of {FORMAT!r}")
        files, tensors, places = dict(index["files"]), {}, {}
        checksums = {file: tuple(sums) for file, sums in index["checksums"].items()}
        counts = {file: len(sums) for file, sums in checksums.items()}
        if counts != {file: -(-size // SUMMED_BYTES) for file, size in files.items()}:
            raise ValueError("the checksums are not those of its files")
        for name, tensor in index["tensors"].items():
            dtype, shape, chunks = DTYPES[tensor["dtype"]], torch.Size(tensor["shape"]), []
            for offsets, sizes, file, start in tensor["chunks"]:
                if Path(file).name != file or file not in files:
                    raise ValueError(f"{name} lies in {file}, not a file of the checkpoint")
                box = list(zip(offsets, sizes, shape, strict=True))
                end = start + prod(sizes) * dtype.itemsize
                if any(o < 0 or n < 0 or o + n > whole for o, n, whole in box) or not 0 <= start <= end <= files[file]:
                    raise ValueError(f"a part of {name} lies outside of it or of {file}")
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(name, offsets)] = Stored(file, start, tuple(sizes), dtype, checksums[file])
            if sum(prod(chunk.sizes) for chunk in chunks) != shape.numel():
                raise ValueError(f"parts of {name} are missing")
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)
        metadata = Metadata(tensors, planner_data=index["meta"], storage_data=places)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX} cannot be read ({type(error).__name__}: {error})") from error
    for name, size in files.items():
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing")
        if (found := (folder / name).stat().st_size) != size:
            raise ValueError(f"{folder / name} has {found} bytes instead of {size}")
    return metadata


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors by name; there is nothing else in these checkpoints."""
    return metadata.state_dict_metadata  # type: ignore[return-value]


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, blocks: Sequence[Block]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.blocks = blocks
        self.held: dict[MetadataIndex, Tensor] = {}

    def create_local_plan(self) -> plans.SavePlan:
        items = []
        for block in self.blocks:
            chunk, dtype = _chunk(block), block.tensor.dtype
            if dtype not in CODES:
                raise ValueError(f"{block.name}: a checkpoint cannot hold {dtype}")
            # An empty shard starts where its neighbour starts and would be taken for a copy of it.
            if block.tensor.numel() == 0 and prod(block.global_shape) > 0:
                continue
            index = MetadataIndex(block.name, chunk.offsets)
            data = plans.TensorWriteData(chunk, TensorProperties(dtype), torch.Size(block.global_shape))
            items.append(plans.WriteItem(index, plans.WriteItemType.SHARD, tensor_data=data))
            self.held[index] = block.tensor.detach()
        return plans.SavePlan(items)

    def create_global_plan(self, all_plans: list[plans.SavePlan]) -> tuple[list[plans.SavePlan], Metadata]:
        kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        # By place, since the same block on several ranks counts once.
        elements: dict[str, dict[MetadataIndex, int]] = defaultdict(dict)
        for item in (item for plan in all_plans for item in plan.items):
            assert item.tensor_data is not None
            name, kind = item.index.fqn, (item.tensor_data.size, item.tensor_data.properties.dtype)
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"{name} is {_text(*kind)} on one rank, {_text(*kinds[name])} on another")
            elements[name][item.index] = item.tensor_data.chunk.sizes.numel()
        for name, (shape, _) in kinds.items():
            held, wanted = sum(elements[name].values()), shape.numel()
            if held != wanted:
                raise ValueError(f"{name}: the blocks of all ranks hold {held} of its {wanted} elements")
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: plans.WriteItem) -> Tensor:
        return self.held[write_item.index]


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, blocks: Sequence[Block], folder: Path):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.folder = folder
        self.wanted: dict[str, list[Block]] = defaultdict(list)
        for block in blocks:
            self.wanted[block.name].append(block)

    def create_local_plan(self) -> plans.LoadPlan:
        assert self.metadata is not None
        saved = tensors_of(self.metadata)
        items = []
        for name, blocks in self.wanted.items():
            for block in blocks:
                self._check(block, saved)
            found = create_read_items_for_chunk_list(name, saved[name], [_chunk(block) for block in blocks])
            items += [item for item in found if prod(item.lengths) > 0]
        return plans.LoadPlan(items)

    def _check(self, block: Block, saved: dict[str, TensorStorageMetadata]) -> None:
        asked = _text(block.global_shape, block.tensor.dtype)
        if block.name not in saved:
            near = difflib.get_close_matches(block.name, saved, 1)
            hint = f"; nearest name: {near[0]} {_text(saved[near[0]].size)}" if near else ""
            raise ValueError(f"{self.folder} has no {block.name}, asked for as {asked}{hint}")
        shape, dtype = saved[block.name].size, saved[block.name].properties.dtype
        alike = dtype.is_floating_point == block.tensor.dtype.is_floating_point
        if tuple(shape) != tuple(block.global_shape) or not alike:
            raise ValueError(f"{self.folder} has {block.name} as {_text(shape, dtype)}, asked for as {asked}")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        return self.wanted[index.fqn][index.index].tensor.detach()


class _Writer(FileSystemWriter):
    """DCP's writer with files and index of its own."""

    def __init__(self, folder: Path, meta: dict[str, Any]):
        super().__init__(folder)
        self.meta = meta

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        return plan

    def prepare_global_plan(self, all_plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        names = (f"rank_{rank:05d}.safetensors" for rank in range(len(all_plans)))
        return [replace(plan, storage_data=name) for plan, name in zip(all_plans, names, strict=True)]

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> Future[list[WriteResult]]:
        return _done(self._write(plan, planner) if plan.items else [])

    def _write(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> list[WriteResult]:
        """A safetensors file, streamed: length of the header (8 bytes), header (JSON), tensors, no gaps."""
        tensors: dict[MetadataIndex, Any] = {item.index: planner.resolve_data(item) for item in plan.items}
        # Widest dtype first: each tensor then starts at a multiple of its element size, as readers want it.
        items = sorted(plan.items, key=lambda item: -tensors[item.index].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for item in items:
            tensor = tensors[item.index]
            begin, end = end, end + tensor.nbytes
            place = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
            header[_key(item)] = place
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        results = []
        with open(Path(self.path) / plan.storage_data, "wb") as file:
            summed = _SummedFile(file)
            summed.write(len(text).to_bytes(8, "little") + text)
            for item in items:
                tensor = tensors[item.index].cpu().contiguous()
                # The list is whole once the last block has been written.
                place = plan.storage_data, file.tell(), summed.sums
                results.append(WriteResult(item.index, tensor.nbytes, place))
                summed.write(_bytes(tensor))
            _sync(file)
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """The index; on the first rank, after all have written their files."""
        written = {result.index: result for rank_results in results for result in rank_results}
        files: dict[str, int] = {}
        checksums: dict[str, list[int]] = {}
        tensors = {}
        for name, tensor in tensors_of(metadata).items():
            chunks = []
            for chunk in tensor.chunks:
                result = written[MetadataIndex(name, chunk.offsets)]
                file, start, checksums[file] = result.storage_data
                files[file] = max(files.get(file, 0), start + result.size_in_bytes)
                chunks.append((chunk.offsets, chunk.sizes, file, start))
            tensors[name] = {"dtype": CODES[tensor.properties.dtype], "shape": tensor.size, "chunks": chunks}
        index = {"format": FORMAT, "meta": self.meta, "files": files, "checksums": checksums, "tensors": tensors}
        write_text(Path(self.path) / INDEX, json.dumps(index))
        sync_folder(Path(self.path))


class _Reader(FileSystemReader):
    """DCP's reader with index and files of its own."""

    def __init__(self, folder: Path, metadata: Metadata):
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        reads: dict[str, list[tuple[Stored, plans.ReadItem]]] = defaultdict(list)
        for item in plan.items:
            stored: Stored = self.storage_data[item.storage_index]
            reads[stored.file].append((stored, item))
        for name, items in reads.items():
            with open(Path(self.path) / name, "rb") as file:
                _verify(file, items)
                for stored, item in sorted(items, key=lambda read: read[0].start):
                    _read(file, stored, item, planner.resolve_tensor(item))
        return _done(None)


class _SummedFile:
    """Writes to a file, with the CRC-32 of each SUMMED_BYTES of it, the last stretch as long as there is something."""

    def __init__(self, file: BufferedWriter) -> None:
        self.file = file
        self.sums: list[int] = []
        self.room = 0

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        rest = memoryview(data)
        while rest:
            if not self.room:
                self.sums.append(0)
                self.room = SUMMED_BYTES
            now, rest = rest[: self.room], rest[self.room :]
            self.sums[-1] = zlib.crc32(now, self.sums[-1])
            self.room -= len(now)


def _verify(file: BufferedReader, items: list[tuple[Stored, plans.ReadItem]]) -> None:
    """ValueError if what `items` are read from is not what was saved."""
    touched = set()
    for stored, item in items:
        first = stored.start + (item.storage_offsets[0] if stored.sizes else 0) * stored.row_bytes
        end = first + (item.lengths[0] if stored.sizes else 1) * stored.row_bytes
        touched.update(range(first // SUMMED_BYTES, -(-end // SUMMED_BYTES)))
    buffer = memoryview(bytearray(SUMMED_BYTES))
    for number in sorted(touched):
        file.seek(number * SUMMED_BYTES)
        if zlib.crc32(buffer[: file.readinto(buffer)]) != items[0][0].checksums[number]:
            raise ValueError(
                f"{file.name} is damaged, in the {SUMMED_BYTES} bytes from byte {number * SUMMED_BYTES} on: remove "
                "this checkpoint to go on from the one before"
            )


def _read(file: BufferedReader, stored: Stored, item: plans.ReadItem, target: Tensor) -> None:
    """Fill `target` with a box of a stored block: piece by piece, each some rows [rows, ...] of the block.

    A piece is read straight into the target where that looks like the file, else into a buffer and copied.
    """
    offsets, lengths, sizes = item.storage_offsets, item.lengths, stored.sizes
    if not sizes:
        offsets, lengths, sizes, target = (0,), (1,), (1,), target.view(1)
    columns = [slice(begin, begin + length) for begin, length in zip(offsets[1:], lengths[1:], strict=True)]
    like_file = target.device.type == "cpu" and target.dtype == stored.dtype
    like_file = like_file and tuple(lengths[1:]) == sizes[1:]
    row_bytes = stored.row_bytes
    step = max(1, READ_BYTES // row_bytes)
    for row in range(0, lengths[0], step):
        part = target[row : row + step]
        direct = like_file and part.is_contiguous()
        source = part if direct else torch.empty(len(part), *sizes[1:], dtype=stored.dtype)
        file.seek(stored.start + (offsets[0] + row) * row_bytes)
        if file.readinto(_bytes(source)) != source.nbytes:
            raise OSError(f"{file.name} ends inside {item.dest_index.fqn}")
        if not direct:
            part.copy_(source[(slice(None), *columns)])


def _chunk(block: Block) -> ChunkStorageMetadata:
    """The place of a block; ValueError if that is not inside the global tensor."""
    shape, offsets, sizes = block.global_shape, block.offsets, block.tensor.shape
    aligned = len(shape) == len(offsets) == len(sizes)
    if not aligned or any(o < 0 or o + n > s for o, n, s in zip(offsets, sizes, shape, strict=True)):
        place = f"a block {_text(sizes)} at {_text(offsets)}"
        raise ValueError(f"{block.name}: {place} is not inside {_text(shape)}")
    return ChunkStorageMetadata(torch.Size(offsets), sizes)


def _key(item: plans.WriteItem) -> str:
    """Name of a block in its file: the tensor's, and which part of it unless it is whole."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    ranges = (f"{begin}:{begin + size}" for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return item.index.fqn if chunk.sizes == item.tensor_data.size else f"{item.index.fqn}[{','.join(ranges)}]"


def _text(shape: Sequence[int], dtype: torch.dtype | None = None) -> str:
    return f"[{', '.join(map(str, shape))}]" + (f" {dtype}".replace("torch.", "") if dtype else "")


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def write_text(path: Path, text: str) -> None:
    with open(path, "wb") as file:
        file.write(text.encode())
        _sync(file)


def _sync(file: BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _done(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future


@contextmanager
def _plain_errors() -> Iterator[None]:
    """The first failing rank's error in one line. DCP's own has all tracebacks, and is no Exception."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        rank = min(failure.failures)
        error = failure.failures[rank][0]
        kind = next((kind for kind in (ValueError, OSError) if isinstance(error, kind)), RuntimeError)
        raise kind(f"rank {rank}: {error}") from failure
