from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from megacp.data.documents import BadDocument, RawDocument, Source, batches, find_sources, parse, read

TEXTS = [f"line {i} é\n\ttext" * (i % 7) for i in range(500)]


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def compressed(ending: str, data: bytes) -> bytes:
    if ending == ".gz":
        return gzip.compress(data)
    if ending == ".zst":
        return pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return data


def source(path: Path) -> Source:
    return find_sources([str(path)])[0]


def texts_of(path: Path) -> list[str]:
    return [parse(document, ["text"])[0] for document, _ in read(source(path))]


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_jsonl_comes_back_whatever_its_compression(ending, tmp_path):
    path = tmp_path / f"corpus.jsonl{ending}"
    path.write_bytes(compressed(ending, jsonl(TEXTS[:200])) + compressed(ending, jsonl(TEXTS[200:])))
    assert texts_of(path) == TEXTS
    consumed = sum(part for _, part in batches([source(path)], 1000))
    assert consumed == path.stat().st_size


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_a_file_that_breaks_off_is_no_shorter_corpus(ending, keep, tmp_path):
    whole = compressed(ending, jsonl(TEXTS))
    path = tmp_path / f"corpus.jsonl{ending}"
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(ValueError, match=rf"corpus\.jsonl\{ending}: truncated"):
        texts_of(path)
    path.write_bytes(b"no compressed data at all" + whole)
    with pytest.raises(ValueError, match=rf"corpus\.jsonl\{ending}: damaged"):
        texts_of(path)


def test_zst_without_zstandard_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="pip install zstandard"):
        texts_of(tmp_path / "a.jsonl.zst")


def test_lines_keep_their_numbers_and_blank_ones_are_none(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert [(d.line, parse(d, ["text"])) for d, _ in read(source(path))] == [(1, ["a"]), (4, ["b"])]


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\r\n\n  b\x00\t")
    assert texts_of(path) == ["a\r\n\n  b\x00\t"]


BAD = {
    b'{"text": "a"': r"a\.jsonl:7: not JSON: .* \(column 13\)",
    b"[1]": r"a\.jsonl:7: not a JSON object but list",
    b'{"body": "a"}': r"a\.jsonl:7: no key 'text', only 'body'",
    b'{"text": 3}': r"a\.jsonl:7: 'text' is not text but int",
    b'{"text": "\xff"}': r"a\.jsonl:7: not UTF-8: byte 0xff",
    b'{"text": "x\\ud800"}': r"a\.jsonl:7: 'text' holds a lone surrogate at character 1",
    b"[" * 100_000: r"a\.jsonl:7: not JSON that can be read",
}


@pytest.mark.parametrize("data", BAD, ids=lambda data: repr(data[:20]))
def test_a_bad_line_is_named(data):
    with pytest.raises(BadDocument, match=BAD[data]):
        parse(RawDocument("a.jsonl", 7, data), ["text"])


def test_a_bad_text_file_is_named_with_its_line():
    with pytest.raises(BadDocument, match=r"a\.py:3: not UTF-8: byte 0xe9"):
        parse(RawDocument("a.py", 0, b"one\ntwo\nthr\xe9\n"), ["text"])


def test_folders_are_searched_in_sorted_order(tmp_path):
    for name in ("b/z.py", "b/a.py", "test/t.py", "c.py", "a.txt", "d.jsonl.gz", "e.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)

    def names(*arguments, **options):
        return [str(Path(s.path).relative_to(tmp_path)) for s in find_sources(*arguments, **options)]

    assert names([str(tmp_path)], [".py"], ["test"]) == ["b/a.py", "b/z.py", "c.py"]
    assert names([str(tmp_path)]) == ["a.txt", "d.jsonl.gz"]
    assert names([str(tmp_path / "e.md"), str(tmp_path / "b")], [".py"]) == ["e.md", "b/a.py", "b/z.py"]
    with pytest.raises(ValueError, match=r"no file ending in \.rs below"):
        find_sources([str(tmp_path)], [".rs"])
    with pytest.raises(FileNotFoundError, match="input .*/nowhere: no such file or folder"):
        find_sources([str(tmp_path / "nowhere")])


def test_the_name_tells_the_format_unless_told(tmp_path):
    for name in ("a.jsonl", "a.json.gz", "a.txt", "a.py.gz"):
        (tmp_path / name).write_text("x")
    paths = [str(tmp_path / name) for name in ("a.jsonl", "a.json.gz", "a.txt", "a.py.gz")]
    assert [s.json for s in find_sources(paths)] == [True, True, False, False]
    assert not any(s.json for s in find_sources(paths, format="text"))
    assert all(s.json for s in find_sources(paths, format="json"))
