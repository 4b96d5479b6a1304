"""What only a GPU can show, in one run of minutes: exactness, every exchange, training, memory, speed.

    python -m tools.check_gpu [--device cpu] [--out FOLDER] [part ...]      from the root of the checkout

Prints a Markdown table, a row as soon as it is known, and keeps the same numbers in FOLDER/check_gpu.json. Each part
runs in processes of its own and has a limit; one for which too little of --seconds is left is skipped, and so is what
the machine lacks. `--device cpu` runs everything at tiny sizes, where times mean nothing: it checks these checks.
Exit code 1 if a check failed, 2 for wrong arguments, else 0. scripts/check_gpu.sh brings missing packages along.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tools.gpu.comm import check_exchanges
from tools.gpu.report import MEASURED, Report, Row, failed, skipped
from tools.gpu.world import WorldError, WorldTimeout, run_world, start_server

# What the processes import, which is most of their start (the third with the first gradient). None touches a device.
SLOW = ["torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes"]
SLOW += ["tools.gpu.exact", "tools.gpu.training", "tools.gpu.cost"]
# What --seconds is by default. Limits of parts grow and shrink with it, and so does that of the first process.
SECONDS = 450.0
START = 60.0


class Options(NamedTuple):
    """What a part must know; `named`: it was asked for by its name."""

    kind: str
    tolerance: float
    facts: dict[str, Any]
    named: bool


class Part(NamedTuple):
    """`rows` gets what is to be checked and how many seconds it may take; skipped where fewer than `needs` are left."""

    about: str
    needs: float
    limit: float
    rows: Callable[[Options, float], Iterator[Row]]


def alone(function: str, *names: str) -> Callable[[Options, float], Iterator[Row]]:
    """Rows that `function`, "module:name", yields in a process of its own, given these arguments by name."""

    def rows(options: Options, seconds: float) -> Iterator[Row]:
        known = {"kind": options.kind, "tolerance": options.tolerance, "seconds": seconds, "yes": True, "no": False}
        for _, row in run_world(function, 1, tuple(known[name] for name in names), seconds):
            yield row

    return rows


def exchanges(options: Options, seconds: float) -> Iterator[Row]:
    return check_exchanges(options.kind, options.tolerance, seconds)


def transformer_engine(options: Options, seconds: float) -> Iterator[Row]:
    if not options.facts["transformer_engine"]:
        yield skipped("te", "TransformerEngine is not installed")
    elif options.kind == "cpu":
        yield skipped("te", "TransformerEngine needs a CUDA device")
    else:
        yield from alone("tools.gpu.exact:check_te", "kind", "tolerance")(options, seconds)


def compiled(options: Options, seconds: float) -> Iterator[Row]:
    if options.kind == "cpu" and not options.named:
        yield skipped("compile", "takes a CPU minutes: name it to run it")
    else:
        yield from alone("tools.gpu.training:check_steps", "kind", "tolerance", "yes")(options, seconds)


# In order of worth: what comes late may find no time left.
PARTS = {
    "kernels": Part(
        "attention kernels against float64", 20, 60, alone("tools.gpu.exact:check_kernels", "kind", "tolerance")
    ),
    "comm": Part("every cp_comm_type on ranks that share the device", 40, 120, exchanges),
    "train": Part(
        "steps of 1.24 B weights", 40, 90, alone("tools.gpu.training:check_steps", "kind", "tolerance", "no")
    ),
    "entry": Part("pretrain_gpt.py, save, resume", 30, 75, alone("tools.gpu.training:check_entry", "kind", "seconds")),
    "memory": Part("bytes at 32K to 128K tokens", 30, 75, alone("tools.gpu.cost:check_memory", "kind", "tolerance")),
    "speed": Part("attention against PyTorch's", 20, 45, alone("tools.gpu.cost:check_speed", "kind")),
    "te": Part("TransformerEngine's attention", 20, 45, transformer_engine),
    "rope": Part("rotation's share of a layer", 10, 30, alone("tools.gpu.cost:check_rope", "kind")),
    "compile": Part("the same steps compiled", 60, 120, compiled),
}


def main() -> int:
    options = parse()
    begin, slower = time.monotonic(), options.seconds / SECONDS
    start_server(SLOW)
    try:
        ((_, facts),) = run_world("tools.gpu.device:facts", 1, (options.device,), START * slower)
    except WorldError as error:
        print(f"check_gpu: {error}", file=sys.stderr)
        return 1
    today = datetime.now(UTC)
    facts |= {"date": today.isoformat(timespec="seconds"), "kind": options.device}
    title = f"GPU check of {today:%Y-%m-%d}: {facts['device']}, torch {facts['torch']}, Python {facts['python']}"
    if options.device == "cpu":
        title += "; on a CPU and at tiny sizes: times mean nothing"
    report = Report(title, facts, options.out)
    for name in options.parts or PARTS:
        if facts["lacks"]:
            report.add(skipped(name, facts["lacks"]))
            continue
        left, limit = options.seconds - (time.monotonic() - begin), PARTS[name].limit * slower
        what = Options(options.device, options.tolerance, facts, bool(options.parts))
        for row in part_rows(name, what, left, limit):
            if row.verdict == MEASURED and options.device == "cpu":
                row = replace(row, verdict="no meaning on a CPU")
            report.add(row)
    print(f"\n{time.monotonic() - begin:.0f} s")
    return report.close()


def part_rows(name: str, options: Options, left: float, limit: float) -> Iterator[Row]:
    """Its rows, the last one a failure where the part did not come to its end."""
    part = PARTS[name]
    if left < part.needs:
        yield skipped(name, f"{left:.0f} s left, it may need {part.needs:.0f} s")
        return
    try:
        yield from part.rows(options, min(left, limit))
    except WorldError as error:
        if isinstance(error, WorldTimeout) and left < limit:
            yield skipped(name, f"cut short: {error}, which is all that was left", part.about)
        else:
            yield failed(name, part.about, str(error))


def parse() -> argparse.Namespace:
    parts = "\n".join(f"  {name:8} {part.about}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="check_gpu",
        description=f"{__doc__}\nParts, in order of worth:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for everything; default: {SECONDS:.0f}")
    parser.add_argument("--out", type=Path, help="folder for check_gpu.json")
    parser.add_argument("--tolerance", type=float, default=1.0, help="factor of all bounds; 0 makes every check fail")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}: use {', '.join(PARTS)}")
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds:g} is not above 0")
    if options.out:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out: {error}")
    return options


if __name__ == "__main__":
    sys.exit(main())
