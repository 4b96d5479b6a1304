"""The first fine-tuning step is that of transformers, which runs one conversation at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megacp import step, train
from megacp.blocks import Block, row_blocks
from megacp.convert import hf, hf_names
from megacp.convert.hf_config import architecture_of, model_config
from megacp.data.sft import SFTDataset
from tests.conversations import Masked, write_conversations
from tests.hf_models import config_of, make
from tests.spawn import run
from tests.test_parity import CP2, CP4, SP, TP2
from tests.tiny import portable, setup, whole, write_config

ROOM, VOCABULARY = 64, 130
LENGTHS = (64, 2, 5, 47, 3, 31, 1, 12, 58, 7, 23, 2, 17, 9, 40, 4)
# Number of packs: a global batch holds all conversations once, at dp 2 too.
PACKS = 6
LAYOUTS = {
    "one": (1, []),
    "cp2": (2, [CP2]),
    "cp4": (4, [CP4]),
    "tp2-cp2": (4, [TP2, CP2]),
    "tp2-sp-cp2": (4, [TP2, CP2, SP]),
    "dp2-cp2": (4, [CP2]),
    "unpacked cp2": (2, ["data.sft_packing=false", "train.global_batch_size=16", "train.micro_batch_size=8", CP2]),
}
# Where the few tokens taught are all in one conversation, some rank has none of them. Elsewhere no rank is without.
CASES = [
    *(("llama3", "turns", layout) for layout in LAYOUTS),
    *(("llama3", "rare", layout) for layout in ("cp4", "tp2-cp2", "dp2-cp2")),
    *(("smollm2", "turns", layout) for layout in ("one", "cp4", "tp2-cp2")),
]


class Expected(NamedTuple):
    """transformers' loss, number of supervised tokens, and gradients by our global names."""

    loss: float
    tokens: int
    gradients: dict[str, np.ndarray]


class Seen(NamedTuple):
    """A rank's first step; its blocks of the sums of gradients; supervised tokens it has in each of its packs."""

    taken: step.Step
    gradients: list[tuple]
    supervised: list[float]


def conversations(kind: str) -> list[Masked]:
    """Sixteen, taught in ways as uneven as their lengths; the mask of a first token counts nowhere."""
    random = np.random.default_rng(0)
    chats = []
    for i, length in enumerate(LENGTHS):
        place = np.arange(length)
        turns = [place % 11 > 5, place >= 0, place > length - 3, place < 0, place % 2 == 0][i % 5]
        mask = {"turns": turns, "rare": (i == 0) & (place > 0) & (place < 4), "nothing": place < 0}[kind]
        chats.append((random.integers(0, VOCABULARY, length), mask.astype(np.uint8)))
    return chats


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of transformers (GQA; untied, tied), and a configuration for each way of teaching, by name."""
    root = tmp_path_factory.mktemp("sft_transformers")
    found = {kind: make(root / kind, kind) for kind in ("llama3", "smollm2")}
    for taught in ("turns", "rare", "nothing"):
        prefix = write_conversations(root / taught / "chats", conversations(taught))
        for kind in ("llama3", "smollm2"):
            (root / taught / kind).mkdir()
            found[f"{kind} {taught}"] = write_config(
                root / taught / kind,
                Path(prefix),
                model=model_config(found[kind]).model_dump(),
                data={"seq_length": ROOM, "pack_multiple": 8, "split": "1", "sft": True},
                train={"global_batch_size": PACKS, "train_iters": 4, "device": "cpu", "num_threads": 1},
            )
    return found


def one_at_a_time(folder: Path, chats: Sequence[Masked]) -> Expected:
    """Sum of losses of supervised tokens over their number, and its gradients, by transformers alone."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    total = sum(int(mask[1:].sum()) for _, mask in chats)
    loss = 0.0
    for tokens, mask in chats:
        inputs, taught = torch.tensor(tokens)[None], torch.tensor(mask)[None]
        # Labels are shifted inside, and those of -100 passed over.
        part = model(input_ids=inputs, labels=inputs.where(taught > 0, -100), num_items_in_batch=total).loss
        part.backward()
        loss += part.item()
    gradients = {name: parameter.grad.double().numpy() for name, parameter in model.named_parameters()}
    places = hf_names.places(model_config(folder), architecture_of(config_of(folder)))
    return Expected(loss, total, {ours: gradients[place.name] for ours, place in places.items()})


def begin(folder: Path, config: Path, overrides: Sequence[str]) -> train.Run:
    """A run that begins with the weights of a Hugging Face folder."""
    _, one = setup(config, overrides)
    hf.fill(folder, [block for block in one.optimizer.blocks() if not block.name.startswith("exp_avg")])
    one.optimizer.sync_parameters()
    return one


def first_step(folder: Path, config: Path, overrides: Sequence[str]) -> Seen:
    """The first global batch of the files, three times: looked at, its gradients, a training step."""
    one = begin(folder, config, overrides)
    with closing(train.make_loader(one, one.train_data, 0)) as loader:
        masks = [batch.loss_mask for batch in step.next_batches(one, loader)]
        loader.consumed_samples = 0
        step.forward_backward(one, loader)
        gradients = portable(gradient_blocks(one))
        loader.consumed_samples = 0
        return Seen(train.train_step(one, loader), gradients, [float(mask.sum()) for mask in masks if mask is not None])


def gradient_blocks(one: train.Run) -> list[Block]:
    sums = [gradient for bucket in one.optimizer.buckets.buckets for gradient in bucket.gradients()]
    pairs = zip(one.optimizer.rows, sums, strict=True)
    return [block for rows, gradient in pairs for block in row_blocks(rows.shard, gradient, rows.first_row)]


@pytest.mark.parametrize(("kind", "taught", "layout"), CASES)
def test_loss_and_gradients_are_those_of_transformers(
    kind: str, taught: str, layout: str, folders: dict[str, Path]
) -> None:
    ranks, overrides = LAYOUTS[layout]
    expected = one_at_a_time(folders[kind], conversations(taught))
    seen = run(first_step, ranks, folders[kind], folders[f"{kind} {taught}"], overrides)
    gradients = whole([one.gradients for one in seen])
    assert gradients.keys() == expected.gradients.keys()
    for name, wanted in expected.gradients.items():
        error = np.linalg.norm(gradients[name] / expected.tokens - wanted) / np.linalg.norm(wanted)
        assert error <= 1e-4, (name, error)
    norm = np.sqrt(sum(np.square(gradient).sum() for gradient in expected.gradients.values()))
    for one in seen:
        assert one.taken.tokens == expected.tokens
        assert one.taken.loss == pytest.approx(expected.loss, rel=1e-5)
        assert one.taken.grad_norm == pytest.approx(norm, rel=1e-4)
    assert (min(sum(one.supervised) for one in seen) == 0) == (taught == "rare")
    if taught == "rare":
        assert any(not any(packs) for packs in zip(*(one.supervised for one in seen), strict=True))


def nothing_learnt(folder: Path, config: Path, overrides: Sequence[str]) -> tuple[Any, ...]:
    """Two steps without a supervised token: what changed, what was counted."""
    one = begin(folder, config, overrides)
    assert isinstance(one.train_data, SFTDataset) and one.train_data.pattern.packs == PACKS
    before = portable(one.optimizer.blocks())
    with closing(train.make_loader(one, one.train_data, 0)) as loader:
        taken = [train.train_step(one, loader) for _ in range(2)]
    after = portable(one.optimizer.blocks())
    same = all(np.array_equal(old[-1], new[-1]) for old, new in zip(before, after, strict=True))
    progress = one.progress
    counts = (progress.iteration, progress.skipped, progress.nonfinite, progress.consumed_samples)
    return same, [(each.loss, each.tokens, each.grad_norm, each.skipped) for each in taken], counts


@pytest.mark.parametrize("layout", ["one", "cp4", "tp2-sp-cp2", "dp2-cp2"])
def test_a_step_without_a_supervised_token_is_skipped_and_counted(layout: str, folders: dict[str, Path]) -> None:
    ranks, overrides = LAYOUTS[layout]
    for seen in run(nothing_learnt, ranks, folders["llama3"], folders["llama3 nothing"], overrides):
        unchanged, steps, counts = seen
        assert unchanged and counts == (2, 2, 0, 2 * PACKS)
        assert len(steps) == 2
        for loss, *rest in steps:
            assert math.isnan(loss) and rest == [0, 0, True]
