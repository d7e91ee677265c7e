"""Moments of less than fp32: the compiled update equals its reference bit for bit, and what is rounded is unbiased and comes back."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native import (
    CASE_IDS,
    CASES,
    DTYPES,
    ISAS,
    Problem,
    address,
    assert_same_bits,
    specials,
)
from torch import Tensor

from zero_plugin.config import MomentDType
from zero_plugin.kernels import HYPER_COLUMNS, SEGMENT_COLUMNS, Kernels
from zero_plugin.optim import moments
from zero_plugin.optim.moments import GROUP, STORED, decode, encode, kept_numel, random_bits
from zero_plugin.optim.rule import Rule
from zero_plugin.optim.split import join, split

KINDS: tuple[MomentDType, ...] = ("bf16", "int8")


@dataclass
class Kept:
    """One parameter's slices, cut into segments that start where a group does, each with memory of its own beyond its end."""

    rule: Rule
    kind: MomentDType
    group: dict[str, Any]
    master: Tensor
    states: list[Tensor]
    sizes: list[int]
    output: Tensor | None = None
    remainder: Tensor | None = None
    step: int = 0
    stream: int = 77
    places: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, whole: Problem, kind: MomentDType, sizes: list[int], *, split_master: bool) -> Kept:
        """The same problem with moments kept as `kind`."""
        starts = [0, *itertools.accumulate(-(-size // GROUP) * GROUP for size in sizes)]
        made = cls(
            whole.rule,
            kind,
            whole.group,
            torch.zeros(starts[-1]),
            [],
            sizes,
            places=starts,
        )
        at = 0
        for start, size in zip(starts, sizes, strict=False):
            made.master[start : start + size] = whole.master[at : at + size]
            at += size
        for fill, signed in zip(whole.states, whole.rule.signed, strict=True):
            kept = torch.zeros(kept_numel(kind, starts[-1]), dtype=STORED[kind])
            values = torch.zeros(starts[-1])
            for start, size in zip(starts, sizes, strict=False):
                values[start : start + size] = fill[:1] if len(fill) else 0.0
            encode(values, kind, kept, signed=signed)
            made.states.append(kept)
        if split_master:
            made.output, made.remainder = split(made.master)
        elif whole.output is not None:
            made.output = torch.zeros(starts[-1], dtype=whole.output.dtype)
        return made

    def copy(self) -> Kept:
        """An independent problem in the same state."""
        return Kept(
            self.rule,
            self.kind,
            self.group,
            self.master.clone(),
            [state.clone() for state in self.states],
            self.sizes,
            None if self.output is None else self.output.clone(),
            None if self.remainder is None else self.remainder.clone(),
            self.step,
            self.stream,
            self.places,
        )

    def row(self) -> tuple[float, ...]:
        """Counts a step and gives its hyper row."""
        self.step += 1
        return self.rule.hyper(self.group, self.step)

    def native(self, handle: Kernels, gradient: Tensor, **options: Any) -> None:
        """One step with the compiled kernel."""
        table: list[list[int]] = []
        places: list[list[int]] = []
        total = self.master.numel()
        for start, size in zip(self.places, self.sizes, strict=False):
            first = self.master if self.remainder is None else self.remainder
            row = [address(item, start) for item in (first, *self.states)]
            row += [0] * (2 - len(self.states))
            output = 0 if self.output is None else address(self.output, start)
            table.append([*row, address(gradient, start), output, size, 0])
            exponents = [
                address(state, total + start // GROUP) if self.kind == "int8" else 0
                for state in self.states
            ]
            places.append([self.stream, start, *exponents, *[0] * (2 - len(exponents))])
        handle.update(
            self.rule.native_id,
            torch.tensor(table, dtype=torch.int64).reshape(-1, SEGMENT_COLUMNS),
            torch.tensor([self.row()], dtype=torch.float64),
            gradient_dtype=gradient.dtype,
            output_dtype=None if self.output is None else self.output.dtype,
            split=self.remainder is not None,
            moment_dtype=STORED[self.kind],
            places=torch.tensor(places, dtype=torch.int64).reshape(-1, 4),
            **{"scale": 1.0, "clip_value": None, **options},
        )

    def plain(self, gradient: Tensor, **options: Any) -> None:
        """One step with the reference, each segment on its own; never with a split master."""
        hyper, total = self.row(), self.master.numel()
        for start, size in zip(self.places, self.sizes, strict=False):
            if not size:
                continue
            stop = start + size
            padded = start + -(-size // GROUP) * GROUP
            kept = [self.part(state, start, padded, total) for state in self.states]
            moments.update(
                self.rule,
                self.kind,
                master=self.master[start:stop],
                kept=kept,
                stream=self.stream,
                first=start,
                gradient=gradient[start:stop],
                output=None if self.output is None else self.output[start:stop],
                hyper=hyper,
                **{"scale": 1.0, "clip_value": None, **options},
            )
            for state, new in zip(self.states, kept, strict=True):
                numel = padded - start
                state[start:stop] = new[:size]
                if self.kind == "int8":
                    state[total + start // GROUP : total + padded // GROUP] = new[numel:]

    def part(self, state: Tensor, start: int, stop: int, total: int) -> Tensor:
        """A copy of whole groups of a state."""
        if self.kind == "bf16":
            return state[start:stop].clone()
        exponents = state[total + start // GROUP : total + stop // GROUP]
        return torch.cat([state[start:stop], exponents])

    def assert_is(self, other: Kept) -> None:
        """Bit for bit the other, which has no split master."""
        master = self.master
        if self.remainder is not None and self.output is not None:
            master = join(self.output, self.remainder)
        elif self.output is not None and other.output is not None:
            assert_same_bits(self.output, other.output, "output")
        assert_same_bits(master, other.master, "master")
        for mine, theirs in zip(self.states, other.states, strict=True):
            if self.kind == "bf16":
                assert_same_bits(mine, theirs, "state")
            else:
                assert torch.equal(mine, theirs)


def slopes(numel: int, seed: int, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of a range that needs the whole of an exponent."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.exp(torch.randn(numel, generator=generator))
    return [(torch.randn(numel, generator=generator) * wide).to(dtype) for _ in range(steps)]


def gap_free(sizes: list[int]) -> int:
    return sum(-(-size // GROUP) * GROUP for size in sizes)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "options"), CASES, ids=CASE_IDS)
def test_equals_the_reference(kind, options, isa):
    sizes = [1013, 5, 0, 48]
    master = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1))
    with Kernels(threads=1, isa=isa) as handle:
        for number, form in enumerate(KINDS):
            for index, dtype in enumerate(DTYPES):
                output = (torch.bfloat16, torch.float16, None)[index]
                whole = Problem.create(kind, options, master, output)
                mine = Kept.of(whole, form, sizes, split_master=False)
                other = mine.copy()
                halves = Kept.of(whole, form, sizes, split_master=True)
                clip_value = (None, 0.5)[(index + number) % 2]
                for gradient in slopes(gap_free(sizes), index, 3, dtype):
                    mine.native(handle, gradient, scale=0.37, clip_value=clip_value)
                    other.plain(gradient, scale=0.37, clip_value=clip_value)
                    halves.native(handle, gradient, scale=0.37, clip_value=clip_value)
                    mine.assert_is(other)
                    halves.assert_is(other)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=8),
    case=st.sampled_from(
        [case for case in CASES if case[1].get("momentum") or "SGD" not in case[0].__name__]
    ),
    seed=st.integers(0, 2**31),
    clip_value=st.none() | st.floats(0, 10),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
    form=st.sampled_from(KINDS),
    split_master=st.booleans(),
)
def test_any_sizes(*, sizes, case, seed, clip_value, dtype, isa, threads, form, split_master):
    kind, options = case
    master = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))
    whole = Problem.create(kind, options, master)
    mine = Kept.of(whole, form, sizes, split_master=split_master)
    other = Kept.of(whole, form, sizes, split_master=False)
    with Kernels(threads=threads, isa=isa) as handle:
        for gradient in slopes(gap_free(sizes), seed, 2, dtype):
            mine.native(handle, gradient, scale=0.5, clip_value=clip_value)
            other.plain(gradient, scale=0.5, clip_value=clip_value)
    mine.assert_is(other)


@pytest.mark.parametrize("form", KINDS)
def test_special_values(form):
    values = specials()
    master = values.repeat_interleave(len(values))
    # Each with neighbours of every size, and alone in its group.
    gradient = torch.cat([values.repeat(len(values)), torch.zeros(-(len(values) ** 2) % GROUP)])
    alone = torch.zeros(len(values), GROUP)
    alone[:, 3] = values
    gradient = torch.cat([gradient, alone.flatten()])
    master = torch.cat([master, torch.zeros(gradient.numel() - master.numel())])
    for kind, options in (CASES[0], CASES[6], CASES[8], CASES[12]):
        whole = Problem.create(kind, options, master)
        expected = Kept.of(whole, form, [master.numel()], split_master=False)
        made = [expected.copy() for _ in ISAS]
        for _ in range(2):
            expected.plain(gradient, scale=0.5)
        for isa, mine in zip(ISAS, made, strict=True):
            with Kernels(threads=2, isa=isa) as handle:
                for _ in range(2):
                    mine.native(handle, gradient, scale=0.5)
            mine.assert_is(expected)


@pytest.mark.parametrize("form", KINDS)
def test_threads_and_cuts_do_not_change_bits(form):
    # Several chunks a thread, and stores past the caches.
    numel = (1 << 21) + 4099
    master = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    (gradient,) = slopes(-(-numel // GROUP) * GROUP, 8, 1, torch.bfloat16)
    whole = Problem.create(torch.optim.AdamW, {}, master, torch.bfloat16)
    made: list[Kept] = []
    cut = 700_000 // GROUP * GROUP
    for threads, sizes in ((1, [numel]), (3, [numel]), (2, [GROUP, cut, numel - cut - GROUP])):
        mine = Kept.of(whole, form, sizes, split_master=False)
        with Kernels(threads=threads) as handle:
            mine.native(handle, gradient)
        made.append(mine)
    for mine in made[1:]:
        mine.assert_is(made[0])
    first = made[0].copy()
    start = 1 << 20
    part = slice(start, start + 4096)
    whole.master = master[part]
    whole.states = [state[part] for state in whole.states]
    other = Kept.of(whole, form, [4096], split_master=False)
    # The same place of the parameter, seen from another tile.
    other.places = [0, 4096]
    kept = [other.part(state, 0, 4096, 4096) for state in other.states]
    moments.update(
        other.rule,
        form,
        master=other.master,
        kept=kept,
        stream=other.stream,
        first=start,
        gradient=gradient[part],
        output=None,
        hyper=other.row(),
        scale=1.0,
        clip_value=None,
    )
    for state, new in zip(first.states, kept, strict=True):
        assert torch.equal(state[part], new[:4096])


# What is kept ------------------------------------------------------------------------------------------------------


def kept_of(
    values: Tensor, form: MomentDType, *, signed: bool, random: Tensor | None = None
) -> Tensor:
    kept = torch.zeros(kept_numel(form, values.numel()), dtype=STORED[form])
    encode(values, form, kept, signed=signed, random=random)
    return kept


def chances(numel: int, step: int) -> Tensor:
    return random_bits(7, step, 0, numel, torch.device("cpu")) & 0xFFFF


@pytest.mark.parametrize("signed", [True, False])
def test_every_kept_number_comes_back(signed):
    """Each byte beside the largest one, under each exponent; each bf16 number."""
    groups = torch.full((255, 256, GROUP), 127 if signed else 255, dtype=torch.uint8)
    groups[:, :, 5] = torch.arange(256, dtype=torch.uint8)
    groups[:, :, 9] = 0
    exponents = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 256)
    # Exponents below those that a group can have.
    lowest = 7 if signed else 15
    kept = torch.cat([groups[lowest:].flatten(), exponents[lowest:].flatten()])
    values = decode(kept, "int8", signed=signed)
    assert values.isfinite().all()
    for random in (
        None,
        torch.zeros(values.numel(), dtype=torch.int64),
        chances(values.numel(), 1),
    ):
        again = kept_of(values, "int8", signed=signed, random=random)
        assert torch.equal(again, kept)
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    again = kept_of(halves.float(), "bf16", signed=signed, random=chances(2**16, 2))
    assert_same_bits(again, halves)


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("signed", [True, False])
def test_rounding_has_the_number_as_its_mean(form, signed):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(4096, generator=generator) * torch.exp(
        torch.randn(4096, generator=generator)
    )
    values = values if signed else values.square()
    turns = 400
    total = torch.zeros(4096, dtype=torch.float64)
    for turn in range(turns):
        kept = kept_of(values, form, signed=signed, random=chances(4096, turn))
        total += decode(kept, form, signed=signed)
    # A unit is at most 1/128 or 1/16 of a number, and of a signed byte's group 1/1,024 of the largest.
    unit = values.abs().double() * {"bf16": 1 / 128, "int8": 1 / 16}[form]
    inside = torch.ones(4096, dtype=torch.bool)
    if form == "int8":
        largest = values.abs().view(-1, GROUP).amax(1, keepdim=True).expand(-1, GROUP).flatten()
        if signed:
            unit = torch.maximum(unit, largest.double() / 1024)
        else:
            # A square below the smallest one that there is becomes that.
            inside = values > largest * 2.0**-14
            assert inside.sum() > 3800
    error = ((total / turns - values) / unit)[inside]
    # The deviation of a mean of `turns` is at most half a unit over their root.
    assert error.abs().max() < 5.5 * 0.5 / math.sqrt(turns)
    assert abs(error.mean()) < 5 * 0.5 / math.sqrt(turns * 4096)
    nearest = decode(kept_of(values, form, signed=signed), form, signed=signed)
    assert ((nearest - values).abs() <= unit * 0.5001)[inside].all()


def test_squares_never_become_zero_and_zero_stays():
    values = torch.tensor([1e-45, 1e-38, 1e-20, 0.0] * 4 + [1e-12] * 15 + [1e4])
    for random in (None, torch.zeros(32, dtype=torch.int64)):
        found = decode(kept_of(values, "int8", signed=False, random=random), "int8", signed=False)
        assert torch.equal(found == 0, values == 0)
        assert (found[values > 0] >= values[values > 0] * 0.93).all()
    assert not decode(torch.zeros(34, dtype=torch.uint8), "int8", signed=True).any()
    assert not decode(torch.zeros(34, dtype=torch.uint8), "int8", signed=False).any()


def test_what_is_not_finite_takes_its_group():
    values = torch.ones(48)
    values[3], values[20] = torch.nan, torch.inf
    for signed in (True, False):
        found = decode(kept_of(values, "int8", signed=signed), "int8", signed=signed)
        assert found[:32].isnan().all()
        assert torch.equal(found[32:], values[32:])


def test_random_bits_are_even_and_differ_by_parameter_step_and_place():
    cpu = torch.device("cpu")
    numel = 1 << 14
    first = random_bits(1, 1, 0, numel, cpu)
    assert torch.equal(random_bits(1, 1, 1000, 500, cpu), first[1000:1500])
    wraps = random_bits(1, 1, 2**32 - 8, 16, cpu)
    assert torch.equal(wraps[8:], first[:8])
    pairs = [
        (first, random_bits(1, 2, 0, numel, cpu)),
        (first, random_bits(2, 1, 0, numel, cpu)),
        (first[1:], first[:-1]),
        (first & 0xFFFF, first >> 16),
    ]
    for one, other in pairs:
        both = torch.stack([one.double(), other.double()])
        assert abs(torch.corrcoef(both)[0, 1]) < 5 / math.sqrt(numel)
    for bit in range(32):
        assert abs((first >> bit & 1).double().mean() - 0.5) < 5 * 0.5 / math.sqrt(numel)


# Refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ([0, 0, 0, 4096], "exponents pointer is null"),
        ([0, 0, 4096, 0], "exponents pointer is null"),
        ([0, 8, 4096, 4096], "first element 8 is inside a group of 16"),
        (None, "states below fp32 need a table of places"),
    ],
)
def test_places_that_cannot_be_right_are_refused(place, message):
    buffer = torch.zeros(64)
    table = torch.tensor([[address(buffer)] * 4 + [0, 8, 0]])
    with Kernels(threads=1) as handle, pytest.raises(ValueError, match=message):
        handle.update(
            0,
            table,
            torch.zeros((1, HYPER_COLUMNS), dtype=torch.float64),
            gradient_dtype=torch.float32,
            output_dtype=None,
            scale=1.0,
            clip_value=None,
            moment_dtype=torch.uint8,
            places=None if place is None else torch.tensor([place]),
        )
