"""One loop over the microbatches of a step: forward, loss, backward. The same for every kind of data and layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megacp.batch import Batch

Stage = Callable[[Batch], Tensor]
Loss = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]


def run(stage: Stage, batches: Sequence[Batch], loss: Loss, before_last: Callable[[], None] | None = None) -> Tensor:
    """Forward and, where gradients are on, backward of every microbatch in order.

    `loss` gives (sum of losses, number of tokens) of a stage's output. Returns their totals over the microbatches,
    float64 [2], of this rank alone. `before_last` is called before the last backward pass: from there on gradients may
    be reduced while it runs.
    """
    totals: list[Tensor] = []
    for number, batch in enumerate(batches):
        total, tokens = loss(stage(batch), batch)
        if torch.is_grad_enabled():
            if before_last is not None and number == len(batches) - 1:
                before_last()
            total.backward()
        totals.append(torch.stack([total.detach().double(), tokens.double()]))
    return torch.stack(totals).sum(0) if totals else torch.zeros(2, dtype=torch.float64)
