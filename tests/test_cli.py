"""pretrain_gpt.py from outside: mistakes, signals, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megacp import checkpoint, train
from megacp.config import load_config
from tests.jobs import job, keeps, records
from tests.tiny import write_config, write_data

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "pretrain_gpt.py"
ENDLESS = ["train.train_iters=100000", "train.num_threads=1", "data.verify_peers=false"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    return write_config(folder, write_data(folder))


@pytest.fixture(scope="module")
def saved(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints with one of two iterations."""
    folder = tmp_path_factory.mktemp("saved")
    job(config, [*keeps(folder), "train.exit_interval=2", "train.num_threads=1"])
    return folder / "checkpoints"


# --- mistakes, told in this process


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """What main does with signals ends with the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls main; the one line it tells, within a second of CPU time and before a process group."""

    def no_group(*_: object, **__: object) -> None:
        raise AssertionError("a process group was asked for")

    monkeypatch.setattr(dist, "init_process_group", no_group)

    def call(*arguments: object, ranks: int = 2) -> str:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        began = time.process_time()
        assert train.main([str(argument) for argument in arguments]) == 2
        assert time.process_time() - began < 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        return err

    return call


def test_wrong_arguments(mistake: Callable[..., str], config: Path, tmp_path: Path) -> None:
    assert "required: config" in mistake()
    assert "--train-iters" in mistake(config, "--train-iters", 4)
    assert f"config file {tmp_path}/none.yaml does not exist" in mistake(tmp_path / "none.yaml")
    assert "must read part.key=value" in mistake(config, "quick")
    assert "unknown key train.train_iter; did you mean" in mistake(config, "train.train_iter=4")
    assert "train.train_iters = 'ten'" in mistake(config, "train.train_iters=ten")


def test_wrong_numbers_of_ranks(mistake: Callable[..., str], config: Path) -> None:
    assert "world size 3 must be tp*cp*pp*dp" in mistake(config, "parallel.context_parallel_size=2", ranks=3)
    assert "global_batch_size = 4 must be a multiple" in mistake(config, ranks=3)


def test_wrong_data(mistake: Callable[..., str], config: Path, tmp_path: Path) -> None:
    assert f"{tmp_path}/text.idx does not exist" in mistake(config, f"data.data_path={tmp_path}/text")
    prefix = write_data(tmp_path, documents=3)
    evaluation = ["train.eval_interval=1", "train.eval_iters=1", "data.split=99,1"]
    assert "leaves valid none of the 3" in mistake(config, f"data.data_path={prefix}", *evaluation)
    assert "does not fit into memory" in mistake(config, "train.train_iters=1000000000000000")
    whole = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(whole[:-2])
    assert f"{prefix}.bin" in mistake(config, f"data.data_path={prefix}")


def test_wrong_tokenizers(mistake: Callable[..., str], config: Path, tmp_path: Path) -> None:
    assert "ByteLevelTokenizer has 257 tokens" in mistake(config, "model.vocab_size=256")
    kind, model = "data.tokenizer_type=SentencePieceTokenizer", tmp_path / "bad.model"
    assert f"{model} does not exist" in mistake(config, kind, f"data.tokenizer_model={model}")
    model.write_bytes(b"\x00\x01")
    assert f"{model}: not a sentencepiece model" in mistake(config, kind, f"data.tokenizer_model={model}")


def test_wrong_checkpoints(mistake: Callable[..., str], config: Path, saved: Path, tmp_path: Path) -> None:
    load = f"checkpoint.load={saved}"
    assert "num_layers is 4 there, 2 in the configuration" in mistake(config, load, "model.num_layers=2")
    assert "head_dim is 12 there, 24 in" in mistake(config, load, "model.kv_channels=24")
    assert f"no checkpoint in {tmp_path}" in mistake(config, f"checkpoint.load={tmp_path}")
    for content in (
        "{",
        "{}",
        '{"format": "megacp checkpoint 2", "meta": {}, "files": {}, "checksums": {}, "tensors": {}}',
    ):
        folder = tmp_path / "iter_0000001"
        folder.mkdir(exist_ok=True)
        (folder / "index.json").write_text(content)
        for key in ("load", "save"):
            line = mistake(config, f"checkpoint.{key}={tmp_path}")
            assert f"checkpoint.{key}: " in line and str(folder) in line


def test_edited_checkpoints(mistake: Callable[..., str], config: Path, saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    index = next(copy.glob("iter_*")) / "index.json"
    whole = json.loads(index.read_text())
    for key, value in (("iteration", "4"), ("iteration", -5), ("consumed_samples", 3.5), ("skipped", None)):
        progress = {**whole["meta"]["progress"], key: value}
        index.write_text(json.dumps({**whole, "meta": {**whole["meta"], "progress": progress}}))
        assert "was not saved by this trainer" in mistake(config, f"checkpoint.load={copy}")


def test_nowhere_to_write(mistake: Callable[..., str], config: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for key in ("checkpoint.save", "logging.run_dir"):
        assert str(file) in mistake(config, f"{key}={file}/below")


def test_wrong_devices(mistake: Callable[..., str], config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fitting = ["train.params_dtype=bfloat16", "model.kv_channels=16"]
    assert "has no CUDA device" in mistake(config, "train.device=cuda", *fitting)
    nccl = ["train.device=auto", "parallel.distributed_backend=nccl"]
    assert "use gloo or auto" in mistake(config, *nccl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "2 processes on a machine with 1 CUDA devices" in mistake(config, "train.device=auto", *fitting)
    # Known only once there is a GPU.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert "flash attention takes bfloat16" in mistake(config, "train.device=auto")


def test_configuration_is_read_in_under_a_second(config: Path) -> None:
    began = time.process_time()
    for path in (config, *(ROOT / "configs").glob("*.yaml")):
        load_config(path, check_files=False)
    assert time.process_time() - began < 1


def test_a_diverged_run_ends_with_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wild = ["optimizer.lr=1e30", "optimizer.clip_grad=0", "train.max_consecutive_nonfinite=3", "train.num_threads=1"]
    assert train.main([str(config), *wild]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: loss or gradient was not finite in 3 steps in a row") and err.count("\n") == 1


def test_other_ranks_wait_to_be_ended(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By torchrun, once rank 0 has told the mistake."""
    monkeypatch.setenv("RANK", "1")
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as ended:
        train.main(["none.yaml"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == ""


def test_a_mistake_of_another_rank_alone_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(train, "PATIENCE", 0.01)
    assert train.main(["none.yaml"]) == 2
    assert capsys.readouterr().err.startswith("error on rank 1: config file none.yaml does not exist")


# --- processes


@contextmanager
def started(*arguments: object, ranks: int = 0) -> Iterator[subprocess.Popen[str]]:
    """`python ARGUMENTS`, by torchrun where `ranks` are given; killed in the end if it is still there."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    environment = {key: value for key, value in os.environ.items() if key not in launcher}
    process = subprocess.Popen(
        [sys.executable, *torchrun, *map(str, arguments)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun must end its own
            try:
                process.communicate(timeout=40)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(process: subprocess.Popen[str], folder: Path, iteration: int) -> None:
    """Until the run in `folder` has written the record of that iteration."""
    deadline = time.monotonic() + 90
    while not ((folder / "metrics.jsonl").exists() and iteration in records(folder)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children(parent: int) -> list[int]:
    """Process ids, ascending (Linux)."""
    status = {int(path.parent.name): path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()}
    return sorted(pid for pid, text in status.items() if int(text.rpartition(")")[2].split()[1]) == parent)


def newest(folder: Path) -> int:
    return checkpoint.read_meta(folder / "checkpoints")["progress"]["iteration"]


def test_sigterm_saves_and_ctrl_c_does_not(config: Path, tmp_path: Path) -> None:
    arguments = [SCRIPT, config, *keeps(tmp_path), *ENDLESS]
    with started(*arguments) as process:
        wait_for(process, tmp_path, 3)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    done = newest(tmp_path)
    assert (process.returncode, err) == (0, "")
    assert out.endswith(f"stopping after iteration {done}: received SIGTERM\n")
    assert list(records(tmp_path)) == list(range(1, done + 1))
    with started(*arguments) as process:
        wait_for(process, tmp_path, done + 2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted: what came after the last checkpoint is lost\n")
    assert newest(tmp_path) == done


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes of torchrun in /proc")
def test_signals_under_torchrun(config: Path, tmp_path: Path) -> None:
    """To one process: exit code 0. To torchrun: it ends with 1, and lets its processes save first."""
    arguments = [SCRIPT, config, *keeps(tmp_path), *ENDLESS, "parallel.context_parallel_size=2"]
    with started(*arguments, ranks=2) as process:
        wait_for(process, tmp_path, 3)
        os.kill(children(process.pid)[-1], signal.SIGUSR1)
        out, err = process.communicate(timeout=60)
    done = newest(tmp_path)
    assert process.returncode == 0, err
    assert out.endswith(f"stopping after iteration {done}: received SIGUSR1\n")
    with started(*arguments, ranks=2) as process:
        wait_for(process, tmp_path, done + 2)
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert newest(tmp_path) > done + 1
    assert out.endswith(f"stopping after iteration {newest(tmp_path)}: received SIGTERM\n")
    assert list(records(tmp_path)) == list(range(1, newest(tmp_path) + 1))
    done = newest(tmp_path)
    with started(*arguments, ranks=2) as process:
        wait_for(process, tmp_path, done + 2)
        orphans = children(process.pid)
        process.kill()
        process.communicate(timeout=60)
    assert len(orphans) == 2 and newest(tmp_path) > done + 1


def test_mistake_under_torchrun_is_told_once(config: Path) -> None:
    with started(SCRIPT, config, "parallel.context_parallel_size=3", ranks=2) as process:
        _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert [line for line in err.splitlines() if line.startswith("error")] == [
        f"error: {config}: world size 2 must be tp*cp*pp*dp, a multiple of tp*cp*pp = 1*3*1 = 3: start 3 processes, "
        "or set parallel.context_parallel_size to 1 or 2"
    ]
    assert "exitcode  : 2" in err


def test_nothing_to_do_under_torchrun(config: Path, saved: Path, tmp_path: Path) -> None:
    """Exit code 0; but where one rank sees no checkpoint, one line and 1, at once."""
    done = ["train.train_iters=2", "optimizer.lr_warmup_iters=0", "train.num_threads=1"]
    with started(SCRIPT, config, f"checkpoint.save={saved}", *done, ranks=2) as process:
        out, err = process.communicate(timeout=90)
    assert (process.returncode, out.count("nothing to do")) == (0, 1), err
    script = tmp_path / "own_disk.py"
    script.write_text(
        "import os, sys\n"
        "from megacp import train\n"
        f"folder = ('{saved}', '{tmp_path}/own')[int(os.environ['RANK'])]\n"
        "sys.exit(train.main([*sys.argv[1:], f'checkpoint.save={folder}']))\n"
    )
    with started(script, config, *done, ranks=2) as process:
        _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    (line,) = [line for line in err.splitlines() if line.startswith("error")]
    assert f"ranks [0] at {saved}/iter_0000002 (iteration 2); ranks [1] at the very beginning" in line


def test_a_bug_on_one_rank_ends_all(config: Path, tmp_path: Path) -> None:
    """At once, though the others wait for that rank: long before the time limit of their collective."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys\n"
        "from megacp import step, train\n"
        "forward_backward = step.forward_backward\n"
        "def broken(run, loader):\n"
        "    if run.progress.iteration == 2 and run.grid.rank == 1:\n"
        "        raise RuntimeError('rank 1 has a bug')\n"
        "    return forward_backward(run, loader)\n"
        "step.forward_backward = broken\n"
        "sys.exit(train.main(sys.argv[1:]))\n"
    )
    with started(script, config, *keeps(tmp_path), *ENDLESS, "parallel.context_parallel_size=2", ranks=2) as process:
        wait_for(process, tmp_path, 2)
        began = time.monotonic()
        _, err = process.communicate(timeout=90)
    assert time.monotonic() - began < 45
    assert process.returncode == 1
    assert "RuntimeError: rank 1 has a bug" in err
    assert list((tmp_path / "checkpoints").iterdir()) == []
