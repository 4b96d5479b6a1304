from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.data.tokenizer import ByteLevelTokenizer, HuggingFaceTokenizer, build_tokenizer

ROOT = Path(__file__).parent.parent
STDLIB = Path(sysconfig.get_paths()["stdlib"])
SOURCES = [(STDLIB / name).read_text("utf-8") for name in ("ast.py", "heapq.py", "textwrap.py")]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    command = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), "--vocab-size", "600"]
    inputs = ["--input", *(str(STDLIB / name) for name in ("ast.py", "heapq.py", "textwrap.py"))]
    subprocess.run(
        [*command, *inputs, "--output-prefix", str(folder / "code")],
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )
    return folder / "code.model"


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<s>", "<|endoftext|>", "<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(SOURCES[:1], trainer)
    model.enable_truncation(4)
    # Adds <s> in front wherever special tokens are asked for, which must not be here.
    model.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizers") / "tokenizer.json"
    model.save(str(path))
    return path


def test_bytes_come_back():
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    text = "añ\x00\n▁🙂"
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod]) == text


def test_source_text_comes_back_exactly_from_sentencepiece(sentencepiece_model):
    tokenizer = build_tokenizer("SentencePieceTokenizer", sentencepiece_model)
    assert tokenizer.vocab_size == 600
    for text in SOURCES:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) < len(text) / 2 and min(ids) >= 0 and max(ids) < tokenizer.vocab_size
        assert tokenizer.eod not in ids and tokenizer.encode(text + "</s>")[-1] != tokenizer.eod
        assert tokenizer.decode([*ids, tokenizer.eod]) == text


# U+2581 is how sentencepiece writes a space; surrogates are no characters.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
pieces_of_code = st.sampled_from(["\n", "    ", "\t", "\r\n", " ", "self.", "def ", "\x0c", "\u3000", "é", "\0"])


@settings(max_examples=200, deadline=None)
@given(parts=st.lists(pieces_of_code | st.text(characters, max_size=4), max_size=12))
def test_any_text_comes_back_exactly_from_sentencepiece(sentencepiece_model, parts):
    tokenizer = build_tokenizer("SentencePieceTokenizer", sentencepiece_model)
    text = "".join(parts)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_twice_gives_the_same_model(sentencepiece_model, tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), "--vocab-size", "600"]
    inputs = ["--input", *(str(STDLIB / name) for name in ("ast.py", "heapq.py", "textwrap.py"))]
    subprocess.run([*command, *inputs, "--output-prefix", str(tmp_path / "again")], check=True, timeout=120)
    assert (tmp_path / "again.model").read_bytes() == sentencepiece_model.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.model"]


def test_a_bare_tokenizer_json(tokenizer_json):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_json)
    vocabulary = json.loads(tokenizer_json.read_text())["model"]["vocab"]
    assert tokenizer.vocab_size == 1 + max(vocabulary.values())
    assert tokenizer.eod == vocabulary["<|endoftext|>"]
    ids = tokenizer.encode(SOURCES[1])
    assert ids[0] != 0 and tokenizer.decode(ids) == SOURCES[1]
    beside = tokenizer_json.with_name("tokenizer_config.json")
    for eos in ("<end>", {"content": "<end>"}):
        beside.write_text(json.dumps({"eos_token": eos}))
        assert HuggingFaceTokenizer(tokenizer_json).eod == vocabulary["<end>"]
    beside.unlink()


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_a_folder_as_transformers_saves_it(tokenizer_json, tmp_path):
    from transformers import PreTrainedTokenizerFast

    saved = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json), eos_token="<end>", bos_token="<s>")
    saved.save_pretrained(tmp_path)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path)
    bare = build_tokenizer("HuggingFaceTokenizer", tokenizer_json)
    assert tokenizer.vocab_size == bare.vocab_size
    assert tokenizer.eod == 2
    ids = tokenizer.encode(SOURCES[1])
    assert ids == bare.encode(SOURCES[1])
    assert tokenizer.decode(ids) == SOURCES[1]


@pytest.mark.parametrize("package", ["tokenizers", "transformers"])
def test_a_missing_extra_says_what_to_install(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path if package == "transformers" else tmp_path / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ImportError, match=rf"needs {package}: pip install -e '.\[hf\]'"):
        build_tokenizer("HuggingFaceTokenizer", path)


def test_wrong_files_are_named(tmp_path):
    path = tmp_path / "some.model"
    path.write_bytes(random.Random(0).randbytes(100))
    for name, kind, message in (
        (path, "SentencePieceTokenizer", r"some\.model: not a sentencepiece model"),
        (tmp_path, "SentencePieceTokenizer", "is a folder"),
        (None, "SentencePieceTokenizer", "needs tokenizer_model"),
        (path, "SentencepieceTokeniser", "none of .*; did you mean SentencePieceTokenizer"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            build_tokenizer(kind, name)
        assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="nowhere: no such file"):
        build_tokenizer("SentencePieceTokenizer", tmp_path / "nowhere")


@pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs tokenizers")
def test_wrong_tokenizer_json_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
        build_tokenizer("HuggingFaceTokenizer", tmp_path / "tokenizer.json")


def test_no_end_of_document_is_an_error_only_when_asked_for(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path / "tokenizer.json")
    assert tokenizer.encode("b") == [1]
    with pytest.raises(ValueError, match=r"tokenizer\.json: no end-of-document token"):
        _ = tokenizer.eod


def test_nothing_optional_is_imported_before_it_is_asked_for():
    program = (
        "import sys, megacp.data.tokenizer\n"
        "assert not {'torch', 'transformers', 'tokenizers', 'sentencepiece'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0
    assert isinstance(build_tokenizer("ByteLevelTokenizer"), ByteLevelTokenizer)
