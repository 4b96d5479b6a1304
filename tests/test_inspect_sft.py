from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from megacp.data.tokens import TokenFile, TokenFileWriter

TOOLS = Path(__file__).parent.parent / "tools"
HI, END = [104, 105], 256


def write_pair(prefix: Path, documents: list[list[int]], masks: list[list[int]]) -> Path:
    for name, dtype, rows in ((prefix, "uint16", documents), (f"{prefix}_loss_mask", "uint8", masks)):
        with TokenFileWriter(name, dtype) as writer:
            for row in rows:
                writer.add_document(row)
    return prefix


@pytest.fixture
def inspected(monkeypatch, capsys):
    """(exit code, stdout, stderr) of inspect_data.py --sft, in this process."""
    monkeypatch.syspath_prepend(str(TOOLS))
    module = importlib.import_module("inspect_data")

    def inspected(*arguments: object) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["inspect_data.py", *map(str, arguments), "--sft"])
        try:
            code = module.main()
        except SystemExit as exit:
            code = exit.code
        said = capsys.readouterr()
        return code, said.out, said.err

    return inspected


@pytest.fixture
def chats(tmp_path) -> Path:
    """Conversations of 10, 30, 7 and 20 tokens; 4, 0, 1 and 15 are supervised."""
    sizes = ((10, 4), (30, 0), (7, 1), (20, 15))
    prefix = write_pair(
        tmp_path / "chats",
        [[1] * length for length, _ in sizes],
        [[0] * (length - learned) + [1] * learned for length, learned in sizes],
    )
    report = {"read": 9, "bad": 2, "dropped": 3, "dropped_tokens": 3000, "truncated": 1, "truncated_tokens": 50}
    report |= {"max_length": 30, "long_conversations": "drop", "chat_template": "chatml", "turns": "all"}
    Path(f"{prefix}_report.json").write_text(json.dumps(report))
    return prefix


def test_the_audit(inspected, chats):
    code, out, _ = inspected(chats, "--seq-length", 48, "--cp", 4, "--check", "--vocab-size", 257)
    assert code == 0
    assert "4 documents, 4 sequences, 67 tokens, uint16" in out and "most 30" in out
    rows = [line.split() for line in out.splitlines() if "#" in line]
    assert [(row[0], row[2], row[3]) for row in rows] == [("4", "7", "1"), ("8", "15", "1"), ("16", "31", "2")]
    assert "supervised: 20 tokens, 29.9 %; of a conversation least 0, median 1, most 15" in out
    assert "without a supervised token: 1 (documents 1)" in out
    assert "9 read, 2 bad and skipped, 3 dropped (3,000 tokens), 1 truncated (by 50 tokens); max_length 30, drop" in out
    # 32 + 16 and 32 + 16: 96 of 96 with rounding, 67 of them tokens.
    assert (
        "packs of 48 tokens, each conversation rounded up to a multiple of 16: 2 packs, 2.0 conversations each" in out
    )
    assert "fill 100.00 % with rounding, of which 30.21 % is the rounding; 69.79 % are tokens" in out
    # 16 + 32 + 8 + 24 = 80.
    assert "padding at cp 4, each conversation to a multiple of 8: 16.25 % of 80 tokens computed" in out
    assert out.endswith("checked: whole, all ids below 257\n")
    assert (
        "padding at cp 1, each conversation to a multiple of 2: 1.47 % of 68 tokens"
        in inspected(chats, "--seq-length", 48)[1]
    )


def test_what_cannot_be_packed_is_refused(inspected, chats):
    for arguments, message in (
        (("--seq-length", 48, "--cp", 3), "--pack-multiple 16 is no multiple of 2*cp = 6; take 18"),
        (("--seq-length", 16), "2 of 4 conversations are longer than data.seq_length = 16"),
        (("--seq-length", 50), "packs of 50 tokens are no multiple of 16"),
    ):
        code, _, err = inspected(chats, *arguments)
        assert code == 2 and message in err and err.count("\n") == 1


def test_without_a_report(inspected, chats):
    report = Path(f"{chats}_report.json")
    report.write_text(json.dumps(json.loads(report.read_text()) | {"not_nested": 1234}))
    assert "2 bad and skipped, 1,234 that do not nest left out, 3 dropped" in inspected(chats)[1]
    report.write_text("[]")
    code, _, err = inspected(chats)
    assert code == 2 and "chats_report.json: not a report of prepare_sft.py" in err
    report.unlink()
    code, out, _ = inspected(chats)
    assert code == 0 and "chats_report.json: no such file, so what was dropped or truncated is not known" in out


def test_files_that_do_not_belong_together(inspected, chats, tmp_path):
    write_pair(tmp_path / "other", [[1] * 9], [[0, 1]])
    code, _, err = inspected(tmp_path / "other")
    assert code == 2 and "other_loss_mask" in err and err.count("\n") == 1
    Path(f"{chats}_loss_mask.idx").unlink()
    code, _, err = inspected(chats)
    assert code == 2 and "chats_loss_mask.idx: no such file" in err
    prefix = write_pair(tmp_path / "twos", [[1, 1]], [[0, 2]])
    code, out, _ = inspected(prefix, "--check")
    assert code == 1 and "twos_loss_mask.bin: token 1 is 2, not an id of a vocabulary of 2" in out


def test_a_file_without_conversations(inspected, tmp_path):
    code, out, _ = inspected(write_pair(tmp_path / "none", [], []), "--seq-length", 48, "--check")
    assert code == 0 and "0 documents" in out


BYTES = ("--tokenizer-type", "ByteLevelTokenizer")


def test_a_conversation_with_what_is_learned(inspected, tmp_path):
    face = list("🙂".encode())
    document = [*HI, *face, END, *HI, *face[:2]]
    prefix = write_pair(tmp_path / "pair", [HI, document], [[0, 0], [0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1]])
    assert inspected(prefix, "--decode", 1, *BYTES)[1] == "hi[[🙂]]hi[[\ufffd]]\n"
    assert inspected(prefix, "--decode", -1, "--color", *BYTES)[1] == "hi\x1b[32m🙂\x1b[0mhi\x1b[32m\ufffd\x1b[0m\n"
    assert inspected(prefix, "--decode", 0, *BYTES)[1] == "hi\n"
    assert inspected(prefix, "--decode", 1)[1] == "104 105[[ 240 159 153 130 256]] 104 105[[ 240 159]]\n"
    code, _, err = inspected(prefix, "--decode", 2)
    assert code == 2 and "has no document 2: it has 2, counted from 0" in err


def test_a_terminal_gets_colours(inspected, tmp_path, monkeypatch):
    prefix = write_pair(tmp_path / "pair", [HI], [[0, 1]])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert inspected(prefix, "--decode", 0, *BYTES)[1] == "h\x1b[32mi\x1b[0m\n"


def test_supervision_of_many_conversations(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOOLS))
    module = importlib.import_module("inspect_data")
    random = np.random.default_rng(0)
    sizes = random.integers(1, 300, 500)
    # Empty ones in the middle, several on end, and last.
    sizes[[7, 8, 100, 498, 499]] = 0
    for name, masks in (
        ("mask", [random.integers(0, 2, size) for size in sizes]),
        ("empty", [random.integers(0, 2, 0)] * 2),
    ):
        with TokenFileWriter(tmp_path / name, "uint8") as writer:
            for mask in masks:
                writer.add_document(mask, [len(mask)])
        assert module.supervised_counts(TokenFile(tmp_path / name)).tolist() == [int(mask.sum()) for mask in masks]
