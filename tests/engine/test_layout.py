"""Properties of the layout: pure arithmetic, and the moves that rest on it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zero_plugin.errors import ConfigError
from zero_plugin.sharding.layout import UNIT, cut, group_by_bytes, lay_out
from zero_plugin.sharding.parameters import ManagedParameter
from zero_plugin.sharding.partition import (
    Block,
    ShardPlace,
    form_blocks,
    pack,
    unpack_pairs,
)
from zero_plugin.store.layout import round_up

NUMELS = st.integers(0, 400) | st.integers(0, 10**9)
SMALL_NUMELS = st.lists(st.integers(0, 130), min_size=1, max_size=7)
SHARDS = st.integers(1, 9)
UNITS = st.sampled_from([1, 2, 16, 64])


@given(value=st.integers(0, 10**12), unit=st.integers(1, 10**6))
def test_round_up_is_the_least_multiple(value: int, unit: int) -> None:
    rounded = round_up(value, unit)
    assert rounded % unit == 0
    assert value <= rounded < value + unit


@given(numel=NUMELS, shards=SHARDS, unit=UNITS)
def test_slices_cover_every_element_once_in_rank_order(numel: int, shards: int, unit: int) -> None:
    slices = cut(numel, shards, unit)
    assert len(slices) == shards
    assert slices[0].start == 0
    assert slices[-1].stop == numel
    for left, right in itertools.pairwise(slices):
        assert left.stop == right.start
        assert left.numel >= right.numel
    # Counted in units, of which the parameter's last may be a short one.
    units = [-(-part.numel // unit) for part in slices]
    assert max(units) - min(units) <= 1
    for part in slices:
        assert part.numel >= 0
        assert part.start % unit == 0 or part.numel == 0


@given(numels=SMALL_NUMELS, shards=SHARDS, unit=UNITS, multiple=st.integers(1, 5))
def test_slots_are_disjoint_aligned_and_large_enough(
    numels: list[int], shards: int, unit: int, multiple: int
) -> None:
    layout = lay_out(numels, shards, unit=unit, multiple=multiple)
    assert layout.numels == tuple(numels)
    end = 0
    for index, (offset, slot) in enumerate(zip(layout.offsets, layout.slots, strict=True)):
        assert offset >= end
        assert offset % unit == 0
        assert slot == round_up(max(part.numel for part in layout.slices[index]), unit)
        assert layout.is_even(index) == all(p.numel == slot for p in layout.slices[index])
        end = offset + slot
    assert layout.end == end <= layout.chunk
    assert layout.chunk % (unit * multiple) == 0
    assert layout.padding == layout.chunk * shards - sum(numels) >= 0
    # What padding costs: less than a unit a member and rank for rounding, and one rounding of the chunk.
    assert layout.padding <= shards * unit * (len(numels) + multiple)


@pytest.mark.parametrize(
    ("numel", "shards", "unit"), [(-1, 2, 16), (5, 0, 16), (5, -1, 16), (5, 2, 0)]
)
def test_senseless_counts_are_refused(numel: int, shards: int, unit: int) -> None:
    with pytest.raises(ConfigError, match="counts must be positive"):
        cut(numel, shards, unit)


@given(
    sizes=st.lists(st.integers(0, 100), max_size=12),
    limit=st.integers(1, 120),
    data=st.data(),
)
def test_groups_hold_every_item_once_and_fit(
    sizes: list[int], limit: int, data: st.DataObject
) -> None:
    keys = data.draw(st.lists(st.sampled_from("ab"), min_size=len(sizes), max_size=len(sizes)))
    groups = group_by_bytes(sizes, keys, limit)
    assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
    for group in groups:
        assert group
        assert group == sorted(group)
        assert len({keys[index] for index in group}) == 1
        assert len(group) == 1 or sum(sizes[index] for index in group) <= limit
    # Blocks stand in the order of their first members; of one key, everything is in order.
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for key in "ab":
        chained = [index for group in groups for index in group if keys[index] == key]
        assert chained == sorted(chained)
    # No two neighbours of one key could have been one block.
    for key in "ab":
        mine = [group for group in groups if keys[group[0]] == key]
        for left, right in itertools.pairwise(mine):
            assert sum(sizes[index] for index in left) + sizes[right[0]] > limit


# Moves between parameters and chunks ---------------------------------------------------------------------------------


def blocks_of(
    numels: Sequence[int], *, shards: int, rank: int = 0, limit: int = 1 << 30
) -> list[Block]:
    members = [
        ManagedParameter(
            index=index,
            name=f"p{index}",
            parameter=nn.Parameter(torch.arange(numel, dtype=torch.float32) + 1000 * index),
            optimizer=0,
        )
        for index, numel in enumerate(numels)
    ]
    place = ShardPlace(shards=shards, rank=rank, world_size=shards)
    return form_blocks(members, place, wire_bytes=4, limit=limit)


@settings(deadline=None)
@given(numels=SMALL_NUMELS, shards=SHARDS)
def test_packing_and_unpacking_give_every_parameter_back(numels: list[int], shards: int) -> None:
    (block,) = blocks_of(numels, shards=shards)
    buffer = torch.full((shards, block.chunk), float("nan"))
    for position, member in enumerate(block.parameters):
        pack(block, position, member.parameter.data, buffer)
    buffer[:, block.layout.end :].zero_()
    assert not buffer.isnan().any()
    assert buffer.sum(dtype=torch.float64) == sum(
        m.parameter.sum(dtype=torch.float64) for m in block.parameters
    )
    for position, member in enumerate(block.parameters):
        full = torch.full((member.numel,), float("nan"))
        for target, source in unpack_pairs(block, buffer, position, full):
            target.copy_(source)
        assert torch.equal(full, member.parameter.data)


@settings(deadline=None)
@given(numels=SMALL_NUMELS, shards=SHARDS)
def test_views_and_padding_split_every_ranks_chunk(numels: list[int], shards: int) -> None:
    for rank in range(shards):
        (block,) = blocks_of(numels, shards=shards, rank=rank)
        chunk = torch.zeros(block.chunk, dtype=torch.int64)
        for position, member in enumerate(block.parameters):
            part = block.own_slice(position)
            assert block.own_view(chunk, position).numel() == part.numel
            block.own_view(chunk, position).add_(1)
            own = member.parameter.data[part.start : part.stop]
            assert own.numel() == part.numel
        for view in block.padding_views(chunk):
            view.add_(1)
        assert torch.equal(chunk, torch.ones_like(chunk))


@settings(deadline=None)
@given(numels=SMALL_NUMELS, shards=SHARDS)
def test_absent_members_are_zero(numels: list[int], shards: int) -> None:
    (block,) = blocks_of(numels, shards=shards)
    buffer = torch.full((shards, block.chunk), float("nan"))
    for position, member in enumerate(block.parameters):
        pack(block, position, member.parameter.data if position % 2 else None, buffer)
    for position, member in enumerate(block.parameters):
        full = torch.empty(member.numel)
        for target, source in unpack_pairs(block, buffer, position, full):
            target.copy_(source)
        before: Tensor = member.parameter.data if position % 2 else torch.zeros(member.numel)
        assert torch.equal(full, before)


@settings(deadline=None)
@given(numels=SMALL_NUMELS, shards=SHARDS, limit=st.integers(64, 800))
def test_every_rank_forms_the_same_blocks(numels: list[int], shards: int, limit: int) -> None:
    of_rank = [blocks_of(numels, shards=shards, rank=rank, limit=limit) for rank in range(shards)]
    for blocks in of_rank:
        assert [block.layout for block in blocks] == [block.layout for block in of_rank[0]]
        assert [block.index for block in blocks] == list(range(len(blocks)))
        for block in blocks:
            wire = sum(block.layout.numels) * 4
            assert wire <= limit or len(block.parameters) == 1
    names = [member.name for block in of_rank[0] for member in block.parameters]
    assert names == [f"p{index}" for index in range(len(numels))]


def test_dtypes_do_not_share_a_block() -> None:
    members = [
        ManagedParameter(
            index=index,
            name=str(index),
            parameter=nn.Parameter(torch.ones(3, dtype=dtype)),
            optimizer=0,
        )
        for index, dtype in enumerate([torch.float32, torch.bfloat16, torch.float32])
    ]
    place = ShardPlace(shards=2, rank=0, world_size=2)
    blocks = form_blocks(members, place, wire_bytes=4, limit=1 << 20)
    assert [[member.index for member in block.parameters] for block in blocks] == [[0, 2], [1]]


def test_parameters_smaller_than_the_world_leave_some_ranks_with_nothing() -> None:
    slices = cut(5, 4)
    assert [part.numel for part in slices] == [5, 0, 0, 0]
    assert [part.numel for part in cut(UNIT + 1, 4)] == [UNIT, 1, 0, 0]


# Storages ------------------------------------------------------------------------------------------------------------


def test_parameters_get_aligned_storages_of_their_own() -> None:
    slab = torch.zeros(101)
    wide = torch.zeros(6, 4)
    for data in (slab[1:33], wide.t(), slab[:32].view(8, 4), torch.zeros(4, 4)[:, ::2]):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.data = data
        before = data.clone()
        member = ManagedParameter(index=0, name="p", parameter=parameter, optimizer=0)
        assert torch.equal(parameter.data, before)
        assert parameter.is_contiguous()
        assert parameter.data_ptr() % 64 == 0
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 4
        version = parameter._version
        member.alias.fill_(7.0)
        assert parameter._version == version, "publishing must not look like a write"
        assert (parameter.data == 7.0).all()
        assert not member.moved
        parameter.data = torch.ones_like(parameter)
        assert member.moved
