"""Chats on disk: a line of JSON in one of the common shapes -> a `Conversation`.

    {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", "content": ".."}], "tools": [..]}
    {"prompt": "..", "completion": ".."}                 each a text or a list of messages
    {"instruction": "..", "input": "..", "output": ".."}

Beside any of them `system` is the text of a first message; beside the last two `history` holds earlier turns that
are not learned, [[question, answer], ..]. What is null counts as not there.

Whatever else a message holds (tool_calls, name, ..) goes to the chat template as it stands. `weight` (0 or 1) and
`train` (true or false) of an assistant's message say whether its words are to be learned; the template sees neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megacp.data.documents import BadDocument, RawDocument, parse_record

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Conversation:
    """
    where     file and line
    messages  dicts with `role`, mostly `content`, and what the template may want
    learned   for each message, whether its words are to be learned: those of assistants unless the record says no
    tools     definitions of the tools that may be called, for the template
    """

    where: str
    messages: list[dict[str, Any]]
    learned: list[bool]
    tools: list[dict[str, Any]] | None = None

    def answers(self) -> list[int]:
        """The assistant's messages, by number."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def learned_answers(self, last_only: bool) -> list[int]:
        """Those to be learned; with `last_only` the last one, or none where its record says no."""
        answers = self.answers()
        return [i for i in (answers[-1:] if last_only else answers) if self.learned[i]]


def parse_conversation(document: RawDocument) -> Conversation:
    """Raises BadDocument with file, line and what is wrong."""
    record, where = parse_record(document, strict=True), f"{document.path}:{document.line}"
    try:
        messages, learned = _with_system(record, *_messages_of(record))
        if not messages:
            raise ValueError("no message")
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("no message of the assistant, so there is nothing to learn")
        return Conversation(where, messages, learned, _tools_of(record))
    except ValueError as error:
        raise BadDocument(f"{where}: {error}") from error


def _messages_of(record: dict[str, Any]) -> tuple[list[dict[str, Any]], list[bool]]:
    if record.get("messages") is not None:
        return _turns(record["messages"], "messages")
    if "prompt" in record and "completion" in record:
        asked, _ = _turns(_as_messages(record["prompt"], "user"), "prompt")
        given, learned = _turns(_as_messages(record["completion"], "assistant"), "completion")
        # What an assistant said in the prompt is given, as everything there.
        return _after_history(record, asked + given, [False] * len(asked) + learned)
    if "instruction" in record and "output" in record:
        instruction, context, output = (_text_of(record, key) for key in ("instruction", "input", "output"))
        asked = f"{instruction}\n\n{context}" if context else instruction
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
        return _after_history(record, turns, [False, True])
    keys = ", ".join(map(repr, list(record)[:8])) or "none"
    raise ValueError(f"neither messages, prompt and completion, nor instruction and output, but the keys {keys}")


def _with_system(
    record: dict[str, Any], messages: list[dict[str, Any]], learned: list[bool]
) -> tuple[list[dict[str, Any]], list[bool]]:
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise ValueError(f"'system' is not text but {type(system).__name__}")
    if not system:
        return messages, learned
    if not _begins_with_system(messages):
        return [{"role": "system", "content": system}, *messages], [False, *learned]
    if messages[0].get("content") != system:
        raise ValueError("'system' and a first message of role system, which contradict each other")
    return messages, learned


def _after_history(
    record: dict[str, Any], messages: list[dict[str, Any]], learned: list[bool]
) -> tuple[list[dict[str, Any]], list[bool]]:
    history = record.get("history")
    if history is not None and not isinstance(history, list):
        raise ValueError(f"'history' is not a list of turns but {type(history).__name__}")
    earlier: list[dict[str, Any]] = []
    for k, turn in enumerate(history or []):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise ValueError(f"history[{k}] is not a question and an answer, two texts")
        earlier += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    at = int(_begins_with_system(messages))
    return messages[:at] + earlier + messages[at:], learned[:at] + [False] * len(earlier) + learned[at:]


def _begins_with_system(messages: list[dict[str, Any]]) -> bool:
    return bool(messages) and messages[0]["role"] == "system"


def _text_of(record: dict[str, Any], key: str) -> str:
    text = record.get(key)
    if text is None and key == "input":
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{key!r} is not text but {type(text).__name__}")
    return text


def _as_messages(given: Any, role: str) -> Any:
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def _turns(given: Any, name: str) -> tuple[list[dict[str, Any]], list[bool]]:
    if not isinstance(given, list):
        raise ValueError(f"{name!r} is not a list of messages but {type(given).__name__}")
    turns = [_turn(message, f"{name}[{k}]") for k, message in enumerate(given)]
    return [message for message, _ in turns], [learned for _, learned in turns]


def _turn(given: Any, name: str) -> tuple[dict[str, Any], bool]:
    if not isinstance(given, dict):
        raise ValueError(f"{name} is not an object but {type(given).__name__}")
    if (role := given.get("role")) not in ROLES:
        raise ValueError(f"{name} has role {role!r}, which is none of {', '.join(ROLES)}")
    # Many templates take a key for given although its value is null.
    message = {key: value for key, value in given.items() if value is not None and key not in ("weight", "train")}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise ValueError(f"{name}.tool_calls is not a list but {type(calls).__name__}")
    if "content" in message:
        message["content"] = _content(message["content"], f"{name}.content")
    elif not calls:
        raise ValueError(f"{name} has no content")
    return message, _learned(given, name)


def _content(given: Any, name: str) -> str:
    """Text, or a list of parts that are text."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ValueError(f"{name} is not text but {type(given).__name__}")
    for part in given:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"{name} has a part that is not text but {kind!r}")
    return "".join(part["text"] for part in given)


def _learned(given: dict[str, Any], name: str) -> bool:
    weight, train = given.get("weight"), given.get("train")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError(f"{name}.weight is {weight!r}: 0 or 1")
    if train is not None and not isinstance(train, bool):
        raise ValueError(f"{name}.train is {train!r}: true or false")
    if weight is not None and train is not None and bool(weight) != train:
        raise ValueError(f"{name} has weight {weight} and train {str(train).lower()}, which contradict each other")
    asked = weight if weight is not None else train
    if given["role"] != "assistant":
        if asked:
            raise ValueError(f"{name} is to be learned, but of role {given['role']}: only the assistant's words are")
        return False
    return asked is None or bool(asked)


def _tools_of(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("'tools' is not a list of objects")
    return tools or None
