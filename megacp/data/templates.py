"""The built-in chat templates: messages -> pieces of text, each with the message whose author wrote it.

Only what an assistant writes has an author here: its words and the token that ends its turn, not the header before
and not the white space after.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]


class Piece(NamedTuple):
    text: str
    author: int | None = None  # number of the assistant's message, or None: written by the template or the user


class BuiltIn(NamedTuple):
    """`control_tokens` are those that the pieces are built of."""

    pieces: Callable[[Messages], list[Piece]]
    control_tokens: tuple[str, ...]


def _chatml(messages: Messages) -> list[Piece]:
    """ChatML; tool calls as Hermes and Qwen write them, one <tool_call> block after the other."""
    pieces = []
    for i, message in enumerate(messages):
        author = i if message["role"] == "assistant" else None
        calls = [f"<tool_call>\n{_call(call, 'arguments')}\n</tool_call>" for call in message.get("tool_calls", [])]
        words = "\n".join(filter(None, [message.get("content"), *calls]))
        pieces += [Piece(f"<|im_start|>{message['role']}\n"), Piece(words + "<|im_end|>", author), Piece("\n")]
    return pieces


def _llama3(messages: Messages) -> list[Piece]:
    """Llama 3's; tool calls and results as in Llama 3.1, a line of JSON each and a role `ipython`."""
    pieces = [Piece("<|begin_of_text|>")]
    for i, message in enumerate(messages):
        author = i if message["role"] == "assistant" else None
        role = "ipython" if message["role"] == "tool" else message["role"]
        calls = [_call(call, "parameters") for call in message.get("tool_calls", [])]
        words = "\n".join(filter(None, [message.get("content", "").strip(), *calls]))
        pieces += [Piece(f"<|start_header_id|>{role}<|end_header_id|>\n\n"), Piece(words + "<|eot_id|>", author)]
    return pieces


def _call(call: Any, arguments_key: str) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool call has no function.name")
    arguments = function.get("arguments", {})
    try:
        # The OpenAI form holds them as a text of JSON.
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise ValueError(f"the arguments of a call of {function['name']} are not JSON: {error}") from error
    try:
        return json.dumps({"name": function["name"], arguments_key: arguments}, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"the arguments of a call of {function['name']} hold a number that JSON has not") from error


BUILT_IN = {
    "chatml": BuiltIn(_chatml, ("<|im_start|>", "<|im_end|>")),
    "llama3": BuiltIn(_llama3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
}
