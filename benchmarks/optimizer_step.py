"""The compiled AdamW step against memory bandwidth, torch and DeepSpeed.

Every side turns bf16 gradients into an updated fp32 master, fp32 moments and bf16 weights:

- zero-plugin: one call, one pass over memory, 28 bytes a parameter;
- memory only: a loop that moves the same 28 bytes with the same threads and hardly computes;
- torch: gradient cast to fp32, `torch.optim.AdamW(fused=True)`, weights cast to bf16;
- DeepSpeed (where installed): the same casts around `DeepSpeedCPUAdam`, as its offload makes them.

A second table has the step with moments of fewer bytes, and the one that writes a second set of states (`speculate`).

Run: python benchmarks/optimizer_step.py [--numel 200e6] [--rounds 9] [--threads N] [--json out.json]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _report import Report, interleaved, median_ratio, write_json

from zero_plugin.config import MomentDType
from zero_plugin.kernels import Kernels
from zero_plugin.optim.moments import GROUP, STORED, kept_bytes
from zero_plugin.optim.rule import ADAMW

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BYTES = 28
OURS, MEMORY, TORCH, DEEPSPEED = (
    "zero-plugin",
    "memory only",
    "torch fused + casts",
    "DeepSpeed CPUAdam + casts",
)


class State:
    """Buffers of one side: bf16 gradient and weights, fp32 master, and moments in what dtype."""

    def __init__(self, numel: int, moments: MomentDType = "fp32") -> None:
        self.moments: MomentDType = moments
        self.master = torch.empty(numel).normal_()
        self.first, self.second = (
            torch.zeros(kept_bytes(moments, numel), dtype=torch.uint8).view(STORED[moments])
            for _ in range(2)
        )
        self.gradient = torch.empty(numel, dtype=torch.bfloat16).normal_()
        self.weights = torch.zeros(numel, dtype=torch.bfloat16)

    def segments(self, size: int) -> torch.Tensor:
        """A segment table of pieces of `size` elements."""
        starts = torch.arange(0, self.master.numel(), size)
        tensors = (self.master, self.first, self.second, self.gradient, self.weights)
        columns = [tensor.data_ptr() + starts * tensor.element_size() for tensor in tensors]
        sizes = torch.clamp(self.master.numel() - starts, max=size)
        return torch.stack([*columns, sizes, torch.zeros_like(starts)], dim=1).contiguous()

    def places(self) -> torch.Tensor:
        """The table beside that of one piece, for moments below fp32."""
        exponents = [part.data_ptr() + self.master.numel() for part in (self.first, self.second)]
        return torch.tensor([[1, 0, *exponents]], dtype=torch.int64)

    def sources(self) -> torch.Tensor:
        """This side's states as what another one's update reads."""
        parts = (self.master, self.first, self.second)
        return torch.tensor([[part.data_ptr() for part in parts]], dtype=torch.int64)


def our_step(
    kernels: Kernels,
    segments: torch.Tensor,
    moments: MomentDType = "fp32",
    places: torch.Tensor | None = None,
    sources: torch.Tensor | None = None,
) -> Callable[[], None]:
    hyper = torch.tensor([ADAMW.hyper(OPTIONS, 10)], dtype=torch.float64)

    def step() -> None:
        kernels.update(
            ADAMW.native_id,
            segments,
            hyper,
            gradient_dtype=torch.bfloat16,
            output_dtype=torch.bfloat16,
            scale=1.0,
            clip_value=None,
            moment_dtype=STORED[moments],
            places=places,
            sources=sources,
        )

    return step


def step_with_casts(
    state: State, optimizer: torch.optim.Optimizer, master: torch.nn.Parameter
) -> Callable[[], None]:
    master.grad = torch.zeros_like(master)

    def step() -> None:
        gradient = master.grad
        if gradient is None:
            raise RuntimeError("the gradient buffer is gone")
        gradient.copy_(state.gradient)
        optimizer.step()
        state.weights.copy_(master.detach())

    return step


def torch_step(numel: int) -> Callable[[], None]:
    state = State(numel)
    master = torch.nn.Parameter(state.master)
    return step_with_casts(state, torch.optim.AdamW([master], fused=True, **OPTIONS), master)


def deepspeed_step(numel: int) -> Callable[[], None] | str:
    """The step, or why there is none."""
    if importlib.util.find_spec("deepspeed") is None:
        return "not installed"
    try:
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        state = State(numel)
        master = torch.nn.Parameter(state.master)
        optimizer = adam([master], adamw_mode=True, **OPTIONS)
    except Exception as error:  # noqa: BLE001 - it compiles at run time, which fails in many ways
        return f"does not build here ({type(error).__name__})"
    return step_with_casts(state, optimizer, master)


def compare_sides(numel: int, rounds: int, kernels: Kernels) -> Report:
    state = State(numel)
    whole = state.segments(numel)
    sides: dict[str, Callable[[], object]] = {
        OURS: our_step(kernels, whole),
        MEMORY: lambda: kernels.stream(whole),
        TORCH: torch_step(numel),
    }
    notes = []
    other = deepspeed_step(numel)
    if isinstance(other, str):
        notes.append(f"{DEEPSPEED}: {other}")
    else:
        sides[DEEPSPEED] = other
    seconds = interleaved(sides, rounds, warm_up=2)
    rows = [
        [
            name,
            statistics.median(times),
            BYTES * numel / statistics.median(times) / 1e9,
            median_ratio(times, seconds[OURS]),
        ]
        for name, times in seconds.items()
    ]
    return Report(
        benchmark="AdamW step, bf16 gradient in, bf16 weights out",
        settings=settings(numel, rounds, kernels),
        columns=["side", "seconds", "GB/s at 28 B", "time / ours"],
        rows=rows,
        notes=notes,
    )


def compare_forms(numel: int, rounds: int, kernels: Kernels) -> Report:
    numel = numel // GROUP * GROUP
    widths: dict[MomentDType, float] = {"fp32": 4, "bf16": 2, "int8": 1 + 1 / GROUP}
    states = {moments: State(numel, moments) for moments in widths}
    second = State(numel)
    sides: dict[str, Callable[[], object]] = {
        f"{state.moments} moments": our_step(
            kernels, state.segments(numel), state.moments, state.places()
        )
        for state in states.values()
    }
    apart = "fp32, second set of states"
    sides[apart] = our_step(kernels, second.segments(numel), sources=states["fp32"].sources())
    moved = {f"{moments} moments": 12 + 4 * width for moments, width in widths.items()}
    moved[apart] = moved["fp32 moments"]
    seconds = interleaved(sides, rounds, warm_up=2)
    plain = seconds["fp32 moments"]
    rows = [
        [
            name,
            moved[name],
            statistics.median(times),
            moved[name] * numel / statistics.median(times) / 1e9,
            median_ratio(times, plain),
        ]
        for name, times in seconds.items()
    ]
    return Report(
        benchmark="AdamW step by what it keeps",
        settings=settings(numel, rounds, kernels),
        columns=["side", "bytes a parameter", "seconds", "GB/s", "time / fp32"],
        rows=rows,
    )


def compare_sizes(numel: int, rounds: int, kernels: Kernels) -> Report:
    state = State(numel)
    sizes = [numel, 100_000, 5_000, 1_000]
    sides = {f"{size}": our_step(kernels, state.segments(size)) for size in sizes}
    seconds = interleaved(sides, rounds)
    whole = seconds[f"{numel}"]
    rows = [
        [name, f"{-(-numel // int(name))}", statistics.median(times), median_ratio(times, whole)]
        for name, times in seconds.items()
    ]
    return Report(
        benchmark="AdamW step by size of a parameter",
        settings=settings(numel, rounds, kernels),
        columns=["elements", "parameters", "seconds", "time / one"],
        rows=rows,
    )


def compare_other_kernels(numel: int, rounds: int, kernels: Kernels) -> Report:
    wide, other = torch.randn(numel), torch.randn(numel)
    narrow = wide.bfloat16()
    # name: (bytes an element, ours, torch's)
    cases: dict[str, tuple[int, Callable[[], object], Callable[[], object]]] = {
        "copy fp32 to bf16": (6, lambda: kernels.copy(narrow, wide), lambda: narrow.copy_(wide)),
        "copy bf16 to fp32": (6, lambda: kernels.copy(wide, narrow), lambda: wide.copy_(narrow)),
        "copy fp32": (8, lambda: kernels.copy(other, wide), lambda: other.copy_(wide)),
        "accumulate bf16": (
            10,
            lambda: kernels.accumulate(wide, narrow),
            lambda: wide.add_(narrow),
        ),
        "exact norm of fp32": (
            4,
            lambda: kernels.norm_partial(wide),
            lambda: torch.linalg.vector_norm(wide),
        ),
        "exact norm of bf16": (
            2,
            lambda: kernels.norm_partial(narrow),
            lambda: torch.linalg.vector_norm(narrow),
        ),
        "sum of 2 ranks": (
            12,
            lambda: kernels.sum_ranks(other, [wide, other], 2),
            lambda: other.add_(wide).div_(2),
        ),
    }
    rows = []
    for name, (size, ours, theirs) in cases.items():
        seconds = interleaved({"ours": ours, "torch": theirs}, rounds)
        rows.append(
            [
                name,
                size * numel / statistics.median(seconds["ours"]) / 1e9,
                size * numel / statistics.median(seconds["torch"]) / 1e9,
                median_ratio(seconds["torch"], seconds["ours"]),
            ]
        )
    return Report(
        benchmark="other kernels",
        settings=settings(numel, rounds, kernels),
        columns=["kernel", "GB/s", "GB/s torch", "torch time / ours"],
        rows=rows,
    )


def settings(numel: int, rounds: int, kernels: Kernels) -> dict[str, object]:
    return {
        "parameters": numel,
        "rounds": rounds,
        "threads": kernels.threads,
        "isa": kernels.isa,
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=float, default=200e6, help="parameters of the first table")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=None, help="default: every processor")
    parser.add_argument("--json", type=Path, default=None, help="file to write the results to")
    arguments = parser.parse_args()
    numel = int(arguments.numel)
    with Kernels(threads=arguments.threads) as kernels:
        torch.set_num_threads(kernels.threads)
        half = max(numel // 2, 1)
        reports = []
        for compare, count in (
            (compare_sides, numel),
            (compare_forms, half),
            (compare_sizes, half),
            (compare_other_kernels, half),
        ):
            report = compare(count, arguments.rounds, kernels)
            report.show()
            print()
            reports.append(report)
    write_json(arguments.json, reports)


if __name__ == "__main__":
    main()
