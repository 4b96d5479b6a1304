"""Every shipped config loads at its size, and every config field does something."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megacp import support
from megacp.config import Config, Part, load_config

ROOT = Path(__file__).parents[1]
# The number of ranks each config is written for.
WORLD_SIZES = {"quickstart": 2, "sft_smollm2": 2, "gpt2_345m": 8, "llama3_8b_8k": 8, "llama3_8b_128k": 64}
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads(path: Path) -> None:
    config = load_config(path, (), WORLD_SIZES[path.stem], check_files=False)
    assert config.checkpoint.save and path.stem in config.checkpoint.save
    assert config.logging.run_dir and path.stem in config.logging.run_dir


def test_no_config_is_missing() -> None:
    assert {path.stem for path in CONFIGS} == set(WORLD_SIZES)


@pytest.mark.parametrize("name", ["llama3_8b_8k", "llama3_8b_128k"])
def test_llama3_numbers(name: str) -> None:
    """config.json of Llama 3 8B: 8.03 billion parameters."""
    model = load_config(ROOT / f"configs/{name}.yaml", check_files=False).model
    attention = model.hidden_size * model.head_dim * 2 * (model.num_attention_heads + model.kv_heads)
    layer = attention + 3 * model.hidden_size * model.ffn_size + 2 * model.hidden_size
    assert model.num_layers * layer + (2 * model.padded_vocab_size + 1) * model.hidden_size == 8_030_261_248
    assert model.head_dim == 128 and model.rotary_base == 500_000


def test_gpt2_numbers() -> None:
    """GPT-2 medium: 355 million parameters counting the vocabulary as it is."""
    model = load_config(ROOT / "configs/gpt2_345m.yaml", check_files=False).model
    width, rows = model.hidden_size, model.max_position_embeddings or 0
    layer = 12 * width**2 + 13 * width
    assert model.num_layers * layer + (model.vocab_size + rows + 2) * width == 354_823_168


def fields(part: type[Part], names: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths like (model, rope_scaling, factor)."""
    for key, field in part.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Part):
            yield from fields(field.annotation, (*names, key))
        else:
            yield (*names, key)


FIELDS = list(fields(Config))


# Not every `.compile`, `.split` or `.load` is a config's: the part goes by its own name, its initial or one of these.
NAMES = {"config", "scaling"}


@cache
def reads() -> set[tuple[str, str]]:
    """(owner, attribute) of every attribute read in megacp/; owner is the last name before the dot.

    support*.py are left out: asking whether a value is allowed does nothing with it. Properties in parts.py read
    their own part as `self`.
    """
    found: set[tuple[str, str]] = set()
    for path in (ROOT / "megacp").rglob("*.py"):
        if path.name.startswith("support"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = last_name(node.value)
                found.add(("config" if owner == "self" and path.name == "parts.py" else owner, node.attr))
    return found


def last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_field_is_read(path: tuple[str, ...]) -> None:
    """A setting nobody reads would be ignored in silence. Features to come are refused by name instead."""
    if ".".join(path) in {name for name, _, _ in support.NOT_BUILT} | WITH_FEATURES_TO_COME:
        return
    owners = {owner for owner, attribute in reads() if attribute == path[-1]}
    assert owners & (NAMES | {path[0], path[0][0], f"{path[0]}_config"}), f"{'.'.join(path)} is read nowhere in megacp/"


# Settings of refused features; each goes when its feature comes.
WITH_FEATURES_TO_COME = {
    "parallel.max_seqlen_per_dp_cp_rank",
}


def parts(part: type[Part]) -> Iterator[type[Part]]:
    yield part
    for field in part.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Part):
            yield from parts(field.annotation)


@pytest.mark.parametrize("part", list(parts(Config)), ids=lambda part: part.__name__)
def test_every_field_is_described(part: type[Part]) -> None:
    assert part.__doc__
    undescribed = {name for name, field in part.model_fields.items() if not field.description}
    assert undescribed == (set(part.model_fields) if part is Config else set())
