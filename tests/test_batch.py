"""The door against what TransformerEngine and Megatron-LM cut, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacp.batch import PackedSeqParams, Sample, shard, token_index
from megacp.grid import CPGroup

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> dict:
    return json.loads((GOLDEN / name).read_text())


def group(rank: int, size: int) -> CPGroup:
    return CPGroup(tuple(range(size)), rank)


def pack(lengths: list[int], multiple: int) -> Sample:
    """Sequences of these real lengths, each padded to the multiple; tokens count from 1."""
    room = [-(-length // multiple) * multiple for length in lengths]
    real = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    padded = torch.tensor([0, *np.cumsum(room)], dtype=torch.int32)
    total = sum(room)
    mask = torch.zeros(total)
    for start, length in zip(padded.tolist(), lengths, strict=False):
        mask[start : start + length] = 1
    tokens = torch.arange(1, total + 1)
    return Sample(tokens, tokens + 1, mask, real, real if lengths == room else padded, (7,))


@pytest.mark.parametrize(
    "case", golden("thd_partition.json")["cases"], ids=lambda c: f"cp{c['cp_size']}-{c['total_tokens']}"
)
def test_token_index_is_transformer_engines(case: dict) -> None:
    for rank, expected in enumerate(case["indices"]):
        assert token_index(torch.tensor(case["cu_seqlens"]), rank, case["cp_size"]).tolist() == expected


@pytest.mark.parametrize("case", golden("thd_partition.json")["out_of_contract"], ids=lambda c: str(c["cu_seqlens"]))
def test_offsets_out_of_contract_are_refused(case: dict) -> None:
    """By token_index where a boundary is odd, by shard where offsets and number of tokens disagree."""
    total, offsets = case["total_tokens"], torch.tensor(case["cu_seqlens"], dtype=torch.int32)
    sample = Sample(torch.arange(total), torch.arange(total), torch.ones(total), offsets, offsets)
    with pytest.raises(ValueError, match="multiple|offsets"):
        shard(sample, group(0, case["cp_size"]))


def dense_sample(arrays: np.lib.npyio.NpzFile, names: dict, width: int) -> Sample:
    """The sample behind a golden batch [b, S]; keys that the case lacks are filled with zeros."""
    shape = next(arrays[names[key]].shape for key in ("tokens", "labels", "loss_mask") if names[key])
    rows, length = shape[0], shape[1]

    def flat(key: str, dtype: torch.dtype) -> torch.Tensor:
        if names[key] is None:
            return torch.zeros(rows * length, dtype=dtype)
        return torch.from_numpy(arrays[names[key]]).to(dtype).flatten()

    offsets = torch.arange(rows + 1, dtype=torch.int32) * length
    return Sample(
        flat("tokens", torch.int64), flat("labels", torch.int64), flat("loss_mask", torch.float32), offsets, offsets
    )


def test_dense_cut_is_megatrons() -> None:
    """cp_batch.json, plain batches: tokens, labels, loss_mask, position_ids.

    Left out: attention_mask (attention takes offsets, there is no mask tensor), the case "hidden" (hidden states are
    never cut here) and all-None batches (a Sample is always whole); cu_seqlens etc. of the packed and hybrid cases are
    checked below where they have a counterpart.
    """
    arrays = np.load(GOLDEN / "cp_batch.npz")
    compared = 0
    for case in golden("cp_batch.json")["cases"]:
        names = case["inputs"]
        dense = case["fn"] == "get_pretrain_batch_on_this_cp_rank"
        if not dense or not any(names.get(key) for key in ("tokens", "labels", "loss_mask")):
            continue
        batch = shard(dense_sample(arrays, names, case["cp_size"]), group(case["cp_rank"], case["cp_size"]))
        for key in ("tokens", "labels", "loss_mask", "position_ids"):
            if names.get(key) is None:
                continue
            ours = getattr(batch, key)
            theirs = arrays[case["outputs"][key]]
            if key == "position_ids" and not np.array_equal(
                arrays[names[key]], np.broadcast_to(np.arange(arrays[names[key]].shape[1]), arrays[names[key]].shape)
            ):
                continue  # arbitrary numbers there; ours always count from 0 in each sequence
            assert np.array_equal(ours.numpy(), theirs.reshape(-1)), (case["name"], key)
            compared += 1
    assert compared > 100


def test_packed_cut_is_megatrons() -> None:
    """cp_batch.json, packed and hybrid cases: tokens, labels, loss_mask, position_ids cut by padded offsets."""
    arrays = np.load(GOLDEN / "cp_batch.npz")
    compared = 0
    for case in golden("cp_batch.json")["cases"]:
        names = case["inputs"]
        if case["fn"] != "get_batch_on_this_cp_rank" or not names.get("tokens") or not names.get("cu_seqlens"):
            continue
        local = names.get("local_cp_size")
        size = case.get("cp_size") or int(arrays[local].reshape(-1)[0])
        ranks = case["outputs"].get("hybrid_cp_group")
        members = ranks["process_group_ranks"] if isinstance(ranks, dict) else None
        rank = members.index(case["cp_rank"]) if members else case["cp_rank"] % size
        offsets = torch.from_numpy(arrays[names.get("cu_seqlens_padded") or names["cu_seqlens"]].reshape(-1)).int()
        tensors = {key: torch.from_numpy(arrays[names[key]]).flatten() for key in ("tokens", "labels", "loss_mask")}
        sample = Sample(tensors["tokens"], tensors["labels"], tensors["loss_mask"], offsets, offsets)
        batch = shard(sample, group(rank, size))
        for key in ("tokens", "labels", "loss_mask"):
            assert np.array_equal(getattr(batch, key).numpy(), arrays[case["outputs"][key]].reshape(-1)), (
                case["name"],
                key,
            )
            compared += 1
    assert compared > 30


def test_seq_idx_is_megatrons() -> None:
    data = golden("packed_seq_params.json")
    for case in data["cases"]:
        padded = case["cu_seqlens_q_padded"]
        real = torch.tensor(case["cu_seqlens_q"], dtype=torch.int32)
        given_padded = None if padded is None else torch.tensor(padded, dtype=torch.int32)
        params = PackedSeqParams("thd", real, real, given_padded, given_padded, 0, 0, total_tokens=case["total_tokens"])
        if case["seq_idx"] is None:
            assert params.seq_idx is None
            continue
        assert params.seq_idx is not None and params.seq_idx.dtype == torch.int32
        assert params.seq_idx.shape == (1, case["total_tokens"])
        if case["name"] not in data["length_differs_from_total"]:
            assert params.seq_idx.tolist() == case["seq_idx"], case["name"]
        else:
            shared = min(case["total_tokens"], len(case["seq_idx"][0]))
            assert params.seq_idx[0, :shared].tolist() == case["seq_idx"][0][:shared], case["name"]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([1, 2, 3, 4, 8]))
def test_ranks_share_every_token_once(lengths: list[int], size: int) -> None:
    sample = pack(lengths, 2 * size)
    batches = [shard(sample, group(rank, size)) for rank in range(size)]
    tokens = torch.cat([batch.tokens for batch in batches if batch.tokens is not None])
    assert torch.equal(tokens.sort().values, sample.tokens)
    assert len({len(batch.position_ids) for batch in batches}) == 1
    starts = sample.cu_seqlens_padded
    for batch in batches:
        assert batch.tokens is not None
        sequence = torch.bucketize(batch.tokens - 1, starts, right=True) - 1
        assert torch.equal(batch.position_ids, batch.tokens - 1 - starts[sequence])


def test_packed_record_describes_the_whole_pack() -> None:
    batch = shard(pack([3, 8, 1], 4), group(1, 2))
    packed = batch.packed
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == [0, 3, 11, 12]
    assert packed.cu_seqlens_q_padded is not None and packed.cu_seqlens_q_padded.tolist() == [0, 4, 12, 16]
    assert (packed.max_seqlen_q, packed.total_tokens, packed.local_cp_size) == (8, 16, 2)
    assert packed.cu_seqlens_q.dtype == torch.int32


def test_padded_offsets_are_the_same_object_where_nothing_is_padded() -> None:
    packed = shard(pack([8, 8], 4), group(0, 2)).packed
    assert packed.qkv_format == "sbhd" and packed.cu_seqlens_q_padded is packed.cu_seqlens_q
    moved = shard(pack([8, 4], 4), group(0, 2)).to("cpu").packed
    assert moved.qkv_format == "thd" and moved.cu_seqlens_q_padded is moved.cu_seqlens_q
    assert shard(pack([8, 8], 2), group(0, 1)).packed.cu_seqlens_q_padded is None


def test_wrong_samples_are_refused_by_sequence() -> None:
    with pytest.raises(ValueError, match=r"sample \(7,\): sequence 1 ends at offset 12, not a multiple of 2\*cp = 8"):
        shard(pack([8, 4], 4), group(0, 4))
    good = pack([3, 5], 4)
    with pytest.raises(ValueError, match="sequence 1 has real length 9"):
        shard(replace(good, cu_seqlens=torch.tensor([0, 3, 12])), group(0, 2))
    with pytest.raises(ValueError, match="12 tokens, 11 labels"):
        shard(replace(good, labels=good.labels[:-1]), group(0, 2))
    with pytest.raises(ValueError, match="rank 2 is not in a context-parallel group of 2"):
        token_index(torch.tensor([0, 8]), 2, 2)
