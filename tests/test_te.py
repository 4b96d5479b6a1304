"""What TransformerEngine is asked, call by call and release by release, and what comes of it.

No TE is needed: tests/te_standin.py has the signatures of its releases.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megacp.attention import reference, te
from megacp.attention.te import TEAttention
from megacp.batch import PackedSeqParams, Sample, shard, token_index
from megacp.config import ModelConfig, ParallelConfig
from megacp.grid import CPGroup, Grid, Group
from tests import te_standin
from tests.spawn import run
from tests.te_standin import Record, install

RELEASES = ["1.8.0", "1.12.0", "2.0", "2.2.0", "2.8.0", "2.19.0", "2.20.2", "2.21.0.dev0+abc"]
HEAD_DIM = 8
ALONE = CPGroup((3,), 0)


class Name(NamedTuple):
    """A process group that nobody talks over."""

    name: str
    size: int


PAIR = CPGroup((2, 3), 1, Name("pair", 2))
FOUR = CPGroup(
    (0, 1, 2, 3), 3, Name("four", 4), (Group((2, 3), 1, Name("inner", 2)), Group((1, 3), 1, Name("outer", 2)))
)


def attention(
    grid: Any = None,
    comm_type: Any = "p2p",
    heads: tuple[int, int] = (4, 2),
    layer: int = 1,
    cp: int | None = None,
    **model: Any,
) -> TEAttention:
    """Of one of two layers; `grid` is its CP group, or a live grid."""
    grid = ALONE if grid is None else grid
    if isinstance(grid, CPGroup):
        grid = cast(Grid, type("G", (), {"cp": grid, "tp": Group((3,), 0)}))
    config = ModelConfig(
        num_layers=2,
        hidden_size=HEAD_DIM * heads[0],
        num_attention_heads=heads[0],
        num_query_groups=heads[1],
        vocab_size=8,
        **model,
    )
    parallel = ParallelConfig(context_parallel_size=cp or grid.cp.size, cp_comm_type=comm_type)
    return TEAttention(config, parallel, layer, grid)


def pack(lengths: Sequence[int], cp: CPGroup, room: Sequence[int] | None = None) -> PackedSeqParams:
    """The record of the door."""
    room = lengths if room is None else room
    real, offsets = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (lengths, room))
    blank = torch.zeros(sum(room))
    return shard(Sample(blank.long(), blank.long(), blank, real, offsets), cp).packed


def inputs(rows: int, heads: tuple[int, int] = (4, 2)) -> list[Tensor]:
    """q, k, v, float64 [rows, n, D]."""
    generator = torch.Generator().manual_seed(rows)
    sizes = (heads[0], heads[1], heads[1])
    return [torch.randn(rows, n, HEAD_DIM, generator=generator, dtype=torch.float64) for n in sizes]


def call(module: TEAttention, packed: PackedSeqParams, cp: CPGroup, heads: tuple[int, int] = (4, 2)) -> Tensor:
    return module(*inputs(sum(packed.padded_lengths) // cp.size, heads), packed, cp)


def without_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}


# --- the stand-in


@pytest.mark.parametrize(
    ("version", "function", "args", "arguments"),
    [
        ("2.20.2", "__init__", (), {"num_attention_heads": 4}),  # one is missing
        ("2.20.2", "__init__", (4, 8), {}),
        ("2.20.2", "__init__", (), {"num_attention_heads": 4, "kv_channels": 8, "cp_type": "p2p"}),
        ("2.19.0", "__init__", (), {"num_attention_heads": 4, "kv_channels": 8, "softcap": 9.0}),
        ("2.7", "__init__", (), {"num_attention_heads": 4, "kv_channels": 8, "softmax_type": "vanilla"}),
        ("1.9", "__init__", (), {"num_attention_heads": 4, "kv_channels": 8, "cp_comm_type": "p2p"}),
        ("2.19.0", "set_context_parallel_group", (None, None, None, "p2p"), {}),
        ("2.19.0", "set_context_parallel_group", (), {"cp_group": None, "cp_global_ranks": None}),
        ("2.1", "forward", (), {"pad_between_seqs": True}),
        ("2.20.2", "forward", (), {"is_first_microbatch": True}),
        ("2.20.2", "forward", (torch.zeros(1),), {}),
    ],
)
def test_standin_refuses_what_a_release_has_not(
    version: str, function: str, args: tuple[Any, ...], arguments: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        Record(version).note(function, 0, args, arguments)


@pytest.mark.parametrize(
    "name",
    ["num_gqa_groups", "window_size", "cp_global_ranks", "cp_stream", "cp_comm_type", "softmax_scale", "tp_group"]
    + ["query_layer", "qkv_format", "attn_mask_type", "cu_seqlens_kv_padded", "max_seqlen_q", "pad_between_seqs"],
)
def test_renamed_argument_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch, "2.20.2", {name: f"{name}_"})
    with pytest.raises(TypeError, match=name):
        call(attention(PAIR), pack([8, 3], PAIR, [8, 4]), PAIR)


# --- how it is made


@pytest.mark.parametrize("version", RELEASES)
def test_construction(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    record = install(monkeypatch, version)
    grid = cast(Grid, type("G", (), {"cp": PAIR, "tp": Group((3, 7), 0, Name("tp", 2))}))
    module = attention(grid, layer=2, heads=(8, 4), softmax_scale=0.3, attention_dropout=0.1, kv_channels=16)
    expected = {
        "num_attention_heads": 8,
        "kv_channels": 16,
        "num_gqa_groups": 4,
        "attention_dropout": 0.1,
        "qkv_format": "bshd",
        "attn_mask_type": "causal",
        "window_size": (-1, 0),
        "tp_size": 2,
        "tp_group": Name("tp", 2),
        "layer_number": 2,
        "softmax_scale": 0.3,
        "cp_group": Name("pair", 2),
        "cp_global_ranks": [2, 3],
        "cp_stream": module.shared_stream(),
        "cp_comm_type": "p2p",
    }
    if version == "1.8.0":
        del expected["cp_comm_type"]
    assert record.calls == [("__init__", 0, expected)]


def test_context_parallelism_is_for_the_config_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    record = install(monkeypatch, "2.20.2")
    attention(CPGroup((3,), 0, Name("of one", 1)))
    attention(PAIR, cp=1)
    assert not [name for made in record["__init__"] for name in made if name.startswith("cp_")]


@pytest.mark.parametrize(
    ("mask", "window", "expected"),
    [
        ("causal", None, (-1, 0)),
        ("causal", [-1, -1], (-1, 0)),
        ("causal", [128, -1], (128, 0)),
        ("causal", [0, 0], (0, 0)),
        ("no_mask", None, (-1, -1)),
        ("no_mask", [5, 3], (5, 3)),
    ],
)
def test_windows(
    monkeypatch: pytest.MonkeyPatch, mask: str, window: list[int] | None, expected: tuple[int, int]
) -> None:
    record = install(monkeypatch, "2.20.2")
    attention(attn_mask_type=mask, window_size=window)
    (made,) = record["__init__"]
    assert made["window_size"] == expected and made["attn_mask_type"] == mask


def test_other_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    record = install(monkeypatch, "2.20.2")
    attention(softmax_type="off-by-one", attn_logit_softcapping=30.0)
    (made,) = record["__init__"]
    assert made["softmax_type"] == "off-by-one" and made["softcap"] == 30.0
    install(monkeypatch, "2.19.0")
    attention(softmax_type="off-by-one")
    with pytest.raises(
        ValueError, match=r"softcap = 30.0 of layer 1 needs TransformerEngine 2.20, 2.19.0 is installed"
    ):
        attention(attn_logit_softcapping=30.0)
    install(monkeypatch, "2.7.0")
    with pytest.raises(ValueError, match=r"softmax_type = off-by-one of layer 1 needs TransformerEngine 2.8, 2.7.0 is"):
        attention(softmax_type="off-by-one")


def test_one_stream_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    record = install(monkeypatch, "2.20.2")
    attention()
    assert TEAttention.cp_stream is None  # nobody to overlap with
    for layer in (1, 2):
        attention(PAIR, layer=layer)
    one, other = (made["cp_stream"] for made in record["__init__"][1:])
    assert one is other is TEAttention.cp_stream


def test_te_that_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te, "te_version", lambda: None)
    with pytest.raises(ValueError, match=r"not installed: pip install -e '.\[te\]', or use attention_backend native"):
        attention()
    install(monkeypatch, "2.3")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(ValueError, match="TransformerEngine 2.3 cannot be loaded .*transformer_engine.pytorch"):
        attention()


# --- how it is called


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("cp", [ALONE, PAIR], ids=lambda cp: f"cp{cp.size}")
def test_equal_rows(monkeypatch: pytest.MonkeyPatch, cp: CPGroup, version: str, mask: str) -> None:
    """TE's bshd, of local rows; nothing about offsets, which it derives."""
    record = install(monkeypatch, version)
    out = call(attention(cp, attn_mask_type=mask), pack([16, 16, 16], cp), cp)
    assert out.shape == (48 // cp.size, 4, HEAD_DIM)
    (asked,) = record["forward"]
    assert without_tensors(asked) == {"qkv_format": "bshd", "attn_mask_type": mask}
    for name, heads, x in zip(("query", "key", "value"), (4, 2, 2), inputs(48 // cp.size), strict=True):
        assert torch.equal(asked[f"{name}_layer"], x.reshape(3, 16 // cp.size, heads, HEAD_DIM))


def test_rows_are_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one projection stay where they are."""
    record = install(monkeypatch, "2.20.2")
    qkv = torch.randn(32, 8, HEAD_DIM)
    q, k, v = qkv.split([4, 2, 2], dim=1)
    attention()(q, k, v, pack([16, 16], ALONE), ALONE)
    (asked,) = record["forward"]
    assert {asked[f"{name}_layer"].data_ptr() for name in ("query", "key", "value")} == {
        x.data_ptr() for x in (q, k, v)
    }


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cp", [ALONE, PAIR], ids=lambda cp: f"cp{cp.size}")
def test_packs(monkeypatch: pytest.MonkeyPatch, cp: CPGroup, padded: bool, version: str, mask: str) -> None:
    """Offsets of the whole pack, and as padded ones the same object where nothing is padded."""
    record = install(monkeypatch, version)
    packed = pack([8, 3, 12], cp, [8, 4, 12]) if padded else pack([8, 4, 12], cp)
    call(attention(cp, attn_mask_type=mask), packed, cp)
    (asked,) = record["forward"]
    expected = {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal" if mask == "causal" else "padding",
        "max_seqlen_q": 12,
        "max_seqlen_kv": 12,
    }
    if version not in ("1.8.0", "1.12.0", "2.0"):
        expected["pad_between_seqs"] = padded
    assert without_tensors(asked) == expected
    assert asked["cu_seqlens_q"] is packed.cu_seqlens_q and asked["cu_seqlens_kv"] is packed.cu_seqlens_kv
    assert asked["cu_seqlens_q"].tolist() == ([0, 8, 11, 23] if padded else [0, 8, 12, 24])
    offsets = [asked.get(f"cu_seqlens_{x}_padded") for x in ("q", "kv")]
    if padded:
        assert [x.tolist() for x in offsets if x is not None] == [[0, 8, 12, 24]] * 2
    elif cp.size > 1:
        assert offsets[0] is asked["cu_seqlens_q"] and offsets[1] is asked["cu_seqlens_kv"]
    else:
        assert not [name for name in asked if name.endswith("_padded")]
    assert asked["query_layer"].shape == (24 // cp.size, 4, HEAD_DIM)


def test_ranks_are_bound_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    record = install(monkeypatch, "2.20.2")
    module = attention(PAIR)
    for cp in (PAIR, PAIR, ALONE, ALONE, FOUR, PAIR, CPGroup((2, 3), 1, Name("pair", 2))):
        call(module, pack([16], cp), cp)
    stream = module.shared_stream()
    keys = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
    bound = [
        (None, None, None, "p2p"),
        (Name("four", 4), [0, 1, 2, 3], stream, "p2p"),
        (Name("pair", 2), [2, 3], stream, "p2p"),
    ]
    assert record["set_context_parallel_group"] == [dict(zip(keys, values, strict=True)) for values in bound]
    letters = {"__init__": "i", "forward": "f", "set_context_parallel_group": "s"}
    assert "".join(letters[name] for name, _, _ in record.calls) == "iffsffsfsff"


def test_ranks_from_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """cp of 1 in the configuration, of 2 in a microbatch, and back."""
    record = install(monkeypatch, "2.20.2")
    module = attention(ALONE, "all_gather")
    for cp in (ALONE, PAIR, ALONE):
        call(module, pack([16], cp), cp)
    joined, left = record["set_context_parallel_group"]
    assert joined["cp_group"] == Name("pair", 2) and joined["cp_comm_type"] == "all_gather"
    assert left == {"cp_group": None, "cp_global_ranks": None, "cp_stream": None, "cp_comm_type": "all_gather"}


def test_before_types_there_is_p2p_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    record = install(monkeypatch, "1.9.0")
    module = attention(PAIR)
    call(module, pack([16], ALONE), ALONE)
    assert record["set_context_parallel_group"] == [{"cp_group": None, "cp_global_ranks": None, "cp_stream": None}]
    with pytest.raises(ValueError, match=r"all_gather of layer 1 needs TransformerEngine 1.10, 1.9.0 is installed"):
        attention(PAIR, "all_gather")


@pytest.mark.parametrize(
    ("comm_type", "first"), [("all_gather", "1.10"), ("a2a", "1.11"), ("a2a+p2p", "1.12"), ("p2p", "1.8")]
)
def test_first_release_of_each_type(monkeypatch: pytest.MonkeyPatch, comm_type: str, first: str) -> None:
    record = install(monkeypatch, first)
    attention(FOUR, comm_type)
    assert record["__init__"][0].get("cp_comm_type", "p2p") == comm_type
    major, minor = first.split(".")
    install(monkeypatch, f"{major}.{int(minor) - 1}.3")
    with pytest.raises(
        ValueError, match=rf"{comm_type.replace('+', '.')} of layer 1 needs .* {first}, .* is installed"
    ):
        attention(FOUR, comm_type)


def test_each_layer_has_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    record = install(monkeypatch, "2.20.2")
    for types in (["a2a", "p2p"], [["a2a", 1], ["p2p", 1]]):
        for layer in (1, 2):
            attention(PAIR, types, layer=layer)
    assert [made["cp_comm_type"] for made in record["__init__"]] == ["a2a", "p2p"] * 2


def test_hierarchy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its groups as a list, inner first; where a level is one rank alone, the type that is left."""
    record = install(monkeypatch, "2.20.2")
    module = attention(FOUR, "a2a+p2p")
    inner_alone = FOUR.levels[1], Group((3,), 0)
    call(module, pack([16], ALONE), ALONE)
    for levels in (inner_alone, inner_alone[::-1]):
        attention(CPGroup(FOUR.ranks, 3, FOUR.process_group, levels[::-1]), "a2a+p2p", (4, 4))
    made = [(one["cp_comm_type"], one["cp_group"]) for one in record["__init__"]]
    four = Name("four", 4)
    assert made == [("a2a+p2p", [Name("inner", 2), Name("outer", 2)]), ("p2p", four), ("a2a", four)]
    assert record["__init__"][0]["cp_global_ranks"] == [0, 1, 2, 3]
    assert record["set_context_parallel_group"][0]["cp_comm_type"] == "a2a+p2p"
    with pytest.raises(ValueError, match=r"a2a\+p2p of layer 1 needs ranks in two levels, \[2, 3\] have 0"):
        attention(PAIR, "a2a+p2p")


@pytest.mark.parametrize(
    ("comm_type", "heads", "cp", "groups"),
    [
        ("a2a", (4, 4), PAIR, 4),
        ("a2a", (4, 1), PAIR, 2),
        ("a2a", (12, 3), PAIR, 6),
        ("a2a", (12, 6), FOUR, 12),
        ("a2a+p2p", (12, 1), FOUR, 2),
        ("a2a+p2p", (12, 3), FOUR, 6),
        ("p2p", (12, 3), FOUR, 3),
        ("all_gather", (12, 1), FOUR, 1),
    ],
)
def test_kv_heads_are_repeated_to_be_dealt(
    monkeypatch: pytest.MonkeyPatch, comm_type: str, heads: tuple[int, int], cp: CPGroup, groups: int
) -> None:
    record = install(monkeypatch, "2.20.2")
    call(attention(cp, comm_type, heads), pack([16], cp), cp, heads)
    assert record["__init__"][0]["num_gqa_groups"] == groups
    _, k, v = inputs(16 // cp.size, heads)
    for name, x in (("key_layer", k), ("value_layer", v)):
        given = record["forward"][0][name][0]
        assert given.shape[1] == groups
        assert all(torch.equal(given[:, n], x[:, n * heads[1] // groups]) for n in range(groups))


def test_one_module_for_each_number_of_kv_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """TE takes as many as it was made for; what is made later evaluates when the model does."""
    record = install(monkeypatch, "2.20.2")
    heads = (4, 1)
    module = attention(PAIR, "a2a", heads).eval()
    for cp in (PAIR, ALONE, PAIR, FOUR, ALONE):
        call(module, pack([16], cp), cp, heads)
    assert [made["num_gqa_groups"] for made in record["__init__"]] == [2, 1, 4]
    assert [number for name, number, _ in record.calls if name == "forward"] == [0, 1, 0, 2, 1]
    assert not record["set_context_parallel_group"]  # each was made for its ranks, and kept them
    assert not any(one.training for one in module.modules()) and not list(module.parameters())


def test_heads_that_cannot_be_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "2.20.2")
    with pytest.raises(ValueError, match="a2a cannot deal 3 query heads .* over 2 ranks: use p2p or all_gather"):
        attention(PAIR, "a2a", (3, 1))


def test_wrong_pack_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "2.20.2")
    with pytest.raises(
        ValueError, match="a pack of 16 tokens over 1 ranks does not lie in 8 queries and 8 keys a rank"
    ):
        attention()(*inputs(8), pack([16], ALONE), ALONE)
    q, k, v = inputs(0)
    assert attention()(q, k, v, pack([0], ALONE), ALONE).shape == q.shape


# --- what comes of it


class Case(NamedTuple):
    comm_type: str
    lengths: tuple[int, ...]
    room: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    mask: str = "causal"
    window: tuple[int, int] | None = None
    levels: tuple[int, ...] = ()


EVEN, ODD = ((32, 32), (32, 32)), ((8, 21, 1, 0), (8, 24, 8, 8))


def errors(case: Case) -> list[float]:
    """Largest differences of the output and of the gradients of q, k, v on this rank, nan where one is not finite."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch, "2.20.2")
        size = dist.get_world_size() if dist.is_initialized() else 1
        levels = list(case.levels) or None
        parallel = ParallelConfig(context_parallel_size=size, hierarchical_context_parallel_sizes=levels)
        grid = Grid.create(parallel)
        packed = pack(case.lengths, grid.cp, case.room)
        view: dict[str, Any] = {"attn_mask_type": case.mask, "window_size": list(case.window or ()) or None}
        module = attention(grid, case.comm_type, case.heads, softmax_scale=0.4, **view)
        index = token_index(torch.tensor([0, *accumulate(case.room)]), grid.cp.rank, size)
        local = [x[index].requires_grad_() for x in inputs(sum(case.room), case.heads)]
        dout, expected = exact(case, inputs(sum(case.room), case.heads), softmax_scale=0.4)
        out = module(*local, packed, grid.cp)
        got = [out, *torch.autograd.grad(out, local, dout[index])]
        return [(a - b[index]).abs().max().item() for a, b in zip(got, expected, strict=True)]


def exact(case: Case, whole: list[Tensor], softmax_scale: float | None = None) -> tuple[Tensor, list[Tensor]]:
    """A gradient of the output; the output of the whole pack and the gradients of q, k, v. Padding is 0 in all."""
    room = list(case.room)
    real = torch.cat([torch.arange(n) < m for m, n in zip(case.lengths, room, strict=True)])[:, None, None]
    q, k, v = (x.requires_grad_() for x in whole)
    out = real * reference.attention(
        *(q, k, v),
        case.lengths,
        room,
        causal=case.mask == "causal",
        window=case.window,
        softmax_scale=softmax_scale,
    )
    dout = real * torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return dout, [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


CASES = {
    1: [
        Case("p2p", *EVEN),
        Case("p2p", *EVEN, mask="no_mask"),
        Case("p2p", *ODD),
        Case("a2a", *ODD, heads=(6, 3), mask="no_mask"),
        Case("p2p", *ODD, window=(5, 0)),
        Case("p2p", *EVEN, mask="no_mask", window=(4, 2)),
    ],
    2: [
        Case("p2p", *EVEN),
        Case("all_gather", *ODD, heads=(4, 1), mask="no_mask"),
        Case("a2a", *ODD, heads=(6, 3)),
        Case("a2a", *EVEN, heads=(4, 1), window=(5, 0)),
        Case("a2a+p2p", *ODD, heads=(6, 3), levels=(2, 1)),
        Case("a2a+p2p", *ODD, heads=(3, 1), levels=(1, 2)),
    ],
    4: [
        Case("a2a+p2p", *ODD, heads=(6, 3), levels=(2, 2)),
        Case("a2a+p2p", *EVEN, levels=(2, 2)),
        Case("a2a", *ODD, heads=(12, 6)),
    ],
}


def all_errors(cases: list[Case]) -> list[list[float]]:
    return [errors(case) for case in cases]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_result(cp: int) -> None:
    """The one of the reference: right heads, order, masks and offsets, and no rubbish from padding."""
    found = run(all_errors, cp, CASES[cp]) if cp > 1 else [all_errors(CASES[1])]
    for rank, ranks in enumerate(found):
        for case, worst in zip(CASES[cp], ranks, strict=True):
            assert all(error < 1e-12 for error in worst), (rank, case, worst)


def test_rubbish_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the care taken of padding the stand-in's rubbish comes through."""
    everything = torch.ones((), dtype=torch.bool)
    monkeypatch.setattr(te, "real_rows", lambda *_: everything)
    assert torch.tensor(errors(Case("p2p", *ODD))).isnan().any()


@pytest.mark.gpu
@pytest.mark.te
@pytest.mark.parametrize("case", [Case("p2p", *EVEN), Case("p2p", *ODD), Case("p2p", *EVEN, window=(5, 0))])
def test_real_one(case: Case) -> None:
    """TransformerEngine itself, bfloat16 on one GPU."""
    module = attention(heads=case.heads, kv_channels=64, window_size=list(case.window or ()) or None)
    rows, blank = sum(case.room), torch.zeros(sum(case.room))
    real, offsets = (torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (case.lengths, case.room))
    batch = shard(Sample(blank.long(), blank.long(), blank, real, offsets), ALONE).to("cuda")
    heads = (case.heads[0], case.heads[1], case.heads[1])
    local = [torch.randn(rows, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in heads]
    dout, expected = exact(case, [x.detach().cpu().double() for x in local])
    out = module(*local, batch.packed, ALONE)
    got = [out, *torch.autograd.grad(out, local, dout.to("cuda", torch.bfloat16))]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, atol=3e-2, rtol=3e-2)


def test_standin_has_the_recorded_signatures() -> None:
    for version, functions in te_standin.FACTS["signatures"].items():
        for name in ("__init__", "forward", "set_context_parallel_group"):
            recorded = functions[f"DotProductAttention.{name}"]
            assert list(te_standin.signature(version, name).parameters) == recorded["required"] + recorded["optional"]
