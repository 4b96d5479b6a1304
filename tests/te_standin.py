"""Stands in for transformer_engine.pytorch: signatures of any release, every call recorded, exact attention computed.

Signatures come from golden/te_api.json and all arguments are keyword-only: a name that a release does not have, one
that is missing, or one by position is a TypeError. What TE asserts about shapes and masks is asserted here too, and
like TE it leaves rubbish in rows of padding.
"""

from __future__ import annotations

import json
import sys
from inspect import Parameter, Signature
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megacp.attention import reference, te
from megacp.batch import token_index

FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "te_api.json").read_text())


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def signature(version: str, function: str) -> Signature:
    """Of `DotProductAttention.<function>`: the last recorded one that is not newer, without what came later."""
    recorded = sorted(FACTS["signatures"], key=numbers)
    older = [one for one in recorded if numbers(one) <= numbers(version)]
    names = FACTS["signatures"][(older or recorded)[-1 if older else 0]][f"DotProductAttention.{function}"]
    first = {name: since for key, since in FACTS["first_release"].items() for name in key.split("/")}
    there = [name for name in names["optional"] if numbers(first.get(name, "0")) <= numbers(version)]
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names["required"]]
    parameters += [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in there]
    return Signature(parameters)


class Call(NamedTuple):
    """`attention` numbers the modules in the order they were made."""

    function: str
    attention: int
    arguments: dict[str, Any]


class Record:
    """What was called; `renamed` are arguments that have another name than recorded."""

    def __init__(self, version: str, renamed: dict[str, str] | None = None) -> None:
        self.version, self.renamed = version, renamed or {}
        self.calls: list[Call] = []
        self.made = 0

    def __getitem__(self, function: str) -> list[dict[str, Any]]:
        return [call.arguments for call in self.calls if call.function == function]

    def note(self, function: str, attention: int, args: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        known = signature(self.version, function)
        names = [p.replace(name=self.renamed.get(p.name, p.name)) for p in known.parameters.values()]
        known.replace(parameters=names).bind(*args, **arguments)
        self.calls.append(Call(function, attention, arguments))


def install(monkeypatch: Any, version: str, renamed: dict[str, str] | None = None) -> Record:
    """From here on `version` is installed."""
    record = Record(version, renamed)

    class DotProductAttention(Attention):
        calls = record

    package, module = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    module.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setattr(te, "te_version", lambda: version)
    monkeypatch.setattr(te.TEAttention, "cp_stream", None)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    return record


class Attention(nn.Module):
    calls: Record

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__()
        self.number, self.calls.made = self.calls.made, self.calls.made + 1
        self.calls.note("__init__", self.number, args, arguments)
        self.made = arguments
        self.heads = arguments["num_gqa_groups"] // arguments["tp_size"]
        self.groups: list[Any] = []
        self.comm_type = "p2p"
        self._join(**{"cp_group": None, **{k: v for k, v in arguments.items() if k.startswith("cp_")}})

    def set_context_parallel_group(self, *args: Any, **arguments: Any) -> None:
        self.calls.note("set_context_parallel_group", self.number, args, arguments)
        self._join(**arguments)

    def _join(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        self.groups = cp_group if isinstance(cp_group, list) else [cp_group] if cp_group is not None else []
        self.comm_type = cp_comm_type
        if cp_group is not None:
            assert cp_global_ranks is not None and cp_stream is not None
            assert isinstance(cp_group, list) == (cp_comm_type == "a2a+p2p") and None not in self.groups

    def forward(self, *args: Any, **arguments: Any) -> Tensor:
        self.calls.note("forward", self.number, args, arguments)
        q, k, v = (arguments[f"{name}_layer"] for name in ("query", "key", "value"))
        layout, mask = arguments["qkv_format"], arguments["attn_mask_type"]
        assert k.shape[-2] == v.shape[-2] == self.heads, "not the heads it was made for"
        assert q.ndim == (4 if layout == "bshd" else 3)
        assert mask in (("causal", "no_mask") if layout == "bshd" else ("padding_causal", "padding"))
        sizes = [group_size(group) for group in self.groups]
        dealt = {"a2a": sizes[:1], "a2a+p2p": sizes[:1]}.get(self.comm_type, [])
        assert all(q.shape[-2] % n == 0 and k.shape[-2] % n == 0 for n in dealt), "heads that cannot be dealt"
        assert not self.groups or layout == "bshd" or arguments["cu_seqlens_q_padded"] is not None
        if any(not isinstance(group, dist.ProcessGroup) for group in self.groups):
            return torch.zeros_like(q).flatten(-2)  # groups of names only
        return self._compute(q, k, v, arguments)

    def _compute(self, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Tensor:
        size = prod(map(group_size, self.groups))
        # The inner group holds neighbours: a rank's place is that of its group, then its own in it.
        rank = 0
        for group in reversed(self.groups):
            rank = rank * group_size(group) + dist.get_rank(group)
        if arguments["qkv_format"] == "bshd":
            real = padded = torch.arange(q.shape[0] + 1) * q.shape[1] * size
        else:
            real = arguments["cu_seqlens_q"]
            padded = arguments.get("cu_seqlens_q_padded", real)
        index = torch.cat([token_index(padded, number, size) for number in range(size)])
        flat = [x if x.ndim == 3 else x.flatten(0, 1) for x in (q, k, v)]
        own, lengths, room = token_index(padded, rank, size), real.diff().tolist(), padded.diff().tolist()
        rubbish = torch.cat([torch.arange(n) >= m for m, n in zip(lengths, room, strict=True)])[own]
        q_whole, k_whole, v_whole = (self._gather(x, index) for x in flat)
        out = reference.attention(
            *(q_whole, k_whole, v_whole),
            lengths,
            room,
            causal="causal" in arguments["attn_mask_type"],
            window=self.made["window_size"],
            softmax_scale=self.made["softmax_scale"],
        )[own]
        if rubbish.any():
            for x in filter(lambda x: x.requires_grad, (q, k, v)):
                x.register_hook(lambda grad: grad.masked_fill(rubbish[:, None, None], torch.nan))
            out = out.masked_fill(rubbish[:, None, None], torch.nan)
        return out.to(q.dtype).reshape(*q.shape[:-2], -1)

    def _gather(self, x: Tensor, index: Tensor) -> Tensor:
        """[T, n, D] of each rank -> the whole pack in its order."""
        for group in self.groups:
            x = cast(Tensor, Gather.apply(x, group))
        return torch.empty_like(x).index_copy(0, index, x)


def group_size(group: Any) -> int:
    return dist.get_world_size(group) if isinstance(group, dist.ProcessGroup) else group.size


class Gather(torch.autograd.Function):
    """[t, ..] of each rank -> [size*t, ..]; backward sums what all ranks found."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(group_size(ctx.group))[dist.get_rank(ctx.group)], None
