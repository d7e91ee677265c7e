"""`zero-plugin plan MODEL`: where a model's states should lie, on this machine or on one that is described."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zero_plugin.machine.hardware import shipped

_PINNED = ("stage", "params", "optimizer", "gradients", "activations", "prefetch_units")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", help="a Hugging Face config, a folder with one, or a name")
    parser.add_argument("--batch", type=int, default=1, help="samples of a micro-batch on one rank")
    parser.add_argument(
        "--seq", type=int, help="tokens of a sample (a transformer's default: 2048)"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--dtype", default="bf16", help="of the weights: bf16, fp16 or fp32")
    parser.add_argument("--optim", default="adamw", help="adam, adamw, adagrad, lion or sgd")
    parser.add_argument(
        "--hardware", help=f"a JSON file, or one of {', '.join(shipped())}; without: this machine"
    )
    parser.add_argument("--gpu", metavar="SIZE", help="memory of a device, such as 24GiB")
    parser.add_argument("--host", metavar="SIZE", help="memory of a machine")
    parser.add_argument("--nvme", metavar="PATH", action="append", help="folder on a fast disk")
    parser.add_argument("--nvme-size", metavar="SIZE", help="space there; without: what is free")
    parser.add_argument("--cache", metavar="PATH", help="folder that bench kept its figures in")
    parser.add_argument("--world", type=int, help="number of ranks")
    parser.add_argument("--delayed-update", action="store_true", help="allow updates one step late")
    parser.add_argument(
        "--speculate", action="store_true", help="allow updates inside backward, kept to be undone"
    )
    checkpointing = parser.add_mutually_exclusive_group()
    for name, value in (("--checkpointing", True), ("--no-checkpointing", False)):
        checkpointing.add_argument(name, dest="checkpointing", action="store_const", const=value)
    for name in _PINNED:
        kind: Any = int if name in ("stage", "prefetch_units") else str
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="fix this choice")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--draw", metavar="FILE", help="draw memory by tier (needs matplotlib)")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Print the plan; returns 0 if it fits, 1 if nothing does."""
    with _without_collector():
        return _run(arguments, say)


@contextmanager
def _without_collector() -> Generator[None]:
    """Leave cycles where they are: looking for them in all that torch loads takes a fourth of a plan, and finds next to nothing."""
    was_on = gc.isenabled()
    gc.disable()
    # Python looks more than once when a program ends.
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        if was_on:
            # What was made meanwhile becomes old without being looked at: the first new object would have the collector do so.
            gc.freeze()
            gc.unfreeze()
            gc.enable()


def _run(arguments: argparse.Namespace, say: Callable[[str], None]) -> int:
    from zero_plugin.planner import show
    from zero_plugin.planner.plan import plan

    pinned = {name: getattr(arguments, name) for name in (*_PINNED, "checkpointing")}
    nvme: list[str] | None = arguments.nvme
    found = plan(
        arguments.model,
        batch=arguments.batch,
        seq=2048 if arguments.seq is None else arguments.seq,
        accumulate=arguments.accumulate,
        dtype=arguments.dtype,
        rule=arguments.optim,
        hardware=arguments.hardware,
        world=arguments.world,
        gpu=arguments.gpu,
        host=arguments.host,
        nvme=nvme if nvme is None or len(nvme) > 1 else nvme[0],
        nvme_size=arguments.nvme_size,
        cache=arguments.cache,
        delayed_update=arguments.delayed_update,
        speculate=arguments.speculate,
        **{name: value for name, value in pinned.items() if value is not None},
    )
    if arguments.json:
        say(json.dumps(show.as_dict(found), indent=2))
    else:
        for line in show.table(found):
            say(line)
    if arguments.draw:
        show.draw(found, Path(arguments.draw))
    return 0 if found.fits else 1
