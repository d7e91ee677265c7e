"""The split form: a bf16 weight and 16 bits are the fp32 master, exactly, and its update is the master's."""

from __future__ import annotations

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
    bits,
    specials,
)
from torch import Tensor

from zero_plugin.kernels import HYPER_COLUMNS, SEGMENT_COLUMNS, Kernels
from zero_plugin.optim.split import follow, join, split

LOW_HALVES = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def every_high_half() -> Tensor:
    """Each bf16 number with the low halves at which rounding turns, subnormals, infinities and NaNs included."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16
    return (high + torch.tensor(LOW_HALVES, dtype=torch.int32)).flatten().view(torch.float32)


def away_from_zero(master: Tensor) -> Tensor:
    """A master rounded to bf16, ties away from zero, by float64 arithmetic; finite results only."""
    wide = master.to(torch.float64)
    down = (master.view(torch.int32) & -0x10000).view(torch.float32).to(torch.float64)
    up = ((master.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).to(torch.float64)
    return torch.where((wide - down).abs() < (up - wide).abs(), down, up).to(torch.bfloat16)


def test_the_parts_give_the_master_again():
    master = every_high_half()
    weights, remainder = split(master)
    assert (weights.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    number = ~master.isnan()
    again = join(weights, remainder)
    assert torch.equal(again.view(torch.int32)[number], master.view(torch.int32)[number])
    assert weights[~number].isnan().all()
    assert again[~number].isnan().all()


def test_weights_are_the_nearest_and_differ_from_torch_in_ties_only():
    master = every_high_half()
    weights, _ = split(master)
    finite = master.isfinite() & (master.abs() < 3.3895e38)
    assert_same_bits(weights[finite], away_from_zero(master[finite]))
    differs = bits(weights) != bits(master.to(torch.bfloat16))
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    odd = (master.view(torch.int32) & 0x10000) != 0
    assert torch.equal(differs, ties & ~odd & ~master.isnan())


def test_the_largest_masters_come_back_from_an_infinite_weight():
    master = torch.tensor([3.4028234e38, -3.4028234e38, 3.4e38, torch.inf, -torch.inf])
    weights, remainder = split(master)
    assert weights.isinf().all()
    assert torch.equal(join(weights, remainder), master)


class SplitProblem(Problem):
    """A problem whose master is kept as weight (`output`) and remainder."""

    remainder: Tensor

    @classmethod
    def of(cls, whole: Problem) -> SplitProblem:
        """The same problem in split form."""
        made = cls(whole.rule, whole.group, whole.master, [s.clone() for s in whole.states], None)
        made.sizes = whole.sizes
        made.output, made.remainder = split(whole.master)
        return made

    def step_with(self, handle: Kernels, gradient: Tensor, **options: Any) -> None:
        """One step with the compiled kernel."""
        assert self.output is not None
        table: list[list[int]] = []
        start = 0
        for size in self.sizes:
            tensors = [self.remainder, *self.states]
            row = [address(item, start) for item in tensors] + [0] * (2 - len(self.states))
            table.append([*row, address(gradient, start), address(self.output, start), size, 0])
            start += size
        handle.update(
            self.rule.native_id,
            torch.tensor(table, dtype=torch.int64).reshape(-1, SEGMENT_COLUMNS),
            torch.tensor([self.next_row()], dtype=torch.float64),
            gradient_dtype=gradient.dtype,
            output_dtype=torch.bfloat16,
            split=True,
            **options,
        )

    def assert_is(self, whole: Problem) -> None:
        """Master and states are the other's, and weight and remainder its parts."""
        assert self.output is not None
        assert_same_bits(join(self.output, self.remainder), whole.master, "master")
        weights, remainder = split(whole.master)
        assert_same_bits(self.output, weights, "weights")
        number = ~whole.master.isnan()
        assert torch.equal(self.remainder[number], remainder[number])
        for mine, other in zip(self.states, whole.states, strict=True):
            assert_same_bits(mine, other, "state")


def gradients(
    numel: int, seed: int, steps: int, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(steps)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "options"), CASES, ids=CASE_IDS)
def test_twenty_steps_have_the_masters_bits(kind, options, isa):
    whole = Problem.create(
        kind, options, torch.randn(1013, generator=torch.Generator().manual_seed(1))
    )
    mine = SplitProblem.of(whole)
    with Kernels(threads=1, isa=isa) as handle:
        for step, gradient in enumerate(gradients(1013, 2, 20)):
            clip_value = (None, 0.5)[step % 2]
            mine.step_with(handle, gradient, scale=0.37, clip_value=clip_value)
            whole.plain(gradient, scale=0.37, clip_value=clip_value)
            mine.assert_is(whole)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=CASE_IDS)
def test_special_values(kind, options):
    values = torch.cat(
        [
            specials(),
            torch.tensor([0x3F808000, 0x3F818000, -0x7FFFFFFF], dtype=torch.int32).view(
                torch.float32
            ),
        ]
    )
    master = values.repeat_interleave(len(values))
    gradient = values.repeat(len(values))
    for dtype in DTYPES:
        whole = Problem.create(kind, options, master)
        made = [SplitProblem.of(whole) for _ in ISAS]
        for _ in range(2):
            whole.plain(gradient.to(dtype), scale=0.5, clip_value=1e30)
        for isa, mine in zip(ISAS, made, strict=True):
            with Kernels(threads=2, isa=isa) as handle:
                for _ in range(2):
                    mine.step_with(handle, gradient.to(dtype), scale=0.5, clip_value=1e30)
            mine.assert_is(whole)


@pytest.mark.parametrize("isa", ISAS)
def test_every_half_of_every_number_through_a_step(isa):
    """A step of rate zero reads and writes each master and changes none."""
    master = every_high_half()
    whole = Problem.create(torch.optim.SGD, {"lr": 0.0}, master)
    mine = SplitProblem.of(whole)
    with Kernels(threads=2, isa=isa) as handle:
        mine.step_with(handle, torch.zeros(master.numel()), scale=1.0, clip_value=None)
    whole.plain(torch.zeros(master.numel()))
    mine.assert_is(whole)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 90), max_size=12),
    offset=st.integers(0, 6),
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**31),
    clip_value=st.none() | st.floats(0, 10),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
)
def test_any_sizes_at_any_place(*, sizes, offset, case, seed, clip_value, dtype, isa, threads):
    total = sum(sizes)
    master = torch.randn(total, generator=torch.Generator().manual_seed(seed))
    kind, options = case
    whole = Problem.create(kind, options, master, None, sizes or [0])
    mine = SplitProblem.of(whole)

    def moved(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(offset), tensor, tensor.new_zeros(3)])

    assert mine.output is not None
    around = [moved(item) for item in (mine.remainder, mine.output, *mine.states)]
    mine.remainder, mine.output, *mine.states = [item[offset : offset + total] for item in around]
    with Kernels(threads=threads, isa=isa) as handle:
        for gradient in gradients(total, seed, 3, dtype):
            mine.step_with(handle, gradient, scale=0.5, clip_value=clip_value)
            whole.plain(gradient, scale=0.5, clip_value=clip_value)
    mine.assert_is(whole)
    for item in around:
        assert not item[:offset].any()
        assert not item[offset + total :].any()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_bits(threads):
    numel = (1 << 20) + 4099
    whole = Problem.create(
        torch.optim.AdamW, {}, torch.randn(numel), None, [1, 700_001, numel - 700_002]
    )
    mine = SplitProblem.of(whole)
    gradient = torch.randn(numel).bfloat16()
    with Kernels(threads=threads) as handle:
        mine.step_with(handle, gradient, scale=1.0, clip_value=None)
    whole.plain(gradient)
    mine.assert_is(whole)


def row(**changes: int) -> Tensor:
    values = torch.ones(8)
    columns = {"remainder": address(values), "state0": address(values), "state1": address(values)}
    columns |= {"gradient": address(values), "output": address(values), "numel": 8, "hyper": 0}
    return torch.tensor([list((columns | changes).values())])


@pytest.mark.parametrize(
    ("changes", "output_dtype", "message"),
    [
        ({"output": 0}, torch.bfloat16, "segment 0: output pointer is null"),
        ({"remainder": 0}, torch.bfloat16, "segment 0: remainder pointer is null"),
        ({"remainder": 4097}, torch.bfloat16, "remainder pointer is not aligned"),
        ({}, torch.float16, "the split form needs bf16 outputs"),
        ({}, None, "the split form needs bf16 outputs"),
    ],
)
def test_what_cannot_be_right_is_refused(changes, output_dtype, message):
    with Kernels(threads=1) as handle, pytest.raises(ValueError, match=message):
        handle.update(
            0,
            row(**changes),
            torch.zeros((1, HYPER_COLUMNS), dtype=torch.float64),
            gradient_dtype=torch.float32,
            output_dtype=output_dtype,
            scale=1.0,
            clip_value=None,
            split=True,
        )


def test_low_bits_follow_a_write_only_where_it_changed_the_weight():
    master = torch.tensor([1.0 + 2.0**-10, -0.3, 2.0, 1.0 + 2.0**-8, 1.0 + 2.0**-8])
    weights, remainder = split(master)
    assert float(weights[3]) == 1.0078125
    written = weights.clone()
    written[2] = 5.0
    written[3] = 1.0  # the fourth master to nearest even
    written[4] = 0.5
    follow(weights, written, remainder)
    expected = master.clone()
    expected[2], expected[4] = 5.0, 0.5
    assert_same_bits(join(written, remainder), expected)
    assert_same_bits(written[3:4], weights[3:4])
