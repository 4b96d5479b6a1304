"""Functions and their docstrings as conversations: what is taken, what is left, in which order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.docstring_chats import MOST_ANSWER, MOST_SOURCE, chats, functions, main, source_files

ANSWER = "Give the sum of all the numbers."
FUNCTION = f'''def total(numbers):
    """{ANSWER}"""

    return sum(numbers)
'''
BARE = "def total(numbers):\n    return sum(numbers)"


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def pairs(folder: Path) -> list[tuple[str, str]]:
    found = [[message["content"] for message in chat["messages"]] for chat in chats(source_files(folder))]
    return [(source, answer) for _, source, answer in found]


def test_docstring_leaves_the_source():
    assert list(functions(FUNCTION)) == [(BARE, ANSWER)]


def test_methods_and_decorators_move_to_the_margin():
    body = '''class Numbers:
    é = 1

    @property
    @cached(
        size=1)
    async def total(self):
        r"""Give the sum
        of all the numbers: π.
        """  # or nothing
        return 1
'''
    assert list(functions(body)) == []  # a comment stands on the docstring's last line
    source = "@property\n@cached(\n    size=1)\nasync def total(self):\n    return 1"
    assert list(functions(body.replace("  # or nothing", ""))) == [(source, "Give the sum\nof all the numbers: π.")]


@pytest.mark.parametrize(
    "text",
    [
        FUNCTION.replace(ANSWER, "Sum."),
        FUNCTION.replace(ANSWER, "word " * (MOST_ANSWER // 5 + 1)),
        FUNCTION + "    #" + "x" * MOST_SOURCE + "\n    pass\n",
        FUNCTION.replace("return sum(numbers)", "pass"),
        FUNCTION.replace("return sum(numbers)", "..."),
        FUNCTION.replace("return sum(numbers)", "raise NotImplementedError"),
        f'def total(numbers): "{ANSWER}"; return sum(numbers)\n',
        BARE,
    ],
    ids=["short", "long answer", "long source", "pass", "ellipsis", "raise", "one line", "none"],
)
def test_what_teaches_nothing_is_left_out(text):
    assert list(functions(text)) == []


def test_each_source_and_each_docstring_once(tmp_path):
    other = FUNCTION.replace("sum(numbers)", "add(numbers)")
    files = {"a.py": FUNCTION, "b.py": FUNCTION, "c.py": other, "d.py": FUNCTION.replace("sum of", "total of")}
    found = pairs(write(tmp_path, files))
    assert len(found) == len({source for source, _ in found}) == len({answer for _, answer in found})
    assert 1 <= len(found) <= 2


def test_order_is_of_whole_modules_and_stays(tmp_path):
    files = {
        f"m{i}.py": "".join(FUNCTION.replace("numbers", f"x{i}_{j}").replace("Give", f"Give {i} {j}") for j in range(3))
        for i in range(6)
    }
    one, two = pairs(write(tmp_path / "one", files)), pairs(write(tmp_path / "two", dict(reversed(files.items()))))
    assert one == two and len(one) == 18
    modules = [answer.split()[1] for _, answer in one]
    assert [modules[i : i + 3] for i in range(0, 18, 3)] == [[module] * 3 for module in modules[::3]]
    assert modules[::3] != sorted(modules[::3])


def test_files_that_cannot_be_read_or_are_no_library_are_passed_over(tmp_path):
    files = {"good.py": FUNCTION, "bad.py": "def :", "test/a.py": FUNCTION.replace("sum", "x"), "note.txt": "no"}
    write(tmp_path, files)
    (tmp_path / "latin.py").write_bytes(b"\xff\xfe")
    assert pairs(tmp_path) == [(BARE, ANSWER)]


def test_file(tmp_path, capsys):
    write(tmp_path / "source", {"a.py": FUNCTION})
    output = tmp_path / "new/chats.jsonl"
    assert main(["--source", str(tmp_path / "source"), "--output", str(output)]) == 0
    (chat,) = map(json.loads, output.read_text("utf-8").splitlines())
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "assistant"]
    assert "1 conversations" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["--source", str(tmp_path / "empty"), "--output", str(tmp_path / "none.jsonl")]) == 2
    assert "no function with a docstring" in capsys.readouterr().err and not (tmp_path / "none.jsonl").exists()
