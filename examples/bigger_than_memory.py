"""Train a Llama-shaped model that is larger than memory: weights, gradients and optimizer states lie on a disk.

    python examples/bigger_than_memory.py --parameters 1e9 --host-memory 2GiB --nvme /path/on/a/fast/disk

The model has random weights and learns synthetic tokens. 14 bytes of disk are needed for each parameter (bf16 weights 2,
bf16 gradients 2, the rest of the fp32 master weights 2, AdamW moments 8), or 16 with `--whole-master`; memory holds a few
layers and buffers. `--rlimit` has the
system enforce the budget (RLIMIT_DATA), `--plain` trains the same model with plain PyTorch, which needs 16 bytes of
*memory* for each parameter.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_plugin
from zero_plugin.config import parse_bytes
from zero_plugin.errors import BudgetError, ZeroError

DISK_BYTES = {
    "weights (bf16)": 2,
    "gradients (bf16)": 2,
    "remainder of the master": 2,
    "moments (fp32)": 8,
}
"""Bytes of disk for each parameter, its master split from its weight."""

WHOLE_BYTES = {"weights (bf16)": 2, "gradients (bf16)": 2, "master and moments (fp32)": 12}
"""The same with masters of their own."""

SPARE_DISK = 0.02
"""Share of the states that alignment and file systems may take on top."""

LOWEST_LIMIT = "128MiB"
"""Least memory for the engine and the model's computation, beside what the libraries take."""

MB = 1e6


# ------------------------------------------------------------------ the model


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Llama.

    Attributes:
        width: of the residual stream.
        inner: width of the gated feed-forward layer.
        layers: decoder layers.
        heads: attention heads.
        vocabulary: tokens; embedding and head are two matrices.
    """

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        return 4 * self.width**2 + 3 * self.width * self.inner + 2 * self.width

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        outside = 2 * self.vocabulary * self.width + self.width
        return self.layers * self.layer_parameters + outside


def choose_shape(parameters: float, vocabulary: int) -> Shape:
    """The Llama proportions (about one layer for 96 of width) with at least so many parameters."""
    width = max(64, round((8 * parameters) ** (1 / 3) / 64) * 64)
    while width > 64 and 2 * vocabulary * width > parameters / 2:
        width -= 64  # a small model must not be all vocabulary
    inner = -(-8 * width // 3 // 64) * 64
    one = Shape(
        width=width, inner=inner, layers=1, heads=max(1, width // 64), vocabulary=vocabulary
    )
    more = max(0.0, parameters - one.parameters)
    layers = 1 + int(-(-more // one.layer_parameters))
    return Shape(width=width, inner=inner, layers=layers, heads=one.heads, vocabulary=vocabulary)


class Wide:
    """Memory for fp32 numbers that are needed for the time of one product."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def empty(self, *shape: int) -> Tensor:
        """A tensor of this shape, in the memory that the last one was in."""
        numel = math.prod(shape)
        if self._memory.numel() < numel:
            self._memory = torch.empty(numel, dtype=torch.float32)
        return self._memory[:numel].view(shape)

    def copy(self, weight: Tensor) -> Tensor:
        """A weight in fp32, until the next call."""
        return self.empty(*weight.shape).copy_(weight)


class Product(torch.autograd.Function):
    """`F.linear` without bias on bf16 tensors, the products made and summed in fp32.

    On processors without bf16 instructions torch's own takes several times as long, in some orders a hundred times.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, wide: Wide) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        ctx.save_for_backward(inputs, weight)
        ctx.wide = wide
        return F.linear(inputs.float(), wide.copy(weight)).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of input and weight."""
        inputs, weight = ctx.saved_tensors
        gradient = gradients[0].float()
        of_inputs = (gradient @ ctx.wide.copy(weight)).to(inputs.dtype)
        flat, seen = gradient.flatten(0, -2), inputs.float().flatten(0, -2)
        of_weight = torch.mm(flat.t(), seen, out=ctx.wide.empty(*weight.shape))
        return of_inputs, of_weight.to(weight.dtype), None


class Linear(nn.Linear):
    """A linear layer without bias."""

    def __init__(self, inputs: int, outputs: int, wide: Wide) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.wide = wide

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """[..., inputs] to [..., outputs]."""
        if torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        return Product.apply(input, self.weight, self.wide)


class Embedding(nn.Embedding):
    """An embedding that starts small, as Llama's does."""

    def reset_parameters(self) -> None:
        """Initialise."""
        nn.init.normal_(self.weight, std=0.02)


class Layer(nn.Module):
    """Attention with rotary positions, and a gated feed-forward layer, each behind an RMS norm."""

    def __init__(self, shape: Shape, wide: Wide) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.RMSNorm(shape.width, eps=1e-5)
        self.query = Linear(shape.width, shape.width, wide)
        self.key = Linear(shape.width, shape.width, wide)
        self.value = Linear(shape.width, shape.width, wide)
        self.output = Linear(shape.width, shape.width, wide)
        self.before_inner = nn.RMSNorm(shape.width, eps=1e-5)
        self.gate = Linear(shape.width, shape.inner, wide)
        self.up = Linear(shape.width, shape.inner, wide)
        self.down = Linear(shape.inner, shape.width, wide)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[batch, tokens, width] to the same."""
        batch, tokens, width = hidden.shape
        normed = self.before_attention(hidden)

        def by_head(projected: Tensor) -> Tensor:
            return projected.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            rotate(by_head(self.query(normed)), cosine, sine),
            rotate(by_head(self.key(normed)), cosine, sine),
            by_head(self.value(normed)),
            is_causal=True,
        )
        hidden = hidden + self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))
        normed = self.before_inner(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding of [batch, heads, tokens, size]."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


class Llama(nn.Module):
    """A causal language model whose layers are checkpointed; `forward` gives the loss.

    Args:
        shape: its sizes.
        loss_bytes: most memory of the logits that exist at one time.
    """

    def __init__(self, shape: Shape, loss_bytes: int) -> None:
        super().__init__()
        self.shape = shape
        self.loss_bytes = loss_bytes
        self.embedding = Embedding(shape.vocabulary, shape.width)
        wide = Wide()
        self.layers = nn.ModuleList(Layer(shape, wide) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = Linear(shape.width, shape.vocabulary, wide)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of predicting each of `tokens` [batch, tokens + 1] from those before it."""
        hidden = self.embedding(tokens[:, :-1])
        cosine, sine = self._positions(hidden)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, cosine, sine, use_reentrant=False)
        return zero_plugin.tiled_cross_entropy(
            self.norm(hidden), self.head, tokens[:, 1:], max_bytes=self.loss_bytes
        )

    def _positions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        size = self.shape.width // self.shape.heads
        steps = torch.arange(0, size, 2, dtype=torch.float32) / size
        angles = torch.outer(torch.arange(hidden.shape[1], dtype=torch.float32), 10000.0**-steps)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def make_batch(step: int, batch: int, tokens: int) -> Tensor:
    """Sequences [batch, tokens + 1] of a fixed rule, from other starts in each step: each token gives the next one."""
    generator = torch.Generator().manual_seed(step)
    row = torch.randint(61, (batch, 1), generator=generator)
    rows = [row]
    for _ in range(tokens):
        rows.append((rows[-1] * 5 + 3) % 61)
    return torch.cat(rows, dim=1)


# ------------------------------------------------------------------ what fits where


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How a memory budget is divided.

    Attributes:
        engine: bytes for everything but the libraries.
        buffer: bytes that states on disk pass through.
        bucket: gradient bytes that move together.
        logits: of the head that exist at one time.
    """

    engine: int
    buffer: int
    bucket: int
    logits: int


def divide(budget: int, taken: int) -> Sizes:
    """Divide a budget of which the libraries have taken something.

    Raises:
        SystemExit: too little is left.
    """
    left = budget - taken
    lowest = parse_bytes(LOWEST_LIMIT)
    if left < lowest:
        raise SystemExit(
            f"--host-memory {budget / MB:,.0f} MB is too little: Python and its libraries have taken {taken / MB:,.0f} MB, "
            f"and at least {lowest / MB:,.0f} MB more are needed"
        )
    return Sizes(
        engine=left,
        buffer=min(max(left // 8, 1 << 22), 1 << 28),
        bucket=min(max(left // 48, 1 << 20), 1 << 25),
        logits=min(max(left // 64, 1 << 20), 1 << 26),
    )


def check_disk(folder: Path, parameters: int, kinds: dict[str, int]) -> None:
    """Refuse what the disk cannot hold, before anything is built.

    Args:
        folder: on that disk.
        parameters: of the model.
        kinds: bytes for each parameter, by kind.

    Raises:
        SystemExit: there is no such folder, or too little room in it.
    """
    if not folder.is_dir():
        raise SystemExit(f"--nvme {folder}: there is no such folder; make one on a fast local disk")
    need = int(parameters * sum(kinds.values()) * (1 + SPARE_DISK))
    free = shutil.disk_usage(folder).free
    if need > free:
        parts = ", ".join(f"{name} {parameters * n / 1e9:,.1f} GB" for name, n in kinds.items())
        raise SystemExit(
            f"--nvme {folder} has {free / 1e9:,.1f} GB free and {parameters:,} parameters need {need / 1e9:,.1f} GB "
            f"({parts}): free some, name another disk, or choose fewer --parameters"
        )


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status such as VmHWM; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0


def settle_libraries() -> int:
    """Load what the first optimizer loads, keep freed memory from lying about, and measure what is taken by now."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    # glibc keeps freed blocks below a threshold that grows by itself, up to 32 MiB: fixed, they go back to the system.
    with contextlib.suppress(AttributeError, OSError):
        allocator = ctypes.CDLL(None)
        for option, value in ((-3, 1 << 18), (-1, 1 << 20)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            allocator.mallopt(option, value)
    return max(status("VmRSS"), status("VmData"))


def peak_resident() -> int:
    """Most bytes of memory this process had at one time."""
    return status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ------------------------------------------------------------------ progress inside the step


class Meter:
    """A bar for each phase of the step, or a line where there is no terminal to draw on.

    Args:
        moved: bytes read from and written to disk so far.
    """

    def __init__(self, moved: Callable[[], int]) -> None:
        self._moved = moved
        self._show = sys.stdout.isatty()
        self._progress = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(),
            TextColumn("{task.fields[detail]:>24}"),
            TimeElapsedColumn(),
            disable=not self._show,
        )
        self._task: Any = None
        self._total = 1.0
        self._done = 0.0
        self._unit = ""

    @contextmanager
    def phase(self, name: str, total: float, unit: str) -> Generator[None]:
        """One phase of the step: `total` layers, or bytes on disk where `unit` is `MB`."""
        begin, before = time.perf_counter(), self._moved()
        self._total, self._done, self._unit = max(1.0, total), 0.0, unit
        self._task = self._progress.add_task(name, total=self._total, detail="")
        stop = threading.Event()
        poller = threading.Thread(target=self._poll, args=(stop, before), daemon=True)
        if self._show and unit == "MB":
            poller.start()
        try:
            yield
        finally:
            stop.set()
            if poller.is_alive():
                poller.join()
            self._progress.update(self._task, completed=self._total)
            if not self._show:
                seconds = time.perf_counter() - begin
                moved = (self._moved() - before) / MB
                print(
                    f"{name}: {seconds:.1f} s, {moved:,.0f} MB moved to and from disk", flush=True
                )

    def advance(self, *_: Any) -> None:
        """One layer is done; a forward hook."""
        self._done += 1
        if self._show and self._task is not None and self._unit != "MB":
            self._update(self._done)

    def _poll(self, stop: threading.Event, before: int) -> None:
        while not stop.wait(0.25):
            self._update((self._moved() - before) / MB)

    def _update(self, done: float) -> None:
        detail = f"{done:,.0f} of {self._total:,.0f} {self._unit}"
        self._progress.update(self._task, completed=min(done, self._total), detail=detail)

    def __enter__(self) -> Meter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


# ------------------------------------------------------------------ training


@dataclass
class Record:
    """What a run measured; times in seconds, one entry a step."""

    parameters: int = 0
    loss: list[float] = field(default_factory=list[float])
    forward: list[float] = field(default_factory=list[float])
    backward: list[float] = field(default_factory=list[float])
    step: list[float] = field(default_factory=list[float])
    build: float = 0.0
    memory: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    moved: dict[str, int] = field(default_factory=dict[str, int])
    busy: dict[str, float] = field(default_factory=dict[str, float])
    peak_resident: int = 0
    budget: int = 0
    state_bytes: int = 0


def build(shape: Shape, loss_bytes: int) -> Llama:
    """The model in the default dtype, its weights drawn from a fixed seed."""
    torch.manual_seed(0)
    return Llama(shape, loss_bytes)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """Parameters that are made inside have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train_plain(options: argparse.Namespace, shape: Shape) -> Record:
    """Plain PyTorch: fp32 weights, gradients and moments in memory, computing in bf16."""
    model = build(shape, 1 << 26)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    record = Record(parameters=shape.parameters, budget=parse_bytes(options.host_memory))
    for step in range(options.steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(make_batch(step, options.batch, options.tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.loss.append(loss.item())
        print(f"step {step + 1} of {options.steps}: loss {record.loss[-1]:.4f}", flush=True)
    record.peak_resident = peak_resident()
    return record


def train(options: argparse.Namespace, shape: Shape, sizes: Sizes, trace: Path) -> Record:
    """Train with every state on disk."""
    config = zero_plugin.ZeroConfig(
        stage=3,
        params="nvme",
        gradients="nvme",
        optimizer="nvme",
        activations=options.activations,
        split_master=not options.whole_master,
        nvme_path=options.nvme,
        nvme_buffer_bytes=sizes.buffer,
        bucket_bytes=sizes.bucket,
        prefetch_units=options.prefetch_units,
        host_limit=sizes.engine,
        device_limit=sizes.engine,
        threads=options.threads,
        trace=trace,
    )
    begin = time.perf_counter()
    with zero_plugin.init_context(config), default_dtype(torch.bfloat16):
        model = build(shape, sizes.logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    try:
        engine = zero_plugin.ZeroEngine(model, optimizer, config)
    except BudgetError as error:
        raise SystemExit(
            f"--host-memory is too little for this model; of it, {sizes.engine:,} bytes are not the libraries: {error}"
        ) from error
    record = Record(parameters=shape.parameters, budget=parse_bytes(options.host_memory))
    record.build = time.perf_counter() - begin
    print(f"built on disk in {record.build:.1f} s", flush=True)
    start = engine.ledger()

    def moved() -> int:
        ledger = engine.ledger()
        return ledger["nvme_read"] + ledger["nvme_write"]

    record.state_bytes = shape.parameters * sum(kinds_of(options).values())
    # Gradient in, states in and out, and weights; these in and out where they are half of the master.
    both_ways = 12
    updated = shape.parameters * (2 + 2 * both_ways + 2 * options.whole_master) / MB
    with engine, Meter(moved) as meter:
        for layer in model.layers:
            layer.register_forward_hook(meter.advance)
        for step in range(options.steps):
            label = f"step {step + 1} of {options.steps}"
            tokens = make_batch(step, options.batch, options.tokens)
            with timed(record.forward), meter.phase(f"{label} forward", shape.layers, "layers"):
                loss = model(tokens)
            with timed(record.backward), meter.phase(f"{label} backward", shape.layers, "layers"):
                engine.backward(loss)
            with timed(record.step), meter.phase(f"{label} update", updated, "MB"):
                optimizer.step()
                optimizer.zero_grad()
                engine.drain()
            record.loss.append(loss.item())
            print(f"{label}: loss {record.loss[-1]:.4f}", flush=True)
        record.memory = engine.memory()
        record.moved = {key: value - start[key] for key, value in engine.ledger().items()}
    record.busy = busy_seconds(trace)
    record.peak_resident = peak_resident()
    return record


def kinds_of(options: argparse.Namespace) -> dict[str, int]:
    """Bytes of disk for each parameter, by kind."""
    return WHOLE_BYTES if options.whole_master else DISK_BYTES


@contextmanager
def timed(into: list[float]) -> Generator[None]:
    """Append the seconds that the block takes."""
    begin = time.perf_counter()
    yield
    into.append(time.perf_counter() - begin)


def busy_seconds(trace: Path) -> dict[str, float]:
    """Seconds in which each lane had an operation running, from the engine's trace; the build included."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    busy: dict[str, float] = {}
    opened: dict[int, float] = {}
    for event in events:
        if event["ph"] == "B":
            opened[event["tid"]] = event["ts"]
        elif event["ph"] == "E":
            name = names[event["tid"]]
            busy[name] = busy.get(name, 0.0) + (event["ts"] - opened[event["tid"]]) / 1e6
    return busy


# ------------------------------------------------------------------ report


def report(record: Record) -> str:
    """Tables of a run under the engine."""
    steps = len(record.loss)
    kinds = list(next(iter(record.memory.values())))
    lines = ["", "what lies where after the last step (MB)"]
    lines.append("  " + f"{'':<8}" + "".join(f"{kind:>13}" for kind in kinds))
    for tier, held in record.memory.items():
        lines.append("  " + f"{tier:<8}" + "".join(f"{held[kind] / MB:>13,.1f}" for kind in kinds))
    lines += ["", f"bytes moved in {steps} steps (MB)"]
    lines += [f"  {key:<16}{value / MB:>12,.1f}" for key, value in record.moved.items() if value]
    lines += [
        "",
        f"seconds, sum over {steps} steps (waits for the disk inside each phase included)",
    ]
    for name, values in (
        ("forward", record.forward),
        ("backward (with recomputation)", record.backward),
        ("optimizer step", record.step),
    ):
        lines.append(f"  {name:<32}{sum(values):>9.1f}")
    lines += ["seconds in which a lane was at work (lanes overlap; the build's I/O included)"]
    for name, value in sorted(record.busy.items(), key=lambda item: -item[1]):
        if value >= 0.05:
            lines.append(f"  {name:<32}{value:>9.1f}")
    lines += [
        "",
        f"states        {record.state_bytes / MB:>12,.0f} MB ({record.parameters:,} parameters)",
        f"memory budget {record.budget / MB:>12,.0f} MB",
        f"peak resident {record.peak_resident / MB:>12,.0f} MB",
        f"loss          {' '.join(f'{value:.4f}' for value in record.loss)}",
    ]
    return "\n".join(lines)


def positive(text: str) -> int:
    """A whole number above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def count(text: str) -> float:
    """A number of parameters such as 1e9, for argparse."""
    number = float(text)
    if not 1e5 <= number <= 1e13:
        raise argparse.ArgumentTypeError(f"{text} is not between 1e5 and 1e13")
    return number


def byte_size(text: str) -> int:
    """A size such as 2GiB, for argparse."""
    try:
        return parse_bytes(text)
    except ZeroError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=count, default=1e9, help="at least (default: 1e9)")
    parser.add_argument(
        "--host-memory", type=byte_size, default="2GiB", help="memory budget (default: 2GiB)"
    )
    parser.add_argument("--nvme", type=Path, help="folder for the states, on a fast local disk")
    parser.add_argument("--steps", type=positive, default=3)
    parser.add_argument("--batch", type=positive, default=1, help="sequences in a step")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens in a sequence")
    parser.add_argument(
        "--vocabulary", type=positive, default=8192, help="a matrix of it is the largest piece"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument(
        "--activations",
        choices=["device", "host", "nvme"],
        default="nvme",
        help="where the inputs of the layers wait for backward (default: nvme)",
    )
    parser.add_argument("--prefetch-units", type=int, default=1, help="layers read ahead")
    parser.add_argument("--threads", type=positive, help="threads of computation and update")
    parser.add_argument(
        "--rlimit",
        action="store_true",
        help="have the system refuse memory beyond the budget (RLIMIT_DATA; Linux)",
    )
    parser.add_argument(
        "--whole-master", action="store_true", help="fp32 masters of their own, 2 bytes more each"
    )
    parser.add_argument(
        "--plain", action="store_true", help="plain PyTorch instead, every state in memory"
    )
    parser.add_argument("--output", type=Path, help="file for the numbers, as JSON")
    options = parser.parse_args(arguments)
    if options.vocabulary < 61:
        parser.error(f"--vocabulary {options.vocabulary} is below the 61 tokens of the data")
    if not options.plain and options.nvme is None:
        parser.error("--nvme is missing: name a folder on a fast local disk for the states")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Check, train, report."""
    options = parse(arguments)
    shape = choose_shape(options.parameters, options.vocabulary)
    if not options.plain:
        check_disk(options.nvme, shape.parameters, kinds_of(options))
    threading.stack_size(1 << 20)  # lanes need little, and the limit counts the stacks
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = divide(options.host_memory, settle_libraries())
    if options.rlimit:
        resource.setrlimit(resource.RLIMIT_DATA, (options.host_memory, options.host_memory))
    print(
        f"{shape.parameters:,} parameters: {shape.layers} layers, width {shape.width}, "
        f"vocabulary {shape.vocabulary}; states "
        f"{shape.parameters * (16 if options.plain else sum(kinds_of(options).values())) / 1e9:,.2f} GB, "
        f"memory budget {options.host_memory / 1e9:,.2f} GB"
        f"{' (enforced)' if options.rlimit else ''}",
        flush=True,
    )
    if options.plain:
        record = train_plain(options, shape)
        print(f"peak resident {record.peak_resident / MB:,.0f} MB")
    else:
        with tempfile.TemporaryDirectory(dir=options.nvme, prefix="trace-") as folder:
            record = train(options, shape, sizes, Path(folder) / "trace.json")
        print(report(record))
    if options.output is not None:
        options.output.write_text(json.dumps(record.__dict__, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
