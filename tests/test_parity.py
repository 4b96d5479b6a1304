"""Any layout gives one rank's losses, gradients and weights, from the real dataset through the real loader."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from megacp.data.pack import Row
from megacp.data.pretrain import Dataset
from tests.spawn import run
from tests.tiny import GPT2, Result, run_steps, whole, write_config, write_data

STEPS = 20
CP2, CP4 = (f"parallel.context_parallel_size={n}" for n in (2, 4))
TP2, SP = "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"


def types(cp_comm_type: str, levels: str = "null") -> tuple[str, str]:
    """Overrides for the attention of all layers, or of each."""
    return f"parallel.cp_comm_type={cp_comm_type}", f"parallel.hierarchical_context_parallel_sizes={levels}"


LAYOUTS = {
    "cp2": (2, [CP2]),
    "cp4": (4, [CP4]),
    "tp2": (2, [TP2]),
    "tp2-sp": (2, [TP2, SP]),
    "dp2": (2, []),
    "dp2-cp2": (4, [CP2]),
    "tp2-cp2": (4, [TP2, CP2]),
    "tp2-sp-cp2": (4, [TP2, CP2, SP]),
}
MIXED = "[a2a+p2p, [a2a, 1], [all_gather, 1], p2p]"
TYPES = {
    "cp2 all_gather": (2, [CP2, *types("all_gather")]),
    "cp2 a2a": (2, [CP2, *types("a2a")]),
    "cp2 a2a+p2p": (2, [CP2, *types("a2a+p2p", "[2, 1]")]),
    "cp2 mixed": (2, [CP2, *types("[p2p, all_gather, a2a, a2a+p2p]", "[1, 2]")]),
    "cp4 all_gather": (4, [CP4, *types("all_gather")]),
    "cp4 a2a": (4, [CP4, *types("a2a")]),
    "cp4 a2a+p2p": (4, [CP4, *types("a2a+p2p", "[2, 2]")]),
    "cp4 mixed": (4, [CP4, *types(MIXED, "[2, 2]")]),
    "cp4 runs": (4, [CP4, *types("[[a2a, 2], [p2p, 2]]")]),
    "tp2-sp-cp2 all_gather": (4, [TP2, CP2, SP, *types("all_gather")]),
    "tp2-cp2 a2a": (4, [TP2, CP2, *types("a2a")]),
    "tp2-cp2 a2a+p2p": (4, [TP2, CP2, *types("a2a+p2p", "[2, 1]")]),
    "dp2-cp2 runs": (4, [CP2, *types("[[a2a, 2], [all_gather, 2]]")]),
}
MASKED = ("data.mask_between_documents=true", "data.eod_mask_loss=true")
WINDOW = "model.window_size=[20, 0]"
VARIANTS = {
    "dense": (),
    "masked": MASKED,
    "micro2": ("train.micro_batch_size=2",),
    "gpt2-masked": (*GPT2, "data.mask_between_documents=true", "train.micro_batch_size=2"),
    "window": (WINDOW,),
    "window-masked": (WINDOW, *MASKED, "train.micro_batch_size=2"),
}
# Each type of attention with each variant somewhere: one by one they are tested against the exact formula.
PAIRS = [
    *product(LAYOUTS, ("dense", "masked")),
    *product(("cp2", "cp4", "dp2-cp2", "tp2-sp-cp2"), ("micro2", "gpt2-masked")),
    *(("cp2", "window"), ("cp4", "window-masked"), ("tp2-sp-cp2", "window-masked")),
    *product(("cp2 all_gather", "cp2 a2a", "cp2 a2a+p2p"), ("dense", "window-masked")),
    *product(("cp4 all_gather", "cp4 a2a", "cp4 a2a+p2p"), ("masked", "window")),
    *product(("tp2-sp-cp2 all_gather", "tp2-cp2 a2a", "tp2-cp2 a2a+p2p"), ("masked",)),
    *(("cp2 mixed", "masked"), ("cp4 mixed", "window-masked"), ("cp4 mixed", "gpt2-masked")),
    *(("cp4 runs", "dense"), ("dp2-cp2 runs", "window-masked")),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    return write_config(folder, write_data(folder))


@cache
def one_rank(config: Path, overrides: tuple[str, ...], steps: int, one_label: bool = False) -> Result:
    return run(run_steps, 1, config, overrides, steps, OneLabel if one_label else None)[0]


class OneLabel:
    """The dataset with a single supervised token in every four samples."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def row(self, i: int, read: bool = True) -> Row:
        return replace(self.data.row(i, read), labels=1 if i % 4 == 2 else 0)


def check_gradients(ours: list[Result], expected: Result) -> None:
    """Each within 1e-4 of the expected Frobenius norm, or of a ten-thousandth of the largest one.

    What is 1e-8 of the largest, less than fp32 tells apart, is rounding of what has added up to nearly nothing.
    """
    got, wanted = whole([result.gradients for result in ours]), whole([expected.gradients])
    assert got.keys() == wanted.keys()
    floor = 1e-4 * max(np.linalg.norm(gradient) for gradient in wanted.values())
    for name, gradient in wanted.items():
        error = np.linalg.norm(got[name] - gradient)
        assert error <= 1e-4 * max(np.linalg.norm(gradient), floor), (name, error, np.linalg.norm(gradient))


@pytest.mark.parametrize(("layout", "variant"), PAIRS)
def test_losses_and_gradients(config: Path, layout: str, variant: str) -> None:
    ranks, overrides = (LAYOUTS | TYPES)[layout]
    expected = one_rank(config, VARIANTS[variant], STEPS)
    results = run(run_steps, ranks, config, [*VARIANTS[variant], *overrides], STEPS)
    assert expected.losses[0] == pytest.approx(np.log(257), rel=0.05)
    assert expected.losses[-1] < 0.9 * expected.losses[0]
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    check_gradients(results, expected)


@pytest.mark.parametrize("layout", [*LAYOUTS, "cp4 mixed", "tp2-cp2 a2a"])
def test_final_weights_in_float64(config: Path, layout: str) -> None:
    """No more than 1e-9 of what twenty steps of the learning rate can move a weight."""
    ranks, overrides = (LAYOUTS | TYPES)[layout]
    double = ("train.params_dtype=float64", *VARIANTS["masked"])
    expected = one_rank(config, double, STEPS)
    results = run(run_steps, ranks, config, [*double, *overrides], STEPS)
    got, wanted = whole([result.weights for result in results]), whole([expected.weights])
    assert got.keys() == wanted.keys()
    for name in wanted:
        if not name.startswith("exp_avg"):
            assert np.abs(got[name] - wanted[name]).max() <= 1e-9 * 2e-3 * STEPS, name


@pytest.mark.parametrize("layout", ["cp2", "cp4", "dp2-cp2", "tp2-sp-cp2"])
def test_one_supervised_token_in_the_batch(config: Path, layout: str) -> None:
    """All but one rank have nothing to learn from; the loss is still divided by one token, once."""
    ranks, overrides = LAYOUTS[layout]
    expected = one_rank(config, (), 5, one_label=True)
    results = run(run_steps, ranks, config, overrides, 5, OneLabel)
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    check_gradients(results, expected)


def test_recomputation_changes_nothing(config: Path) -> None:
    expected = one_rank(config, VARIANTS["masked"], 3)
    kinds = (
        ["train.recompute_granularity=full"],
        ["train.recompute_granularity=full", "train.recompute_num_layers=2"],
        ["train.recompute_granularity=selective", "train.recompute_modules=[core_attn, mlp]"],
    )
    for kind in kinds:
        results = run(run_steps, 2, config, [*VARIANTS["masked"], *kind, *TYPES["cp2 mixed"][1]], 3)
        assert results[0].losses == pytest.approx(expected.losses, rel=1e-5)
        check_gradients(results, expected)
