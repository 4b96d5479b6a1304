"""What a check found: rows of one table, printed as they come and kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, MEASURED, SKIPPED = "ok", "FAILED", "measured", "skipped"
COLUMNS = ("part", "check", "result", "bound", "verdict")


@dataclass(frozen=True)
class Row:
    """One line of the table. `numbers` holds what `result` says in words, for machines; sizes in bytes, times in s."""

    part: str
    check: str
    result: str
    verdict: str
    bound: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        cells = (str(getattr(self, name)).replace("|", "\\|") for name in COLUMNS)
        return "| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |"


def checked(part: str, check: str, errors: Mapping[str, float], bound: float, result: str = "") -> Row:
    """Fails unless every error lies below the bound; nan does not."""
    verdict = OK if all(error < bound for error in errors.values()) else FAILED
    words = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return Row(part, check, result or words, verdict, f"{bound:.2g}", dict(errors))


def failed(part: str, check: str, reason: str) -> Row:
    return Row(part, check, reason, FAILED)


def skipped(part: str, reason: str, check: str = "") -> Row:
    return Row(part, check, reason, SKIPPED)


class Report:
    """Prints rows as they come; keeps the file of `folder` up to date, so that a run cut short leaves what it had."""

    def __init__(self, title: str, facts: Mapping[str, Any], folder: Path | None) -> None:
        self.facts = dict(facts)
        self.file = folder / "check_gpu.json" if folder else None
        self.rows: list[Row] = []
        rule = "|".join(" --- " for _ in COLUMNS)
        print(f"### {title}\n\n| {' | '.join(COLUMNS)} |\n|{rule}|", flush=True)
        self._write()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row.line(), flush=True)
        self._write()

    def close(self) -> int:
        """Says what was skipped and what failed; the exit code."""
        for verdict in (SKIPPED, FAILED):
            rows = [row for row in self.rows if row.verdict == verdict]
            if rows:
                print(f"\n{verdict}: {len(rows)}")
            for row in rows:
                print(f"- {row.part}{', ' * bool(row.check)}{row.check}: {row.result}")
        counts = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in (OK, MEASURED)}
        print(f"\n{counts[OK]} checks passed, {counts[MEASURED]} rows measured", flush=True)
        return int(any(row.verdict == FAILED for row in self.rows))

    def _write(self) -> None:
        if self.file is not None:
            content = {**self.facts, "rows": [asdict(row) for row in self.rows]}
            self.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
