from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from megacp.data.documents import RawDocument
from megacp.data.tokens import TokenFile, TokenFileWriter

TOOLS = Path(__file__).parent.parent / "tools"
EOD = 256


def start(name: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(TOOLS / f"{name}.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(name: str, *arguments: object, code: int = 0) -> tuple[str, str]:
    process = start(name, *arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out, err


def preprocess(*arguments: object, code: int = 0) -> tuple[str, str]:
    return run("preprocess_data", "--tokenizer-type", "ByteLevelTokenizer", *arguments, code=code)


def write_pair(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    with TokenFileWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def texts_of(prefix: Path) -> list[bytes]:
    return [bytes(part.astype(np.uint8)) for part in TokenFile(prefix)]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.fixture
def refusal(tool, monkeypatch, capsys):
    """The one line on stderr with which a tool says no, called in this process."""
    on_terminate = signal.getsignal(signal.SIGTERM)

    def refusal(name: str, *arguments: object) -> str:
        module = tool(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            module.main()
        said = capsys.readouterr()
        assert exit.value.code == 2 and not said.out
        assert said.err.count("\n") == 1 and said.err.startswith(f"{name}.py: ")
        return said.err

    yield refusal
    signal.signal(signal.SIGTERM, on_terminate)


@pytest.fixture
def refused(refusal):
    return lambda *arguments: refusal("preprocess_data", "--tokenizer-type", "ByteLevelTokenizer", *arguments)


def test_jsonl_keeps_its_order_for_any_number_of_workers(tmp_path):
    texts = [f"document {i} " + "é" * (i * 37 % 3000) for i in range(2000)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text, "n": "x"}) + "\n" for text in texts))
    for workers in (1, 2):
        out, err = preprocess("--input", corpus, "--output-prefix", tmp_path / str(workers), "--workers", workers)
        assert "2,000 documents" in out and not err
    assert texts_of(tmp_path / "2_text_document") == [text.encode() for text in texts]
    for ending in ("bin", "idx"):
        one, two = (tmp_path / f"{workers}_text_document.{ending}" for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes()
    assert not list(tmp_path.glob("*.tmp"))


def test_keys_get_a_pair_each_and_eod_ends_what_is_not_empty(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"q": "ab", "a": ""}\n{"q": "c", "a": "d"}\n')
    arguments = ("--input", corpus, "--output-prefix", tmp_path / "out", "--workers", 1)
    out, _ = preprocess(*arguments, "--json-keys", "q", "a", "--append-eod")
    questions, answers = TokenFile(tmp_path / "out_q_document"), TokenFile(tmp_path / "out_a_document")
    assert [part.tolist() for part in questions] == [[97, 98, EOD], [99, EOD]]
    assert [part.tolist() for part in answers] == [[100, EOD]]
    # An empty text is a document without a sequence, so that document i is the same line in both.
    assert answers.document_indices.tolist() == [0, 0, 1]
    assert "1 texts were empty" in out


def test_text_files_of_a_folder_are_a_document_each(tmp_path):
    for name, text in (("b.py", "b\r\n"), ("a.py", "a = 1\n"), ("test/c.py", "c"), ("d.txt", "d")):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_bytes(text.encode())
    source = ("--input", tmp_path / "src", "--suffix", ".py", "--exclude", "test")
    preprocess(*source, "--output-prefix", tmp_path / "new" / "out", "--workers", 1)
    assert texts_of(tmp_path / "new" / "out_text_document") == [b"a = 1\n", b"b\r\n"]


def test_bad_lines_stop_or_are_counted(refused, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'{"text": "a"}\n{"text": \n{"text": "\xff"}\n{"text": "b"}\n')
    arguments = ("--input", corpus, "--output-prefix", tmp_path / "out", "--workers", 1)
    assert "corpus.jsonl:2: not JSON" in refused(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]
    out, _ = preprocess(*arguments, "--skip-bad")
    assert texts_of(tmp_path / "out_text_document") == [b"a", b"b"]
    assert "2 bad documents skipped, the first" in out and "corpus.jsonl:2: not JSON" in out


def test_mistakes_are_one_line(refused, refusal, tmp_path):
    (tmp_path / "a.txt").write_text("")
    output = ("--output-prefix", tmp_path / "out")
    assert "nowhere: no such file" in refused("--input", tmp_path / "nowhere", *output)
    assert "no text in 1 files" in refused("--input", tmp_path / "a.txt", *output, "--workers", 1)
    assert "a text file has one text" in refused("--input", tmp_path / "a.txt", *output, "--json-keys", "a", "b")
    assert "0 is less than 1" in refused("--input", tmp_path / "a.txt", *output, "--workers", 0)
    assert "--output-prefix" in refused("--input", tmp_path / "a.txt")
    unknown = ("--input", tmp_path / "a.txt", *output, "--tokenizer-type", "ByteTokenizer")
    assert "did you mean ByteLevelTokenizer" in refusal("preprocess_data", *unknown)
    trained = ("--input", tmp_path / "a.txt", *output, "--vocab-size")
    assert "no text in 1 files" in refusal("train_tokenizer", *trained, 300)
    (tmp_path / "a.txt").write_text("some text\n")
    assert "vocab_size 99 on this text" in refusal("train_tokenizer", *trained, 99)
    assert "vocab_size 99999 on this text" in refusal("train_tokenizer", *trained, 99999)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.fixture
def long_run(tmp_path):
    """A run halfway through, with the processes it started."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text((json.dumps({"text": "x" * 100_000}) + "\n") * 1500)
    arguments = ("--input", corpus, "--output-prefix", tmp_path / "out", "--workers", 1)
    process = start("preprocess_data", "--tokenizer-type", "ByteLevelTokenizer", *arguments)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob("*.tmp")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    yield process, [int(pid) for pid in children]
    process.kill()
    process.communicate(timeout=30)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("signal_number, code", [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_killed_halfway_it_leaves_no_file_and_no_process(signal_number, code, long_run, tmp_path):
    process, children = long_run
    process.send_signal(signal_number)
    assert process.wait(timeout=60) == code
    left = {path.suffix for path in tmp_path.iterdir()} - {".jsonl"}
    assert left == ({".tmp"} if signal_number == signal.SIGKILL else set())
    deadline = time.monotonic() + 30
    while any(map(alive, children)):
        assert time.monotonic() < deadline, "a worker outlives its parent"
        time.sleep(0.05)
    assert children


def test_the_death_of_a_worker_is_reported(tool):
    others = set(multiprocessing.active_children())
    module = tool("preprocess_data")
    task = module.Task("ByteLevelTokenizer", None, ("text",), append_eod=False, skip_bad=False)

    def work():
        for line in range(1, 100):
            yield [RawDocument("a.jsonl", line, b'{"text": "x"}')], 1
            if line == 20:
                for worker in set(multiprocessing.active_children()) - others:
                    assert worker.pid
                    os.kill(worker.pid, signal.SIGKILL)

    with pytest.raises(ValueError, match=r"a worker process died at or after a\.jsonl:\d+"):
        list(module.tokenized(task, work(), workers=2))


def test_few_batches_are_in_memory(tool):
    module = tool("preprocess_data")
    task = module.Task("ByteLevelTokenizer", None, ("text",), append_eod=False, skip_bad=False)
    taken = []

    def work():
        for line in range(1, 60):
            taken.append(line)
            yield [RawDocument("a.jsonl", line, b'{"text": "x"}')], 1

    results = module.tokenized(task, work(), workers=1)
    for number, _ in enumerate(results, start=1):
        assert len(taken) - number <= 4
    assert number == 59


def test_a_refusal_from_the_shell(tmp_path):
    for name in ("preprocess_data", "train_tokenizer", "merge_data", "inspect_data"):
        out, err = run(name, code=2)
        assert not out and err.count("\n") == 1 and err.startswith(f"{name}.py: the following arguments")


def test_merging_is_writing_all_at_once(tmp_path):
    first, second = [[1, 2], []], [[3], [4, 5, 6]]
    write_pair(tmp_path / "in" / "b", second)
    write_pair(tmp_path / "in" / "a", first)
    whole = write_pair(tmp_path / "whole", first + second)
    out, _ = run("merge_data", "--input", tmp_path / "in", "--output-prefix", tmp_path / "out")
    assert "4 documents of 2 files, uint16" in out
    run("merge_data", "--input", tmp_path / "in/a", tmp_path / "in/b", "--output-prefix", tmp_path / "again")
    for name in ("out", "again"):
        for ending in (".bin", ".idx"):
            assert Path(f"{tmp_path / name}{ending}").read_bytes() == Path(f"{whole}{ending}").read_bytes()


def test_merging_refuses_by_name(refusal, tmp_path):
    small, large = write_pair(tmp_path / "small", [[1]]), write_pair(tmp_path / "large", [[1]], "int32")
    output = ("--output-prefix", tmp_path / "out")
    message = refusal("merge_data", "--input", small, large, *output)
    assert f"{small} is uint16, {large} is int32" in message
    assert "is also an input" in refusal("merge_data", "--input", small, "--output-prefix", small)
    assert "nowhere.idx: no such file" in refusal("merge_data", "--input", tmp_path / "nowhere", *output)
    (tmp_path / "empty").mkdir()
    assert "no .idx file" in refusal("merge_data", "--input", tmp_path / "empty", *output)
    assert not list(tmp_path.glob("out*"))


def test_inspecting_counts_and_decodes(refusal, tmp_path):
    prefix = write_pair(tmp_path / "pair", [[104, 105, EOD], [], [120] * 9])
    out, _ = run("inspect_data", prefix, "--check", "--vocab-size", 257)
    assert "3 documents, 2 sequences, 12 tokens, uint16, 24 bytes" in out
    assert "mean 4.0, least 0, median 3, 90 % 3, 99 % 3, most 9" in out
    rows = [line.split() for line in out.splitlines() if "#" in line]
    assert [(row[-5], row[-4]) for row in rows] == [("0", "1"), ("3", "1"), ("15", "1")]
    assert out.endswith("checked: whole, all ids below 257\n")
    decode = ("--decode", 0)
    assert run("inspect_data", prefix, *decode, "--tokenizer-type", "ByteLevelTokenizer")[0] == "hi\n"
    assert run("inspect_data", prefix, "--decode", -3)[0] == "104 105 256\n"
    assert "has no document 3: it has 3, counted from 0" in refusal("inspect_data", prefix, "--decode", 3)
    assert "nowhere.idx: no such file" in refusal("inspect_data", tmp_path / "nowhere")
    assert "0 documents" in run("inspect_data", write_pair(tmp_path / "none", []), "--seq-length", 8)[0]


def test_inspecting_finds_damage(tmp_path):
    prefix = write_pair(tmp_path / "pair", [[1, 2, 300]])
    out, _ = run("inspect_data", prefix, "--check", "--tokenizer-type", "ByteLevelTokenizer", code=1)
    assert out.splitlines()[-1] == f"{prefix}.bin: token 2 is 300, not an id of a vocabulary of 257"


# What opening a pair of documents of 2, 1 and 3 tokens does not see: format, place in the .idx, values.
DAMAGE = {
    "negative length": ("<i", 34, -1),
    "long length": ("<i", 34, 2**30),
    "pointer far outside": ("<q", 34 + 12 + 8, 2**40),
    "negative pointer": ("<q", 34 + 12 + 8, -4),
    "pointer into another": ("<q", 34 + 12 + 8, 0),
    "document outside": ("<q", 34 + 36 + 8, 9),
    "negative document": ("<q", 34 + 36 + 8, -1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_named(refusal, tool, monkeypatch, capsys, tmp_path, damage):
    """Merging refuses it and leaves nothing, --check says what it is; neither ends in a traceback."""
    whole, harmed = write_pair(tmp_path / "whole", [[1]]), write_pair(tmp_path / "harmed", [[1, 2], [3], [4, 5, 6]])
    index = Path(f"{harmed}.idx")
    content = bytearray(index.read_bytes())
    form, at, value = DAMAGE[damage]
    struct.pack_into(form, content, at, value)
    index.write_bytes(content)
    message = refusal("merge_data", "--input", whole, harmed, "--output-prefix", tmp_path / "merged" / "out")
    assert f"{index}: " in message
    assert not list(tmp_path.glob("merged/*"))
    module = tool("inspect_data")
    monkeypatch.setattr(sys, "argv", ["inspect_data.py", str(harmed), "--check"])
    assert module.main() == 1
    said = capsys.readouterr()
    assert said.out.startswith(f"{index}: ") and not said.err


def most_by_hand(lengths: list[int], window: int) -> int:
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return max(len(set(owner[at : at + window].tolist())) for at in range(len(owner)))


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 30])
def test_most_documents_of_a_window(window, tool):
    module = tool("inspect_data")
    rng = np.random.default_rng(window)
    for _ in range(5):
        lengths = rng.integers(1, 5, 4)
        assert module.most_in_file_order(lengths, window) == most_by_hand(lengths.tolist(), window)
        # Two epochs, each in an order of its own.
        orders = list(permutations(lengths.tolist()))
        worst = max(most_by_hand([*a, *b], window) for a in orders for b in orders[:: max(1, len(orders) // 24)])
        assert module.most_in_any_order(lengths, window) >= worst
        assert module.most_in_any_order(lengths, window) <= 2 * len(lengths)


def test_most_documents_in_any_order_is_reached(tool):
    module = tool("inspect_data")
    # 9 .. 1 1 2 2 .. 9 in a window of 8: one token at each end and the four short ones, over an epoch's end.
    assert module.most_in_any_order(np.array([9, 1, 2, 9]), 8) == 6
    assert most_by_hand([9, 2, 1, 1, 2, 9], 8) == 6


def test_padding_of_document_masking_is_printed(tmp_path):
    prefix = write_pair(tmp_path / "pair", [[1] * length for length in (9, 1, 2, 0, 9)])
    out, _ = run("inspect_data", prefix, "--seq-length", 8, "--cp", 4)
    assert "in the file's order: at most 4 documents a sample, a pack exceeds seq_length by up to 28" in out
    assert "in any shuffled order: at most 6 documents a sample" in out and "42 tokens, 50 in all" in out
