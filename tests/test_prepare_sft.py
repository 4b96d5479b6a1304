from __future__ import annotations

import gzip
import importlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megacp.data.documents import BadDocument, RawDocument
from megacp.data.tokenizer import build_tokenizer
from megacp.data.tokens import TokenFile
from tests.chats import SMOLLM2, assistant, save_tokenizer, user

TOOLS = Path(__file__).parent.parent / "tools"
BYTES = ("--tokenizer-type", "ByteLevelTokenizer", "--chat-template", "chatml", "--spell-control-tokens")
ENDINGS = (".bin", ".idx", "_loss_mask.bin", "_loss_mask.idx", "_report.json")


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOOLS / "prepare_sft.py"), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*arguments: object) -> str:
    process = start(*arguments)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


@pytest.fixture
def tool(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("prepare_sft")


@pytest.fixture
def refused(tool, monkeypatch, capsys):
    """The one line on stderr with which the tool says no, called in this process."""
    on_terminate = signal.getsignal(signal.SIGTERM)

    def refused(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["prepare_sft.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            tool.main()
        said = capsys.readouterr()
        assert exit.value.code == 2 and not said.out
        assert said.err.count("\n") == 1 and said.err.startswith("prepare_sft.py: ")
        return said.err

    yield refused
    signal.signal(signal.SIGTERM, on_terminate)


def write_chats(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def chatml(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


def documents_of(prefix: Path) -> list[tuple[str, str]]:
    """Text of each conversation, and of its supervised tokens."""
    decode = build_tokenizer("ByteLevelTokenizer").decode
    tokens, mask = TokenFile(prefix), TokenFile(f"{prefix}_loss_mask")
    assert mask.dtype == np.uint8 and mask.lengths.tolist() == tokens.lengths.tolist()
    assert mask.document_indices.tolist() == tokens.document_indices.tolist() == list(range(len(tokens) + 1))
    return [
        (decode(ids.tolist()), decode(ids[learned == 1].tolist())) for ids, learned in zip(tokens, mask, strict=True)
    ]


def test_the_files_are_the_same_for_any_number_of_workers_and_compression(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    count = 2400
    texts = [(f"question {i} é", "answer 🙂 " * (i * 37 % 100)) for i in range(count)]
    chats = write_chats(tmp_path / "chats.jsonl", [{"prompt": q, "completion": a} for q, a in texts])
    (tmp_path / "gz").mkdir()
    half = chats.read_bytes().index(b"\n", chats.stat().st_size // 2) + 1
    (tmp_path / "gz" / "a.jsonl.gz").write_bytes(gzip.compress(chats.read_bytes()[:half]))
    (tmp_path / "gz" / "b.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(chats.read_bytes()[half:]))
    assert chats.stat().st_size > 2 << 20  # several batches
    for name, source, workers in (("one", chats, 1), ("two", chats, 2), ("squeezed", tmp_path / "gz", 2)):
        out = run("--input", source, "--output-prefix", tmp_path / "out" / name, *BYTES, "--workers", workers)
        assert f"{count:,} conversations" in out and "uint16, vocabulary 257" in out
    for name in ("two", "squeezed"):
        for ending in ENDINGS[:4]:
            one, other = (tmp_path / "out" / f"{which}{ending}" for which in ("one", name))
            assert one.read_bytes() == other.read_bytes()
    reports = [
        json.loads((tmp_path / "out" / f"{name}_report.json").read_text()) for name in ("one", "two", "squeezed")
    ]
    assert reports[0] == reports[1] == reports[2] | {"input": [str(chats)]}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        name + ending for name in ("one", "two", "squeezed") for ending in ENDINGS
    }
    expected = [(chatml(("user", q), ("assistant", a)), f"{a}<|im_end|>") for q, a in texts]
    assert documents_of(tmp_path / "out" / "one") == expected
    tokens = sum(len(text.encode()) for text, _ in expected)
    assert (reports[0]["tokens"], reports[0]["supervised_tokens"]) == (
        tokens,
        sum(len(text.encode()) for _, text in expected),
    )


def prepared(tool: ModuleType, records: list[Any], *tokenizer: Any, **options: Any) -> Any:
    if not tokenizer:
        tokenizer, options = ("ByteLevelTokenizer", None, "chatml"), options | {"spell_control_tokens": True}
    lines = [RawDocument("chats.jsonl", n, json.dumps(record).encode()) for n, record in enumerate(records, start=1)]
    return tool.prepare(tool.Task(*tokenizer, **options), lines)


def test_a_hugging_face_folder_with_its_own_template(tool, tmp_path):
    folder = save_tokenizer(tmp_path, "chatml", SMOLLM2)
    records = [
        {"messages": [user("a"), assistant("Hello"), user("b"), assistant("🙂", weight=0), assistant("")]},
        {"instruction": "do", "input": "this", "output": "saying <|im_end|>"},
        {"messages": [user("a"), assistant("b", train=False)]},
    ]
    found = prepared(tool, records, "HuggingFaceTokenizer", str(folder))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", folder)
    ends = np.cumsum(found.lengths)[:-1]
    parts = list(zip(np.split(found.ids, ends), np.split(found.learned, ends), strict=True))
    assert [tokenizer.decode(ids[learned == 1].tolist()) for ids, learned in parts] == [
        "Hello<|im_end|><|im_end|>",
        "saying <|im_end|><|im_end|>",
        "",
    ]
    end = "<|im_start|>user\ndo\n\nthis<|im_end|>\n<|im_start|>assistant\nsaying <|im_end|><|im_end|>\n"
    assert tokenizer.decode(parts[1][0].tolist()).endswith(end)
    assert found.ids.dtype == np.uint16
    assert (found.counts["without_supervision"], found.counts["control_tokens_in_text"]) == (1, 1)


CHAT = {"messages": [user("a"), assistant("12345"), user("b"), assistant("6789")]}
WHOLE = chatml(("user", "a"), ("assistant", "12345"), ("user", "b"), ("assistant", "6789"))


@pytest.mark.parametrize(
    ("policy", "length", "text", "learned"),
    [
        ("truncate_right", len(WHOLE), WHOLE, "12345<|im_end|>6789<|im_end|>"),
        # Only the line break after the last turn is cut off.
        ("truncate_right", len(WHOLE) - 1, WHOLE[:-1], "12345<|im_end|>6789<|im_end|>"),
        # In the middle of the first answer.
        ("truncate_right", WHOLE.index("345"), WHOLE[: WHOLE.index("345")], "12"),
        ("truncate_right", WHOLE.index("12345"), WHOLE[: WHOLE.index("12345")], ""),
        # In the middle of an answer again; its first token that is left follows nothing, so none can predict it.
        ("truncate_left", len(WHOLE) - WHOLE.index("789"), WHOLE[WHOLE.index("789") :], "89<|im_end|>"),
        ("truncate_left", len(WHOLE) - WHOLE.index("\n6789"), WHOLE[WHOLE.index("\n6789") :], "6789<|im_end|>"),
        ("truncate_left", 2, ">\n", ""),
    ],
)
def test_long_conversations_are_truncated(policy, length, text, learned, tool):
    found = prepared(tool, [CHAT], max_length=length, long_conversations=policy)
    assert found.lengths == [length] and bytes(found.ids.astype(np.uint8)).decode() == text
    assert bytes(found.ids[found.learned == 1].astype(np.uint8)).decode() == learned
    cut = len(WHOLE) - length
    assert (found.counts["truncated"], found.counts["truncated_tokens"]) == (cut > 0, cut)
    assert found.counts["without_supervision"] == (not learned)


def test_long_conversations_are_dropped_or_stop_the_work(tool):
    short = {"prompt": "a", "completion": "b"}
    found = prepared(tool, [short, CHAT, short], max_length=100, long_conversations="drop")
    assert len(found.lengths) == 2
    assert (found.counts["dropped"], found.counts["dropped_tokens"]) == (1, len(WHOLE))
    # No bad record, so that skipping those does not hide it.
    message = rf"^chats\.jsonl:2: {len(WHOLE)} tokens are more than --max-length 100: .* --long-conversations drop"
    with pytest.raises(ValueError, match=message) as caught:
        prepared(tool, [short, CHAT], max_length=100, skip_bad=True)
    assert not isinstance(caught.value, BadDocument)


def test_the_last_turn_alone(tool):
    found = prepared(tool, [CHAT], turns="last")
    assert bytes(found.ids[found.learned == 1].astype(np.uint8)).decode() == "6789<|im_end|>"


def test_dropped_and_truncated_are_in_the_report(tmp_path):
    short = {"prompt": "a", "completion": "b"}
    chats = write_chats(tmp_path / "chats.jsonl", [short, CHAT, short, CHAT])
    source = ("--input", chats, *BYTES, "--workers", 1, "--max-length", 100, "--long-conversations")
    out = run(*source, "drop", "--output-prefix", tmp_path / "drop")
    assert f"2 too long and dropped, with {2 * len(WHOLE)} tokens" in out
    report = json.loads((tmp_path / "drop_report.json").read_text())
    names = ("read", "written", "dropped", "dropped_tokens", "truncated", "max_length", "long_conversations")
    assert [report[name] for name in names] == [4, 2, 2, 2 * len(WHOLE), 0, 100, "drop"]
    out = run(*source, "truncate_right", "--output-prefix", tmp_path / "cut")
    assert f"2 truncated, by {2 * (len(WHOLE) - 100)} tokens in all" in out
    report = json.loads((tmp_path / "cut_report.json").read_text())
    assert [report[name] for name in names] == [4, 4, 0, 0, 2, 100, "truncate_right"]
    assert report["truncated_tokens"] == 2 * (len(WHOLE) - 100) and TokenFile(tmp_path / "cut").lengths.max() == 100


def test_bad_records_stop_the_work_or_are_counted(refused, tmp_path):
    chats = write_chats(
        tmp_path / "chats.jsonl",
        [{"prompt": "a", "completion": "b"}, {"messages": []}, CHAT | {"tools": [{}]}, {"x": 1}],
    )
    arguments = ("--input", chats, *BYTES, "--output-prefix", tmp_path / "out", "--workers", 1)
    assert f"prepare_sft.py: {chats}:2: no message\n" == refused(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]
    out = run(*arguments, "--skip-bad")
    assert f"2 bad conversations skipped, the first: {chats}:2: no message\n" in out
    assert "warning: 1 conversations define tools, which the template does not write down" in out
    assert [text for text, _ in documents_of(tmp_path / "out")] == [chatml(("user", "a"), ("assistant", "b")), WHOLE]
    report = json.loads((tmp_path / "out_report.json").read_text())
    assert (report["read"], report["bad"], report["written"]) == (4, 2, 2)


def test_conversations_that_do_not_nest_are_counted_apart(refused, tmp_path):
    pytest.importorskip("transformers")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ loop.length if m.content == 'b' }}{{ m.content }}{% endfor %}")
    chats = write_chats(tmp_path / "chats.jsonl", [{"prompt": "a", "completion": "c"}, CHAT, {"messages": []}, CHAT])
    arguments = ("--input", chats, *BYTES[:2], "--output-prefix", tmp_path / "out", "--workers", 1)
    arguments += ("--chat-template", template)
    reason = f"{chats}:2: the prefixes of the chat template do not nest, "
    said = refused(*arguments)
    assert said.startswith(f"prepare_sft.py: {reason}") and "--skip-bad leaves such conversations out" in said
    out = run(*arguments, "--skip-bad")
    assert f"1 bad conversations skipped, the first: {chats}:3: no message\n" in out
    assert f"2 conversations that do not nest skipped, the first: {reason}" in out
    report = json.loads((tmp_path / "out_report.json").read_text())
    assert [report[name] for name in ("read", "bad", "not_nested", "written")] == [4, 1, 2, 1]
    write_chats(chats, [CHAT])
    said = refused(*arguments, "--skip-bad")
    assert "0 bad, 1 that do not nest, the first: " in said


def test_a_template_that_hides_its_markers_stops_the_work(tool, tmp_path):
    pytest.importorskip("transformers")
    template = tmp_path / "template.jinja"
    template.write_text("{% set x %}{% generation %}{{ messages[-1].content }}{% endgeneration %}{% endset %}{{ x }}")
    with pytest.raises(ValueError, match=r"{% generation %} in line 1 inside a macro"):
        prepared(tool, [CHAT], "ByteLevelTokenizer", None, str(template), skip_bad=True)


def test_a_second_run_does_not_read_the_report_of_the_first(tmp_path):
    write_chats(tmp_path / "chats.jsonl", [CHAT])
    for _ in range(2):
        run("--input", tmp_path, *BYTES, "--output-prefix", tmp_path / "out", "--workers", 1)
        assert json.loads((tmp_path / "out_report.json").read_text())["read"] == 1
    # A file that is named is read whatever its name.
    (tmp_path / "chats.jsonl").rename(tmp_path / "chats.json")
    run("--input", tmp_path / "chats.json", *BYTES, "--output-prefix", tmp_path / "out", "--workers", 1)


def test_mistakes_are_one_line(refused, tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl", [{"messages": [user("a"), assistant("b", weight=0)]}])
    output = ("--output-prefix", tmp_path / "out", "--workers", 1)
    arguments = ("--input", chats, *BYTES, *output)
    nothing = refused(*arguments)
    assert "no token to learn in 1 files: 1 conversations, all without supervision, 0 dropped, 0 bad\n" in nothing
    assert "--long-conversations drop needs --max-length" in refused(*arguments, "--long-conversations", "drop")
    assert "1 is less than 2" in refused(*arguments, "--max-length", 1)
    assert "'{' is not JSON" in refused(*arguments, "--template-variables", "{")
    assert "is not JSON: " in refused(*arguments, "--template-variables", '{"x": "\\ud800"}')
    assert "'[]' is not a JSON object" in refused(*arguments, "--template-variables", "[]")
    assert "takes no variables, got x" in refused(*arguments, "--template-variables", '{"x": 1}')
    assert "this tokenizer has no chat template" in refused(*arguments, "--chat-template", "tokenizer")
    assert "nowhere: no such file or folder" in refused("--input", tmp_path / "nowhere", *BYTES, *output)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    assert "no file ending in .jsonl" in refused("--input", tmp_path / "texts", *BYTES, *output)
    assert {path.name for path in tmp_path.iterdir()} == {"chats.jsonl", "texts"}


def test_an_older_run_does_not_make_a_failed_one_look_whole(tool, tmp_path, monkeypatch, refused):
    """The new mask is in place, the report and the tokens are not."""
    chats = write_chats(tmp_path / "chats.jsonl", [CHAT])
    arguments = ("--input", chats, *BYTES, "--output-prefix", tmp_path / "out", "--workers", 1)
    run(*arguments)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tool, "write_report", full)
    assert "No space left on device" in refused(*arguments)
    with pytest.raises(FileNotFoundError):
        TokenFile(tmp_path / "out")
    assert not list(tmp_path.glob("*.tmp"))


@pytest.fixture
def long_run(tmp_path):
    """A run halfway through."""
    line = json.dumps({"prompt": "x" * 50_000, "completion": "y" * 50_000})
    (tmp_path / "chats.jsonl").write_text((line + "\n") * 1500)
    process = start("--input", tmp_path / "chats.jsonl", *BYTES, "--output-prefix", tmp_path / "out", "--workers", 1)
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob("*.tmp")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    yield process
    process.kill()
    process.communicate(timeout=30)


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_killed_halfway_it_leaves_nothing_that_looks_whole(signal_number, code, long_run, tmp_path):
    long_run.send_signal(signal_number)
    assert long_run.wait(timeout=60) == code
    left = {path.suffix for path in tmp_path.iterdir()} - {".jsonl"}
    assert left == ({".tmp"} if signal_number == signal.SIGKILL else set())
