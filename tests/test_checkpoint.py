from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from megacp import block_files, checkpoint
from megacp.blocks import Block
from tests.spawn import run

META = {"iteration": 3, "consumed_samples": 10**12, "lr": 1e-5, "losses": [1.5, None], "text": "naïve"}


def whole_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "embedding": normal(7, 6),
        "projection": normal(4, 9).bfloat16(),
        "tiles": normal(6, 8, 2).double(),
        "norm": normal(5),
        "short": normal(1, 3),
        "nothing": torch.empty(0, 4),
        "step": torch.tensor(12345678901),
        "mask": torch.tensor([True, False, True]),
        "rng": torch.arange(11, dtype=torch.uint8),
    }


def part(name: str, whole: Tensor, dim: int, rank: int, size: int) -> Block:
    """Rank's share of a tensor cut along a dimension, in a memory of its own."""
    index = torch.arange(whole.shape[dim]).tensor_split(size)[rank]
    offsets = [0] * whole.dim()
    offsets[dim] = int(index[0]) if len(index) else 0
    return Block(name, tuple(whole.shape), tuple(offsets), whole.index_select(dim, index))


def copy_of(name: str, whole: Tensor) -> Block:
    return Block(name, tuple(whole.shape), (0,) * whole.dim(), whole.clone())


def blocks_by_rows(rank: int, size: int) -> list[Block]:
    """Cut matrices by rows, the tiles once more by columns, all else whole on every rank."""
    blocks = []
    for name, whole in whole_tensors().items():
        if name == "tiles":
            rows = part(name, whole, 0, rank, size)
            for half in (rows.tensor[:, :3], rows.tensor[:, 3:]):
                offsets = (rows.offsets[0], 0 if half.shape[1] == 3 else 3, 0)
                blocks.append(Block(name, rows.global_shape, offsets, half))
        elif whole.dim() == 2:
            blocks.append(part(name, whole, 0, rank, size))
        else:
            blocks.append(copy_of(name, whole))
    return blocks


def blocks_by_columns(rank: int, size: int) -> list[Block]:
    return [
        part(name, whole, whole.dim() - 1, rank, size) if whole.dim() else copy_of(name, whole)
        for name, whole in whole_tensors().items()
    ]


def emptied(blocks: list[Block]) -> list[Block]:
    return [replace(block, tensor=torch.zeros_like(block.tensor)) for block in blocks]


def save_by_rows(root: Path) -> None:
    checkpoint.save(root, 3, blocks_by_rows(dist.get_rank(), dist.get_world_size()), META)


def load_by_columns(root: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    wanted, blocks = blocks_by_columns(rank, size), emptied(blocks_by_columns(rank, size))
    if rank == 1:
        # A rank may ask for less than the others, and for parts that are not contiguous in its memory.
        del wanted[1:], blocks[1:]
        blocks[0] = replace(blocks[0], tensor=torch.zeros(7, 2 * blocks[0].tensor.shape[1])[:, ::2])
    assert checkpoint.load(root, blocks) == META
    for expected, block in zip(wanted, blocks, strict=True):
        assert torch.equal(expected.tensor, block.tensor), block.name


def save_small(root: Path, iteration: int, keep_last: int | None = None) -> None:
    weight = torch.full((4, 2), float(iteration))
    blocks = [copy_of("weight", weight)]
    folder = checkpoint.save(root, iteration, blocks, {"iteration": iteration}, keep_last=keep_last)
    assert folder == checkpoint.find(folder)


def loaded(path: Path) -> int:
    block = copy_of("weight", torch.zeros(4, 2))
    iteration = checkpoint.load(path, [block])["iteration"]
    assert (block.tensor == iteration).all()
    return iteration


def folders(root: Path) -> list[str]:
    return sorted(os.listdir(root))


@pytest.mark.parametrize("n", [1, 3, 4])
def test_what_two_ranks_save_any_number_loads(tmp_path: Path, n: int) -> None:
    run(save_by_rows, 2, tmp_path)
    run(load_by_columns, n, tmp_path)


def test_what_one_or_four_ranks_save_one_process_loads(tmp_path: Path) -> None:
    for n in (1, 4):
        run(save_by_rows, n, tmp_path / str(n))
        wanted, blocks = blocks_by_rows(0, 1), emptied(blocks_by_rows(0, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert checkpoint.load(tmp_path / str(n), blocks) == META
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(wanted, blocks, strict=True))


def test_files_are_safetensors_and_hold_each_element_once(tmp_path: Path) -> None:
    run(save_by_rows, 2, tmp_path)
    whole = whole_tensors()
    elements = dict.fromkeys(whole, 0)
    for path in (tmp_path / "iter_0000003").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                name, _, box = key.partition("[")
                tensor = file.get_tensor(key)
                ranges = [slice(*map(int, side.split(":"))) for side in box.rstrip("]").split(",")] if box else ()
                assert torch.equal(tensor, whole[name][tuple(ranges)])
                elements[name] += tensor.numel()
    assert elements == {name: tensor.numel() for name, tensor in whole.items()}


def test_contents_and_meta_without_loading(tmp_path: Path) -> None:
    run(save_by_rows, 2, tmp_path)
    for path in (tmp_path, tmp_path / "iter_0000003"):
        whole = whole_tensors()
        assert checkpoint.contents(path) == {name: (tuple(t.shape), t.dtype) for name, t in whole.items()}
        assert checkpoint.read_meta(path) == META
        assert checkpoint.find(path) == tmp_path / "iter_0000003"


def test_values_take_the_dtype_of_their_destination(tmp_path: Path) -> None:
    weight = torch.randn(5, 3, dtype=torch.float64)
    checkpoint.save(tmp_path, 1, [copy_of("weight", weight), copy_of("step", torch.tensor(7))], {})
    for dtype in (torch.float32, torch.bfloat16):
        block = copy_of("weight", torch.zeros(5, 3, dtype=dtype))
        checkpoint.load(tmp_path, [block])
        assert torch.equal(block.tensor, weight.to(dtype))
    with pytest.raises(ValueError, match=r"has step as \[\] int64, asked for as \[\] float32"):
        checkpoint.load(tmp_path, [copy_of("step", torch.tensor(0.0))])


def test_large_blocks_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacp.block_files.READ_BYTES", 100)
    weight = torch.randn(50, 6)
    checkpoint.save(tmp_path, 1, [copy_of("weight", weight)], {})
    for block in (
        copy_of("weight", torch.zeros(50, 6)),
        Block("weight", (50, 6), (7, 2), torch.zeros(41, 3)),
        Block("weight", (50, 6), (7, 0), torch.zeros(41, 6, dtype=torch.bfloat16)),
    ):
        checkpoint.load(tmp_path, [block])
        box = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.tensor.shape, strict=True))
        assert torch.equal(block.tensor, weight[box].to(block.tensor.dtype))


def test_parameters_that_require_gradients(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    checkpoint.save(tmp_path, 1, [Block("w", (3, 2), (0, 0), parameter)], {})
    other = torch.nn.Parameter(torch.zeros(3, 2))
    checkpoint.load(tmp_path, [Block("w", (3, 2), (0, 0), other)])
    assert torch.equal(parameter, other)


def test_a_name_or_shape_that_does_not_fit_is_named(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    with pytest.raises(ValueError, match=r"has weight as \[4, 2\] float32, asked for as \[5, 2\] float32"):
        checkpoint.load(tmp_path, [copy_of("weight", torch.zeros(5, 2))])
    with pytest.raises(ValueError, match=r"has no weights, asked for as \[4, 2\] .*; nearest name: weight \[4, 2\]"):
        checkpoint.load(tmp_path, [copy_of("weights", torch.zeros(4, 2))])
    with pytest.raises(ValueError, match=r"weight: a block \[4, 2\] at \[1, 0\] is not inside \[4, 2\]"):
        checkpoint.load(tmp_path, [Block("weight", (4, 2), (1, 0), torch.zeros(4, 2))])


def wrong_shape_on_rank_1(root: Path) -> tuple[str, str]:
    rows = 4 + dist.get_rank()
    with pytest.raises(ValueError) as load_error:
        checkpoint.load(root, [copy_of("weight", torch.zeros(rows, 2))])
    with pytest.raises(ValueError) as save_error:
        checkpoint.save(root, 2, [copy_of("weight", torch.zeros(rows, 2))], {})
    return str(load_error.value), str(save_error.value)


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    answers = run(wrong_shape_on_rank_1, 2, tmp_path)
    assert answers[0] == answers[1]
    assert answers[0][0].startswith("rank 1: ") and "[5, 2] float32" in answers[0][0]
    assert "weight is [5, 2] float32 on one rank, [4, 2] float32 on another" in answers[0][1]
    assert folders(tmp_path) == ["iter_0000001", "latest"] and loaded(tmp_path) == 1


def fill_the_disk_of_rank_1(root: Path) -> str:
    rank = dist.get_rank()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as error:
            checkpoint.save(root, 1, [part("weight", torch.zeros(4000, 2), 0, rank, 2)], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(error.value)


def test_a_full_disk_of_one_rank_leaves_what_was_there(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    answers = run(fill_the_disk_of_rank_1, 2, tmp_path)
    assert answers[0] == answers[1] and answers[0].startswith("rank 1: ")
    assert folders(tmp_path) == ["iter_0000001", "latest"] and loaded(tmp_path) == 1


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    def save(*blocks: Block, **meta: object) -> None:
        checkpoint.save(tmp_path, 1, blocks, meta)

    with pytest.raises(ValueError, match="w: the blocks of all ranks hold 4 of its 8 elements"):
        save(Block("w", (4, 2), (0, 0), torch.zeros(2, 2)))
    with pytest.raises(ValueError, match="w: the blocks of all ranks hold 10 of its 8 elements"):
        save(Block("w", (4, 2), (0, 0), torch.zeros(3, 2)), Block("w", (4, 2), (2, 0), torch.zeros(2, 2)))
    with pytest.raises(ValueError, match=r"w: a block \[3\] at \[0, 0\] is not inside \[4, 2\]"):
        save(Block("w", (4, 2), (0, 0), torch.zeros(3)))
    with pytest.raises(ValueError, match="w: a checkpoint cannot hold torch.complex64"):
        save(copy_of("w", torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(ValueError, match="meta cannot be written as JSON"):
        save(copy_of("w", torch.zeros(2)), rng=b"bytes")
    with pytest.raises(ValueError, match="keep_last must be at least 1, not 0"):
        save_small(tmp_path, 1, keep_last=0)
    assert folders(tmp_path) == []


def test_keep_last(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 30):
        save_small(tmp_path, iteration)
    save_small(tmp_path, 4, keep_last=2)
    # 30 is of a run that was rolled back; it does not push out what has just been saved.
    assert folders(tmp_path) == ["iter_0000003", "iter_0000004", "iter_0000030", "latest"]
    assert loaded(tmp_path) == 4


def test_the_same_iteration_again_and_leftovers(tmp_path: Path) -> None:
    save_small(tmp_path, 1)
    for leftover in (".tmp-iter_0000002", ".trash-x"):
        shutil.copytree(tmp_path / "iter_0000001", tmp_path / leftover)
    assert loaded(tmp_path) == 1
    checkpoint.save(tmp_path, 1, [copy_of("other", torch.ones(2))], {"again": True})
    assert checkpoint.contents(tmp_path) == {"other": ((2,), torch.float32)}
    assert checkpoint.read_meta(tmp_path) == {"again": True}
    assert folders(tmp_path) == ["iter_0000001", "latest"]


def test_latest_may_be_turned_back(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        save_small(tmp_path, iteration)
    (tmp_path / "latest").write_text("iter_0000002")
    assert loaded(tmp_path) == 2
    assert loaded(tmp_path / "iter_0000003") == 3


@pytest.mark.parametrize("pointer", ["iter_0000009", "nonsense", "../elsewhere", ""])
def test_latest_that_points_to_nothing_is_passed_over(tmp_path: Path, pointer: str) -> None:
    for iteration in (1, 2):
        save_small(tmp_path, iteration)
    (tmp_path / "latest").write_text(pointer)
    with pytest.warns(UserWarning, match=r"has no index.json. Reading .*iter_0000002 instead"):
        assert loaded(tmp_path) == 2
    (tmp_path / "latest").unlink()
    assert loaded(tmp_path) == 2


def break_data(folder: Path) -> None:
    with open(folder / "rank_00000.safetensors", "r+b") as file:
        file.truncate(os.path.getsize(folder / "rank_00000.safetensors") - 1)


def break_index(folder: Path) -> None:
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text[: len(text) // 2])


def lose_data(folder: Path) -> None:
    (folder / "rank_00000.safetensors").unlink()


def lose_checksum(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["checksums"]["rank_00000.safetensors"].clear()
    (folder / "index.json").write_text(json.dumps(index))


def other_checksums(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["checksums"] = {"rank_00001.safetensors": [0]}
    (folder / "index.json").write_text(json.dumps(index))


def lose_chunk(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["tensors"]["weight"]["chunks"].clear()
    (folder / "index.json").write_text(json.dumps(index))


def point_outside(folder: Path) -> None:
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text.replace("rank_00000", "../../rank_00000"))


def chunk_at(offsets: list[int], sizes: list[int], shift: int = 0) -> Callable[[Path], None]:
    """Says that the one block of `weight` lies elsewhere, with as many elements as before."""

    def harm(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        ((_, _, file, start),) = index["tensors"]["weight"]["chunks"]
        index["tensors"]["weight"]["chunks"] = [[offsets, sizes, file, start + shift]]
        (folder / "index.json").write_text(json.dumps(index))

    return harm


def other_format(folder: Path) -> None:
    (folder / "index.json").write_text('{"weight_map": {}}')


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (break_data, r"rank_00000.safetensors has \d+ bytes instead of \d+"),
        (lose_data, "rank_00000.safetensors is missing"),
        (lose_checksum, "the checksums are not those of its files"),
        (other_checksums, "cannot be read"),
        (break_index, "index.json cannot be read"),
        (lose_chunk, "parts of weight are missing"),
        (point_outside, "weight lies in ../../rank_00000.safetensors, not a file of the checkpoint"),
        (other_format, "index.json cannot be read"),
        (chunk_at([-1, 0], [4, 2]), "a part of weight lies outside of it or of rank_00000.safetensors"),
        (chunk_at([1, 0], [4, 2]), "a part of weight lies outside of it"),
        (chunk_at([2**62, 0], [4, 2]), "a part of weight lies outside of it"),
        (chunk_at([0, 0], [8, 1]), "a part of weight lies outside of it"),
        (chunk_at([0, 0], [-4, -2]), "a part of weight lies outside of it"),
        (chunk_at([0], [8]), "index.json cannot be read"),
        (chunk_at([0, 0], [4, 2], -(2**20)), "a part of weight lies outside of it or of rank_00000.safetensors"),
        (chunk_at([0, 0], [4, 2], 1), "a part of weight lies outside of it or of rank_00000.safetensors"),
        (chunk_at([0, 0], [4, 2], 2**62), "a part of weight lies outside of it or of rank_00000.safetensors"),
    ],
)
def test_a_broken_checkpoint_is_passed_over(tmp_path: Path, harm, reason: str) -> None:
    for iteration in (1, 2, 3, 4):
        save_small(tmp_path, iteration)
    (tmp_path / "latest").write_text("iter_0000003")
    harm(tmp_path / "iter_0000003")
    with pytest.warns(UserWarning, match=reason + r".*Reading .*iter_0000002 instead"):
        assert loaded(tmp_path) == 2
    with pytest.raises(ValueError, match=reason):
        loaded(tmp_path / "iter_0000003")


def test_what_is_damaged_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of any tensor, whichever part of it is wanted; but what is read of other stretches is not refused."""
    monkeypatch.setattr(block_files, "SUMMED_BYTES", 64)
    whole = torch.arange(300, dtype=torch.float32).view(50, 6)
    others = [copy_of(name, tensor) for name, tensor in whole_tensors().items()]
    folder = checkpoint.save(tmp_path, 1, [copy_of("wide", whole), *others], META)
    data = folder / "rank_00000.safetensors"
    with safe_open(data, "pt") as file:
        assert torch.equal(file.get_tensor("wide"), whole)
    good = data.read_bytes()
    start = good.index(whole.numpy().tobytes())

    def rows(first: int, last: int, columns: slice = slice(0, 6)) -> Block:
        wanted = torch.full_like(whole[first:last, columns], torch.nan)
        return Block("wide", (50, 6), (first, columns.start), wanted)

    header = 8 + int.from_bytes(good[:8], "little")
    generator = random.Random(0)
    for place in [start, start + 1199, *generator.sample(range(header, len(good)), 30)]:
        bad = bytearray(good)
        bad[place] ^= 1 << generator.randrange(8)
        data.write_bytes(bad)
        with pytest.raises(ValueError, match=r"rank_00000\.safetensors is damaged, in the .* from byte \d+ on"):
            checkpoint.load(folder, [rows(0, 50), *others])
        row, stretch = (place - start) // 24, place // 64
        if start <= place < start + 1200:
            with pytest.raises(ValueError, match="is damaged"):
                checkpoint.load(folder, [rows(row, row + 1, slice(2, 3))])
        for first in range(0, 50, 7):
            wanted = rows(first, first + 1, slice(1, 4))
            if stretch not in range((start + 24 * first) // 64, (start + 24 * first + 23) // 64 + 1):
                checkpoint.load(folder, [wanted])
                assert torch.equal(wanted.tensor, whole[first : first + 1, 1:4])
    data.write_bytes(good)
    checkpoint.load(folder, [wanted := rows(0, 50), *others])
    assert torch.equal(wanted.tensor, whole)


def find_on_all(root: Path) -> tuple[Path | None, str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            return checkpoint.find(root), str(len(seen))
        except (FileNotFoundError, ValueError) as error:
            return None, f"{type(error).__name__}: {error}"


def test_all_ranks_agree_on_what_they_found(tmp_path: Path) -> None:
    for iteration in (1, 2):
        save_small(tmp_path, iteration)
    break_data(tmp_path / "iter_0000002")
    assert run(find_on_all, 2, tmp_path) == [
        (tmp_path / "iter_0000001", "1"),
        (tmp_path / "iter_0000001", "0"),
    ]
    break_data(tmp_path / "iter_0000001")
    answers = run(find_on_all, 2, tmp_path)
    assert answers[0] == answers[1]
    assert answers[0][1].startswith(f"ValueError: no whole checkpoint in {tmp_path}: ")
    answers = run(find_on_all, 2, tmp_path / "none")
    assert answers == [(None, f"FileNotFoundError: no checkpoint in {tmp_path / 'none'}")] * 2


class Bomb:
    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple:
        return Path.touch, (self.mark,)


def test_a_pickle_is_never_executed(tmp_path: Path) -> None:
    root, mark = tmp_path / "root", tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(mark))
    pickle.loads(bomb)
    assert mark.exists(), "the bomb must work for this test to mean anything"
    mark.unlink()
    for iteration in (1, 2):
        save_small(root, iteration)
    data = root / "iter_0000001" / "rank_00000.safetensors"
    data.write_bytes(bomb.ljust(data.stat().st_size, b"\0")[: data.stat().st_size])
    for name in (".metadata", "index.json"):
        (root / "iter_0000002" / name).write_bytes(bomb)
    (root / "iter_0000001" / ".metadata").write_bytes(bomb)
    with (
        pytest.raises(ValueError, match="iter_0000001/rank_00000.safetensors is damaged"),
        pytest.warns(UserWarning, match="iter_0000002.*index.json cannot be read"),
    ):
        checkpoint.load(root, [copy_of("weight", torch.zeros(4, 2))])
    assert not mark.exists()


@pytest.mark.parametrize("moments", ["random", "each"])
def test_killed_while_saving(tmp_path: Path, moments: str) -> None:
    command = [sys.executable, "-m", "tests.kill_while_saving", str(tmp_path), moments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 20
