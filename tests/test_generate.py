from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch

from megacp.batch import Sample, shard
from megacp.data.tokenizer import build_tokenizer
from megacp.grid import CPGroup
from tests.jobs import job, keeps
from tests.spawn import run
from tests.tiny import GPT2, write_config, write_data
from tools import generate


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    kinds = {"global_batch_size": 4, "train_iters": 6, "device": "cpu", "num_threads": 1}
    return write_config(folder, write_data(folder), train=kinds)


@pytest.fixture(scope="module")
def checkpoints(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two tensor-parallel ranks that recompute and drop out."""
    folder = tmp_path_factory.mktemp("trained")
    layout = ["parallel.tensor_model_parallel_size=2", "train.recompute_granularity=full"]
    run(job, 2, config, [*keeps(folder), *layout, "model.hidden_dropout=0.1"])
    return folder / "checkpoints"


def test_logits_are_those_of_the_whole_text(checkpoints: Path) -> None:
    """At odd and even lengths, as in one pass over the text with nothing padded."""
    _, model = generate.load_model(str(checkpoints), "cpu")
    assert not model.training
    text = list(b"def generate(model):")
    tokens, offsets = torch.tensor(text), torch.tensor([0, 20], dtype=torch.int32)
    sample = Sample(tokens, tokens, torch.zeros(20), offsets, offsets)
    with torch.no_grad():
        whole = model.logits(model(shard(sample, CPGroup(ranks=(0,), rank=0))))
    for length in (1, 2, 7, 20):
        torch.testing.assert_close(generate.next_logits(model, text[:length]), whole[length - 1])


def test_tokens(checkpoints: Path) -> None:
    _, model = generate.load_model(str(checkpoints), "cpu")
    tokenizer = build_tokenizer("ByteLevelTokenizer")

    def tokens(temperature: float, seed: int = 0) -> list[int]:
        return list(islice(generate.generate(model, tokenizer, list(b"def "), 64, temperature, seed), 70))

    assert tokens(0.0) == tokens(0.0, seed=1)
    assert tokens(1.0) == tokens(1.0) != tokens(1.0, seed=1)
    context = list(b"def ")
    for token in tokens(0.0)[:5]:
        assert token == int(generate.next_logits(model, context).argmax())
        context.append(token)


def test_end_of_document_ends_the_text(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the entries past the tokenizer's last token are never taken, however likely."""
    _, model = generate.load_model(str(checkpoints), "cpu")
    tokenizer = build_tokenizer("ByteLevelTokenizer")
    answers = iter([97, tokenizer.eod])

    def logits(*_: object) -> torch.Tensor:
        scores = torch.zeros(300)
        scores[next(answers)], scores[280] = 1, 2
        return scores

    monkeypatch.setattr(generate, "next_logits", logits)
    assert list(generate.generate(model, tokenizer, [100], 64, 0.0, 0)) == [97]


def test_command_line(checkpoints: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--device", "cpu", "--prompt", "def ", "--tokens", "7"]
    assert generate.main([str(checkpoints / "iter_0000006"), *command]) == 0
    text = capsys.readouterr().out
    assert text.startswith("def ") and len(text) > len("def \n")
    assert generate.main([str(checkpoints), *command]) == 0
    assert capsys.readouterr().out == text
    assert generate.main([str(checkpoints), "--device", "cpu", "--prompt", "", "--tokens", "0"]) == 0
    assert capsys.readouterr().out == "\n"
    assert generate.main([str(tmp_path), *command]) == 2
    assert capsys.readouterr().err == f"error: no checkpoint in {tmp_path}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "nonsense"],
        ["--device", "cuda:99"],
        ["--device", "mps"],
        ["--device", ""],
        ["--temperature", "1e-300"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--temperature", "warm"],
        ["--tokens", "-5"],
        ["--tokens", "1.5"],
        ["--seed", "9" * 30],
    ],
    ids=" ".join,
)
def test_wrong_arguments(checkpoints: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, exit code 2."""
    try:
        code = generate.main([str(checkpoints), "--device", "cpu", "--tokens", "2", *arguments])
    except SystemExit as exit:
        code = exit.code
    said = capsys.readouterr()
    assert code == 2 and not said.out and said.err.count("\n") == 1 and said.err.strip()


def test_learned_positions_are_not_run_past(config: Path, tmp_path: Path) -> None:
    job(config, [*keeps(tmp_path), *GPT2, "train.exit_interval=1", "train.params_dtype=bfloat16"])
    assert generate.main([str(tmp_path / "checkpoints"), "--device", "cpu", "--prompt", "x" * 63, "--tokens", "4"]) == 0
