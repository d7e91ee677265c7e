"""Where stripes put bytes: every byte has one place, and no place two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_plugin.store.layout import Stripes, weights_for

STRIPES = st.builds(
    Stripes,
    unit=st.integers(1, 5),
    weights=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
)


@given(STRIPES, st.integers(0, 80))
def test_every_byte_has_one_place(stripes: Stripes, nbytes: int) -> None:
    spans = list(stripes.spans(0, nbytes))
    assert [span.start for span in spans] == [
        sum(s.nbytes for s in spans[:i]) for i in range(len(spans))
    ]
    places = [(span.path, span.position + i) for span in spans for i in range(span.nbytes)]
    assert len(places) == len(set(places)) == nbytes
    # Each path's part is gapless, so that its size is what sizes() says.
    sizes = stripes.sizes(nbytes)
    assert set(places) == {(path, i) for path, size in enumerate(sizes) for i in range(size)}


@given(STRIPES, st.integers(0, 80), st.integers(0, 80))
def test_a_range_lies_where_the_whole_puts_it(stripes: Stripes, one: int, two: int) -> None:
    start, stop = sorted((one, two))

    def places(begin: int, end: int) -> dict[int, tuple[int, int]]:
        return {
            s.start + i: (s.path, s.position + i)
            for s in stripes.spans(begin, end)
            for i in range(s.nbytes)
        }

    whole = places(0, 100)
    assert places(start, stop) == {byte: whole[byte] for byte in range(start, stop)}


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([100.0], (1,)),
        ([None], (1,)),
        ([100.0, 110.0], (1, 1)),
        ([100.0, None], (1, 1)),
        ([3000.0, 1000.0], (3, 1)),
        ([1500.0, 1000.0], (3, 2)),
        ([100.0, 5000.0], (1, 50)),
    ],
)
def test_weights_follow_the_speeds(speeds: list[float | None], expected: tuple[int, ...]) -> None:
    assert weights_for(speeds) == expected


@given(st.lists(st.floats(50, 5000), min_size=2, max_size=4))
def test_weights_are_close_to_the_speeds(speeds: list[float]) -> None:
    weights = weights_for(speeds)
    assert min(weights) >= 1
    slowest = max(weight / speed for weight, speed in zip(weights, speeds, strict=True))
    # The time of a round against that of a perfect division.
    assert slowest * sum(speeds) / sum(weights) <= 1.5
