from __future__ import annotations

import gc
import hashlib
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.tokens import TokenFile, TokenFileWriter, best_dtype, check_vocabulary

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "indexed_dataset.json").read_text())["cases"]
CASE_IDS = [case["name"] for case in CASES]


def write_pair(prefix: Path, documents: list[list[int]], dtype: str = "int32") -> Path:
    with TokenFileWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write_pair(tmp_path / "pair", [[1, 2, 3], [4], [5, 6]])


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
def test_reads_the_reference_files(case):
    tokens = TokenFile(GOLDEN / "indexed" / case["name"])
    if "sequences" not in case:
        # The reference cannot open a pair without tokens; here it is a file of length 0.
        assert len(tokens) == 0 and tokens[:] == [] and tokens.document_indices.tolist() == [0]
        return
    assert len(tokens) == case["n"] and tokens.dtype == case["dtype"]
    assert tokens.lengths.tolist() == case["sequence_lengths"]
    assert tokens.pointers.tolist() == case["sequence_pointers"]
    assert tokens.document_indices.tolist() == case["document_indices"]
    assert [tokens[i].tolist() for i in range(len(tokens))] == case["sequences"]
    for i, offset, length, expected in case["get"]:
        assert tokens.read(i, offset, length).tolist() == expected
    for (begin, end), expected in case["slices"]:
        # Beyond the end the reference raises; here slices clip, as everywhere in Python.
        clipped = case["sequences"][begin:end] if isinstance(expected, dict) else expected
        assert [part.tolist() for part in tokens[begin:end]] == clipped
    assert list(tokens.problems()) == []


@pytest.mark.parametrize("case", CASES, ids=CASE_IDS)
@pytest.mark.parametrize("by", ["item", "document", "index"])
def test_writes_the_reference_files_byte_for_byte(case, by, tmp_path):
    prefix = tmp_path / "out"
    bounds = case.get("document_indices", [0])
    with TokenFileWriter(prefix, case.get("dtype", "int32")) as writer:
        if by == "index":
            writer.add_index(GOLDEN / "indexed" / case["name"])
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True) if by != "index" else ():
            parts = case["sequences"][begin:end]
            if by == "document":
                writer.add_document([t for part in parts for t in part], [len(part) for part in parts])
                continue
            for part in parts:
                writer.add_item(part)
            writer.end_document()
    for ending in ("bin", "idx"):
        digest = hashlib.sha256(Path(f"{prefix}.{ending}").read_bytes()).hexdigest()
        assert digest == case[f"{ending}_sha256"]


documents_of_ids = st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=8)


@settings(max_examples=30, deadline=None)
@given(first=documents_of_ids, second=documents_of_ids)
def test_merging_equals_writing_all_at_once(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("merge")
    whole = write_pair(folder / "whole", first + second, "uint16")
    with TokenFileWriter(folder / "merged", "uint16") as writer:
        for number, part in enumerate((first, second)):
            writer.add_index(write_pair(folder / str(number), part, "uint16"))
    with TokenFileWriter(folder / "bulk", "uint16") as writer:
        for part in (first, second):
            flat = np.array([t for document in part for t in document], np.int64)
            writer.add_documents(flat, [len(document) for document in part])
    for name in ("merged", "bulk"):
        for ending in (".bin", ".idx"):
            assert Path(f"{folder / name}{ending}").read_bytes() == Path(f"{whole}{ending}").read_bytes()
    kept = [document for document in first + second if document]
    assert [part.tolist() for part in TokenFile(whole)[:]] == kept


def test_merging_other_dtypes_is_refused(pair, tmp_path):
    message = r"pair: stored as int32, but .*out as uint16"
    with (
        pytest.raises(ValueError, match=message),
        TokenFileWriter(tmp_path / "out", "uint16") as writer,
    ):
        writer.add_index(pair)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.bin", "pair.idx"]


@pytest.mark.parametrize("dtype, ids", [("uint16", [65536]), ("uint16", [3, -1]), ("int32", [2**31])])
def test_an_id_that_does_not_fit_raises(dtype, ids, tmp_path):
    with TokenFileWriter(tmp_path / "out", dtype) as writer:
        for given_ids in (ids, np.array(ids, np.int64)):
            with pytest.raises(ValueError, match="does not fit " + dtype):
                writer.add_item(given_ids)
        writer.add_document([7])
    assert [part.tolist() for part in TokenFile(tmp_path / "out")[:]] == [[7]]


def test_what_is_no_row_of_ids_is_refused(tmp_path):
    with TokenFileWriter(tmp_path / "out", "int32") as writer:
        with pytest.raises(ValueError, match="whole numbers, got float64"):
            writer.add_item([1.5])
        with pytest.raises(ValueError, match=r"shape \(1, 2\)"):
            writer.add_item([[1, 2]])
        with pytest.raises(ValueError, match="add up to 3, but 2 tokens"):
            writer.add_document([1, 2], [3])
        with pytest.raises(ValueError, match="got -1 to 3"):
            writer.add_document([1, 2], [3, -1])
    with pytest.raises(ValueError, match="complex128 cannot be stored"):
        TokenFileWriter(tmp_path / "out", "complex128")


def test_an_open_document_is_refused_and_nothing_is_left(tmp_path):
    message = "2 sequences after the last end_document"
    with (
        pytest.raises(ValueError, match=message),
        TokenFileWriter(tmp_path / "out", "int32") as writer,
    ):
        writer.add_item([1])
        writer.add_item([2])
    assert list(tmp_path.iterdir()) == []


def test_arrays_outlive_the_file(pair):
    tokens = TokenFile(pair)
    lengths, documents, sequence, part = tokens.lengths, tokens.document_indices, tokens[0], tokens.read(2, 1)
    del tokens
    gc.collect()
    assert (lengths.tolist(), documents.tolist()) == ([3, 1, 2], [0, 1, 2, 3])
    assert (sequence.tolist(), part.tolist()) == ([1, 2, 3], [6])
    sequence[:] = 9
    assert TokenFile(pair)[0].tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        lengths[0] = 9


def test_travels_to_other_processes_by_name(pair):
    assert pickle.loads(pickle.dumps(TokenFile(pair)))[-1].tolist() == [5, 6]


def test_reading_beyond_a_sequence_raises(pair):
    tokens = TokenFile(pair)
    assert len(list(tokens)) == 3
    for i in (3, -4):
        with pytest.raises(IndexError, match=f"sequence {i} of 3"):
            tokens.read(i)
    for offset, length in ((-1, 1), (2, 2), (4, None), (1, -1)):
        with pytest.raises(ValueError, match=f"tokens {offset} to .* of sequence 0, which has 3"):
            tokens.read(0, offset, length)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def patch(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


DAMAGE = {
    "cut .bin": (lambda b, i: cut(b, 20), r"pair\.bin: 20 bytes, but .*pair\.idx tells of 24"),
    "empty .bin": (lambda b, i: cut(b, 0), r"pair\.bin: 0 bytes, but"),
    "long .bin": (lambda b, i: b.write_bytes(b.read_bytes() + b"\0"), r"pair\.bin: 25 bytes, but"),
    "cut .idx": (lambda b, i: cut(i, 60), r"pair\.idx: 60 bytes, but its header tells of 3 sequences"),
    "cut header": (lambda b, i: cut(i, 20), r"pair\.idx: truncated, 20 bytes of a header of 34"),
    "empty .idx": (lambda b, i: cut(i, 0), r"pair\.idx: not the index of a token file"),
    "foreign": (lambda b, i: i.write_bytes(b"TNTIDX\0\0" * 9), r"pair\.idx: not the index .*TNTIDX"),
    "version": (lambda b, i: patch(i, 9, b"\2"), r"pair\.idx: foreign header, version 2 \(known: 1\)"),
    "dtype": (lambda b, i: patch(i, 17, b"\x0c"), r"pair\.idx: foreign header, .*dtype code 12"),
    "documents": (
        lambda b, i: patch(i, 94, b"\2"),
        r"pair\.idx: documents span .* 0 to 2, not 0 to 3",
    ),
    "other dtype": (lambda b, i: patch(i, 17, b"\x08"), r"pair\.bin: 24 bytes, but"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_pair_is_refused_by_name(damage, pair):
    harm, message = DAMAGE[damage]
    harm(Path(f"{pair}.bin"), Path(f"{pair}.idx"))
    with pytest.raises(ValueError, match=message) as caught:
        TokenFile(pair)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_missing_half_is_named(ending, pair):
    Path(f"{pair}{ending}").unlink()
    with pytest.raises(FileNotFoundError, match=rf"pair\{ending}: no such file"):
        TokenFile(pair)


def test_the_prefix_with_an_ending_is_explained(pair):
    with pytest.raises(FileNotFoundError, match=r"give the prefix without its ending: .*/pair$"):
        TokenFile(f"{pair}.bin")


def test_problems_names_what_opening_does_not_see(pair):
    index = Path(f"{pair}.idx")
    assert list(TokenFile(pair).problems(vocab_size=7)) == []
    assert list(TokenFile(pair).problems(vocab_size=6)) == [f"{pair}.bin: token 5 is 6, not an id of a vocabulary of 6"]
    patch(index, 34 + 12 + 8, (2**40).to_bytes(8, "little"))
    patch(index, 34 + 36 + 8, b"\3")
    tokens = TokenFile(pair)
    first, second = tokens.problems()
    assert "sequence 1 (length 1, byte 1099511627776) does not begin" in first
    assert "document 1 ends before it begins" in second
    with pytest.raises(ValueError, match=r"pair\.idx: damaged, sequence 1 lies outside"):
        tokens.read(1)


def test_problems_sees_negative_ids(tmp_path):
    prefix = write_pair(tmp_path / "negative", [[1, -5]])
    assert list(TokenFile(prefix).problems()) == [f"{prefix}.bin: token 1 is -5, not an id"]


def test_vocabulary_and_dtype():
    assert [best_dtype(n) for n in (257, 65499, 65500, 200_000)] == ["uint16", "uint16", "int32", "int32"]
    check_vocabulary("uint16", 65535)
    check_vocabulary("int32", 65536)
    with pytest.raises(ValueError, match="stories: stored as uint16, .* up to 65,535, .* 65,536: .* int32"):
        check_vocabulary("uint16", 65536, "stories")
    with pytest.raises(ValueError, match="float32, which cannot be token ids"):
        check_vocabulary("float32", 10)


def test_rewriting_replaces_the_pair_only_when_done(pair):
    writer = TokenFileWriter(pair, "uint16")
    writer.add_document([8])
    assert TokenFile(pair)[0].tolist() == [1, 2, 3]
    writer.finalize()
    writer.discard()
    assert TokenFile(pair)[0].tolist() == [8]
    assert sorted(path.name for path in pair.parent.iterdir()) == ["pair.bin", "pair.idx"]


def test_a_killed_writer_leaves_nothing_that_looks_whole(tmp_path):
    program = (
        "import os, signal\n"
        "from megacp.data.tokens import TokenFileWriter\n"
        f"writer = TokenFileWriter({str(tmp_path / 'out')!r}, 'int32')\n"
        "writer.add_document(range(100000))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60).returncode == -9
    assert all(path.suffix == ".tmp" for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "documents", [[5000], [700], [1] * 300], ids=["while writing", "with the last buffer", "in the index"]
)
def test_a_full_disk_leaves_what_was_there(pair, documents):
    """Files of the child hold 1000 bytes at most, as a disk that fills up; closing such a file fails once more."""
    program = (
        "import resource\n"
        "from megacp.data.tokens import TokenFileWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "try:\n"
        f"    with TokenFileWriter({str(pair)!r}, 'uint16') as writer:\n"
        f"        for size in {documents}:\n"
        "            writer.add_document([1] * size)\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("File too large\n", "")
    assert sorted(path.name for path in pair.parent.iterdir()) == ["pair.bin", "pair.idx"]
    assert [part.tolist() for part in TokenFile(pair)[:]] == [[1, 2, 3], [4], [5, 6]]


def test_needs_no_torch():
    program = "import sys, megacp.data.tokens; assert 'torch' not in sys.modules"
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60).returncode == 0


def test_many_documents_open_and_read_quickly(tmp_path):
    count = 1_000_000
    with TokenFileWriter(tmp_path / "many", "uint16") as writer:
        writer.add_documents(np.zeros(3 * count, np.uint16), np.full(count, 3))
    tokens = TokenFile(tmp_path / "many")
    assert len(tokens) == count and tokens.pointers[-1] == 6 * (count - 1)
    assert list(tokens.problems(1)) == []
