"""Schedules of the learning rate and of weight decay, as pure functions of the step.

The formulas are those of Megatron-LM (core/optimizer_param_scheduler.py); WSD is warm-up, stable, decay (MiniCPM, Hu et
al. 2024, with its exponential form as 2 * 0.5**x - 1 so that it ends at 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WD_STYLES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class LRConfig:
    """Steps are iterations. ValueError for a schedule that has no meaning."""

    max_lr: float
    lr_decay_steps: int
    init_lr: float = 0.0
    min_lr: float = 0.0
    lr_warmup_steps: int = 0
    lr_decay_style: str = "cosine"
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str = "exponential"
    start_wd: float = 0.0
    end_wd: float = 0.0
    wd_incr_steps: int = 0
    wd_incr_style: str = "constant"

    def __post_init__(self) -> None:
        _require_choice("lr_decay_style", self.lr_decay_style, DECAY_STYLES)
        _require_choice("lr_wsd_decay_style", self.lr_wsd_decay_style, WSD_DECAY_STYLES)
        _require_choice("wd_incr_style", self.wd_incr_style, WD_STYLES)
        for name in ("init_lr", "min_lr"):
            if not 0 <= getattr(self, name) <= self.max_lr:
                raise ValueError(f"{name} = {getattr(self, name):g} must lie in 0..max_lr = {self.max_lr:g}")
        if not 0 <= self.lr_warmup_steps < self.lr_decay_steps:
            raise ValueError(
                f"lr_warmup_steps = {self.lr_warmup_steps} must be at least 0 and less than lr_decay_steps = "
                f"{self.lr_decay_steps}"
            )
        if self.lr_decay_style == "WSD" and not 0 < (self.wsd_decay_steps or 0) <= self.lr_decay_steps:
            raise ValueError(
                f"lr_decay_style WSD needs wsd_decay_steps in 1..lr_decay_steps = {self.lr_decay_steps}, got "
                f"{self.wsd_decay_steps}"
            )
        if not 0 <= self.start_wd <= self.end_wd:
            raise ValueError(f"start_wd = {self.start_wd:g} must lie in 0..end_wd = {self.end_wd:g}")
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            raise ValueError(
                f"wd_incr_style constant needs start_wd = end_wd, got {self.start_wd:g} and {self.end_wd:g}"
            )
        if self.wd_incr_style != "constant" and self.wd_incr_steps < 1:
            raise ValueError(f"wd_incr_style {self.wd_incr_style} needs wd_incr_steps >= 1, got {self.wd_incr_steps}")


def learning_rate(step: int, lr_config: LRConfig) -> float:
    """The learning rate of iteration `step` (0 is the first)."""
    c = lr_config
    if c.lr_warmup_steps > 0 and step <= c.lr_warmup_steps:
        return c.init_lr + (c.max_lr - c.init_lr) * step / c.lr_warmup_steps
    if c.lr_decay_style == "constant":
        return c.max_lr
    if step > c.lr_decay_steps:
        return c.min_lr
    if c.lr_decay_style == "inverse-square-root":
        return max(c.min_lr, c.max_lr * math.sqrt(max(c.lr_warmup_steps, 1)) / math.sqrt(max(step, 1)))
    return c.min_lr + _remaining(step, c) * (c.max_lr - c.min_lr)


def weight_decay(step: int, lr_config: LRConfig) -> float:
    """The weight decay of iteration `step`, grown from start_wd to end_wd over wd_incr_steps."""
    c = lr_config
    if c.wd_incr_style == "constant" or step > c.wd_incr_steps:
        return c.end_wd
    done = step / c.wd_incr_steps
    grown = done if c.wd_incr_style == "linear" else _half_cosine(1 - done)
    return c.start_wd + grown * (c.end_wd - c.start_wd)


def _remaining(step: int, c: LRConfig) -> float:
    """Share of max_lr - min_lr that is left after warm-up: 1 at its end, 0 at lr_decay_steps."""
    if c.lr_decay_style != "WSD":
        done = (step - c.lr_warmup_steps) / (c.lr_decay_steps - c.lr_warmup_steps)
        return 1 - done if c.lr_decay_style == "linear" else _half_cosine(done)
    steps = c.wsd_decay_steps or 0
    start = c.lr_decay_steps - steps
    if step <= start:
        return 1.0
    done = (step - start) / steps
    if c.lr_wsd_decay_style == "linear":
        return 1 - done
    if c.lr_wsd_decay_style == "cosine":
        return _half_cosine(done)
    if c.lr_wsd_decay_style == "exponential":
        return 2 * 0.5**done - 1
    return 1 - math.sqrt(done)


def _half_cosine(done: float) -> float:
    return 0.5 * (math.cos(math.pi * done) + 1)


def _require_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field} = {value!r} must be one of {', '.join(choices)}")
