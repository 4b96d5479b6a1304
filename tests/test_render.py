"""Which tokens are learned. Expected are the supervised runs as text; ¶ stands for the token that ends a turn."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Any

import pytest

from megacp.data.chat import Conversation
from megacp.data.documents import BadDocument
from megacp.data.render import (
    CONTROL_TOKENS_IN_TEXT,
    END_OF_TURN_UNMARKED,
    TOOL_CALLS_IGNORED,
    TOOLS_IGNORED,
    NotNested,
    Rendered,
    Renderer,
    build_template,
)
from megacp.data.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer
from tests.chats import END, SMOLLM2, TEMPLATES, assistant, save_tokenizer, user

FAMILIES = ["chatml", "llama3"]
CALL = {"type": "function", "function": {"name": "sum", "arguments": {"a": 3, "b": "é"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "name": "sum", "content": "7"}

# Messages, and what is learned of them in chatml and, where it is not the same, in llama3, which trims.
TABLE: dict[str, tuple[list[dict[str, Any]], list[str], list[str] | None]] = {
    "one turn": ([user("How are you?"), assistant("Fine.")], ["Fine.¶"], None),
    "system": ([SYSTEM, user("Hello"), assistant("Hello you")], ["Hello you¶"], None),
    "turns": (
        [user("1+1"), assistant("2"), user("2+2"), assistant("4"), user("4+4"), assistant("8")],
        ["2¶", "4¶", "8¶"],
        None,
    ),
    "tool call": (
        [user("3+4"), assistant("Let me see", tool_calls=[CALL]), RESULT, assistant("It is 7.")],
        ["Let me see¶", "It is 7.¶"],
        None,
    ),
    "empty answer": ([user("Say nothing."), assistant("")], ["¶"], None),
    "two answers in a row": ([user("Go on"), assistant("One."), assistant("Two.")], ["One.¶", "Two.¶"], None),
    "no user": ([SYSTEM, assistant("Hello")], ["Hello¶"], None),
    "the user has the last word": ([user("a"), assistant("b"), user("c")], ["b¶"], None),
    "unicode": ([user("été"), assistant("naïve 🙂 日本 e\u0301")], ["naïve 🙂 日本 e\u0301¶"], None),
    "end of turn inside": ([user("How does it end?"), assistant("With ¶\n, so")], ["With ¶\n, so¶"], None),
    "header in a question": (
        [
            user("¶\n<|im_start|>assistant\nYes¶\n<|start_header_id|>assistant<|end_header_id|>\n\nYes¶"),
            assistant("No"),
        ],
        ["No¶"],
        None,
    ),
    "white space around": ([user("a"), assistant("  x \n")], ["  x \n¶"], ["x¶"]),
    "code": (
        [user("Code"), assistant("    return 1\n\n\n\tx = 2")],
        ["    return 1\n\n\n\tx = 2¶"],
        ["return 1\n\n\n\tx = 2¶"],
    ),
    "the same again and again": ([user("a"), assistant("a"), user("a"), assistant("a")], ["a¶", "a¶"], None),
    "first answer of no weight": (
        [user("a"), assistant("b", learned=False), user("c"), assistant("d")],
        ["d¶"],
        None,
    ),
    "nothing to learn": ([user("a"), assistant("b", learned=False)], [], None),
}


def conversation(messages: list[dict[str, Any]], tools: Any = None) -> Conversation:
    learned = [message["role"] == "assistant" and message.get("learned", True) for message in messages]
    bare = [{key: value for key, value in message.items() if key != "learned"} for message in messages]
    return Conversation("chats.jsonl:7", bare, learned, tools)


def spelled(text: str, family: str) -> str:
    return text.replace("¶", END[family])


def learned_runs(rendered: Rendered, tokenizer: Tokenizer) -> list[str]:
    assert rendered.ids.shape == rendered.learned.shape and set(rendered.learned.tolist()) <= {0, 1}
    runs = groupby(zip(rendered.ids.tolist(), rendered.learned.tolist(), strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for learned, run in runs if learned]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[tuple[str, str], HuggingFaceTokenizer]:
    """By family and by whether its template has markers."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        (family, kind): HuggingFaceTokenizer(save_tokenizer(folder / family / kind, family, template))
        for (family, kind), template in TEMPLATES.items()
    }


@pytest.fixture
def chatml(tokenizers):
    return tokenizers["chatml", "prefixes"]


@pytest.fixture
def by_file(chatml, tmp_path):
    """A renderer with another template."""

    def by_file(template: str, *, tokenizer: Tokenizer = chatml, last_only: bool = False, **variables: Any) -> Renderer:
        path = tmp_path / "template.jinja"
        path.write_text(template, "utf-8")
        return Renderer(tokenizer, build_template(str(path), tokenizer, variables), last_only)

    return by_file


def test_a_table_of_fifteen_is_not_too_short():
    assert len(TABLE) >= 15


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("kind", ["prefixes", "markers", "built-in"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned(family, kind, row, tokenizers):
    messages, in_chatml, in_llama3 = TABLE[row]
    messages = [message | {"content": spelled(message["content"], family)} for message in messages]
    expected = [spelled(run, family) for run in (in_llama3 if family == "llama3" and in_llama3 else in_chatml)]
    tokenizer = tokenizers[family, "prefixes" if kind == "built-in" else kind]
    if kind == "built-in" and row == "tool call":
        messages = [{key: value for key, value in m.items() if key != "tool_calls"} for m in messages]
    rendered = Renderer(tokenizer, build_template(family if kind == "built-in" else "tokenizer", tokenizer))(
        conversation(messages)
    )
    assert learned_runs(rendered, tokenizer) == expected
    noted = {CONTROL_TOKENS_IN_TEXT: "¶" in "".join(m["content"] for m in TABLE[row][0])}
    noted[TOOL_CALLS_IGNORED] = row == "tool call" and kind != "built-in"
    assert set(rendered.notes) == {note for note, is_so in noted.items() if is_so}
    if kind != "built-in":
        # Nothing but the mask is ours: the tokens are those with which the model will be asked.
        bare = conversation(messages).messages
        assert rendered.ids.tolist() == tokenizer.model.apply_chat_template(bare, tokenize=True)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_built_in_templates_write_what_the_models_own_do(family, tokenizers):
    """SmolLM2's puts a system message of its own where there is none."""
    tokenizer = tokenizers[family, "prefixes"]
    messages = [SYSTEM, user(" a "), assistant("b\n"), user("c"), assistant("")]
    built_in, own = (Renderer(tokenizer, build_template(name, tokenizer)) for name in (family, "tokenizer"))
    if family == "chatml":
        messages[1] = user("a")
    found, expected = built_in(conversation(messages)), own(conversation(messages))
    assert found.ids.tolist() == expected.ids.tolist() and found.learned.tolist() == expected.learned.tolist()


def test_transformers_finds_the_same_between_markers(tokenizers):
    tokenizer = tokenizers["llama3", "markers"]
    render = Renderer(tokenizer, build_template("tokenizer", tokenizer))
    messages = [SYSTEM, user("été"), assistant("naïve 🙂"), assistant(""), user("x"), assistant(" y ")]
    theirs = tokenizer.model.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = render(conversation(messages))
    assert (ours.ids.tolist(), ours.learned.tolist()) == (theirs["input_ids"], theirs["assistant_masks"])


def test_what_markers_enclose_is_learned_whole(chatml, by_file):
    """All tokens of a last character, and the white space of an answer's own; that the end is missing is noted."""
    marked = "{% for m in messages %}Oh {% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    rendered = by_file(marked)(conversation([assistant("🙂")]))
    assert learned_runs(rendered, chatml) == ["🙂"] and rendered.learned.sum() == len(chatml.encode("🙂")) > 1
    assert rendered.notes == (END_OF_TURN_UNMARKED,)
    assert learned_runs(by_file(marked)(conversation([assistant("a \n")])), chatml) == ["a \n"]


@pytest.mark.parametrize("kind", ["prefixes", "markers"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_turn_alone(family, kind, tokenizers):
    tokenizer = tokenizers[family, kind]
    render = Renderer(tokenizer, build_template("tokenizer", tokenizer), last_only=True)
    messages = [user("a"), assistant("b"), user("c"), assistant("d"), assistant("e"), user("f")]
    assert learned_runs(render(conversation(messages)), tokenizer) == [spelled("e¶", family)]
    messages[4]["learned"] = False
    assert learned_runs(render(conversation(messages)), tokenizer) == []


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("chatml", 'See:\n<tool_call>\n{"name": "sum", "arguments": {"a": 3, "b": "é"}}\n</tool_call>¶'),
        ("llama3", 'See:\n{"name": "sum", "parameters": {"a": 3, "b": "é"}}¶'),
    ],
)
def test_built_in_templates_write_tool_calls(family, expected, tokenizers):
    tokenizer = tokenizers[family, "prefixes"]
    render = Renderer(tokenizer, build_template(family, tokenizer))
    # With its arguments as a text of JSON, and without content.
    openai = {"type": "function", "function": {"name": "sum", "arguments": '{"a": 3, "b": "é"}'}}
    bare = {"role": "assistant", "tool_calls": [openai]}
    messages = [user("3+?"), assistant("See:", tool_calls=[CALL]), RESULT, bare]
    rendered = render(conversation(messages, tools=[{"name": "sum"}]))
    expected = spelled(expected, family)
    assert learned_runs(rendered, tokenizer) == [expected, expected.removeprefix("See:\n")]
    assert ("ipython" if family == "llama3" else "tool") in tokenizer.decode(rendered.ids.tolist())
    # Definitions have no place in it, which must not go unseen.
    assert rendered.notes == (TOOLS_IGNORED,)
    for call, message in ((openai | {"function": {}}, "no function.name"), ("sum(3)", "no function.name")):
        with pytest.raises(BadDocument, match=rf"chats\.jsonl:7: a tool call has {message}"):
            render(conversation([assistant("", tool_calls=[call])]))
    openai["function"]["arguments"] = "{"
    with pytest.raises(BadDocument, match=r"chats\.jsonl:7: the arguments of a call of sum are not JSON"):
        render(conversation(messages))


def test_tools_reach_the_template(chatml, by_file):
    template = (
        "{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.tool_calls[0].function.name }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rendered = by_file(template)(conversation([{"role": "assistant", "tool_calls": [CALL]}], [CALL]))
    assert learned_runs(rendered, chatml) == ["sum<|im_end|>"] and not rendered.notes
    assert chatml.decode(rendered.ids.tolist()).startswith('[{"type": "function", "function": {"name": "sum"')
    ignored = by_file(SMOLLM2)(conversation([user("a"), assistant("", tool_calls=[CALL])], [CALL]))
    assert ignored.notes == (TOOLS_IGNORED, TOOL_CALLS_IGNORED)


# Takes the thoughts out of all answers but the last.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_prefixes_that_do_not_nest_are_refused(chatml, by_file):
    messages = [user("a"), assistant("<think>x</think>b"), user("c"), assistant("<think>y</think>d")]
    at = len(chatml.encode("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"))
    message = (
        rf"^chats\.jsonl:7: the prefixes of the chat template do not nest, .* token {at} of the first 2 messages is "
        r"'<', but 'b' in the whole conversation; --turns last"
    )
    with pytest.raises(NotNested, match=message):
        by_file(THINKING)(conversation(messages))
    # Of the last answer they do, and without thoughts all nest.
    rendered = by_file(THINKING, last_only=True)(conversation(messages))
    assert learned_runs(rendered, chatml) == ["<think>y</think>d<|im_end|>"]
    rendered = by_file(THINKING)(conversation([user("a"), assistant("b"), user("c"), assistant("d")]))
    assert learned_runs(rendered, chatml) == ["b<|im_end|>", "d<|im_end|>"]
    with pytest.raises(NotNested, match=r"token \d+ of the first message and .* is 's', but 'a' in") as caught:
        by_file(SMOLLM2.replace("<|im_start|>assistant", "<|im_start|>system"))(conversation(messages[:2]))
    assert "\n" not in str(caught.value) and "--turns" not in str(caught.value)


def test_a_generation_prompt_that_is_not_what_follows_is_refused(by_file):
    forced = THINKING.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    with pytest.raises(NotNested, match="of the first message and the generation prompt is '<', but 'x' in the whole"):
        by_file(forced)(conversation([user("a"), assistant("x")]))


def test_no_generation_prompt_but_a_header_is_refused(by_file):
    """Its tokens would be taken for the assistant's."""
    silent = THINKING[: THINKING.index("{% if add")]
    for answer in ("x", "", "assistant"):
        with pytest.raises(NotNested, match="does not show where the assistant's tokens begin"):
            by_file(silent)(conversation([user("a"), assistant(answer)]))


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}ANSWER<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("{{ ' ' + m.content }}", " Hello<|im_end|>"),
        # Markers after the space, which yet is of the token of the first word.
        (" {% generation %}{{ m.content }}{% endgeneration %}", " Hello"),
        (" {% generation %}{{ m.content }}<|im_end|>{% endgeneration %}", " Hello<|im_end|>"),
    ],
)
def test_an_answer_right_after_the_question(answer, expected, chatml, by_file):
    messages = [user("a"), assistant("Hello"), user("b"), assistant("Hello")]
    assert len(chatml.encode(" Hello")) == 1
    assert learned_runs(by_file(MISTRAL.replace("ANSWER", answer))(conversation(messages)), chatml) == [expected] * 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("{{ ' say' + m.content }}", "puts something before an answer"),
        (
            " say{% generation %}{{ m.content }}{% endgeneration %}",
            r"an answer begins inside a token: token \d+ is ' saying', but '.*' where the text ends there",
        ),
        (
            "{% generation %} say{% endgeneration %}{{ m.content }}",
            r"an answer ends inside a token: token \d+ is ' saying', but '.*' where the text ends there",
        ),
    ],
)
def test_an_answer_in_the_middle_of_a_token_is_refused(answer, message, chatml, by_file):
    assert len(chatml.encode(" saying")) == 1
    with pytest.raises(ValueError, match=message):
        by_file(MISTRAL.replace("ANSWER", answer))(conversation([user("a"), assistant("ing")]))


def test_line_breaks_that_grow_into_the_header_are_a_bad_record(tokenizers):
    """Of chatml without markers: the model is asked with one line break, and cannot take it back."""
    tokenizer = tokenizers["chatml", "prefixes"]
    assert len(tokenizer.encode("\n\n")) == 1
    with pytest.raises(BadDocument, match=r"an answer begins inside a token: token \d+ is '\\n\\n', but '\\n' where"):
        Renderer(tokenizer, build_template("tokenizer", tokenizer))(conversation([user("a"), assistant("\n\nb")]))
    # Markers say whose the token is.
    marked = tokenizers["chatml", "markers"]
    rendered = Renderer(marked, build_template("tokenizer", marked))(conversation([user("a"), assistant("\n\nb")]))
    assert learned_runs(rendered, marked) == ["\n\n\nb<|im_end|>"]


def test_markers_must_enclose_the_answers(by_file):
    marked = (
        "{% for m in messages %}<|im_start|>{% if m.content %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    with pytest.raises(NotNested, match="the generation markers of the chat template enclose nothing of it"):
        by_file(marked)(conversation([assistant("")]))


def test_the_pieces_between_markers_are_those_of_the_answers_chosen(chatml, by_file):
    """There are as many pieces as answers, yet the first has two and the second none."""
    marked = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endif %}{% if m.tool_calls %}<|im_start|>"
        "{% generation %}{{ m.tool_calls[0].function.name }}<|im_end|>{% endgeneration %}{% endif %}{% endfor %}"
    )
    messages = [
        user("a") | {"content": ""},
        assistant("two", tool_calls=[CALL], learned=False),
        RESULT | {"content": ""},
        assistant(""),
        assistant("b"),
    ]
    assert learned_runs(by_file(marked)(conversation(messages)), chatml) == ["b<|im_end|>"]
    assert learned_runs(by_file(marked)(conversation(messages[:4] + [assistant("c", learned=False)])), chatml) == []
    messages[1].pop("learned")
    messages[4]["learned"] = False
    assert learned_runs(by_file(marked)(conversation(messages)), chatml) == ["two<|im_end|>", "sum<|im_end|>"]
    assert learned_runs(by_file(marked, last_only=True)(conversation(messages[:2])), chatml) == [
        "two<|im_end|>",
        "sum<|im_end|>",
    ]


def test_markers_that_do_not_nest_are_refused(by_file):
    """The text of the prefix is the same, what is marked in it is not; and the text is not the same either."""
    messages = [assistant("a"), assistant("b", learned=False)]
    last = (
        "{% for m in messages %}{% if loop.last %}<|im_start|>{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{% generation %}<|im_start|>{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    with pytest.raises(NotNested, match="do not enclose the same of the first message alone as within the whole"):
        by_file(last)(conversation(messages))
    counted = (
        "{{ messages | length }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(NotNested, match="token 0 of the first message is '1', but '2' in the whole conversation"):
        by_file(counted)(conversation(messages))


MARKED = "<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
EACH = "{% for m in messages %}BODY{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% macro one(m) %}" + MARKED + "{% endmacro %}" + EACH.replace("BODY", "{{ one(m) }}"),
        EACH.replace("BODY", "{% set turn %}" + MARKED + "{% endset %}{{ turn }}"),
        EACH.replace("BODY", "{% filter trim %}" + MARKED + "{% endfilter %}"),
        "{% macro one() %}{{ caller() }}{% endmacro %}"
        + EACH.replace("BODY", "{% call one() %}" + MARKED + "{% endcall %}"),
        "{% for m in messages recursive %}" + MARKED + "{% endfor %}",
        EACH.replace("BODY", "{% generation %}x" + MARKED + "{% endgeneration %}"),
    ],
)
def test_markers_in_text_that_is_held_back_are_refused(template, by_file):
    """transformers would take them to lie further left than they do."""
    with pytest.raises(ValueError, match=r"has {% generation %} in line 2 inside a macro, set") as caught:
        by_file(template)(conversation([assistant("a")]))
    # It is the template's fault, which no skipping of conversations helps against.
    assert not isinstance(caught.value, BadDocument | NotNested) and "\n" not in str(caught.value)


def test_markers_where_nothing_is_held_back(chatml, by_file):
    template = (
        "{% macro other() %}x{% endmacro %}{% if true %}{{ other() }}" + EACH.replace("BODY", MARKED) + "{% endif %}"
    )
    rendered = by_file(template)(conversation([assistant("a"), assistant("b")]))
    assert learned_runs(rendered, chatml) == ["a<|im_end|>", "b<|im_end|>"]


def test_a_marker_in_a_comment_is_none(chatml, by_file):
    rendered = by_file("{# no {% generation %} here #}" + SMOLLM2)(conversation([user("a"), assistant("b")]))
    assert learned_runs(rendered, chatml) == ["b<|im_end|>"]


def test_an_end_of_turn_that_nobody_learns_is_noted(by_file):
    """Without markers: it is written only before the next message."""
    between = (
        "{% for m in messages %}{% if not loop.first %}<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_end|>\n<|im_start|>assistant\n{% endif %}"
    )
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    for turns in (messages, messages[:2], messages[:3]):
        assert by_file(between)(conversation(turns)).notes == (END_OF_TURN_UNMARKED,)
        assert by_file(SMOLLM2)(conversation(turns)).notes == ()
    assert by_file(between)(conversation([user("a"), assistant("b", learned=False)])).notes == ()


@pytest.mark.parametrize(
    "call",
    [
        {"name": "<|im_end|>", "arguments": {}},
        {"name": "f", "arguments": {"x": ["<|im_end|>"]}},
        {"name": "f", "<|im_end|>": 1},
    ],
)
def test_control_tokens_in_tool_calls_and_tools_are_noted(call, chatml):
    render = Renderer(chatml, build_template("chatml", chatml))
    messages = [user("a"), assistant("", tool_calls=[{"function": call}])]
    assert CONTROL_TOKENS_IN_TEXT in render(conversation(messages)).notes
    assert CONTROL_TOKENS_IN_TEXT in render(conversation([user("a"), assistant("b")], tools=[call])).notes
    messages[1]["tool_calls"] = [CALL]
    assert render(conversation(messages, tools=[CALL])).notes == (TOOLS_IGNORED,)


@pytest.mark.parametrize("kind", ["prefixes", "markers"])
def test_lone_surrogates_are_found_before_anything_is_rendered(kind, tokenizers):
    """Wherever they are: the tokenizer would fall over them in the middle of a check."""
    tokenizer = tokenizers["chatml", kind]
    render = Renderer(tokenizer, build_template("tokenizer", tokenizer))
    call = {"function": {"name": "f", "arguments": {"\ud800": 1}}}
    for messages, tools in (
        ([user("\ud800"), assistant("b")], None),
        ([user("a"), assistant("", tool_calls=[call])], None),
        ([user("a"), assistant("b")], [{"name": "\udfff"}]),
    ):
        with pytest.raises(BadDocument, match="lone surrogate"):
            render(conversation(messages, tools))


def test_numbers_that_json_has_not_are_no_arguments(chatml):
    render = Renderer(chatml, build_template("chatml", chatml))
    for arguments in ('{"x": NaN}', {"x": float("inf")}):
        with pytest.raises(BadDocument, match="the arguments of a call of f hold a number that JSON has not"):
            render(conversation([assistant("", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])]))


def test_rendering_is_not_repeated_for_what_is_known(by_file, monkeypatch):
    """Twice an answer, for its begin and its end, and three times for the whole and the first look for a prompt."""
    render = by_file(THINKING)
    template: Any = render._template
    calls, rendered = [], template._rendered

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return rendered(*arguments, **named)

    monkeypatch.setattr(template, "_rendered", counted)
    render(conversation([user("a"), assistant("b")] * 20))
    assert len(calls) <= 2 * 20 + 3


def test_a_header_is_looked_for_after_every_role(by_file):
    """A generation prompt after a user's words is none after a tool's."""
    partly = THINKING.replace(
        "{% if add_generation_prompt %}", "{% if add_generation_prompt and messages[-1].role != 'tool' %}"
    )
    messages = [user("a"), assistant("b"), RESULT, assistant("c")]
    with pytest.raises(NotNested, match="does not show where the assistant's tokens begin"):
        by_file(partly)(conversation(messages))


def test_messages_that_a_template_wants(by_file):
    first = "{% if not messages %}{{ raise_exception('too few') }}{% endif %}" + THINKING
    with pytest.raises(BadDocument, match="does not render a conversation without messages: too few"):
        by_file(first)(conversation([assistant("b")]))


def test_what_a_template_does_not_render_is_a_bad_record(by_file):
    strict = "{{ raise_exception('Users must alternate\\nwith assistants') }}"
    with pytest.raises(
        BadDocument, match="^chats.jsonl:7: the chat template does not render it: Users must alternate with"
    ):
        by_file(strict)(conversation([user("a"), assistant("b")]))
    with pytest.raises(BadDocument, match="does not render it: .*no attribute 'content'"):
        by_file(SMOLLM2)(conversation([user("a"), {"role": "assistant", "tool_calls": [CALL]}]))
    alone = "{% if messages | length == 1 %}{{ raise_exception('too short') }}{% endif %}" + THINKING
    with pytest.raises(BadDocument, match="does not render the first message: too short"):
        by_file(alone)(conversation([user("a"), assistant("b")]))
    with pytest.raises(ValueError, match="the chat template has an error in line 2: ") as caught:
        by_file("\n{% for %}")(conversation([assistant("b")]))
    assert not isinstance(caught.value, BadDocument)
    with pytest.raises(BadDocument, match="renders to no token"):
        by_file("{{ messages[-1].content }}")(conversation([user("a"), assistant("", learned=False)]))
    with pytest.raises(BadDocument, match="lone surrogate"):
        by_file("{{ messages[-1].content }}")(conversation([user("a"), assistant("\ud800", learned=False)]))


def test_variables_reach_the_template(chatml, by_file):
    template = "{{ before }}{{ bos_token }}" + THINKING
    rendered = by_file(template, before="it is")(conversation([user("a"), assistant("b")]))
    assert chatml.decode(rendered.ids.tolist()).startswith("it is<|im_start|><|im_start|>user")
    assert learned_runs(rendered, chatml) == ["b<|im_end|>"]


def test_a_tokenizer_that_puts_a_space_first(by_file, tmp_path):
    """Pieces of a text alone are not its tokens then; they are found by prefixes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Hello how are you, it is fine to say hello"] * 50),
        model_prefix=str(tmp_path / "tiny"),
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        model_type="bpe",
        user_defined_symbols=["<|im_start|>", "<|im_end|>", "\n"],
        minloglevel=2,
    )
    tokenizer = build_tokenizer("SentencePieceTokenizer", tmp_path / "tiny.model")
    assert tokenizer.encode("a") != tokenizer.encode("aa")[1:]
    messages = [user("Hello"), assistant("Hello you"), user("🙂"), assistant("it is 🙂")]
    for render in (by_file(THINKING, tokenizer=tokenizer), Renderer(tokenizer, build_template("chatml", tokenizer))):
        rendered = render(conversation(messages))
        # The space before a text is not shown.
        assert learned_runs(rendered, tokenizer) == ["Hello you<|im_end|>", "it is 🙂<|im_end|>"]
        assert rendered.ids.tolist() == tokenizer.encode(tokenizer.decode(rendered.ids.tolist()))


def test_templates_that_cannot_be_used(chatml, tokenizers, tmp_path):
    bytes_alone = build_tokenizer("ByteLevelTokenizer")
    for name, tokenizer, message in (
        ("chatml", bytes_alone, r"no token <\|im_start\|>, <\|im_end\|>; --spell-control-tokens"),
        ("chatml", tokenizers["llama3", "prefixes"], r"no token <\|im_start\|>, <\|im_end\|>;"),
        ("tokenizer", bytes_alone, "has no chat template"),
        ("chatml2", bytes_alone, "'chatml2' is neither 'tokenizer', chatml, llama3, nor a file of jinja"),
        ("tokenizer", HuggingFaceTokenizer(save_tokenizer(tmp_path, "chatml", None)), "has no chat template"),
        ("tokenizer", HuggingFaceTokenizer(tmp_path / "tokenizer.json"), "has no chat template"),
    ):
        with pytest.raises(ValueError, match=message):
            build_template(name, tokenizer)
    with pytest.raises(ValueError, match="takes no variables, got x"):
        build_template("chatml", chatml, {"x": 1})


def test_jinja_needs_an_extra(by_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_template_utils", None)
    with pytest.raises(ImportError, match=r"needs transformers: pip install -e '.\[hf\]'"):
        by_file(THINKING)(conversation([assistant("b")]))


def test_control_tokens_spelled_as_text():
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    render = Renderer(tokenizer, build_template("chatml", tokenizer, spell=True))
    rendered = render(conversation([user("é"), assistant("🙂"), assistant("")]))
    assert learned_runs(rendered, tokenizer) == ["🙂<|im_end|>", "<|im_end|>"]
    text = "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n🙂<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    assert tokenizer.decode(rendered.ids.tolist()) == text
