"""Slabs of several sizes: how large they are, who gets which, and who waits."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime.probes import Gate

from zero_plugin.errors import BudgetError, LeaseError
from zero_plugin.runtime.backend import Backend
from zero_plugin.runtime.slabset import SlabSet, planned_bytes, slab_sizes


def slabs_of(backend: Backend, *sizes: int) -> SlabSet:
    return SlabSet(name="slabs", backend=backend, sizes=sizes, memory="host", setting="a_setting")


PIECES = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=7), min_size=1, max_size=6)


@given(groups=PIECES, seed=st.integers(0, 1000))
def test_every_piece_of_a_group_finds_a_slab_in_any_order(
    groups: list[list[int]], seed: int
) -> None:
    sizes = slab_sizes(groups)
    assert list(sizes) == sorted(sizes, reverse=True)
    # No set of as many slabs with less would hold the groups.
    for place, nbytes in enumerate(sizes[: max(map(len, groups))]):
        assert nbytes == max(
            sorted(group, reverse=True)[place] for group in groups if place < len(group)
        )
    rng = random.Random(seed)
    for group in groups:
        free = sorted(sizes)
        for nbytes in rng.sample(group, len(group)):
            free.remove(next(size for size in free if size >= nbytes))


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        ([], ()),
        ([[7]], (7, 7)),
        # An embedding, an output, and layers of three blocks.
        ([[90], [20, 5, 20], [20, 5, 20], [90]], (90, 20, 5)),
        # Layers of one block: the second slab is theirs.
        ([[90], [20], [20], [91]], (91, 20)),
        ([[20], [20], [20]], (20, 20)),
    ],
)
def test_how_many_of_which_size(groups: list[list[int]], sizes: tuple[int, ...]) -> None:
    assert slab_sizes(groups) == sizes


def test_the_smallest_that_fits_is_taken(backend: Backend) -> None:
    slabs = slabs_of(backend, 9000, 9000, 300)
    assert slabs.sizes == (9000, 9000, 300)
    assert slabs.nbytes == planned_bytes(slabs.sizes) == 2 * 12288 + 4096
    small, large = slabs.acquire("small", 300), slabs.acquire("large", 301)
    assert small.tensor(torch.uint8).numel() == 300
    assert large.tensor(torch.uint8).numel() == 9000
    # No small one is left.
    other = slabs.acquire("small, too", 10)
    assert other.tensor(torch.uint8).numel() == 9000
    with pytest.raises(BudgetError, match="none was released; raise 'a_setting'"):
        slabs.acquire("one more", 10)
    with pytest.raises(BudgetError, match="asked 9001 bytes of pool 'slabs', whose largest slab"):
        slabs.acquire("too large", 9001)
    for lease in (small, large, other):
        lease.release()
    slabs.close()
    with pytest.raises(LeaseError, match="is closed"):
        slabs.acquire("late", 1)


def test_who_waits_waits_for_the_first_that_comes_free(deferred: Backend) -> None:
    slabs = slabs_of(deferred, 5000, 100)
    gates = {name: Gate(label=name) for name in ("large", "small")}
    # The larger one is used by what was issued first.
    for name, nbytes in (("large", 5000), ("small", 100)):
        ticket = deferred.lane(f"lane {name}", "host").submit(gates[name])
        slabs.acquire(name, nbytes).release(after=ticket)
    gates["large"].opened.set()
    # The smaller one would never come.
    lease = slabs.acquire("next", 50)
    assert lease.tensor(torch.uint8).numel() == 5000
    lease.release()
    gates["small"].opened.set()
    slabs.close()


def test_what_suffices(backend: Backend) -> None:
    slabs = slabs_of(backend, 500, 100)
    assert slabs.suffices((500, 100))
    assert slabs.suffices((400,))
    assert not slabs.suffices((500, 101))
    assert not slabs.suffices((100, 100, 100))
    slabs.close()


def test_all_pools_are_closed_though_one_has_a_holder(backend: Backend) -> None:
    slabs = slabs_of(backend, 500, 100)
    slabs.acquire("forgotten", 10)
    with pytest.raises(LeaseError, match="'forgotten'"):
        slabs.close()
    with pytest.raises(LeaseError, match="is closed"):
        slabs.acquire("late", 200)
