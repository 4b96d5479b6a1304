"""Conversations -> token ids, and which of these are learned: the assistant's, the end of its turn included.

A chat template says what is whose in one of three ways: a built-in one as it is written, a jinja one by its
{% generation %} markers, and one without markers by its prefixes. For the last, the messages before an answer are
rendered with the generation prompt, and those up to the answer; each must be where the whole conversation begins,
token by token. Nothing is guessed: what does not nest is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megacp.data.chat import Conversation
from megacp.data.documents import BadDocument
from megacp.data.templates import BUILT_IN, BuiltIn
from megacp.data.tokenizer import HuggingFaceTokenizer, Tokenizer

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_PROBE = "answer"

# What may be odd about a conversation without making it a bad one.
TOOLS_IGNORED = "tools_ignored"
TOOL_CALLS_IGNORED = "tool_calls_ignored"
CONTROL_TOKENS_IN_TEXT = "control_tokens_in_text"
END_OF_TURN_UNMARKED = "end_of_turn_unmarked"


class NotNested(ValueError):
    """A template does not show which words are the assistant's."""


class Layout(NamedTuple):
    """
    text     a conversation as its template writes it
    spans    ranges of characters that are learned, ascending
    widened  a token that begins or ends with white space outside a span still belongs to it
    notes    what is odd
    """

    text: str
    spans: list[tuple[int, int]]
    widened: bool = False
    notes: tuple[str, ...] = ()


class Template(Protocol):
    def lay_out(self, conversation: Conversation, answers: list[int]) -> Layout:
        """The conversation with the spans of `answers`, numbers of messages of the assistant.

        Raises BadDocument for a conversation, NotNested for a template that will not do.
        """
        ...


class Rendered(NamedTuple):
    """
    ids      int64 [L]
    learned  uint8 [L], 1 for the tokens to be predicted
    notes    what is odd about the conversation
    """

    ids: np.ndarray
    learned: np.ndarray
    notes: tuple[str, ...]


class Renderer:
    """Gives the tokens of conversations, all of the assistant's turns learned or the last one only."""

    def __init__(self, tokenizer: Tokenizer, template: Template, last_only: bool = False) -> None:
        self._tokenizer, self._template, self._last_only = tokenizer, template, last_only
        self._control = _any_of(tokenizer.control_tokens)

    def __call__(self, conversation: Conversation) -> Rendered:
        """Raises BadDocument or NotNested."""
        texts = list(_texts([conversation.messages, conversation.tools]))
        # Before a template or tokenizer meets it.
        if any(map(_LONE_SURROGATE.search, texts)):
            raise BadDocument(f"{conversation.where}: a message or tool holds a lone surrogate, which is no text")
        layout = self._template.lay_out(conversation, conversation.learned_answers(self._last_only))
        ids = self._tokenizer.encode(layout.text)
        if not ids:
            raise BadDocument(f"{conversation.where}: renders to no token")
        learned = np.zeros(len(ids), np.uint8)
        for begin, end in self._token_spans(layout, ids, conversation.where):
            learned[begin:end] = 1
        odd = self._control is not None and any(map(self._control.search, texts))
        notes = (*layout.notes, CONTROL_TOKENS_IN_TEXT) if odd else layout.notes
        return Rendered(np.array(ids), learned, notes)

    def _token_spans(self, layout: Layout, ids: list[int], where: str) -> Iterable[tuple[int, int]]:
        text = layout.text
        edges = token_edges(self._tokenizer.encode, text, ids, [edge for span in layout.spans for edge in span])
        for begin, end in layout.spans:
            first, last = edges[begin], edges[end]
            while layout.widened and first is None and text[begin - 1].isspace():
                begin -= 1
                first = _token_edge(self._tokenizer.encode, text, ids, begin)
            while layout.widened and last is None and text[end].isspace():
                end += 1
                last = _token_edge(self._tokenizer.encode, text, ids, end)
            if first is None or last is None:
                edge, what = (begin, "begins") if first is None else (end, "ends")
                alone, whole, at = first_difference(self._tokenizer, text[:edge], ids)
                raise BadDocument(
                    f"{where}: an answer {what} inside a token: token {at} is {whole}, but {alone} where the text ends "
                    "there"
                )
            yield first, last


def _texts(given: Any) -> Iterator[str]:
    """All texts in a value of JSON, names of keys included."""
    waiting = [given]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def token_edges(
    encode: Callable[[str], list[int]], text: str, ids: list[int], edges: Iterable[int]
) -> dict[int, int | None]:
    """For each of some places in `text`, the number of tokens before it; None inside a token.

    `ids` are the tokens of `text`; besides `edges` its begin and end are among the places.
    """
    cuts = sorted({0, *edges, len(text)})
    pieces = [encode(text[begin:end]) for begin, end in pairwise(cuts)]
    if [i for piece in pieces for i in piece] == ids:
        return dict(zip(cuts, accumulate(map(len, pieces), initial=0), strict=True))
    # Not every tokenizer writes a piece alone as it does within a text.
    return {cut: _token_edge(encode, text, ids, cut) for cut in cuts}


def _token_edge(encode: Callable[[str], list[int]], text: str, ids: list[int], place: int) -> int | None:
    before = encode(text[:place])
    return len(before) if ids[: len(before)] == before else None


def first_difference(tokenizer: Tokenizer, prefix: str, ids: list[int]) -> tuple[str, str, int]:
    """(its token, the token of `ids`, their place) where the tokens of `prefix` first differ from `ids`."""
    alone = tokenizer.encode(prefix)
    same = (a == b for a, b in zip(alone, ids, strict=False))
    at = next((k for k, equal in enumerate(same) if not equal), min(len(alone), len(ids)))

    def shown(tokens: list[int]) -> str:
        return repr(tokenizer.decode(tokens[at : at + 1])) if at < len(tokens) else "none"

    return shown(alone), shown(ids), at


class BuiltInTemplate:
    """A template of `templates.py`."""

    def __init__(self, built_in: BuiltIn) -> None:
        self._built_in = built_in

    def lay_out(self, conversation: Conversation, answers: list[int]) -> Layout:
        try:
            pieces = self._built_in.pieces(conversation.messages)
        except ValueError as error:
            raise BadDocument(f"{conversation.where}: {error}") from error
        ends = accumulate(len(piece.text) for piece in pieces)
        spans = [
            (end - len(piece.text), end) for piece, end in zip(pieces, ends, strict=True) if piece.author in answers
        ]
        notes = (TOOLS_IGNORED,) if conversation.tools else ()
        return Layout("".join(piece.text for piece in pieces), spans, notes=notes)


class JinjaTemplate:
    """A template as Hugging Face has them, rendered by transformers.

    source     gives the template for a conversation with these tools
    variables  what it finds beside the messages
    """

    def __init__(
        self, source: Callable[[list[dict[str, Any]] | None], str], tokenizer: Tokenizer, variables: dict[str, Any]
    ) -> None:
        self._source, self._tokenizer, self._variables = source, tokenizer, variables

    def lay_out(self, conversation: Conversation, answers: list[int]) -> Layout:
        text, marked = self._render(conversation)
        notes = self._ignored(conversation, text)
        has_markers = _has_markers(self._source(conversation.tools))
        if has_markers:
            chosen = self._chosen(conversation, text, marked, answers)
            spans = [self._without_space_after(text, span) for span in chosen]
        else:
            prompted: set[str] = set()
            spans = [self._span(conversation, text, i, answers, prompted) for i in answers]
        unmarked = any(self._end_is_unmarked(conversation, text, end) for _, end in spans)
        return Layout(text, spans, widened=has_markers, notes=notes + (END_OF_TURN_UNMARKED,) * unmarked)

    def _chosen(
        self, conversation: Conversation, text: str, marked: list[tuple[int, int]], answers: list[int]
    ) -> list[tuple[int, int]]:
        """Of the spans between markers those of `answers`: what comes to the messages before with each of them."""
        if answers and not marked:
            raise NotNested(f"{conversation.where}: the generation markers of the chat template enclose nothing of it")
        if answers == conversation.answers():
            return marked
        edges = {count for answer in answers for count in (answer, answer + 1)}
        spans_before = {count: self._spans_before(conversation, count, text, marked, answers) for count in edges}
        return [span for i in answers for span in marked[spans_before[i] : spans_before[i + 1]]]

    def _spans_before(
        self, conversation: Conversation, count: int, text: str, marked: list[tuple[int, int]], answers: list[int]
    ) -> int:
        """How many of the `marked` spans are of the first `count` messages."""
        if count in (0, len(conversation.messages)):
            return len(marked) if count else 0
        prefix, spans = self._render(conversation, count)
        self._check_nested(prefix.rstrip(), text, _first(count), conversation.where, answers)
        if marked[: len(spans)] != spans:
            raise NotNested(
                f"{conversation.where}: the generation markers of the chat template do not enclose the same of "
                f"{_first(count)} alone as within the whole conversation, so they do not show which piece is of the "
                f"{len(answers)} to be learned"
            )
        return len(spans)

    def _span(
        self, conversation: Conversation, text: str, answer: int, answers: list[int], prompted: set[str]
    ) -> tuple[int, int]:
        """Characters of message `answer`, found by prefixes.

        prompted  roles after which there was a generation prompt, for which this is not looked at again
        """
        begin = self._render(conversation, answer, prompt=True)[0]
        self._check_nested(begin, text, f"{_first(answer)} and the generation prompt", conversation.where, answers)
        role = conversation.messages[answer - 1]["role"] if answer else ""
        if role not in prompted:
            if begin == self._render(conversation, answer)[0]:
                self._check_no_header(conversation, answer, begin)
            else:
                prompted.add(role)
        last = answer + 1 == len(conversation.messages)
        end = (text if last else self._render(conversation, answer + 1)[0]).rstrip()
        self._check_nested(end, text, _first(answer + 1), conversation.where, answers)
        return len(begin), max(len(begin), len(end))

    def _check_nested(self, prefix: str, text: str, what: str, where: str, answers: list[int]) -> None:
        if text.startswith(prefix):
            return
        alone, whole, at = first_difference(self._tokenizer, prefix, self._tokenizer.encode(text))
        advice = "; --turns last asks it of the last answer alone" if len(answers) > 1 else ""
        raise NotNested(
            f"{where}: the prefixes of the chat template do not nest, so it does not show which tokens are the "
            f"assistant's: token {at} of {what} is {alone}, but {whole} in the whole conversation{advice}"
        )

    def _check_no_header(self, conversation: Conversation, answer: int, begin: str) -> None:
        """A template may do without generation prompt where nothing comes between it and the answer."""
        probe = {"role": "assistant", "content": _PROBE}
        messages = [*conversation.messages[:answer], probe]
        text = self._rendered(conversation, messages, conversation.tools, prompt=False)[0]
        if not text.startswith(begin) or not text[len(begin) :].lstrip().startswith(_PROBE):
            raise NotNested(
                f"{conversation.where}: the chat template puts something before an answer, but has no generation "
                "prompt, so it does not show where the assistant's tokens begin"
            )

    def _without_space_after(self, text: str, span: tuple[int, int]) -> tuple[int, int]:
        begin, end = span
        words = text[begin:end].rstrip()
        return (begin, begin + len(words)) if words.endswith(tuple(self._tokenizer.control_tokens)) else span

    def _end_is_unmarked(self, conversation: Conversation, text: str, end: int) -> bool:
        """Whether a control token comes right after a span that ends in none: then nobody learns when to stop."""
        control = tuple(self._tokenizer.control_tokens)
        if text.endswith(control, 0, end):
            return False
        after = text[end:].lstrip()
        if not after and control:
            # Some write the end of a turn only before the next.
            messages = [*conversation.messages, {"role": "user", "content": _PROBE}]
            longer = self._without(conversation, messages, conversation.tools) or ""
            after = longer[end:].lstrip() if longer.startswith(text[:end]) else ""
        return after.startswith(control)

    def _ignored(self, conversation: Conversation, text: str) -> tuple[str, ...]:
        """Whether tools and calls leave no trace in `text`."""
        notes = []
        messages, tools = conversation.messages, conversation.tools
        if tools and self._without(conversation, messages, None) == text:
            notes.append(TOOLS_IGNORED)
        if any("tool_calls" in message for message in messages):
            bare = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
            if self._without(conversation, bare, tools) == text:
                notes.append(TOOL_CALLS_IGNORED)
        return tuple(notes)

    def _without(self, conversation: Conversation, messages: list[dict[str, Any]], tools: Any) -> str | None:
        try:
            return self._rendered(conversation, messages, tools, prompt=False)[0]
        except BadDocument:
            return None

    def _render(
        self, conversation: Conversation, count: int | None = None, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of the first `count` messages (all), and the ranges of characters that markers enclose."""
        return self._rendered(conversation, conversation.messages[:count], conversation.tools, prompt)

    def _rendered(
        self, conversation: Conversation, messages: list[dict[str, Any]], tools: Any, prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ImportError("a chat template in jinja needs transformers: pip install -e '.[hf]'") from error
        source = self._source(tools)
        has_markers = _has_markers(source)
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=source,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=has_markers,
                **self._variables,
            )
        except Exception as error:
            # Whatever a template trips over, it is this conversation that it does not take.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            what = "it" if len(messages) >= len(conversation.messages) else _first(len(messages))
            raise BadDocument(f"{conversation.where}: the chat template does not render {what}: {reason}") from error
        (text,), spans = rendered
        return text, spans[0] if spans else []


def _first(count: int) -> str:
    if not count:
        return "a conversation without messages"
    return f"the first {count} messages" if count != 1 else "the first message"


@functools.lru_cache
def _has_markers(source: str) -> bool:
    """Whether a jinja template has generation markers.

    Raises ValueError for one with errors, or with markers where transformers does not know how much text comes
    before: what these tags enclose is held back until they end.
    """
    from jinja2 import TemplateSyntaxError, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    held_back = (nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock)

    def markers(within: Any, held: bool) -> Iterator[tuple[int, bool]]:
        """The lines of the markers, and whether their text is held back."""
        for node in within.iter_child_nodes():
            if isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.ExtensionAttribute):
                yield node.lineno, held
            recursive = isinstance(node, nodes.For) and node.recursive
            yield from markers(node, held or recursive or isinstance(node, held_back))

    try:
        found = list(markers(_compile_jinja_template(source).environment.parse(source), held=False))
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
    for line, held in found:
        if held:
            raise ValueError(
                f"the chat template has {{% generation %}} in line {line} inside a macro, set, filter, call or other "
                "generation block or a recursive loop, where it does not show which tokens are the assistant's: "
                "take it out of there"
            )
    return bool(found)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    alternatives = "|".join(map(re.escape, sorted(tokens)))
    return re.compile(alternatives) if alternatives else None


def build_template(
    name: str, tokenizer: Tokenizer, variables: dict[str, Any] | None = None, spell: bool = False
) -> Template:
    """'tokenizer' for its own template, the name of a built-in one, or a file of jinja.

    variables  for a jinja template, beside messages, tools and special tokens
    spell      let a built-in one be used although the tokenizer has not all of its control tokens, as plain text
    ValueError where it cannot be used with this tokenizer.
    """
    if name in BUILT_IN:
        if variables:
            raise ValueError(f"the built-in chat template {name} takes no variables, got {', '.join(variables)}")
        missing = [token for token in BUILT_IN[name].control_tokens if not _is_token(tokenizer, token)]
        if missing and not spell:
            raise ValueError(
                f"chat template {name}: this tokenizer has no token {', '.join(missing)}; "
                "--spell-control-tokens writes them as plain text"
            )
        return BuiltInTemplate(BUILT_IN[name])
    model = tokenizer.model if isinstance(tokenizer, HuggingFaceTokenizer) else None
    given = {**(model.special_tokens_map if model else {}), **(variables or {})}
    if name == "tokenizer":
        return JinjaTemplate(_own_source(model), tokenizer, given)
    if not Path(name).is_file():
        raise ValueError(f"chat template {name!r} is neither 'tokenizer', {', '.join(BUILT_IN)}, nor a file of jinja")
    text = Path(name).read_text("utf-8")
    return JinjaTemplate(lambda _: text, tokenizer, given)


def _is_token(tokenizer: Tokenizer, text: str) -> bool:
    # What it adds to itself, since some tokenizers put a space before whatever comes first.
    return len(tokenizer.encode(text + text)) - len(tokenizer.encode(text)) == 1


def _own_source(model: Any) -> Callable[[list[dict[str, Any]] | None], str]:
    if model is None or not model.chat_template:
        raise ValueError(
            "this tokenizer has no chat template (only a folder of Hugging Face can have one): "
            f"give --chat-template {', '.join(BUILT_IN)} or a file of jinja"
        )
    return lambda tools: model.get_chat_template(None, tools)
