"""Schedules against Megatron-LM's (golden/lr_schedule.json).

Left out of the file: `state` (saving and loading of a scheduler object). Ours has no state: the step is an argument.
`wd_mult` of a parameter group has its counterpart in ShardedAdam (decay or no decay) and is applied here by hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacp.optim.lr import LRConfig, learning_rate, weight_decay

CASES = json.loads((Path(__file__).parent / "golden/lr_schedule.json").read_text())["cases"]
VALID = [case for case in CASES if case["error"] is None]
INVALID = [case for case in CASES if case["error"] is not None]
BASE = LRConfig(max_lr=1e-3, lr_decay_steps=100, lr_warmup_steps=10)


@pytest.mark.parametrize("case", VALID, ids=[case["name"] for case in VALID])
def test_equals_megatron(case: dict[str, Any]) -> None:
    assert len(case["num_steps"]) > 10
    for number, group in enumerate(case["groups"]):
        overrides = {key: value for key, value in group.items() if key != "wd_mult"}
        config = replace(LRConfig(**case["args"]), **overrides)
        rates = [learning_rate(step, config) for step in case["num_steps"]]
        decays = [weight_decay(step, config) * group.get("wd_mult", 1.0) for step in case["num_steps"]]
        assert rates == pytest.approx([lr[number] for lr in case["lr"]], rel=1e-12, abs=0)
        assert decays == pytest.approx([wd[number] for wd in case["weight_decay"]], rel=1e-12, abs=0)


@pytest.mark.parametrize("case", INVALID, ids=[case["name"] for case in INVALID])
def test_refuses_what_megatron_refuses(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must|needs"):
        LRConfig(**case["args"])


def test_message_gives_numbers() -> None:
    with pytest.raises(ValueError, match="lr_warmup_steps = 200 .* lr_decay_steps = 100"):
        replace(BASE, lr_warmup_steps=200)
    with pytest.raises(ValueError, match="init_lr = 0.5 .*max_lr = 0.001"):
        replace(BASE, init_lr=0.5)
    with pytest.raises(ValueError, match="'poly' must be one of constant, linear, cosine"):
        replace(BASE, lr_decay_style="poly")
    with pytest.raises(ValueError, match="wd_incr_steps >= 1, got 0"):
        replace(BASE, wd_incr_style="linear", end_wd=0.1)


def test_ends() -> None:
    assert learning_rate(0, BASE) == 0.0
    assert learning_rate(10, BASE) == BASE.max_lr
    for style in ("linear", "cosine"):
        assert learning_rate(100, replace(BASE, lr_decay_style=style)) == pytest.approx(0, abs=1e-18)
    for style in ("exponential", "linear", "cosine", "minus_sqrt"):
        config = replace(BASE, lr_decay_style="WSD", wsd_decay_steps=20, lr_wsd_decay_style=style)
        assert learning_rate(80, config) == BASE.max_lr
        assert learning_rate(100, config) == pytest.approx(0, abs=1e-18)
