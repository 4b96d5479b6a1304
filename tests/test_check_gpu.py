"""The GPU check itself, on a CPU: what a GPU changes is the hardware alone."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tools.check_gpu import PARTS, Options, Part, part_rows
from tools.gpu import comm
from tools.gpu.exact import lse_error, relative_error
from tools.gpu.report import FAILED, OK, SKIPPED, Row, checked
from tools.gpu.world import WorldError, WorldTimeout

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts/check_gpu.sh"


def check(wheels: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [SCRIPT, wheels, *arguments], cwd=wheels, env=environment, capture_output=True, text=True, timeout=600
    )


def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    done = check(tmp_path, "--device", "cpu", "--seconds", "2000", "--out", "found")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "found/check_gpu.json").read_text())
    rows = content["rows"]
    assert {row["part"] for row in rows} == PARTS.keys() and content["torch"] == torch.__version__

    title, _, header, *lines = done.stdout.splitlines()
    assert re.match(rf"### GPU check of {content['date'][:10]}: .* times mean nothing$", title)
    table = [line for line in [header, *lines] if line.startswith("|")]
    assert len(table) == len(rows) + 2 and {line.count(" | ") for line in table if " --- " not in line} == {4}

    verdicts = {part: {row["verdict"] for row in rows if row["part"] == part} for part in PARTS}
    assert all(verdicts[part] == {OK} for part in ("kernels", "comm", "entry"))
    assert verdicts["train"] == {OK, "no meaning on a CPU"}
    assert verdicts["speed"] == verdicts["rope"] == {"no meaning on a CPU"}
    assert verdicts["memory"] == verdicts["compile"] == {SKIPPED}
    tried = {row["check"].split(" over ")[0] for row in rows if row["part"] == "comm"}
    assert tried == {"p2p", "all_gather", "a2a", "a2a+p2p"}
    assert f"skipped: {sum(row['verdict'] == SKIPPED for row in rows)}" in done.stdout and "FAILED" not in done.stdout


def test_a_failed_check_is_told_by_the_exit_code(tmp_path: Path) -> None:
    done = check(tmp_path, "--device", "cpu", "--tolerance", "0", "kernels")
    assert done.returncode == 1
    assert "FAILED: " in done.stdout and "- kernels, packed window, float32: out " in done.stdout
    assert "0 checks passed" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_missing_gpu_is_named(tmp_path: Path) -> None:
    done = check(tmp_path, "--out", ".", "kernels", "speed")
    assert done.returncode == 0
    assert "skipped: 2\n- kernels: no CUDA device (torch" in done.stdout
    assert [row["verdict"] for row in json.loads((tmp_path / "check_gpu.json").read_text())["rows"]] == [SKIPPED] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: "),
        (["--device", "cpu"], "usage: "),
        (["nowhere"], "nowhere is not a folder"),
        ([".", "kernel"], "there is no part kernel: use kernels, comm"),
        ([".", "--out", "/dev/null/x"], "--out: "),
        ([".", "--seconds", "0"], "--seconds 0 is not above 0"),
    ],
)
def test_a_mistake_is_told_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [SCRIPT, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1] and not done.stdout


def test_a_folder_without_the_wheels_is_refused(tmp_path: Path) -> None:
    """pydantic is hidden from the script, as if it were not installed."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nfind = m.version\n"
        "def version(name):\n"
        "    if name == 'pydantic': raise m.PackageNotFoundError(name)\n"
        "    return find(name)\n"
        "m.version = version\n"
    )
    done = check(tmp_path, "--device", "cpu", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "pydantic" in done.stdout
    assert "lacks wheels for pydantic" in done.stderr.splitlines()[-1]


# --- processes


def one_fails(how: str) -> Iterator[str]:
    """Rank 1 of 2 fails after its first message, the other one waits for it."""
    rank = torch.distributed.get_rank()
    yield f"hello from {rank}"
    if rank == 1 and how == "raises":
        raise ValueError("a reason\nin two lines")
    if rank == 1 and how == "dies":
        os._exit(3)
    torch.distributed.barrier() if how != "hangs" else time.sleep(60)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "rank 1 of 2: ValueError: a reason"),
        ("dies", "rank 1 of 2 died"),
        ("hangs", "rank 0, 1 of 2 not done"),
    ],
)
def test_a_failed_rank_is_named(how: str, told: str) -> None:
    """In a process apart: this one's server of processes belongs to tests.spawn."""
    code = f"""
from tools.gpu.world import WorldError, run_world, start_server
start_server(["torch", "torch.distributed", "tests.test_check_gpu"])
seen = []
try:
    for message in run_world("tests.test_check_gpu:one_fails", 2, ({how!r},), 3 if {how!r} == "hangs" else 60):
        seen.append(message)
except WorldError as error:
    print(len(seen), error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    # Neither rank need have been heard where the other fails at once.
    assert re.match(rf"[012] {told}", done.stdout), done.stdout + done.stderr


def test_a_type_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """all_gather breaks in its second case: its others are given up, and a2a is tried on ranks anew."""
    worlds = []

    def run(function: str, size: int, arguments: tuple, seconds: float) -> Iterator[tuple[int, dict]]:
        todo = arguments[2]
        worlds.append([case.comm_type for case in todo])
        broken = [i for i, case in enumerate(todo) if case.comm_type == "all_gather"][1:2]
        for _ in todo[: broken[0] if broken else None]:
            yield from ((rank, {"out": [0.0, 1.0, 0.0]}) for rank in range(size))
        if broken:
            yield 0, {"out": [0.0, 1.0, 0.0]}
            raise WorldError("rank 1 of 2: a reason")

    monkeypatch.setattr(comm, "run_world", run)
    errors: comm.Errors = {}
    rows = list(comm._run("cpu", 2, time.monotonic() + 60, errors))
    assert [(row.check, row.result, row.verdict) for row in rows] == [
        ("all_gather over 2 ranks, dense full", "rank 1 of 2: a reason", FAILED)
    ]
    assert [set(types) for types in worlds] == [{"p2p", "all_gather", "a2a"}, {"a2a"}]
    assert [sum(comm_type == name for comm_type, _ in errors) for name in ("p2p", "all_gather", "a2a")] == [8, 1, 8]


def test_time_that_is_up_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(options: Options, seconds: float) -> Iterator[Row]:
        yield Row("slow", "first", "", OK)
        raise WorldTimeout(f"rank 0 of 1 not done after {seconds:.0f} s")

    monkeypatch.setitem(PARTS, "slow", Part("a slow part", 10, 30, rows))
    options = Options("cpu", 1.0, {}, False)
    found = {left: [row.verdict for row in part_rows("slow", options, left, 30)] for left in (5, 20, 100)}
    assert found == {5: [SKIPPED], 20: [OK, SKIPPED], 100: [OK, FAILED]}


# --- numbers


def test_bounds_fail_on_what_is_not_a_number() -> None:
    verdicts = [checked("p", "c", {"a": 0.0, "b": error}, 1.0).verdict for error in (0.9, 1.0, math.nan, math.inf)]
    assert verdicts == [OK, FAILED, FAILED, FAILED]


def test_one_wrong_row_of_many_is_seen() -> None:
    right = torch.randn(10_000, 2, 8, dtype=torch.float64)
    wrong = right.clone()
    wrong[77] *= 1.1
    assert relative_error(right, right) == 0 and 0.02 < relative_error(wrong, right) < 0.04
    wrong[5, 0, 0] = math.nan
    assert not relative_error(wrong, right) < 1
    lse = torch.tensor([0.5, -torch.inf])
    assert lse_error(lse, lse.double()) == 0 and lse_error(lse, torch.zeros(2)) == math.inf


def test_errors_of_ranks_are_those_of_the_whole() -> None:
    ranks = [{"out": [3.0, 60.0, 0.1]}, {"out": [1.0, 40.0, 0.9]}]
    assert comm.together(ranks) == {"out": pytest.approx(0.3)}  # a third of the worst row, more than sqrt(4/100)
    assert comm.together([{"out": [4.0, 100.0, 0.0]}]) == {"out": pytest.approx(0.2)}
    assert comm.together([{"out": [math.nan, 1.0, math.nan]}, *ranks]) == {"out": math.inf}


def test_growth_of_errors_over_ranks() -> None:
    one = {name: {"out": 1e-3, "dq": 2e-3} for name in ("dense causal", "packed causal", "dense full")}
    errors = {
        ("p2p", "dense causal"): {"out": 1.1e-3, "dq": 2e-3},
        ("p2p", "packed causal"): {"out": 1e-3, "dq": 2.3e-3},
        ("p2p", "dense full"): {"out": 1.23e-3, "dq": 2e-3},
        ("a2a", "dense causal"): {"out": 1.23e-3, "dq": 2e-3},
    }
    causal, full, a2a = comm._growth("cpu", errors, one, 1.0)
    assert causal.numbers == pytest.approx({"out": 1.1, "dq": 1.15}) and causal.verdict == full.verdict == OK
    assert a2a.check.startswith("a2a, causal") and a2a.verdict == FAILED
