"""Hugging Face folders that are not whole, commands that are wrong, and exports that are killed."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megacp.blocks import Block
from megacp.convert import hf, hf_write
from tests.hf_models import check_same, convert, make, tensors_of
from tests.spawn import RankError, run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {kind: make(root / kind, kind) for kind in ("llama2", "smollm2", "qwen3")}


def copied(folders: dict[str, Path], kind: str, target: Path) -> Path:
    return Path(shutil.copytree(folders[kind], target / kind))


def rewrite(folder: Path, change: Any) -> Path:
    """Every tensor in one file, after `change` of the dict of them."""
    tensors = tensors_of(folder)
    for path in folder.glob("model*"):
        path.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def truncate(folder: Path) -> None:
    os.truncate(first_shard(folder), os.path.getsize(first_shard(folder)) - 1)


def lose_shard(folder: Path) -> None:
    first_shard(folder).unlink()


def lose_from_shard(folder: Path) -> None:
    tensors = load_file(first_shard(folder))
    tensors.pop(min(tensors))
    save_file(tensors | {"other": torch.zeros(1)}, first_shard(folder))


def in_two_shards(folder: Path) -> None:
    shards = sorted(folder.glob("model-*.safetensors"))
    save_file(load_file(shards[0]) | load_file(shards[1]), shards[0])


def outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model-', '"../model-'))


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def pickles(folder: Path) -> None:
    torch.save(tensors_of(folder), folder / "pytorch_model.bin")
    for path in folder.glob("model*"):
        path.unlink()


def nothing(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def change(name: str, tensor: Tensor | None) -> Any:
    def harm(folder: Path) -> None:
        rewrite(folder, lambda tensors: tensors.pop(name) if tensor is None else tensors.update({name: tensor}))

    return harm


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncate, r"model-00001-of-\d+.safetensors is damaged or no safetensors file"),
        (lose_shard, r"model-00001-of-\d+.safetensors is missing, which has .* and \d+ more"),
        (lose_from_shard, "model-00001-of-.* lacks .*, which model.safetensors.index.json says it has"),
        (in_two_shards, "both have model"),
        (outside, "lies in ../model-.*, not a file of the folder"),
        (no_index, "model.safetensors.index.json cannot be read"),
        (pickles, r"has its weights in pickles \(pytorch_model.bin\), .* AutoModelForCausalLM.from_pretrained"),
        (nothing, "has neither model.safetensors nor model.safetensors.index.json"),
        (change(NORM, None), f"lacks {NORM}"),
        (change(NORM, torch.zeros(31)), rf"{NORM} as \[31\], by its config.json it is \[32\]"),
        (change(NORM, torch.zeros(32, dtype=torch.int8)), f"{NORM} as I8: quantized weights are not implemented"),
        (
            change("model.layers.2.mlp.up_proj.weight", torch.zeros(1)),
            "has model.layers.2.mlp.up_proj.weight, which its",
        ),
        (change("lm_head.weight", torch.zeros(130, 32)), "ties lm_head.weight to .* with different values"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(
    harm: Any, reason: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(folders, "smollm2", tmp_path)
    harm(folder)
    with pytest.raises((ValueError, OSError), match=reason):
        hf.fill(folder, [])
    with pytest.raises(SystemExit) as exit:
        convert("import", folder, tmp_path / "run")
    assert exit.value.code == 2 and not (tmp_path / "run").exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error


def test_a_block_of_another_model_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="has no tensor for head.weight"):
        hf.fill(folders["smollm2"], [Block("head.weight", (130, 32), (0, 0), torch.zeros(130, 32))])
    with pytest.raises(ValueError, match=r"model.norm.weight for final_norm.weight as \[32\], asked for as \[16\]"):
        hf.fill(folders["smollm2"], [Block("final_norm.weight", (16,), (0,), torch.zeros(16))])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["config", "{tmp}/none"], "is no Hugging Face folder"),
        (["import", "{hf}", "{run}"], "holds checkpoints already"),
        (["export", "{tmp}/none", "{tmp}/out"], "no checkpoint in"),
        (["export", "{run}", "{hf}"], "is there already"),
        (["export", "{run}", "{tmp}/out", "--tokenizer-from", "{hf}"], "has no tokenizer"),
        (["export", "{run}", "{tmp}/out", "--architecture", "Qwen2ForCausalLM"], "has no add_qkv_bias = False"),
        (["export", "{run}", "{tmp}/out", "--max-shard-size", "5 apples"], "5 apples is no size"),
        (["export", "{run}", "{tmp}/out", "--dtype", "int8"], "invalid choice"),
        (["gguf", "{tmp}/none.gguf", "{tmp}/out"], "does not exist"),
    ],
)
def test_wrong_commands_are_refused_in_one_line(
    arguments: list[str], reason: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert("import", folders["llama2"], tmp_path / "run")
    places = {"tmp": str(tmp_path), "hf": str(folders["llama2"]), "run": str(tmp_path / "run")}
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        convert(*(argument.format(**places) for argument in arguments))
    error = capsys.readouterr().err
    assert exit.value.code == 2 and reason in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".tmp-*"))


def test_values_beyond_float16_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders, "smollm2", tmp_path)
    change(NORM, torch.full((32,), 1e5))(folder)
    convert("import", folder, tmp_path / "run")
    with pytest.raises(SystemExit):
        convert("export", tmp_path / "run", tmp_path / "out", "--dtype", "float16")
    assert not (tmp_path / "out").exists()
    convert("export", tmp_path / "run", tmp_path / "out", "--dtype", "bfloat16")


def export_and_die(root: Path, target: Path) -> None:
    """Killed as by the system after two of many files are written."""
    save, written = hf_write.save_file, []

    def dying(*arguments: Any) -> None:
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        written.append(save(*arguments))

    hf_write.save_file = dying
    convert("export", root, target, "--max-shard-size", "20KB")


def test_a_killed_export_leaves_nothing_that_looks_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    convert("import", folders["qwen3"], tmp_path / "run")
    with pytest.raises(RankError, match="died"):
        run(export_and_die, 1, tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tmp-out", "run"]
    assert not (tmp_path / ".tmp-out" / "config.json").exists()
    convert("export", tmp_path / "run", tmp_path / "out")
    check_same(folders["qwen3"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
