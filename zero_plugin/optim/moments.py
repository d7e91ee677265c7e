"""Moments of less than fp32: how they are kept, rounded and read, in plain torch; the compiled kernels do the same.

**bf16**: the upper half of the fp32 number, rounded up with the probability that what is cut off is of a unit. Its expected value
is then the exact one, while rounding to nearest would lose every change below half a unit, which is most of what the
second moment of Adam changes by.

**int8**: a byte an element, and a byte for each group of 16. A byte is a small float whose exponent counts from the one of the
largest of its group, so that an outlier takes precision from 15 neighbours only. Moments of both signs have sign, 3 bits of
exponent and 4 of mantissa, and equal spacing below. Moments that are squares have 4 and 4: 15 octaves below the largest, with
a relative spacing of 1/16 to 1/32 everywhere. Zero stays zero; what is less than the smallest number becomes that, never zero,
since an update divides by it. Rounding is stochastic, too.

Groups start at multiples of 16 elements of the parameter, as all slices of ranks do: no group lies on two ranks, and its bytes do
not depend on their number. The random bits are a hash of the parameter's name, the number of its step and the element's place in
it: of nothing that a thread, an instruction set, a tile, a rank or a resumed run could change.

A number that has been kept is kept again as the same one, whatever is random. So states are saved as fp32, and are exact
after a load. From other fp32 numbers a load rounds to nearest.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zero_plugin.config import MomentDType
from zero_plugin.optim.reference import update as update_whole
from zero_plugin.store.layout import round_up

if TYPE_CHECKING:
    from torch import Tensor

    from zero_plugin.optim.rule import Rule

GROUP = 16
"""Elements that share an exponent; the unit of slices (`zero_plugin.sharding.layout.UNIT`), so that no two ranks part them."""

STORED: dict[MomentDType, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.uint8,
}
"""What memory holds."""

_DROPPED = 19
_INFINITE = 0x7F800000
_LARGEST = 4079
_NOT_NUMBERS = 255
_LOWEST_SIGNED = 7
_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF


def kept_numel(kind: MomentDType, numel: int) -> int:
    """Stored elements of a moment of `numel` elements: exponents come after all bytes."""
    return numel + round_up(numel, GROUP) // GROUP if kind == "int8" else numel


def kept_bytes(kind: MomentDType, numel: int) -> int:
    """Bytes of a moment of `numel` elements."""
    return kept_numel(kind, numel) * STORED[kind].itemsize


def stream_of(name: str) -> int:
    """What tells a parameter's random bits from the others': a hash of its name, which a resumed run has too."""
    return zlib.crc32(name.encode())


def random_bits(stream: int, step: int, first: int, numel: int, device: torch.device) -> Tensor:
    """32 random bits an element, int64 [numel].

    Args:
        stream: from `stream_of`.
        step: number of the step, 1 for the first.
        first: place in the parameter of the first element.
        numel: number of elements.
        device: of the result.
    """
    # Splitmix64 (Steele, Lea and Flood, 2014), then a mixer with full avalanche (Wellons's "lowbias32").
    key = ((stream << 32 ^ step) + 0x9E3779B97F4A7C15) & _LONG
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _LONG
    key = (key ^ key >> 27) * 0x94D049BB133111EB & _LONG
    key ^= key >> 31
    x = torch.arange(first, first + numel, dtype=torch.int64, device=device)
    x = x.add_(key & _WORD).bitwise_and_(_WORD)
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    x = (x ^ x >> 15 ^ key >> 32) * 0x846CA68B & _WORD
    return x ^ x >> 16


def decode(kept: Tensor, kind: MomentDType, *, signed: bool) -> Tensor:
    """The fp32 numbers of what memory holds, [numel]; of fp32 the tensor itself.

    Args:
        kept: what memory holds, flat; whole groups.
        kind: how.
        signed: whether there are numbers below zero; else they are squares.
    """
    if kind == "fp32":
        return kept
    if kind == "bf16":
        return kept.to(torch.float32)
    numel = kept.numel() // (GROUP + 1) * GROUP
    codes = kept[:numel].view(-1, GROUP).to(torch.int32)
    top = kept[numel:].view(-1, 1).to(torch.int32)
    if signed:
        base = top.clamp(min=_LOWEST_SIGNED) * 16 - 112
        magnitude = codes & 0x7F
        low = (magnitude < 16).to(torch.int32)
        values = (magnitude + base + low * 16).bitwise_left_shift_(_DROPPED).view(torch.float32)
        even = (((base + 16) << _DROPPED) * low).view(torch.float32)
        bits = (values - even).view(torch.int32) | (codes >> 7) * -0x80000000
    else:
        bits = ((codes - 240 + 16 * top) * (codes > 0).to(torch.int32)) << _DROPPED
    return torch.where(top == _NOT_NUMBERS, torch.nan, bits.view(torch.float32)).flatten()


def encode(
    values: Tensor, kind: MomentDType, kept: Tensor, *, signed: bool, random: Tensor | None = None
) -> None:
    """Round fp32 numbers into memory; `decode` is the inverse, and what it gave comes back as it was.

    Args:
        values: fp32 [numel]; whole groups.
        kind: how.
        kept: what memory holds, flat.
        signed: as for `decode`.
        random: 16 random bits an element, int64 [numel]; None: to nearest.
    """
    if kind == "fp32":
        if kept.data_ptr() != values.data_ptr():
            kept.copy_(values)
        return
    bits = values.view(torch.int32).to(torch.int64) & _WORD
    if kind == "bf16":
        high = (bits + (0x8000 if random is None else random)) >> 16
        high = torch.where(torch.isnan(values), bits >> 16 | 0x40, high)
        kept.copy_(high.to(torch.int16).view(torch.bfloat16))
        return
    magnitude = (bits & 0x7FFFFFFF).view(-1, GROUP)
    chance = 1 << (_DROPPED - 1) if random is None else ((random << 3) + 4).view(-1, GROUP)
    codes, top = (_signed_codes if signed else _unsigned_codes)(magnitude, chance)
    if signed:
        codes |= bits.view(-1, GROUP) >> 24 & 0x80
    lost = (magnitude >= _INFINITE).any(dim=1, keepdim=True)
    numel = values.numel()
    kept[:numel].copy_(torch.where(lost, 0, codes).flatten())
    kept[numel:].copy_(torch.where(lost, _NOT_NUMBERS, top).flatten())


def _unsigned_codes(magnitude: Tensor, chance: Tensor | int) -> tuple[Tensor, Tensor]:
    number = ((magnitude + chance) >> _DROPPED).clamp_(max=_LARGEST)
    number = torch.where(magnitude > 0, number.clamp(min=1), number)
    top = number.amax(dim=1, keepdim=True) >> 4
    return torch.where(number == 0, 0, (number - 16 * top + 240).clamp_(min=1)), top


def _signed_codes(magnitude: Tensor, chance: Tensor | int) -> tuple[Tensor, Tensor]:
    number = ((magnitude + chance) >> _DROPPED).clamp_(max=_LARGEST)
    top = (number.amax(dim=1, keepdim=True) >> 4).clamp_(min=_LOWEST_SIGNED)
    even = (top - 6) << 23
    # Below the smallest exponent numbers have the spacing that a sum with it has.
    summed = magnitude.to(torch.int32).view(torch.float32) + even.to(torch.int32).view(
        torch.float32
    )
    below = ((summed.view(torch.int32).to(torch.int64) + chance) >> _DROPPED) - 16
    codes = torch.where(magnitude < even, below, number) - 16 * top + 112
    return codes.clamp_(max=127), top


def take(kept: Tensor, kind: MomentDType, start: int, numel: int) -> Tensor:
    """What is kept of a part of a moment: a view, or a copy for `put`.

    Args:
        kept: of the whole.
        kind: how.
        start: first element, where a group starts.
        numel: elements, to the end of a group.
    """
    if kind != "int8":
        return kept[start : start + numel]
    exponents = kept[kept.numel() // (GROUP + 1) * GROUP :]
    part = exponents[start // GROUP : (start + numel) // GROUP]
    return torch.cat([kept[start : start + numel], part])


def put(kept: Tensor, kind: MomentDType, start: int, part: Tensor) -> None:
    """Write back what `take` gave, after a change."""
    if kind != "int8":
        return
    numel = part.numel() // (GROUP + 1) * GROUP
    exponents = kept[kept.numel() // (GROUP + 1) * GROUP :]
    kept[start : start + numel].copy_(part[:numel])
    exponents[start // GROUP : (start + numel) // GROUP].copy_(part[numel:])


@torch.no_grad()
def update(  # noqa: PLR0913 - as the plain update
    rule: Rule,
    kind: MomentDType,
    *,
    master: Tensor,
    kept: Sequence[Tensor],
    stream: int,
    first: int,
    gradient: Tensor,
    output: Tensor | None,
    hyper: Sequence[float],
    scale: float,
    clip_value: float | None,
) -> None:
    """`zero_plugin.optim.reference.update` with moments kept as `kind`.

    Args:
        rule: the update rule.
        kind: how moments are kept.
        master: fp32 [numel].
        kept: what memory holds of each state: whole groups, of which the last may be longer than the master.
        stream: from `stream_of`.
        first: place in the parameter of the first element, a multiple of 16 for int8.
        gradient: as there.
        output: as there.
        hyper: as there.
        scale: as there.
        clip_value: as there.
    """
    numel = master.numel()
    states = [
        decode(item, kind, signed=signed) for item, signed in zip(kept, rule.signed, strict=True)
    ]
    update_whole(
        rule,
        master=master,
        states=[state[:numel] for state in states],
        gradient=gradient,
        output=output,
        hyper=hyper,
        scale=scale,
        clip_value=clip_value,
    )
    if not kept or kind == "fp32":
        return
    total = states[0].numel()
    random = random_bits(stream, int(hyper[STEP_COLUMN]), first, total, master.device)
    for number, (item, state) in enumerate(zip(kept, states, strict=True)):
        chance = random >> 16 if number else random & 0xFFFF
        encode(state, kind, item, signed=rule.signed[number], random=chance)


STEP_COLUMN = 9
"""Of a hyper row: number of the step."""
