"""Copies with a cast, accumulation and rank sums against torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.native import DTYPES, ISAS, assert_same_bits, specials

from zero_plugin.kernels import Kernels

LARGE = (1 << 21) + 1234 + 5  # several chunks, and stores past the caches


def any_bits(numel: int, seed: int) -> torch.Tensor:
    """Random fp32 bit patterns: every exponent, subnormals, infinities and NaNs among them."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31 - 1, (numel,), generator=generator)
    return words.to(torch.int32).view(torch.float32)


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("source_dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_to_every_dtype(isa, source_dtype):
    source = all_halves(source_dtype)
    with Kernels(threads=2, isa=isa) as handle:
        for dtype in DTYPES:
            destination = torch.empty(source.numel(), dtype=dtype)
            handle.copy(destination, source)
            assert_same_bits(destination, source.to(torch.float32).to(dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrowing_rounds_to_nearest_even(isa, dtype):
    # Every number of the narrow dtype, the midpoints above it, and the floats next to those.
    exact = all_halves(dtype).to(torch.float32)
    exact = exact[torch.isfinite(exact)]
    above = torch.sort(exact).values
    middle = ((above[:-1].double() + above[1:].double()) / 2).float()
    infinity = torch.tensor(torch.inf)
    source = torch.cat(
        [
            exact,
            middle,
            torch.nextafter(middle, infinity),
            torch.nextafter(middle, -infinity),
            specials(),
            any_bits(100_003, 1),
        ]
    )
    destination = torch.empty(source.numel(), dtype=dtype)
    with Kernels(threads=2, isa=isa) as handle:
        handle.copy(destination, source)
    assert_same_bits(destination, source.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nan_payloads_do_not_depend_on_the_instruction_set(dtype):
    payloads = torch.arange(1, 2**23, 4099).to(torch.int32)
    source = torch.cat([payloads | 0x7F800000, payloads | -0x00800000]).view(torch.float32)
    assert torch.isnan(source).all()
    results = []
    for isa in ISAS:
        narrow = torch.empty(source.numel(), dtype=dtype)
        wide = torch.empty(source.numel())
        with Kernels(threads=1, isa=isa) as handle:
            handle.copy(narrow, source)
            handle.copy(wide, narrow)
        assert torch.isnan(narrow).all()
        results.append((narrow.view(torch.int16), wide.view(torch.int32)))
    for narrow, wide in results[1:]:
        assert torch.equal(narrow, results[0][0])
        assert torch.equal(wide, results[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_within_a_dtype_keeps_every_bit(dtype):
    source = any_bits(70_001, 2) if dtype == torch.float32 else all_halves(dtype).repeat(2)[:-3]
    word = torch.int32 if dtype == torch.float32 else torch.int16
    for isa in ISAS:
        destination = torch.zeros(source.numel(), dtype=dtype)
        with Kernels(threads=2, isa=isa) as handle:
            handle.copy(destination, source)
        assert torch.equal(destination.view(word), source.view(word))


@pytest.mark.parametrize("isa", ISAS)
def test_every_small_size_and_offset(isa):
    source = torch.randn(100, generator=torch.Generator().manual_seed(3))
    with Kernels(threads=2, isa=isa) as handle:
        for numel, offset in itertools.product(range(71), range(5)):
            for dtype, other in itertools.product(DTYPES, DTYPES):
                part = source.to(other)[offset : offset + numel]
                destination = torch.full((100,), 7.0, dtype=dtype)
                handle.copy(destination[offset : offset + numel], part)
                expected = torch.full((100,), 7.0, dtype=dtype)
                expected[offset : offset + numel] = part.to(torch.float32).to(dtype)
                assert torch.equal(destination, expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float32, torch.float16),
    ],
)
def test_large_copies_at_any_alignment(dtype, other, threads):
    source = any_bits(LARGE, 4).to(other)
    for isa in ISAS:
        with Kernels(threads=threads, isa=isa) as handle:
            for offset in (0, 1, 31):
                buffer = torch.full((LARGE + 64,), 7.0, dtype=dtype)
                handle.copy(buffer[offset : offset + LARGE], source)
                assert_same_bits(buffer[offset : offset + LARGE], source.to(dtype))
                assert (buffer[:offset] == 7.0).all()
                assert (buffer[offset + LARGE :] == 7.0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate(dtype, isa):
    with Kernels(threads=2, isa=isa) as handle:
        for numel, offset in [*((n, n % 5) for n in range(71)), (100_003, 1)]:
            total = any_bits(numel + offset, 5)[offset:]
            source = any_bits(numel + offset, 6)[offset:].to(dtype)
            expected = total + source.to(torch.float32)
            handle.accumulate(total, source)
            assert_same_bits(total, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_ranks(dtype, isa):
    with Kernels(threads=2, isa=isa) as handle:
        for numel in [*range(40), 100_003]:
            for num_parts in (1, 2, 3, 5):
                parts = [
                    torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(
                        DTYPES[(rank + num_parts) % 3]
                    )
                    for rank in range(num_parts)
                ]
                expected = parts[0].to(torch.float32)
                for part in parts[1:]:
                    expected = expected + part.to(torch.float32)
                expected = (expected / torch.tensor(float(num_parts))).to(dtype)
                destination = torch.empty(numel, dtype=dtype)
                handle.sum_ranks(destination, parts, num_parts)
                assert_same_bits(destination, expected)


def test_sum_ranks_may_write_into_a_part():
    parts = [torch.randn(LARGE, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    expected = (parts[0] + parts[1] + parts[2]) / torch.tensor(3.0)
    with Kernels(threads=2) as handle:
        handle.sum_ranks(parts[1], parts, 3)
    assert torch.equal(parts[1], expected)


def test_sums_follow_the_order_of_the_list():
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    result = torch.empty(1)
    with Kernels(threads=1) as handle:
        handle.sum_ranks(result, parts, 1)
        assert result.item() == 0.0
        handle.sum_ranks(result, [parts[0], parts[2], parts[1]], 1)
        assert result.item() == 1.0


def test_wrong_arguments_are_refused():
    good = torch.zeros(4)
    with Kernels(threads=1) as handle:
        with pytest.raises(ValueError, match="destination has 4 elements and source has 3"):
            handle.copy(good, torch.zeros(3))
        with pytest.raises(TypeError, match=r"source has dtype torch.float64; the kernel takes"):
            handle.copy(good, torch.zeros(4, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"not contiguous; pass \.contiguous"):
            handle.copy(good, torch.zeros(8)[::2])
        with pytest.raises(ValueError, match="must be a dense CPU tensor"):
            handle.copy(good, torch.zeros(4, device="meta"))
        with pytest.raises(ValueError, match="must be a dense CPU tensor"):
            handle.norm_partial(torch.zeros(4).to_sparse())
        with pytest.raises(TypeError, match=r"destination has dtype torch\.bfloat16"):
            handle.accumulate(torch.zeros(4, dtype=torch.bfloat16), good)
        with pytest.raises(ValueError, match="parts is empty"):
            handle.sum_ranks(good, [], 1)
        with pytest.raises(ValueError, match="divisor is 0"):
            handle.sum_ranks(good, [good], 0)
        with pytest.raises(ValueError, match=r"parts\[1\] has 3"):
            handle.sum_ranks(good, [good, torch.zeros(3)], 2)
