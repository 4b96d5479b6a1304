from __future__ import annotations

import json
from typing import Any

import pytest

from megacp.data.chat import Conversation, parse_conversation
from megacp.data.documents import BadDocument, RawDocument
from tests.chats import assistant, user

CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def conversation(record: Any) -> Conversation:
    return parse_conversation(RawDocument("chats.jsonl", 7, json.dumps(record).encode()))


SHAPES: dict[str, tuple[Any, list[dict[str, Any]], list[bool]]] = {
    "messages": (
        {"messages": [user("q"), assistant("a"), user("r"), assistant("")], "prompt": "not looked at", "id": 1},
        [user("q"), assistant("a"), user("r"), assistant("")],
        [False, True, False, True],
    ),
    "texts": ({"prompt": "q", "completion": "a"}, [user("q"), assistant("a")], [False, True]),
    # What the assistant said in a prompt is given.
    "lists": (
        {"prompt": [user("q"), assistant("a"), user("r")], "completion": [assistant("b"), assistant("c")]},
        [user("q"), assistant("a"), user("r"), assistant("b"), assistant("c")],
        [False, False, False, True, True],
    ),
    "list and text": (
        {"prompt": [{"role": "system", "content": "s"}, user("q")], "completion": "a"},
        [{"role": "system", "content": "s"}, user("q"), assistant("a")],
        [False, False, True],
    ),
    "instruction": (
        {"instruction": "do", "input": "this", "output": "a"},
        [user("do\n\nthis"), assistant("a")],
        [False, True],
    ),
    "instruction alone": ({"instruction": "do", "output": "a"}, [user("do"), assistant("a")], [False, True]),
    "empty input": ({"instruction": "do", "input": "", "output": "a"}, [user("do"), assistant("a")], [False, True]),
    "null messages": (
        {"messages": None, "prompt": "q", "completion": "a"},
        [user("q"), assistant("a")],
        [False, True],
    ),
    "system": (
        {"system": "s", "prompt": "q", "completion": "a", "history": None},
        [{"role": "system", "content": "s"}, user("q"), assistant("a")],
        [False, False, True],
    ),
    "system of messages": (
        {"system": "s", "messages": [user("q"), assistant("a")]},
        [{"role": "system", "content": "s"}, user("q"), assistant("a")],
        [False, False, True],
    ),
    "system twice": (
        {"system": "s", "messages": [{"role": "system", "content": "s"}, assistant("a")]},
        [{"role": "system", "content": "s"}, assistant("a")],
        [False, True],
    ),
    "history": (
        {"system": "s", "instruction": "do", "output": "a", "history": [["q", "b"], ["r", ""]]},
        [
            {"role": "system", "content": "s"},
            *(user("q"), assistant("b"), user("r"), assistant("")),
            user("do"),
            assistant("a"),
        ],
        [False, False, False, False, False, False, True],
    ),
    "history of a prompt with a system message": (
        {
            "prompt": [{"role": "system", "content": "s"}, user("r")],
            "completion": "a",
            "history": [["q", "b"]],
            "system": "",
        },
        [{"role": "system", "content": "s"}, user("q"), assistant("b"), user("r"), assistant("a")],
        [False, False, False, False, True],
    ),
    # Null is as good as not there, and tool calls are the template's business.
    "tools": (
        {
            "messages": [
                user("q"),
                {"role": "assistant", "content": None, "tool_calls": CALL},
                {"role": "tool", "name": "f", "content": "2"},
                assistant("a", tool_calls=None),
            ]
        },
        [
            user("q"),
            {"role": "assistant", "tool_calls": CALL},
            {"role": "tool", "name": "f", "content": "2"},
            assistant("a"),
        ],
        [False, True, False, True],
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}, assistant("c")]},
        [user("ab"), assistant("c")],
        [False, True],
    ),
    "weights": (
        {
            "messages": [
                user("q") | {"weight": 0},
                assistant("a", weight=0),
                assistant("b", weight=1, train=True),
                assistant("c", train=False),
                assistant("d", weight=1.0),
            ]
        },
        [user("q"), assistant("a"), assistant("b"), assistant("c"), assistant("d")],
        [False, False, True, False, True],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape):
    record, messages, learned = SHAPES[shape]
    found = conversation(record)
    assert (found.where, found.messages, found.learned) == ("chats.jsonl:7", messages, learned)


def test_answers_to_be_learned():
    found = conversation({"messages": [assistant("a"), user("q"), assistant("b", weight=0), assistant("c")]})
    assert found.answers() == [0, 2, 3]
    assert (found.learned_answers(False), found.learned_answers(True)) == ([0, 3], [3])
    # The last turn is the last one said, and may be one not to be learned.
    found = conversation({"messages": [assistant("a"), user("q"), assistant("b", train=False), user("r")]})
    assert (found.learned_answers(False), found.learned_answers(True)) == ([0], [])


def test_tools_are_kept():
    messages = [user("q"), assistant("a")]
    assert conversation({"messages": messages, "tools": CALL}).tools == CALL
    assert conversation({"messages": messages, "tools": []}).tools is None


BAD: list[tuple[Any, str]] = [
    ([1], "not a JSON object but list"),
    ({"messages": None}, "neither messages, prompt and completion"),
    ({"prompt": "a", "completion": "b", "system": ["s"]}, "'system' is not text but list"),
    (
        {"prompt": [{"role": "system", "content": "s"}], "completion": "b", "system": "t"},
        "'system' and a first message of role system, which contradict each other",
    ),
    ({"prompt": "a", "completion": "b", "history": "h"}, "'history' is not a list of turns but str"),
    (
        {"prompt": "a", "completion": "b", "history": [["q", "a"], ["q"]]},
        r"history\[1\] is not a question and an answer",
    ),
    ({"instruction": "a", "output": "b", "history": [["q", None]]}, r"history\[0\] is not a question and an answer"),
    ({"messages": [assistant("a", weight=float("nan"))]}, "NaN is no number of JSON"),
    ({"messages": [assistant("a")], "tools": [{"x": -float("inf")}]}, "-Infinity is no number of JSON"),
    ({"text": "a"}, "neither messages, prompt and completion, nor instruction and output, but the keys 'text'"),
    ({"prompt": "a"}, "neither messages, prompt and completion"),
    ({}, "the keys none"),
    ({"messages": []}, "no message"),
    ({"messages": {"role": "user"}}, "'messages' is not a list of messages but dict"),
    ({"messages": ["hi"]}, r"messages\[0\] is not an object but str"),
    ({"messages": [user("a")]}, "no message of the assistant, so there is nothing to learn"),
    ({"messages": [{"role": "gpt", "content": "a"}]}, r"messages\[0\] has role 'gpt', which is none of system, user"),
    ({"messages": [{"from": "human", "value": "a"}]}, r"messages\[0\] has role None"),
    ({"messages": [user("a"), {"role": "assistant"}]}, r"messages\[1\] has no content"),
    ({"messages": [user("a"), {"role": "assistant", "tool_calls": []}]}, r"messages\[1\] has no content"),
    ({"messages": [user("a"), assistant("", tool_calls="f()")]}, r"messages\[1\].tool_calls is not a list but str"),
    ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content is not text but int"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "a"}]}]},
        r"messages\[0\].content has a part that is not text but 'image'",
    ),
    ({"messages": [user("a"), assistant("b", weight=0.5)]}, r"messages\[1\].weight is 0.5: 0 or 1"),
    ({"messages": [user("a"), assistant("b", weight="1")]}, r"messages\[1\].weight is '1': 0 or 1"),
    ({"messages": [user("a"), assistant("b", weight=True)]}, r"messages\[1\].weight is True: 0 or 1"),
    ({"messages": [user("a"), assistant("b", train=0)]}, r"messages\[1\].train is 0: true or false"),
    ({"messages": [assistant("b", train=True, weight=0)]}, "weight 0 and train true, which contradict each other"),
    ({"messages": [user("a") | {"weight": 1}]}, "is to be learned, but of role user: only the assistant's words are"),
    ({"prompt": 3, "completion": "a"}, "'prompt' is not a list of messages but int"),
    ({"prompt": "a", "completion": [user("b")]}, "no message of the assistant"),
    ({"instruction": "a", "output": None}, "'output' is not text but NoneType"),
    ({"instruction": "a", "input": ["b"], "output": "c"}, "'input' is not text but list"),
    ({"messages": [assistant("a")], "tools": "f"}, "'tools' is not a list of objects"),
]


@pytest.mark.parametrize(("record", "message"), BAD, ids=lambda value: value[:30] if isinstance(value, str) else "")
def test_a_bad_record_is_named_with_what_is_wrong(record, message):
    with pytest.raises(BadDocument, match=rf"^chats\.jsonl:7: .*{message}") as caught:
        conversation(record)
    assert "\n" not in str(caught.value)


def test_what_is_no_json_is_named_too():
    with pytest.raises(BadDocument, match=r"^chats\.jsonl:7: not JSON"):
        parse_conversation(RawDocument("chats.jsonl", 7, b'{"messages": '))


@pytest.mark.parametrize("line", [b"[", b' [{"prompt": "a", "completion": "b"}]', b'\xef\xbb\xbf[{"messages":'])
def test_an_array_is_told_from_lines(line):
    with pytest.raises(BadDocument) as caught:
        parse_conversation(RawDocument("chats.json", 1, line))
    assert str(caught.value) == "chats.json:1: a JSON array, not JSON lines: jq -c '.[]' FILE > FILE.jsonl"
