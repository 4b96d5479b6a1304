"""Hugging Face folders that are not whole, commands that are wrong, and exports that are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megacp import checkpoint
from megacp.blocks import Block
from megacp.convert import hf, hf_write
from tests.hf_models import check_same, config_of, convert, make, tensors_of
from tests.spawn import RankError, run
from tools import convert_hf


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


def deep_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[" * 200_000)


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
        (deep_index, r"model.safetensors.index.json cannot be read \(RecursionError"),
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


def test_nan_is_told_from_what_is_too_large(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the way in by its name, on the way out as no fault of the dtype."""
    folder = copied(folders, "smollm2", tmp_path)
    change(NORM, torch.full((32,), torch.nan))(folder)
    with pytest.raises(SystemExit):
        convert("import", folder, tmp_path / "run")
    assert f"holds nan in {NORM}" in capsys.readouterr().err and not (tmp_path / "run").exists()
    source = hf.open_folder(folder)
    checkpoint.save(tmp_path / "run", 0, hf.whole_blocks(source), convert_hf.meta_of(source))
    with pytest.raises(SystemExit):
        convert("export", tmp_path / "run", tmp_path / "out", "--dtype", "float16")
    error = capsys.readouterr().err
    assert f"{NORM} holds nan" in error and "65504" not in error


def test_a_link_to_an_empty_folder_is_written_through(folders: dict[str, Path], tmp_path: Path) -> None:
    convert("import", folders["smollm2"], tmp_path / "run")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert("export", tmp_path / "run", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    check_same(folders["smollm2"], tmp_path / "real")


def test_a_config_that_names_no_architecture_comes_back(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders, "smollm2", tmp_path)
    config = config_of(folder)
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    convert("import", folder, tmp_path / "run")
    assert convert("export", tmp_path / "run", tmp_path / "out") == 0
    check_same(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 200}}}}, "a tokenizer of 201 tokens, the model has 130"),
        ({"tokenizer.json": {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 130}]}}, "a tokenizer of 131 tok"),
        ({"tokenizer.json": {"model": {"vocab": [["a", 0.0]] * 131}}}, "a tokenizer of 131 tokens"),
        ({"vocab.json": {"a": 0}, "added_tokens.json": {"b": 130}}, "a tokenizer of 131 tokens"),
        ({"tokenizer.json": []}, "tokenizer.json is no tokenizer's file"),
        ({"tokenizer.json": {"model": {"vocab": {"a": 129}}}}, None),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(
    files: dict[str, Any],
    reason: str | None,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A generation config that names tokens the model lacks is left behind."""
    convert("import", folders["smollm2"], tmp_path / "run")
    (tmp_path / "other").mkdir()
    for name, held in {**files, "generation_config.json": {"eos_token_id": [2, 130]}}.items():
        (tmp_path / "other" / name).write_text(json.dumps(held))
    export = ("export", tmp_path / "run", tmp_path / "out", "--tokenizer-from", tmp_path / "other")
    capsys.readouterr()
    if reason is None:
        convert(*export)
        assert "130" not in (tmp_path / "out" / "generation_config.json").read_text()
        return
    with pytest.raises(SystemExit):
        convert(*export)
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


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
