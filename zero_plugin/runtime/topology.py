"""Which processors and which memory of the host a rank's update should use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
"""Where Linux describes processors and memory nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPlace:
    """A rank's place on its host.

    Attributes:
        threads: threads of the compiled update: the rank's share of the physical cores.
        cpus: processors they are bound to, one of each physical core of the node; empty where there is nothing to choose.
        node: memory node that host slabs are taken from; None where there is one only.
    """

    threads: int
    cpus: tuple[int, ...] = ()
    node: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbour:
    """What a rank tells the others of itself.

    Attributes:
        host: which machine.
        allowed: which set of processors it may run on, as a number that is equal for equal sets.
        node: memory node of its accelerator, or -1.
    """

    host: int
    allowed: int
    node: int = -1


def parse_cpus(text: str) -> list[int]:
    """The numbers in a list as the kernel writes it, such as `0-3,8,10-11`."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def allowed_cpus() -> frozenset[int]:
    """Processors that this thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def read_cores(allowed: Collection[int], system: Path = SYSTEM) -> list[int]:
    """The first allowed processor of each physical core, in order; all of them where the system does not say."""
    first: dict[tuple[int, ...], int] = {}
    for cpu in sorted(allowed):
        path = system / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        try:
            siblings = tuple(parse_cpus(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            siblings = (cpu,)
        first.setdefault(siblings, cpu)
    return sorted(first.values())


def read_nodes(allowed: Collection[int], system: Path = SYSTEM) -> dict[int, frozenset[int]]:
    """Allowed processors of each memory node that has some; empty where the system does not say."""
    found: dict[int, frozenset[int]] = {}
    with contextlib.suppress(OSError, ValueError):
        for folder in (system / "node").glob("node[0-9]*"):
            cpus = parse_cpus((folder / "cpulist").read_text(encoding="ascii"))
            if here := frozenset(cpus) & frozenset(allowed):
                found[int(folder.name[4:])] = here
    return dict(sorted(found.items()))


def choose_place(
    rank: int,
    ranks: Sequence[Neighbour],
    cores: Sequence[int],
    nodes: Mapping[int, frozenset[int]],
    allowed: Collection[int],
) -> HostPlace:
    """A rank's place among those that share its processors.

    Ranks that a launcher has bound to other processors do not count. Where there are several memory nodes a rank takes
    that of its accelerator, or an equal share of them in rank order.

    Args:
        rank: this one.
        ranks: what every rank told of itself.
        cores: one processor of each physical core that this rank may run on.
        nodes: those processors, with their siblings, by memory node.
        allowed: all of them.
    """
    own = ranks[rank]
    sharers = [
        number
        for number, each in enumerate(ranks)
        if each.host == own.host and each.allowed == own.allowed
    ]
    if len(nodes) < 2:
        threads = max(1, len(cores) // len(sharers))
        return HostPlace(threads=threads, cpus=_if_fewer(cores, allowed))
    numbers = list(nodes)
    homes = {
        each: ranks[each].node
        if ranks[each].node in nodes
        else numbers[place * len(numbers) // len(sharers)]
        for place, each in enumerate(sharers)
    }
    home = homes[rank]
    here = [core for core in cores if core in nodes[home]]
    together = sum(each == home for each in homes.values())
    return HostPlace(threads=max(1, len(here) // together), cpus=tuple(here), node=home)


def _if_fewer(cores: Sequence[int], allowed: Collection[int]) -> tuple[int, ...]:
    return tuple(cores) if len(cores) < len(allowed) else ()


@contextmanager
def bound(cpus: Collection[int]) -> Generator[None]:
    """Inside, this thread runs on these processors only, and so do the threads that it starts, for good.

    Nothing changes where the list is empty or the system does not allow it.
    """
    if not cpus or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
