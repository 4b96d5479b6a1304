"""Text to token ids and back: sentencepiece models, Hugging Face tokenizers, plain bytes.

`build_tokenizer` takes the names Megatron-LM gives to `--tokenizer-type`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# How model families call the token that ends a document, in the order in which they are looked for.
_EOD_PIECES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<eod>", "<|eos|>", "<|im_end|>")


class Tokenizer(Protocol):
    """What the product asks of a tokenizer. No call adds special tokens by itself."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document; ValueError where the model has none."""
        ...

    @property
    def control_tokens(self) -> frozenset[str]:
        """Texts for each of which `encode` gives one id that stands for no text, wherever they come up."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteLevelTokenizer:
    """The 256 bytes of UTF-8 and an end-of-document id, 256. Any text comes back exactly."""

    vocab_size = 257
    eod = 256
    control_tokens: frozenset[str] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != self.eod).decode("utf-8", errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece model; its eos, or a piece with the name of one, ends a document."""

    # Its control pieces have no text, so that no text can hold them.
    control_tokens: frozenset[str] = frozenset()

    def __init__(self, path: Path) -> None:
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path}: not a sentencepiece model") from error
        self.vocab_size: int = self._model.get_piece_size()
        self._name = path

    @property
    def eod(self) -> int:
        if self._model.eos_id() >= 0:
            return self._model.eos_id()
        named = {piece: self._model.piece_to_id(piece) for piece in _EOD_PIECES}
        return _first_eod({piece: i for piece, i in named.items() if i != self._model.unk_id()}, self._name)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """A folder as `transformers` saves it, or a bare tokenizer.json.

    A tokenizer.json has no end-of-sequence of its own: that of a tokenizer_config.json beside it is taken, else a
    token with the name of one.

    model  what `transformers` makes of a folder, with its chat template; None for a tokenizer.json
    """

    def __init__(self, path: Path) -> None:
        parts = _from_folder(path) if path.is_dir() else _from_file(path)
        self._encode, self._decode = parts.encode, parts.decode
        self._vocabulary, self._eos, self._name = parts.vocabulary, parts.eos, path
        self.vocab_size: int = 1 + max(parts.vocabulary.values(), default=-1)
        self.control_tokens = frozenset(token.content for token in parts.added.values() if token.special)
        self.model = parts.model

    @property
    def eod(self) -> int:
        if self._eos in self._vocabulary:
            return self._vocabulary[self._eos]
        return _first_eod(self._vocabulary, self._name)

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode([int(i) for i in ids])


class _HuggingFace(NamedTuple):
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocabulary: dict[str, int]
    added: dict[int, Any]
    eos: str | None
    model: Any = None


def _from_folder(path: Path) -> _HuggingFace:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _missing("transformers") from error
    try:
        model: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ValueError(f"{path}: no Hugging Face tokenizer: {_one_line(error)}") from error
    # Documents are longer than any context; without this each of them draws a warning.
    model.model_max_length = 1 << 62

    def encode(text: str) -> list[int]:
        return model.encode(text, add_special_tokens=False)

    def decode(ids: list[int]) -> str:
        return model.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return _HuggingFace(encode, decode, model.get_vocab(), model.added_tokens_decoder, model.eos_token, model)


def _from_file(path: Path) -> _HuggingFace:
    try:
        import tokenizers
    except ImportError as error:
        raise _missing("tokenizers") from error
    try:
        model = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ValueError(f"{path}: not a tokenizer.json: {_one_line(error)}") from error
    model.no_truncation()
    model.no_padding()
    config = path.with_name("tokenizer_config.json")
    eos = json.loads(config.read_text("utf-8")).get("eos_token") if config.is_file() else None
    eos = eos.get("content") if isinstance(eos, dict) else eos

    def encode(text: str) -> list[int]:
        return model.encode(text, add_special_tokens=False).ids

    def decode(ids: list[int]) -> str:
        return model.decode(ids, skip_special_tokens=False)

    vocabulary, added = model.get_vocab(with_added_tokens=True), model.get_added_tokens_decoder()
    return _HuggingFace(encode, decode, vocabulary, added, eos)


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a type and the file or folder of its model.

    SentencePieceTokenizer takes a .model file, HuggingFaceTokenizer a folder or a tokenizer.json,
    ByteLevelTokenizer nothing. Raises ValueError for a type or a file that will not do, FileNotFoundError for a
    missing one, ImportError with the command that helps where an extra is not installed.
    """
    if tokenizer_type == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    kinds = {"SentencePieceTokenizer": SentencePieceTokenizer, "HuggingFaceTokenizer": HuggingFaceTokenizer}
    if tokenizer_type not in kinds:
        names = [*kinds, "ByteLevelTokenizer"]
        near = difflib.get_close_matches(tokenizer_type, names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"tokenizer_type {tokenizer_type!r} is none of {', '.join(names)}{hint}")
    if not tokenizer_model:
        raise ValueError(f"{tokenizer_type} needs tokenizer_model, the file or folder of its model")
    path = Path(tokenizer_model)
    if not path.exists():
        raise FileNotFoundError(f"tokenizer_model {path}: no such file or folder")
    if tokenizer_type == "SentencePieceTokenizer" and path.is_dir():
        raise ValueError(f"tokenizer_model {path} is a folder; {tokenizer_type} takes a .model file")
    return kinds[tokenizer_type](path)


def _first_eod(vocabulary: dict[str, int], name: Path) -> int:
    for piece in _EOD_PIECES:
        if piece in vocabulary:
            return vocabulary[piece]
    raise ValueError(f"{name}: no end-of-document token, neither an eos nor one of {', '.join(_EOD_PIECES)}")


def _missing(package: str) -> ImportError:
    return ImportError(f"HuggingFaceTokenizer needs {package}: pip install -e '.[hf]'")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
