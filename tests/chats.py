"""Tiny tokenizers with the chat templates of two families, as transformers saves them; the templates themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CONTROL = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}
END = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}
# As SmolLM2-Instruct has it.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 3 Instruct has it.
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The same two with markers, which in the first take in the line break after the turn.
SMOLLM2_MARKED = SMOLLM2.replace(
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}",
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}",
)
LLAMA3_MARKED = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    ("chatml", "prefixes"): SMOLLM2,
    ("llama3", "prefixes"): LLAMA3,
    ("chatml", "markers"): SMOLLM2_MARKED,
    ("llama3", "markers"): LLAMA3_MARKED,
}
_TEXT = "\n\n".join(["Oh Hello, how are you today? saying: it is 12345 now.\n\n    return the value\n\n\n"] * 20)
# Of Llama 3's way to cut words, what matters here: line breaks with the white space before them are one.
_LLAMA3_WORDS = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+| ?\p{L}+"


def save_tokenizer(folder: Path, family: str, template: str | None) -> Path:
    """A byte-level BPE of some 400 tokens with a family's control tokens and way of cutting words."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model, cut = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers
    words = {
        "chatml": [cut.Digits(individual_digits=True), cut.ByteLevel(add_prefix_space=False)],
        "llama3": [
            cut.Split(tokenizers.Regex(_LLAMA3_WORDS), "isolated"),
            cut.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    model.pre_tokenizer = cut.Sequence(words[family])
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=CONTROL[family],
        initial_alphabet=cut.ByteLevel.alphabet(),
    )
    model.train_from_iterator([_TEXT], trainer)
    saved: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=END[family], bos_token=CONTROL[family][1 if family == "chatml" else 0]
    )
    saved.chat_template = template
    saved.save_pretrained(folder)
    return folder


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}
