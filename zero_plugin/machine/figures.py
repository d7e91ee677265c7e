"""What a run took and moved, step by step: for a logger, and as a file that `zero-plugin report` draws."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

TIERS = ("device", "host", "nvme")
FILE_PATTERN = "zero-plugin-steps*.jsonl"


class Measured(Protocol):
    """What is asked of an engine."""

    @property
    def rank(self) -> int:
        """Which rank it is."""
        ...

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes by tier and kind."""
        ...

    def ledger(self) -> dict[str, int]:
        """Bytes moved since the start."""
        ...


class StepFigures:
    """Bytes held and moved, and seconds, of each step.

    Args:
        engine: whose figures they are.
        folder: where a line is written for each step, or None.
    """

    def __init__(self, engine: Measured, folder: str | Path | None = None) -> None:
        self._engine = engine
        self._file: Path | None = None
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = Path(folder) / f"zero-plugin-steps.rank{engine.rank}.jsonl"
            self._file.write_text("", encoding="utf-8")
        self._moved = engine.ledger()
        self._start = self._last = time.perf_counter()
        self._steps = 0
        self._peak: dict[str, int] = dict.fromkeys(TIERS, 0)

    def step(self) -> dict[str, float]:
        """The figures of the step that has just ended; seconds count from the one before."""
        now, moved = time.perf_counter(), self._engine.ledger()
        held = {tier: sum(kinds.values()) for tier, kinds in self._engine.memory().items()}
        figures: dict[str, float] = {f"zero/{tier}_bytes": held[tier] for tier in TIERS}
        figures |= {
            f"zero/{key}": moved[key] - self._moved.get(key, 0)
            for key in moved
            if moved[key] != self._moved.get(key, 0)
        }
        figures["zero/step_seconds"] = now - self._last
        self._steps += 1
        self._peak = {tier: max(self._peak[tier], held[tier]) for tier in TIERS}
        if self._file is not None:
            line = {"step": self._steps, "seconds": now - self._start, **figures}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self._moved, self._last = moved, now
        return figures

    def summary(self) -> str:
        """One line at the end."""
        if not self._steps:
            return "no step was taken"
        seconds = (self._last - self._start) / self._steps
        held = ", ".join(
            f"{self._peak[tier] / 2**20:,.1f} MiB of {tier}" for tier in TIERS if self._peak[tier]
        )
        return f"{self._steps} steps of {seconds:.3g} s; at most {held or 'nothing'} on rank {self._engine.rank}"


def read_steps(file: Path) -> list[Mapping[str, float]]:
    """The lines of a file, broken ones left out (a run may have been killed in the middle of one)."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
