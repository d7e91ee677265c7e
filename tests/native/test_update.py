"""The compiled update equals its reference bit for bit, however the work is cut."""

from __future__ import annotations

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

from zero_plugin.kernels import HYPER_COLUMNS, Kernels
from zero_plugin.optim.rule import ADAMW

NUM_STEPS = 3


def gradients(numel: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(NUM_STEPS)]


def assert_same_state(actual: Problem, expected: Problem) -> None:
    for index, (mine, other) in enumerate(zip(actual.tensors(), expected.tensors(), strict=True)):
        assert_same_bits(mine, other, f"tensor {index}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "options"), CASES, ids=CASE_IDS)
def test_equals_the_reference(kind, options, isa):
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(1013, generator=generator)
    for index, gradient_dtype in enumerate(DTYPES):
        output_dtype = (torch.bfloat16, torch.float16, None)[index]
        mine = Problem.create(kind, options, master, output_dtype)
        other = mine.copy()
        with Kernels(threads=1, isa=isa) as handle:
            for gradient in gradients(1013, gradient_dtype, index):
                mine.native(handle, gradient, scale=0.37, clip_value=0.5)
                other.plain(gradient, scale=0.37, clip_value=0.5)
                assert_same_state(mine, other)


@pytest.mark.parametrize("output_dtype", [*DTYPES, None])
@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_every_pair_of_dtypes(gradient_dtype, output_dtype):
    master = torch.randn(259, generator=torch.Generator().manual_seed(2))
    for isa in ISAS:
        mine = Problem.create(torch.optim.AdamW, {}, master, output_dtype)
        other = mine.copy()
        with Kernels(threads=2, isa=isa) as handle:
            for gradient in gradients(259, gradient_dtype, 3):
                mine.native(handle, gradient)
                other.plain(gradient)
        assert_same_state(mine, other)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=CASE_IDS)
def test_special_values(kind, options):
    values = specials()
    master = values.repeat_interleave(len(values))
    gradient = values.repeat(len(values))
    for gradient_dtype in DTYPES:
        expected = Problem.create(kind, options, master, torch.float16)
        for _ in range(2):
            expected.plain(gradient.to(gradient_dtype), scale=0.5, clip_value=1e30)
        for isa in ISAS:
            mine = Problem.create(kind, options, master, torch.float16)
            with Kernels(threads=2, isa=isa) as handle:
                for _ in range(2):
                    mine.native(handle, gradient.to(gradient_dtype), scale=0.5, clip_value=1e30)
            assert_same_state(mine, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "options"), [CASES[0], CASES[7], CASES[12]])
def test_every_small_size_and_offset(kind, options, isa):
    sizes = [*range(1, 71), 0, 0, 1, 0, 129]
    total = sum(sizes)
    padded = torch.randn(total + 7, generator=torch.Generator().manual_seed(5))
    for offset in range(7):
        master = padded[offset : offset + total]
        whole = Problem.create(kind, options, master, torch.bfloat16)
        cut = whole.copy()
        cut.sizes = sizes
        # Buffers that start `offset` elements past an aligned address.
        cut.master = padded.clone()[offset : offset + total]
        cut.states = [torch.zeros(total + 7)[offset : offset + total] for _ in cut.states]
        cut.output = torch.zeros(total + 7, dtype=torch.bfloat16)[offset : offset + total]
        with Kernels(threads=2, isa=isa) as handle:
            for gradient in gradients(total + 7, torch.bfloat16, offset):
                whole.plain(gradient[offset : offset + total])
                cut.native(handle, gradient[offset : offset + total])
        assert_same_state(cut, whole)


def test_neighbours_of_a_segment_are_not_touched():
    master = torch.full((200,), 3.0)
    output = torch.full((200,), 5.0, dtype=torch.bfloat16)
    states = [torch.full((200,), 7.0), torch.full((200,), 9.0)]
    gradient = torch.ones(200)
    rows = torch.tensor(
        [ADAMW.hyper({"lr": 1.0, "betas": (0.9, 0.9), "eps": 1.0, "weight_decay": 0.0}, 1)]
    ).double()
    for isa in ISAS:
        for start, size in [(3, 1), (17, 33), (5, 100), (64, 64)]:
            tensors = [tensor.clone() for tensor in (master, *states, gradient, output)]
            table = [[*(address(tensor, start) for tensor in tensors), size, 0]]
            with Kernels(threads=1, isa=isa) as handle:
                handle.update(
                    0,
                    torch.tensor(table),
                    rows,
                    gradient_dtype=torch.float32,
                    output_dtype=torch.bfloat16,
                    scale=1.0,
                    clip_value=None,
                )
            for tensor, before in zip(tensors, (master, *states, gradient, output), strict=True):
                inside = torch.zeros(200, dtype=torch.bool)
                inside[start : start + size] = tensor is not tensors[3]
                assert torch.equal(tensor != before, inside)


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_and_large_outputs_do_not_change_bits(threads):
    # Large enough for several chunks a thread and for stores past the caches.
    numel = (1 << 21) + 4099
    master = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(8)).bfloat16()
    expected = Problem.create(torch.optim.AdamW, {}, master, torch.bfloat16)
    expected.plain(gradient)
    sizes = [1, 700_001, 3, 900_000]
    for cut in ([numel], [*sizes, numel - sum(sizes)]):
        mine = Problem.create(torch.optim.AdamW, {}, master, torch.bfloat16, cut)
        with Kernels(threads=threads) as handle:
            mine.native(handle, gradient)
        assert_same_state(mine, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_large_unaligned_outputs(isa):
    numel = (1 << 21) + 77
    master = torch.randn(numel, generator=torch.Generator().manual_seed(9))
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(10)).half()
    for dtype, offset in [(torch.bfloat16, 3), (torch.float16, 29), (torch.float32, 5)]:
        mine = Problem.create(torch.optim.SGD, {"lr": 0.1}, master, dtype)
        expected = mine.copy()
        mine.output = torch.zeros(numel + 64, dtype=dtype)[offset : offset + numel]
        with Kernels(threads=2, isa=isa) as handle:
            mine.native(handle, gradient)
        expected.plain(gradient)
        assert_same_state(mine, expected)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 90), max_size=12),
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**31),
    scale=st.floats(1e-6, 1e6),
    clip_value=st.none() | st.floats(0, 10),
    gradient_dtype=st.sampled_from(DTYPES),
    output_dtype=st.sampled_from([*DTYPES, None]),
    isa=st.sampled_from(ISAS),
    threads=st.integers(1, 3),
)
def test_any_problem(
    *, sizes, case, seed, scale, clip_value, gradient_dtype, output_dtype, isa, threads
):
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(sum(sizes), generator=generator)
    kind, options = case
    mine = Problem.create(kind, options, master, output_dtype, sizes or [0])
    other = mine.copy()
    with Kernels(threads=threads, isa=isa) as handle:
        for gradient in gradients(sum(sizes), gradient_dtype, seed):
            mine.native(handle, gradient, scale=scale, clip_value=clip_value)
            other.plain(gradient, scale=scale, clip_value=clip_value)
    assert_same_state(mine, other)


def test_each_segment_follows_its_own_hyper_row():
    options = [(1e-2, 0.0, 1), (1e-3, 0.1, 40), (0.0, 0.0, 7)]
    groups = [
        {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": decay}
        for lr, decay, _ in options
    ]
    rows = [ADAMW.hyper(group, step) for group, (_, _, step) in zip(groups, options, strict=True)]
    order = [2, 0, 1, 0]
    size = 50
    generator = torch.Generator().manual_seed(11)
    master, gradient = (torch.randn(size * len(order), generator=generator) for _ in range(2))
    states = [torch.rand(size * len(order), generator=generator) for _ in range(2)]
    mine = [tensor.clone() for tensor in (master, *states)]
    table = [
        [*(address(t, size * i) for t in mine), address(gradient, size * i), 0, size, row]
        for i, row in enumerate(order)
    ]
    with Kernels(threads=2) as handle:
        handle.update(
            ADAMW.native_id,
            torch.tensor(table),
            torch.tensor(rows, dtype=torch.float64),
            gradient_dtype=torch.float32,
            output_dtype=None,
            scale=1.0,
            clip_value=None,
        )
    for index, row in enumerate(order):
        part = slice(size * index, size * (index + 1))
        expected = Problem(
            ADAMW, groups[row], master[part].clone(), [s[part].clone() for s in states], None
        )
        expected.step = options[row][2] - 1
        expected.plain(gradient[part])
        for got, want in zip(mine, expected.tensors(), strict=True):
            assert_same_bits(got[part], want)


def test_nothing_to_do():
    with Kernels(threads=2) as handle:
        handle.update(
            0,
            torch.zeros((0, 7), dtype=torch.int64),
            torch.zeros((0, HYPER_COLUMNS), dtype=torch.float64),
            gradient_dtype=torch.float32,
            output_dtype=None,
            scale=1.0,
            clip_value=None,
        )


def test_clipping_and_scale_act_in_that_order():
    problem = Problem.create(torch.optim.SGD, {"lr": 1.0}, torch.zeros(5))
    with Kernels(threads=1) as handle:
        problem.native(
            handle,
            torch.tensor([10.0, -10.0, 1.0, -torch.inf, torch.nan]),
            scale=0.5,
            clip_value=2.0,
        )
    assert_same_bits(problem.master, torch.tensor([-2.0, 2.0, -0.5, 2.0, torch.nan]))


@pytest.mark.parametrize("isa", ISAS)
def test_signs_of_zero_are_kept(isa):
    gradient = torch.tensor([1.0, -1.0, 0.0, -0.0])
    mine = Problem.create(torch.optim.SGD, {"lr": 0.0, "momentum": 0.5}, -torch.zeros(4))
    other = mine.copy()
    with Kernels(threads=1, isa=isa) as handle:
        for _ in range(2):
            mine.native(handle, gradient, clip_value=0.0)
            other.plain(gradient, clip_value=0.0)
    assert_same_state(mine, other)
    assert torch.signbit(mine.states[0]).tolist() == [False, True, False, True]


def one_row(**changes: int) -> torch.Tensor:
    values = torch.ones(8)
    row = {"master": address(values), "state0": address(values), "state1": address(values)}
    row |= {"gradient": address(values), "output": 0, "numel": 8, "hyper": 0}
    return torch.tensor([list((row | changes).values())])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"numel": -1}, "segment 0: numel is negative"),
        ({"hyper": 1}, "segment 0: hyper row 1 of 1 rows"),
        ({"hyper": -1}, "segment 0: hyper row -1 of 1 rows"),
        ({"master": 0}, "segment 0: master pointer is null"),
        ({"gradient": 0}, "gradient pointer is null"),
        ({"state0": 0}, "first state pointer is null"),
        ({"state1": 0}, "second state pointer is null"),
        ({"master": 4098}, "master pointer is not aligned"),
        ({"output": 4097}, "output pointer is not aligned"),
    ],
)
def test_a_row_that_cannot_be_right_is_refused(changes, message):
    with Kernels(threads=1) as handle, pytest.raises(ValueError, match=message):
        handle.update(
            0,
            one_row(**changes),
            torch.zeros((1, HYPER_COLUMNS), dtype=torch.float64),
            gradient_dtype=torch.float32,
            output_dtype=torch.bfloat16,
            scale=1.0,
            clip_value=None,
        )


@pytest.mark.parametrize(
    ("segments", "hyper", "changes", "error", "message"),
    [
        (torch.zeros((1, 6), dtype=torch.int64), None, {}, ValueError, r"\[1, 6\]"),
        (torch.zeros((1, 7), dtype=torch.int32), None, {}, TypeError, "int32"),
        (None, torch.zeros((1, 15), dtype=torch.float64), {}, ValueError, r"\[1, 15\]"),
        (None, torch.zeros((1, 16)), {}, TypeError, "float32"),
        (
            None,
            None,
            {"gradient_dtype": torch.float64},
            TypeError,
            "gradient_dtype is torch.float64",
        ),
        (None, None, {"output_dtype": torch.int8}, TypeError, "output_dtype is torch.int8"),
        (None, None, {"clip_value": -1.0}, ValueError, "clip_value is -1.0"),
        (None, None, {"clip_value": float("nan")}, ValueError, "clip_value is nan"),
        (None, None, {"rule": 9}, ValueError, "rule 9 is not known"),
    ],
)
def test_wrong_arguments_are_refused(segments, hyper, changes, error, message):
    arguments = {
        "rule": 0,
        "gradient_dtype": torch.float32,
        "output_dtype": None,
        "scale": 1.0,
        "clip_value": None,
    } | changes
    rule = arguments.pop("rule")
    segments = torch.zeros((0, 7), dtype=torch.int64) if segments is None else segments
    hyper = torch.zeros((1, 16), dtype=torch.float64) if hyper is None else hyper
    with Kernels(threads=1) as handle, pytest.raises(error, match=message):
        handle.update(rule, segments, hyper, **arguments)
