"""train.init_from: a run that begins with the weights of a Hugging Face folder, on any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from megacp import checkpoint, train
from megacp.blocks import Block
from megacp.config import ConfigError, load_config
from megacp.convert import hf, hf_config
from megacp.data.tokens import TokenFile, TokenFileWriter
from tests.hf_models import config_of, convert, make
from tests.jobs import job, keeps, losses, records, tensors
from tests.spawn import run
from tests.tiny import write_data

LAYOUTS = {
    "tp2": (2, ["parallel.tensor_model_parallel_size=2"]),
    "cp2": (2, ["parallel.context_parallel_size=2"]),
    "dp2": (2, []),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama of 130 tokens, which tensor parallelism pads."""
    return make(tmp_path_factory.mktemp("init") / "model", "smollm2")


@pytest.fixture(scope="module")
def config(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("init_from")
    model = hf_config.model_config(folder).model_dump(exclude_defaults=True)
    tree = {
        "model": {**model, "make_vocab_size_divisible_by": 8},
        "data": {
            "data_path": write_letters(root), "seq_length": 32, "split": "90,10,0",
            "tokenizer_type": "SentencePieceTokenizer",
        },
        "optimizer": {"lr": 1e-3},
        "train": {"global_batch_size": 4, "train_iters": 4, "device": "cpu", "num_threads": 1},
    }  # fmt: skip
    tree["train"]["init_from"] = str(folder)
    path = root / "init.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def write_letters(root: Path) -> str:
    """Prefix of a token file with ids below 130: bytes of short texts, modulo 130."""
    source = TokenFile(write_data(root, 12))
    with TokenFileWriter(root / "letters", np.uint8) as writer:
        for i in range(len(source)):
            writer.add_document((source[i] % 130).astype(np.uint8))
    return str(root / "letters")


@pytest.fixture(scope="module")
def straight(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations on one rank, with checkpoints at 2 and 4."""
    root = tmp_path_factory.mktemp("straight")
    job(config, [*keeps(root), "checkpoint.save_interval=2"])
    return root


@pytest.mark.parametrize("name", LAYOUTS)
def test_first_loss_is_the_same_on_every_layout(config, straight, tmp_path, name):
    ranks, layout = LAYOUTS[name]
    run(job, ranks, config, [*keeps(tmp_path), *layout])
    expected, found = losses(straight), losses(tmp_path)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    assert found[4] == pytest.approx(expected[4], rel=1e-4)


def test_weights_are_the_folders(config, folder, tmp_path):
    """The first step has a learning rate of 0, so what is saved after it is what it began with."""
    job(config, [*keeps(tmp_path), "train.train_iters=1", "optimizer.lr_warmup_iters=1", "optimizer.lr_decay_iters=2"])
    saved = tensors(tmp_path / "checkpoints")
    theirs = {block.name: block.tensor for block in hf.whole_blocks(hf.open_folder(folder))}
    assert theirs.keys() <= saved.keys()
    assert [name for name in theirs if not torch.equal(theirs[name], saved[name])] == []


def test_loss_before_the_first_step(config, tmp_path):
    asked = ["train.eval_on_start=true", "train.eval_interval=4", "train.eval_iters=2", "optimizer.lr=0.01"]
    job(config, [*keeps(tmp_path), *asked, "train.exit_interval=4", "train.train_iters=5"])
    found = records(tmp_path, "valid")
    assert sorted(found) == [0, 4] and found[4]["lm_loss"] < found[0]["lm_loss"]
    job(config, [*keeps(tmp_path), *asked, "train.train_iters=5"])
    assert sorted(records(tmp_path, "valid")) == [0, 4]


def test_checkpoint_wins(config, folder, straight, tmp_path):
    """A run that goes on is the same whether or not the folder is still there."""
    shutil.copytree(straight / "checkpoints/iter_0000002", tmp_path / "checkpoints/iter_0000002")
    (tmp_path / "checkpoints/latest").write_text("iter_0000002\n")
    job(config, [*keeps(tmp_path), f"train.init_from={tmp_path}/gone"])
    assert checkpoint.read_meta(tmp_path / "checkpoints")["progress"]["iteration"] == 4
    ours, theirs = tensors(tmp_path / "checkpoints"), tensors(straight / "checkpoints")
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture
def mistake(config, tmp_path, capsys, monkeypatch):
    """The one line that a start tells, with exit code 2 and nothing written."""
    monkeypatch.setattr(train.time, "sleep", lambda _: None)

    def tell(*overrides: str) -> str:
        assert train.main([str(config), f"checkpoint.save={tmp_path}/none", *overrides]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert not (tmp_path / "none").exists()
        return line

    return tell


def test_another_model_is_refused(mistake):
    line = mistake("model.rotary_base=500.0", "model.ffn_hidden_size=64")
    assert "train.init_from" in line and "rotary_base is 100000.0 there, 500.0 in the configuration" in line
    assert "ffn_hidden_size is 48 there, 64 in the configuration" in line and "num_layers" not in line


def test_what_is_no_folder_is_refused(mistake, folder, tmp_path):
    assert "no config.json" in mistake(f"train.init_from={tmp_path}/nowhere")
    broken = shutil.copytree(folder, tmp_path / "broken")
    next(iter(sorted(broken.glob("*.safetensors")))).unlink()
    assert "is missing" in mistake(f"train.init_from={broken}")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    assert "MambaForCausalLM" in mistake(f"train.init_from={broken}")


def test_two_places_of_weights_are_refused(config, straight):
    both = [f"checkpoint.load={straight}/checkpoints", "checkpoint.finetune=true"]
    load_config(config, [f"checkpoint.save={straight}/checkpoints", f"{both[0]}/iter_0000002"], 1)
    load_config(config, [f"checkpoint.save={straight}/checkpoints", both[0]], 1)
    for given in (both, both[:1], [f"checkpoint.save={straight}/other", both[0]]):
        with pytest.raises(ConfigError, match=r"train\.init_from = .* and checkpoint\.load = .*leave one of them out"):
            load_config(config, given, 1)


def test_the_folders_config_and_tokenizer_survive_training(config, folder, straight, tmp_path):
    """Also where a checkpoint does not keep the config.json: it says where the run began."""
    meta = checkpoint.read_meta(straight / "checkpoints")
    theirs = json.loads((folder / "config.json").read_text())
    assert meta["hf_config"] == theirs
    origin = Path(shutil.copytree(folder, tmp_path / "model"))
    (origin / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 129}}}))
    (origin / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    meta["config"]["train"]["init_from"] = str(origin)
    del meta["hf_config"]
    blocks = [Block(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors(straight / "checkpoints").items()]
    checkpoint.save(tmp_path / "old", 4, blocks, meta)
    convert("export", tmp_path / "old", tmp_path / "out")
    assert config_of(tmp_path / "out") == theirs
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (origin / name).read_text()
    # One that does not fit stays behind.
    (origin / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 130}}}))
    convert("export", tmp_path / "old", tmp_path / "bare")
    assert not (tmp_path / "bare" / "tokenizer.json").exists()
    # A file of a tokenizer stands for its folder.
    (origin / "tokenizer.json").write_text("{}")
    meta["config"]["train"]["init_from"] = None
    meta["config"]["data"] |= {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(origin / "tokenizer.json"),
    }
    checkpoint.save(tmp_path / "file", 4, blocks, meta)
    convert("export", tmp_path / "file", tmp_path / "beside")
    assert config_of(tmp_path / "beside") == theirs and (tmp_path / "beside" / "tokenizer.json").exists()
