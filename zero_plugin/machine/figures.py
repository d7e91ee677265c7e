"""What a run took and moved, step by step: for a logger, and as a file that `zero-plugin report` draws."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

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

    def note_tokens(self, tokens: int) -> None:
        """Tokens of a step."""
        ...

    def figures(self) -> dict[str, Any]:
        """Bytes moved, seconds waited, and of updates, since the start."""
        ...


class StepFigures:
    """Bytes held and moved, seconds, and what was waited for, of each step.

    Nothing is waited for: what an update beside the next forward moves is counted with the next step.

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
        self._before = self._first = engine.figures()
        self._start = self._last = time.perf_counter()
        self._steps = 0
        self._peak: dict[str, int] = dict.fromkeys(TIERS, 0)

    def step(self) -> dict[str, float]:
        """The figures of the step that has just ended; seconds count from the one before."""
        now, after, before = time.perf_counter(), self._engine.figures(), self._before
        held = {tier: sum(kinds.values()) for tier, kinds in self._engine.memory().items()}
        figures: dict[str, float] = {f"zero/{tier}_bytes": held[tier] for tier in TIERS}
        figures |= _more(after["moved"], before["moved"], "zero/{}")
        figures |= _more(after["stall_seconds"], before["stall_seconds"], "zero/stall_{}_seconds")
        figures["zero/stall_seconds"] = _stalled(after, before)
        figures["zero/prefetch_misses"] = after["prefetch_misses"] - before["prefetch_misses"]
        rate = _update_rate(after, before)
        if rate:
            figures["zero/updated_parameters_per_second"] = rate
        figures["zero/step_seconds"] = now - self._last
        self._steps += 1
        self._peak = {tier: max(self._peak[tier], held[tier]) for tier in TIERS}
        if self._file is not None:
            line = {"step": self._steps, "seconds": now - self._start, **figures}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        self._before, self._last = after, now
        return figures

    def note_tokens(self, tokens: int) -> None:
        """Say how many tokens a step of this rank has; a warning that they are too few then names their number."""
        self._engine.note_tokens(tokens)

    def summary(self) -> str:
        """One line at the end."""
        if not self._steps:
            return "no step was taken"
        seconds = (self._last - self._start) / self._steps
        held = ", ".join(
            f"{self._peak[tier] / 2**20:,.1f} MiB of {tier}" for tier in TIERS if self._peak[tier]
        )
        line = f"{self._steps} steps of {seconds:.3g} s; at most {held or 'nothing'} on rank {self._engine.rank}"
        last, first = self._before, self._first
        stalls = _more(last["stall_seconds"], first["stall_seconds"], "{}")
        if stalls:
            total = sum(stalls.values()) / max(self._last - self._start, 1e-9)
            worst = max(stalls, key=lambda cause: stalls[cause])
            line += f"; {total:.0%} of the time waiting, most for {worst}"
        misses = last["prefetch_misses"] - first["prefetch_misses"]
        if misses:
            line += f"; {misses} gathers not foreseen"
        rate = _update_rate(last, first)
        return line + (f"; updates of {rate / 1e6:.3g} million parameters/s" if rate else "")


def tokens_of(batch: Any) -> int:
    """Tokens of a batch: elements of its first integer tensor (`input_ids`), else its samples; 0 where it has no tensor."""
    tensors = [item for item in _leaves(batch) if hasattr(item, "is_floating_point") and item.ndim]
    for item in tensors:
        if not item.is_floating_point() and item.ndim > 1:
            return int(item.numel())
    return int(tensors[0].shape[0]) if tensors else 0


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _leaves(item)
    else:
        yield batch


def _more(after: Mapping[str, float], before: Mapping[str, float], name: str) -> dict[str, float]:
    """What grew, and by how much."""
    return {
        name.format(key): value - before.get(key, 0)
        for key, value in after.items()
        if value != before.get(key, 0)
    }


def _stalled(after: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    return sum(after["stall_seconds"].values()) - sum(before["stall_seconds"].values())


def _update_rate(after: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    """Parameters a second of updates on the host, while they ran; 0 where there was none."""
    seconds = after["update_seconds"] - before["update_seconds"]
    return (
        (after["updated_parameters"] - before["updated_parameters"]) / seconds if seconds else 0.0
    )


def read_steps(file: Path) -> list[Mapping[str, float]]:
    """The lines of a file, broken ones left out (a run may have been killed in the middle of one)."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
