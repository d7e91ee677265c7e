"""What hides the update: each way to take a step, beside a device that only sleeps.

Eight modules stand for the device: their forward and backward sleep and use no processor, and a gradient is there at once.
The update is the real one, on several times the cache. With T_f and T_b the sleeping parts, T_d their sum, T_u the update and
"swap" the copies of gradients down and weights up, all measured in this run, each side is compared with its bound:

- synchronous: T_d + T_u + swap, the plain sum;
- exact overlap: T_b + 1.05 max(T_f, T_u) + one block (its update and copies);
- speculation, and inside backward: T_f + 1.05 max(T_b, T_u) + one block;
- delayed update: 1.05 max(T_d, T_u) + swap.

The bounds suppose copies that engines of the device make beside everything else. Without a device the processors make them, in the
update's time and memory. `--link 25e9` lets them sleep instead, for as long as a link of that rate (bytes a second each way) would take.

A step's time is the period of consecutive steps, so that what one leaves to the next counts; sides run in turn.

    python benchmarks/overlap_step.py --numel 24e6 --link 25e9 --picture overlap.png
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _report import SETTLE_SECONDS, Report, machine, write_json

from zero_plugin import ZeroConfig, ZeroEngine
from zero_plugin.runtime.operations import Copy
from zero_plugin.trace import Event, Trace

BLOCKS = 8
SLACK = 1.05
SIDES: dict[str, dict[str, Any]] = {
    "synchronous": {"overlap": False},
    "exact overlap": {},
    "speculation": {"speculate": True},
    "inside backward": {"nonfinite": "propagate", "update_in_backward": True},
    "delayed update": {"delayed_update": True, "delayed_update_warmup": 1},
}
DEVICE = "device"
KINDS: tuple[str, ...] = ("forward", "backward", "update", "swap")


@dataclass(kw_only=True, slots=True)
class Pace:
    """Seconds that one block takes in forward and in backward, and where its spans are recorded."""

    forward: float = 0.0
    backward: float = 0.0
    trace: Trace | None = None

    def rest(self, label: str) -> None:
        """Sleep as the named half of a block."""
        begun = time.perf_counter()
        time.sleep(self.forward if label == "forward" else self.backward)
        if self.trace is not None:
            self.trace.record(DEVICE, label, "begin", at=begun)
            self.trace.record(DEVICE, label, "end")


class Rest(torch.autograd.Function):
    """Work of a device, seen from the host: time passes."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,  # noqa: ARG004 - so that it gets a gradient
        gradient: Tensor,
        pace: Pace,
    ) -> Tensor:
        """The values, after a pause."""
        ctx.gradient, ctx.pace = gradient, pace
        pace.rest("forward")
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        """The weight's gradient, after a pause."""
        ctx.pace.rest("backward")
        # Another handle on the same memory: torch takes it as the gradient, without a copy.
        return grad, ctx.gradient.detach(), None, None


class Block(nn.Module):
    """One parameter, whose use takes time and no processor."""

    def __init__(self, numel: int, gradient: Tensor, pace: Pace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), 0.5))
        self._gradient, self._pace = [gradient], pace

    def forward(self, values: Tensor) -> Tensor:
        """The values, later."""
        return Rest.apply(values, self.weight, self._gradient[0], self._pace)


class Side:
    """One way to step.

    Args:
        numel: of one block.
        gradient: of each block.
        folder: for the trace.
        settings: what makes this side.
    """

    def __init__(self, numel: int, gradient: Tensor, folder: str, settings: dict[str, Any]) -> None:
        self.pace = Pace()
        self.model = nn.Sequential(*(Block(numel, gradient, self.pace) for _ in range(BLOCKS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        config = ZeroConfig(bucket_bytes=4 * numel, trace=Path(folder) / "trace.json", **settings)
        self.engine = ZeroEngine(self.model, self.optimizer, config)
        trace = self.engine._resources.trace
        if trace is None:
            raise RuntimeError("the engine keeps no trace")
        self.trace = self.pace.trace = trace

    def step(self) -> None:
        """One step."""
        loss = self.model(torch.ones(1, requires_grad=True)).sum()
        self.engine.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def period(self, steps: int) -> float:
        """Seconds from step to step, once they follow each other."""
        for _ in range(2):
            self.step()
        self.trace.clear()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        seconds = (time.perf_counter() - start) / steps
        self.engine.wait_for_update()
        return seconds


def spans(events: Sequence[Event]) -> list[tuple[str, str, float, float]]:
    """Lane, label, begin and end of every operation."""
    begun: dict[tuple[str, str, int], float] = {}
    found: list[tuple[str, str, float, float]] = []
    for event in events:
        key = (event.lane, event.label, event.sequence)
        if event.phase == "begin":
            begun[key] = event.time
        elif event.phase == "end" and key in begun:
            found.append((event.lane, event.label, begun.pop(key), event.time))
    return found


def kind_of(lane: str, label: str) -> str:
    """What an operation counts as: a sleep, the update, or a copy of the swap."""
    if lane == DEVICE:
        return label
    if lane.startswith("update") and label.startswith("update"):
        return "update"
    return "swap"


def totals(trace: Trace, steps: int) -> dict[str, float]:
    """Seconds a step of each kind."""
    seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for lane, label, begin, end in spans(trace.events()):
        seconds[kind_of(lane, label)] += (end - begin) / steps
    return seconds


def bounds(parts: dict[str, float]) -> dict[str, float]:
    """Each side's bound from the measured parts."""
    forward, backward = parts["forward"], parts["backward"]
    update, swap = parts["update"], parts["swap"]
    device = forward + backward
    in_backward = forward + SLACK * max(backward, update) + (update + swap) / BLOCKS
    return {
        "synchronous": device + update + swap,
        "exact overlap": backward + SLACK * max(forward, update) + (update + swap) / BLOCKS,
        "speculation": in_backward,
        "inside backward": in_backward,
        "delayed update": SLACK * max(device, update) + swap,
    }


def measure(sides: dict[str, Side], ratio: float, args: argparse.Namespace) -> list[list[Any]]:
    """The table's rows of one T_d / T_u."""
    plain = sides["synchronous"]
    for side in sides.values():
        side.pace.forward = side.pace.backward = 0.0
    plain.period(args.steps)
    device = ratio * totals(plain.trace, args.steps)["update"]
    for side in sides.values():
        side.pace.forward, side.pace.backward = device / 3 / BLOCKS, 2 * device / 3 / BLOCKS
    periods: dict[str, list[float]] = {name: [] for name in sides}
    limits: dict[str, list[float]] = {name: [] for name in sides}
    kept: list[dict[str, float]] = []
    for _ in range(args.rounds):
        for name, side in sides.items():
            time.sleep(SETTLE_SECONDS)
            periods[name].append(side.period(args.steps))
        kept.append(totals(plain.trace, args.steps))
        allowed_now = bounds(kept[-1])
        for name in sides:
            limits[name].append(allowed_now[name])
    parts = [statistics.median(part[kind] for part in kept) * 1e3 for kind in KINDS]
    rows: list[list[Any]] = []
    for name in sides:
        taken = statistics.median(periods[name])
        allowed = statistics.median(limits[name])
        # Neighbouring runs are compared: the machine's speed drifts.
        against = statistics.median(a / b for a, b in zip(periods[name], limits[name], strict=True))
        rows.append([f"{ratio:g}", name, *parts, taken * 1e3, allowed * 1e3, against])
    return rows


def draw(sides: dict[str, Side], path: Path, steps: int = 2) -> str:
    """Draw the lanes of two consecutive steps of each side; what became of it."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: matplotlib is not installed"
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    colours = {
        "forward": "tab:blue",
        "backward": "tab:cyan",
        "update": "tab:orange",
        "swap": "tab:green",
    }
    rows = {"forward": 2, "backward": 2, "update": 1, "swap": 0}
    figure, axes = pyplot.subplots(len(sides), 1, sharex=True, figsize=(8, 7.5))
    for axis, (name, side) in zip(axes, sides.items(), strict=True):
        side.period(steps)
        found = [(kind_of(lane, label), b, e) for lane, label, b, e in spans(side.trace.events())]
        start = min(begin for kind, begin, _ in found if kind == "forward")
        for kind, begin, end in found:
            bar = [((begin - start) * 1e3, (end - begin) * 1e3)]
            axis.broken_barh(
                bar, (rows[kind] + 0.1, 0.8), color=colours[kind], edgecolor="white", linewidth=0.3
            )
        axis.set_yticks([0.5, 1.5, 2.5], ["copies", "update", "device"])
        axis.set_title(f"{name}, {steps} steps", fontsize=9, loc="left")
        axis.set_xlim(left=0)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), ncols=len(colours), fontsize=8, loc="upper right")
    axes[-1].set_xlabel("milliseconds")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    return f"picture: {path}"


class Runnable:
    """Counts the threads of this process that run or want to, every two milliseconds (Linux)."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)

    def __enter__(self) -> Runnable:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _count(self) -> None:
        own = threading.get_native_id()
        while not self._ends.wait(0.002):
            running = 0
            for task in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):
                    state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                    running += state == "R" and int(task.name) != own
            self.counts.append(running)


def crowd(name: str, side: Side, steps: int) -> str:
    """How many threads want a processor during steps of one side."""
    if not Path("/proc/self/task").is_dir():
        return "threads are not counted: no /proc"
    with Runnable() as found:
        side.period(steps)
    counts = sorted(found.counts)
    cores = len(os.sched_getaffinity(0))
    beyond = sum(count > cores for count in counts) / len(counts)
    return (
        f"threads that want a processor in {len(counts)} samples of {name}: mean {statistics.fmean(counts):.2f}, most "
        f"{counts[-1]}, more than the {cores} there are in {beyond:.1%}"
    )


def sleeps_for(link: float) -> Callable[[Copy, Any], None]:
    """How a copy runs on an engine of its own, seen from the host: it takes time and no processor."""
    plain = Copy.run

    def run(copy: Copy, kernels: Any) -> None:
        if copy.direction is None:
            plain(copy, kernels)
        else:
            time.sleep(copy.nbytes / link)

    return run


def compare(args: argparse.Namespace) -> Report:
    numel = args.numel // BLOCKS
    if args.link:
        Copy.run = sleeps_for(args.link)  # type: ignore[method-assign]
    # No processor works on the gradient: it is there.
    gradient = torch.full((numel,), 1e-3)
    with tempfile.TemporaryDirectory() as folder:
        settings = {} if args.threads is None else {"threads": args.threads}
        # The synchronous side is always there: its parts make the bounds.
        chosen = [name for name in SIDES if name == "synchronous" or name in args.sides]
        sides = {
            name: Side(numel, gradient, folder, {**settings, **SIDES[name]}) for name in chosen
        }
        try:
            rows = [row for ratio in args.ratios for row in measure(sides, ratio, args)]
            notes = [] if args.picture is None else [draw(sides, args.picture)]
            notes.append(crowd(chosen[-1], sides[chosen[-1]], 4 * args.steps))
        finally:
            for side in sides.values():
                side.engine.close()
    return Report(
        benchmark="step beside a sleeping device",
        settings={
            "parameters": numel * BLOCKS,
            "blocks": BLOCKS,
            "rounds": args.rounds,
            "steps": args.steps,
            "link": f"{args.link:g}" if args.link else "none",
            "load": round(machine()["load"], 1),
        },
        columns=(
            "T_d/T_u",
            "side",
            "T_f",
            "T_b",
            "T_u",
            "swap",
            "step (ms)",
            "bound (ms)",
            "step / bound",
        ),
        rows=rows,
        notes=notes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=float, default=24e6, help="parameters, fp32")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--link", type=float, help="bytes a second of modelled copies")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="consecutive steps of one measurement")
    parser.add_argument("--threads", type=int, default=None, help="default: every processor")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=[name for name in SIDES if name != "synchronous"],
        default=list(SIDES),
        metavar="SIDE",
        help="beside the synchronous one; default: all, each with weights, gradients and states of its own",
    )
    parser.add_argument("--picture", type=Path, default=None, help="file for the timeline")
    parser.add_argument("--json", type=Path, default=None, help="file to write the results to")
    args = parser.parse_args()
    args.numel = int(args.numel)
    report = compare(args)
    report.show()
    write_json(args.json, [report])


if __name__ == "__main__":
    main()
