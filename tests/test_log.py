"""What a run says of itself: lines, files, speed, and the count of FLOPs."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megacp import log
from megacp.config import LoggingConfig, ModelConfig
from tests.jobs import job, keeps, losses
from tests.tiny import setup, write_config, write_data

VALUES = {
    "lm_loss": 5.5432109,
    "grad_norm": 1.23456,
    "learning_rate": 3e-4,
    "consumed_samples": 128,
    "iteration_ms": 1234.56,
    "tokens_per_second": 9876.5,
    "tflops_per_rank": 0.123456,
    "skipped": 1,
    "nan": 2,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    kinds = {"global_batch_size": 4, "train_iters": 8, "device": "cpu", "num_threads": 1}
    return write_config(folder, write_data(folder), train=kinds)


def test_tensorboard_shows_every_iteration_once(config: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for stop in (6, 8):
        # Nothing is saved at 6: the second run begins anew.
        job(config, [f"logging.run_dir={tmp_path}", f"train.train_iters={stop}"])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = events.Scalars("train/lm_loss")
    assert [scalar.step for scalar in scalars] == list(range(1, 9))
    assert [scalar.value for scalar in scalars] == pytest.approx(list(losses(tmp_path).values()))


def test_wandb_offline(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    names = ["logging.wandb_project=tiny", "logging.wandb_mode=offline", "logging.wandb_exp_name=one"]
    job(config, [f"logging.run_dir={tmp_path}", *names, "train.train_iters=3"])
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1


def test_only_rank_zero_writes(config: Path, tmp_path: Path) -> None:
    silent = log.Log(setup(config, keeps(tmp_path))[0], active=False)
    silent.record("train", 1, {"lm_loss": 1.0})
    silent.close()
    assert list(tmp_path.iterdir()) == []


def dense_flops(model: Any, length: int) -> int:
    """Products of one sequence counted one by one, and three times: forward, gradient of inputs, of weights."""
    h, n, k, d, f = (
        model.hidden_size,
        model.num_attention_heads,
        model.kv_heads,
        model.head_dim,
        model.ffn_size,
    )
    linear = [(h, n * d), (h, k * d), (h, k * d), (n * d, h), (h, f), (h, f), (f, h)]
    layer = sum(2 * length * a * b for a, b in linear) + 2 * 2 * length * length * n * d // 2
    return 3 * (model.num_layers * layer + 2 * length * h * model.vocab_size)


def test_flops(config: Path) -> None:
    model = setup(config, [])[0].model
    lengths = np.array([64, 32])
    work = log.Work(float(lengths.sum()), float((lengths**2).sum()))
    assert log.model_flops(work, model) == sum(dense_flops(model, int(length)) for length in lengths)


def llama3_8b(**changes: Any) -> ModelConfig:
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8}
    return ModelConfig(**{**sizes, "ffn_hidden_size": 14336, "vocab_size": 128256, **changes})


def test_flops_of_llama3_8b_by_hand() -> None:
    """Of its 8,030,261,248 weights all multiply but the embedding's look-up and the norms."""
    weights = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert log.model_flops(log.Work(tokens=1, squares=0), llama3_8b()) == 6 * weights
    # A pair of tokens that see each other: scores and values, 2 FLOPs and 3 passes each, 4096 wide in 32 layers.
    pair = 2 * 2 * 3 * 4096 * 32
    assert log.model_flops(log.Work(tokens=0, squares=1), llama3_8b(attn_mask_type="no_mask")) == pair
    assert log.model_flops(log.Work(tokens=0, squares=1), llama3_8b()) == pair / 2


def test_flops_of_gpt2_by_hand() -> None:
    """Two matrices in the MLP, heads of a width of their own; a tied head multiplies all the same."""
    model = ModelConfig(
        num_layers=2,
        hidden_size=6,
        num_attention_heads=2,
        kv_channels=5,
        swiglu=False,
        vocab_size=11,
        untie_embeddings_and_output_weights=False,
    )
    weights = 2 * (3 * 6 * 10 + 10 * 6 + 2 * 6 * 24) + 11 * 6
    assert log.model_flops(log.Work(tokens=7, squares=49), model) == 6 * weights * 7 + 6 * 2 * 10 * 49


def test_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two iterations in four seconds on two ranks; what comes before a restart does not count."""
    now = iter([100.0, 150.0, 154.0, 154.0])
    monkeypatch.setattr("megacp.log.time.perf_counter", lambda: next(now))
    meter = log.Meter(SimpleNamespace(logging=LoggingConfig(peak_tflops=20.0), model=llama3_8b()), world_size=2)
    meter.add(log.Work(1e9, 1e9))
    meter.restart()
    meter.add(log.Work(1000, 1e6))
    meter.add(log.Work(3000, 9e6))
    tflops = log.model_flops(log.Work(4000, 1e7), llama3_8b()) / 4 / 2 / 1e12
    expected = {"iteration_ms": 2000, "tokens_per_second": 1000, "tflops_per_rank": tflops, "mfu": tflops / 20}
    assert meter.read() == pytest.approx(expected)


def test_mfu_needs_a_peak() -> None:
    meter = log.Meter(SimpleNamespace(logging=LoggingConfig(), model=llama3_8b()), world_size=1)
    meter.add(log.Work(10, 100))
    assert "mfu" not in meter.read()


def test_console_line() -> None:
    assert log.console_line(7, 1000, VALUES) == (
        "iteration        7/    1000 | consumed samples:        128 | elapsed time per iteration (ms): 1234.6 | "
        "tokens/s: 9876 | TFLOP/s/rank: 0.123 | learning rate: 3.000000e-04 | lm loss: 5.543211 | grad norm: 1.235 | "
        "skipped: 1 | nan: 2"
    )
    assert "TFLOP/s/rank: 0.123 | MFU: 41.5% | learning" in log.console_line(7, 1000, {**VALUES, "mfu": 0.415})


def test_console_line_of_a_step_that_was_skipped() -> None:
    line = log.console_line(7, 1000, {**VALUES, "lm_loss": math.nan, "grad_norm": math.inf})
    assert "lm loss: nan | grad norm: inf" in line


def places(**logging: Any) -> Any:
    return SimpleNamespace(logging=LoggingConfig(**logging), model_dump=lambda: {"model": {"num_layers": 2}})


def write(folder: Path, iteration: int) -> None:
    """A run of one iteration."""
    writer = log.Log(places(run_dir=str(folder), tensorboard=False), iteration - 1)
    writer.record("train", iteration, VALUES)
    writer.record("valid", iteration, {"lm_loss": 5.0, "ppl": 148.4})
    writer.close()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, by a reader that knows no NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_metrics_file(tmp_path: Path) -> None:
    """One JSON object a line; a run that goes on does so in the same file and says from where."""
    folder = tmp_path / "deep" / "run"
    write(folder, 1)
    write(folder, 2)
    assert lines_of(folder) == [
        line
        for iteration in (1, 2)
        for line in (
            {"kind": "start", "iteration": iteration - 1},
            {"kind": "train", "iteration": iteration, **VALUES},
            {"kind": "valid", "iteration": iteration, "lm_loss": 5.0, "ppl": 148.4},
        )
    ]
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_a_record_can_be_read_at_once(tmp_path: Path) -> None:
    writer = log.Log(places(run_dir=str(tmp_path), tensorboard=False))
    writer.record("train", 1, VALUES)
    assert lines_of(tmp_path)[-1]["iteration"] == 1
    writer.close()


@pytest.mark.parametrize("torn", ["", '{"kind": "tr', '{"kind": "train", "iteration": 2}'])
def test_a_line_cut_short_is_dropped(tmp_path: Path, torn: str) -> None:
    write(tmp_path, 1)
    before = lines_of(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    write(tmp_path, 2)
    assert lines_of(tmp_path)[: len(before)] == before
    assert [line["kind"] for line in lines_of(tmp_path)] == ["start", "train", "valid"] * 2


def test_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    writer = log.Log(places(run_dir=str(tmp_path), tensorboard=False))
    writer.record("train", 1, {"lm_loss": math.nan, "grad_norm": math.inf, "learning_rate": 0.1})
    writer.close()
    assert lines_of(tmp_path)[-1] == {"kind": "train", "iteration": 1, "learning_rate": 0.1}


def test_wandb_gets_every_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in: the real one is an extra."""
    calls: list[Any] = []
    session = SimpleNamespace(
        log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
    )

    def init(**settings: Any) -> Any:
        calls.append(settings)
        return session

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    named = {"wandb_project": "p", "wandb_exp_name": "e", "wandb_mode": "offline"}
    writer = log.Log(places(**named, run_dir=str(tmp_path), tensorboard=False))
    writer.record("train", 4, {"lm_loss": 1.0})
    writer.close()
    settings = {"project": "p", "name": "e", "mode": "offline", "dir": str(tmp_path)}
    assert calls == [{**settings, "config": {"model": {"num_layers": 2}}}, (4, {"train/lm_loss": 1.0}), "finish"]


def test_wandb_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: Any) -> Any:
        raise RuntimeError("api_key not configured")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(ValueError, match=r"api_key not configured.*wandb_mode=offline"):
        log.Log(places(wandb_project="p"))
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    with pytest.raises(ImportError, match=r"pip install -e '.\[wandb\]'"):
        log.Log(places(wandb_project="p"))


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    writer = log.Log(places())
    writer.record("train", 1, VALUES)
    writer.close()
    assert list(tmp_path.iterdir()) == []


class Full:
    """A file on a full disk: what is written fails, and so does closing it with that in its buffer."""

    def __init__(self, room: int = 0) -> None:
        self.room, self.refused = room, 0

    def write(self, text: str) -> None:
        if self.room == 0:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= 1

    def flush(self) -> None: ...

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", ["device", "stand-in"])
def test_a_full_disk_ends_the_metrics_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """One warning, no exception, and nothing is tried again."""
    writer = log.Log(places(run_dir=str(tmp_path), tensorboard=False))
    assert writer._file is not None
    writer._file.close()
    full = Full()
    writer._file = open("/dev/full", "a") if kind == "device" else full  # type: ignore[assignment]  # noqa: SIM115
    for iteration in (1, 2, 3):
        writer.record("train", iteration, VALUES)
        writer.record("valid", iteration, {"lm_loss": 5.0})
    writer.close()
    said = capsys.readouterr()
    assert said.err.startswith("warning: logging.run_dir: ") and said.err.count("\n") == 1 and not said.out
    assert "No space left on device" in said.err and "no more metrics are written" in said.err
    assert full.refused == (0 if kind == "device" else 1)


def test_a_tensorboard_on_a_full_disk_ends_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = log.Log(places(run_dir=str(tmp_path), tensorboard=False))
    writer._board = SimpleNamespace(add_scalar=fail, close=fail)  # type: ignore[assignment]
    for iteration in (1, 2):
        writer.record("train", iteration, VALUES)
    writer.close()
    assert capsys.readouterr().err.count("\n") == 1
    assert [line["iteration"] for line in lines_of(tmp_path)] == [0, 1]


def test_a_job_goes_on_when_its_disk_is_full(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full(room=2)
    monkeypatch.setattr(log, "_append_to", lambda path: full)
    job(config, [*keeps(tmp_path), "train.train_iters=3"])
    assert full.refused == 1 and (tmp_path / "checkpoints" / "iter_0000003").is_dir()


def test_say_when_nobody_reads() -> None:
    """As `... | head -1` leaves a run, and as a log on a full disk does."""
    program = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from megacp import log\n"
        "from megacp.config import LoggingConfig\n"
        "writer = log.Log(SimpleNamespace(logging=LoggingConfig()))\n"
        "sys.stdin.readline()\n"
        "for _ in range(3): writer.say('x' * 9999)\n"
        "sys.stderr.write('done')\n"
        "sys.stderr.flush()\n"
    )
    for full in (False, True):
        with open("/dev/full", "w") if full else nullcontext(subprocess.PIPE) as out:
            process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE, text=True
            )
            if process.stdout is not None:
                process.stdout.close()
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write("\n")
            process.stdin.close()
            assert process.stderr.read().startswith("done")
            process.stderr.close()
            process.wait(60)


def test_say(capsys: pytest.CaptureFixture[str]) -> None:
    log.Log(places(), active=False).say("nothing")
    log.Log(places()).say("hello")
    assert capsys.readouterr().out == "hello\n"
