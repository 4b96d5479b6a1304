from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacp.batch import shard
from megacp.config import DataConfig
from megacp.data import pretrain
from megacp.data.index import build_index
from megacp.data.pack import PackLayout, pack
from megacp.data.pretrain import BlendedDataset, PretrainDataset, build_datasets, parse_split
from megacp.data.tokens import TokenFile, TokenFileWriter
from megacp.grid import CPGroup
from tests.test_index import CASES
from tests.test_index import build as build_case
from tests.test_pack import real_positions

GOLDEN = Path(__file__).parent / "golden"
SAMPLES = json.loads((GOLDEN / "gpt_dataset.json").read_text())
BLENDS = json.loads((GOLDEN / "blending.json").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the token files: what is cached beside them must not land in the repository."""
    return Path(shutil.copytree(GOLDEN / "indexed", tmp_path / "data"))


def config(**fields: Any) -> DataConfig:
    return DataConfig(**{"seq_length": 8, **fields})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_samples_are_megatrons(case: dict[str, Any]) -> None:
    # The reference masks by token, ours by the index: in gpt_tiny documents, and they alone, end with token 0.
    tokens = TokenFile(GOLDEN / "indexed" / "gpt_tiny")
    dataset = PretrainDataset(
        tokens,
        build_case(case, tokens.lengths),
        case["sequence_length"],
        case["add_extra_token_to_sequence"],
    )
    assert len(dataset) == case["length"]
    layout = PackLayout(mask_between_documents=case["reset_attention_mask"], eod_mask_loss=case["eod_mask_loss"])
    for i, wanted in enumerate(case["samples"]):
        sample = pack([dataset.row(i)], [i], layout)
        batch = shard(sample, CPGroup(ranks=(0,), rank=0, process_group=None))
        real = real_positions(sample)
        assert sample.tokens[real].tolist() == wanted["tokens"]
        assert sample.labels[real].tolist() == wanted["labels"]
        assert sample.loss_mask[real].tolist() == wanted["loss_mask"]
        assert batch.position_ids[real].tolist() == wanted["position_ids"]


@pytest.mark.parametrize("case", SAMPLES["splits"], ids=lambda case: case["split"])
def test_splits_are_megatrons(case: dict[str, Any]) -> None:
    wanted = [None if share is None else tuple(share) for share in case["matrix"]]
    assert parse_split(case["split"]) == wanted


@pytest.mark.parametrize("split", ["", "a,b", "1,-1,0", "0,0,0", "1,1,1,1", "nan", "inf,1"])
def test_bad_split(split: str) -> None:
    with pytest.raises(ValueError, match="data.split"):
        parse_split(split)


@pytest.mark.parametrize("case", BLENDS["builder"], ids=lambda case: case["name"])
def test_builds_as_megatron(case: dict[str, Any], folder: Path) -> None:
    # A split of size 0 is None here; the reference builds one nobody reads, and calls it None only without a share.
    prefixes = [str(folder / name) for name in case["prefixes"]]
    weights = case["weights"] or []
    paths = [part for pair in zip(weights, prefixes, strict=True) for part in pair] if weights else prefixes
    data = config(data_path=paths, split=case["split"], seq_length=case["sequence_length"])
    built = build_datasets(data, case["sizes"], case["seed"])
    for dataset, wanted in zip(built, case["splits"], strict=True):
        assert (dataset is None) == (wanted is None)
        if dataset is None:
            continue
        assert len(dataset) == wanted["length"]
        rows = [dataset.row(i).tokens[:-1].tolist() for i in range(len(wanted["tokens_first"]))]
        assert rows == wanted["tokens_first"]
        if isinstance(dataset, BlendedDataset):
            assert dataset.source.tolist() == wanted["dataset_index"]
            assert dataset.sample.tolist() == wanted["dataset_sample_index"]
            for source, part in zip(dataset.sources, wanted["parts"], strict=True):
                check_index(source, part)
        else:
            check_index(dataset, wanted)


def check_index(dataset: Any, wanted: dict[str, Any]) -> None:
    for name, array in dataset.index._asdict().items():
        if name in wanted:
            assert array.tolist() == wanted[name], name


def write(prefix: Path, documents: list[list[int]]) -> str:
    with TokenFileWriter(prefix, np.int32) as writer:
        for document in documents:
            writer.add_document(document, [len(document)])
    return str(prefix)


@pytest.mark.parametrize(("extra", "drop_last"), [(True, True), (True, False), (False, True), (False, False)])
def test_rows_are_the_stream(tmp_path: Path, extra: bool, drop_last: bool) -> None:
    random = np.random.default_rng(0)
    documents = [(1000 * i + np.arange(size)).tolist() for i, size in enumerate(random.integers(0, 7, 40), start=1)]
    tokens = TokenFile(write(tmp_path / "x", documents))
    index = build_index(tokens.lengths, np.arange(40), 30, 6, 5, extra_token=extra, drop_last=drop_last)
    dataset = PretrainDataset(tokens, index, 6, extra)
    stream = [token for i in index.document_index for token in documents[i]]
    for i, sample in enumerate(index.shuffle_index.tolist()):
        real = stream[6 * sample : 6 * sample + 6 + extra]
        row, blind = dataset.row(i), dataset.row(i, read=False)
        assert row.tokens.tolist() == real + [0] * (7 - len(real))
        assert row.starts.tolist() == [k for k in range(1, len(real)) if real[k] % 1000 == 0]
        assert row.labels == min(6, len(real) - 1)
        assert blind.starts.tolist() == row.starts.tolist() and blind.labels == row.labels
        assert not blind.tokens.any()
    for outside in (-1, len(dataset)):
        with pytest.raises(IndexError, match="x: sample"):
            dataset.row(outside)


def test_the_second_time_the_index_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"data_path": [0.5, str(folder / "gpt_tiny"), 0.5, str(folder / "gpt_tiny2")], "split": "6,2,2"}
    for cache in (None, str(folder / "elsewhere" / "cache")):
        data = config(**fields, data_cache_path=cache)
        first = build_datasets(data, [20, 4, 2], 1)
        with monkeypatch.context() as patch:
            patch.setattr(pretrain, "build_index", None)
            patch.setattr(pretrain, "blend_index", None)
            second = build_datasets(data, [20, 4, 2], 1)
        for before, after in zip(first, second, strict=True):
            assert before is not None and after is not None
            rows = [[d.row(i).tokens.tolist() for i in range(len(d))] for d in (before, after)]
            assert rows[0] == rows[1]
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"index_cache", "elsewhere"}


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"sizes": [21, 0, 0]}, {"seq_length": 7}, {"split": "8,1,1"}, {"file": True}]
)
def test_the_key_holds_what_the_index_depends_on(folder: Path, change: dict[str, Any]) -> None:
    def build(sizes: Any = (20, 0, 0), seed: int = 1, file: bool = False, **fields: Any) -> int:
        if file:
            for ending in (".bin", ".idx"):
                shutil.copy(folder / f"gpt_tiny2{ending}", folder / f"gpt_tiny{ending}")
        build_datasets(config(data_path=str(folder / "gpt_tiny"), **fields), sizes, seed)
        return len(list((folder / "index_cache").glob("gpt_tiny-train-*/manifest.json")))

    assert build() == build() == 1
    assert build(**change) == 2


def test_paths_of_their_own(folder: Path) -> None:
    one, two = str(folder / "gpt_tiny"), str(folder / "gpt_tiny2")
    data = config(train_data_path=[1.0, one], valid_data_path=[two, one])
    train, valid, test = build_datasets(data, [40, None, 0], 3)
    assert train is not None and len(train) >= 40 and test is None
    assert isinstance(valid, BlendedDataset)
    assert len(valid) == sum(map(len, valid.sources))
    with pytest.raises(ValueError, match="leave it out"):
        build_datasets(config(data_path=one, valid_data_path=two), [1, 1, 0], 0)
    with pytest.raises(ValueError, match="set data.test_data_path"):
        build_datasets(data, [1, 1, 1], 0)


def test_exhausted_sources_wrap(folder: Path) -> None:
    paths = [str(folder / "gpt_tiny"), str(folder / "gpt_tiny2")]
    for blend in (paths, [9, paths[0], 1, paths[1]]):
        train, *_ = build_datasets(config(data_path=blend, split="1"), [500, 0, 0], 0)
        assert isinstance(train, BlendedDataset) and len(train) >= 500
        for i in range(500):
            train.row(i)
    train, *_ = build_datasets(config(data_path=paths, split="1"), [7, 0, 0], 0)
    assert train is not None and len(train) == 7


@pytest.mark.parametrize(
    ("fields", "sizes", "words"),
    [
        (
            {"split": "1,0,0"},
            [1, 1, 0],
            "1 valid samples are asked for, but data.split '1,0,0' gives valid nothing",
        ),
        ({"split": "999,1,0"}, [1, 1, 0], "leaves valid none of the 12 documents"),
        ({"seq_length": 500}, [None, 0, 0], "gpt_tiny, train: 96 tokens are fewer than one sample of 500"),
        ({"data_path": ["zero"]}, [5, 0, 0], "zero, train: no token"),
        ({"data_path": [1, "gpt_tiny", 1, "gpt_tiny2"]}, [None, 0, 0], "number of samples"),
        ({"data_path": None}, [1, 0, 0], "set data.train_data_path or data.data_path"),
    ],
)
def test_refuses(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], sizes: list[Any], words: str
) -> None:
    monkeypatch.chdir(folder)
    write(folder / "zero", [[], []])
    data = config(**{"data_path": "gpt_tiny", "split": "1", **fields})
    with pytest.raises(ValueError, match=words):
        build_datasets(data, sizes, 0)


@pytest.mark.parametrize("data_path", [["short", "gpt_tiny", "none"], ["gpt_tiny", "short", "none"]])
@pytest.mark.parametrize("size", [None, 5, 100])
def test_a_source_without_one_sample_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, data_path: list[str], size: Any
) -> None:
    """Of an unweighted list, for one epoch or for many, with one warning each."""
    monkeypatch.chdir(folder)
    write(folder / "short", [[1, 2, 3], [4, 5, 6, 7, 8]])  # 8 tokens: one label is missing
    write(folder / "none", [[]])
    write(folder / "enough", [[1, 2, 3], [4, 5, 6, 7, 8, 9]])
    with pytest.raises(ValueError, match="short, train: 8 tokens are fewer than one sample"):
        build_datasets(config(data_path=["short", "none"], split="1"), [size, 0, 0], 0)
    caplog.clear()
    built, *_ = build_datasets(config(data_path=[*data_path, "enough"], split="1"), [size, 0, 0], 0)
    assert sorted(record.message.split(",")[0] for record in caplog.records) == ["none", "short"]
    wanted, *_ = build_datasets(config(data_path=["gpt_tiny", "enough"], split="1"), [size, 0, 0], 0)
    assert built is not None and wanted is not None and len(built) == len(wanted)
    for i in range(len(built)):
        assert built.row(i).tokens.tolist() == wanted.row(i).tokens.tolist()


LENGTHS_AT = 34  # bytes of the header of a .idx


@pytest.mark.parametrize(
    ("at", "format", "values"),
    [
        (LENGTHS_AT, "<2i", (-1, 4)),
        (LENGTHS_AT, "<2i", (7, -4)),
        (LENGTHS_AT + 4 * 3 + 8, "<q", (2**40,)),
        (LENGTHS_AT + 4 * 3 + 8, "<q", (-4,)),
        (LENGTHS_AT + 4 * 3 + 8, "<q", (4,)),
        (LENGTHS_AT + 12 * 3 + 8, "<q", (3,)),
        (LENGTHS_AT + 12 * 3 + 8, "<q", (-1,)),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_damaged_index_is_refused_by_name(
    tmp_path: Path, at: int, format: str, values: tuple[int, ...], weighted: bool
) -> None:
    """When the dataset is built: samples of it would be read outside of their documents, or of the file."""
    whole, harmed = write(tmp_path / "whole", [[5] * 20]), write(tmp_path / "harmed", [[1, 2], [3], [4] * 20])
    path = Path(f"{harmed}.idx")
    content = bytearray(path.read_bytes())
    struct.pack_into(format, content, at, *values)
    path.write_bytes(content)
    data_path = [1, whole, 1, harmed] if weighted else [whole, harmed]
    with pytest.raises(ValueError, match=r"harmed\.idx: ") as error:
        build_datasets(config(data_path=data_path, split="1"), [3, 0, 0], 0)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing.idx"):
        build_datasets(config(data_path=str(tmp_path / "nothing")), [1, 0, 0], 0)
