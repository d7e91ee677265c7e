"""The sum of squares is exact, so it depends on nothing but the elements."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.native import DTYPES, ISAS

from zero_plugin.kernels import Kernels, NormPartial

UNIT = Fraction(1, 2**298)


def exact_sum(values: torch.Tensor) -> Fraction:
    finite = values[torch.isfinite(values)].to(torch.float64)
    return sum((Fraction(value) ** 2 for value in finite.tolist()), Fraction(0))


def spread(numel: int, decades: float, seed: int) -> torch.Tensor:
    """Values whose magnitudes span many binary orders."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    return values * torch.exp(torch.randn(numel, generator=generator) * decades)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decades", [0, 3, 10, 30])
def test_the_sum_is_exact(dtype, decades, isa):
    with Kernels(threads=2, isa=isa) as handle:
        for numel in (0, 1, 7, 64, 1023, 1024, 1025, 5000):
            values = spread(numel, decades, numel).to(dtype)
            partial = handle.norm_partial(values)
            assert partial.sum_squares * UNIT == exact_sum(values)
            assert partial.nonfinite == int((~torch.isfinite(values)).sum())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bit_pattern(dtype, isa):
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (20_000,), generator=generator).to(torch.int32)
    values = (
        bits.view(torch.float32) if dtype == torch.float32 else bits.to(torch.int16).view(dtype)
    )
    with Kernels(threads=2, isa=isa) as handle:
        partial = handle.norm_partial(values)
    assert partial.sum_squares * UNIT == exact_sum(values)
    assert partial.nonfinite == int((~torch.isfinite(values)).sum())
    assert math.isnan(partial.absmax)
    assert math.isnan(partial.norm())


@pytest.mark.parametrize("value", [3.4028234e38, 1.4e-45, 1.1754944e-38, 1.0, 2.0**-126 * 1.5])
def test_extreme_magnitudes(value):
    values = torch.full((100_000,), value)
    for isa in ISAS:
        with Kernels(threads=3, isa=isa) as handle:
            partial = handle.norm_partial(values)
        assert partial.sum_squares * UNIT == 100_000 * Fraction(float(values[0])) ** 2
        assert partial.absmax == float(values[0])


def test_independent_of_threads_instruction_set_and_split():
    values = spread(300_001, 8, 2)
    partials = []
    for isa in ISAS:
        for threads in (1, 2, 4):
            with Kernels(threads=threads, isa=isa) as handle:
                partials.append(handle.norm_partial(values))
                for cut in (1, 1000, 99_999):
                    parts = [
                        handle.norm_partial(part) for part in values.split([cut, 300_001 - cut])
                    ]
                    partials.append(parts[0].merge(parts[1]))
                    partials.append(parts[1].merge(parts[0]))
    assert set(partials) == {partials[0]}
    # The exact value, rounded once to float64 and once by the square root.
    exact = partials[0].sum_squares * UNIT
    assert partials[0].hi == float(exact)
    assert partials[0].norm() == math.sqrt(float(exact))


def test_hi_and_lo_are_a_double_double():
    values = spread(10_000, 8, 3)
    with Kernels(threads=1) as handle:
        partial = handle.norm_partial(values)
    exact = exact_sum(values)
    assert partial.hi == float(exact)
    assert partial.lo == float(exact - Fraction(partial.hi))
    assert partial.hi + partial.lo == partial.hi
    assert partial.lo != 0.0


def test_nonfinite_elements_are_counted_and_left_out():
    values = torch.tensor([3.0, torch.inf, 4.0, -torch.inf])
    with Kernels(threads=1) as handle:
        partial = handle.norm_partial(values)
        assert (partial.hi, partial.absmax, partial.nonfinite) == (25.0, math.inf, 2)
        assert partial.norm() == math.inf
        with_nan = handle.norm_partial(torch.tensor([torch.nan, 1.0]))
    assert math.isnan(partial.merge(with_nan).absmax)
    assert math.isnan(with_nan.merge(partial).norm())
    assert partial.merge(with_nan).nonfinite == 3
    assert NormPartial().norm() == 0.0


@settings(max_examples=60)
@given(
    sum_squares=st.integers(0, 2**639),
    absmax=st.floats(0, allow_nan=False, allow_infinity=True),
    nonfinite=st.integers(0, 2**62),
)
def test_a_partial_survives_the_exchange_between_ranks(sum_squares, absmax, nonfinite):
    partial = NormPartial(sum_squares=sum_squares, absmax=absmax, nonfinite=nonfinite)
    words = partial.to_tensor()
    assert words.dtype == torch.int64
    assert words.shape == (NormPartial.NUM_WORDS,)
    assert NormPartial.from_tensor(words) == partial


def test_words_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"int64 of shape \[12\]"):
        NormPartial.from_tensor(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"int64 of shape \[12\]"):
        NormPartial.from_tensor(torch.zeros(12))
