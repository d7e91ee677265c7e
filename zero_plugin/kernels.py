"""The compiled kernels: copies with a cast, fp32 accumulation, exact norms and optimizer updates on the CPU.

Every result is bit-identical over instruction set, thread count and split of the work: each element is computed
alone, by the same IEEE operations everywhere (a multiply and add is fused only where a rule says so, and then on every
instruction set), and the one reduction there is, the sum of squares, is exact. Where a result is NaN, that holds for
its being NaN, not for its sign and payload.
Denormals are kept and rounding is to nearest, whatever `torch.set_flush_denormal` was told in any thread.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from zero_plugin.errors import EngineStateError, NativeExtensionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

try:
    from zero_plugin import _native
except ImportError as error:
    raise NativeExtensionError(
        f"zero_plugin's compiled extension cannot be loaded ({error}). It is missing or was built for another "
        "Python or processor; reinstall the package on this machine with a C++20 compiler at hand: "
        "pip install --force-reinstall --no-deps zero-plugin (in a checkout: pip install -e .)."
    ) from error

SEGMENT_COLUMNS = _native.SEGMENT_COLUMNS
"""Columns of a segment table: master, state 0, state 1, gradient, output (addresses), numel, hyper row."""

HYPER_COLUMNS = _native.HYPER_COLUMNS
"""Columns of a hyper row; their meaning belongs to the rule, see `zero_plugin.optim.rule`."""

PLACE_COLUMNS = _native.PLACE_COLUMNS
"""Columns of the table beside the segments where states are not fp32: parameter, first element, and the addresses of the
exponents of state 0 and state 1; see `zero_plugin.optim.moments`."""

SOURCE_COLUMNS = _native.SOURCE_COLUMNS
"""Columns of the table of what an update reads where it does not update in place: master, state 0, state 1."""

_MOMENT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SQUARE_EXPONENT = 298
_NUM_LIMBS = 10
_NAN_BITS = 0x7F800001
_INF_BITS = 0x7F800000


def available_isas() -> tuple[str, ...]:
    """Instruction sets compiled in that this machine has, best last."""
    return tuple(_native.available_isas())


@dataclass(frozen=True, kw_only=True, slots=True)
class NormPartial:
    """Sum of squares, largest magnitude and non-finite count of some elements.

    The sum is an exact integer, so merging is exact too and its value does not depend on how the elements
    were cut into partials.
    """

    sum_squares: int = 0
    """Sum of the squares of the finite elements in units of 2**-298 (the square of the smallest float32)."""
    absmax: float = 0.0
    """Largest magnitude; inf or NaN when an element is."""
    nonfinite: int = 0
    """Number of elements that are infinite or NaN."""

    NUM_WORDS = _NUM_LIMBS + 2

    def merge(self, other: NormPartial) -> NormPartial:
        """The partial of both sets of elements."""
        either_nan = math.isnan(self.absmax) or math.isnan(other.absmax)
        return NormPartial(
            sum_squares=self.sum_squares + other.sum_squares,
            absmax=math.nan if either_nan else max(self.absmax, other.absmax),
            nonfinite=self.nonfinite + other.nonfinite,
        )

    @property
    def hi(self) -> float:
        """The sum of squares rounded once to float64."""
        return self.sum_squares / (1 << SQUARE_EXPONENT)

    @property
    def lo(self) -> float:
        """What `hi` leaves out, rounded to float64."""
        numerator, denominator = self.hi.as_integer_ratio()
        rest = self.sum_squares * denominator - (numerator << SQUARE_EXPONENT)
        return rest / (denominator << SQUARE_EXPONENT)

    def norm(self) -> float:
        """The 2-norm in float64: NaN when an element is NaN, inf when one is infinite."""
        return self.absmax if self.nonfinite else math.sqrt(self.hi)

    def to_tensor(self) -> Tensor:
        """int64 [`NUM_WORDS`] on the CPU, to be exchanged between ranks; `from_tensor` is its inverse."""
        raw = self.sum_squares.to_bytes(8 * _NUM_LIMBS, "little")
        words = [
            int.from_bytes(raw[8 * i : 8 * i + 8], "little", signed=True) for i in range(_NUM_LIMBS)
        ]
        absmax = (
            torch.tensor([self.absmax], dtype=torch.float64, device="cpu").view(torch.int64).item()
        )
        return torch.tensor([*words, int(absmax), self.nonfinite], dtype=torch.int64, device="cpu")

    @classmethod
    def from_tensor(cls, words: Tensor) -> NormPartial:
        """The partial that `to_tensor` gave.

        Raises:
            ValueError: `words` is not int64 of shape [`NUM_WORDS`].
        """
        if words.dtype != torch.int64 or tuple(words.shape) != (cls.NUM_WORDS,):
            raise ValueError(
                f"a norm partial is int64 of shape [{cls.NUM_WORDS}], not {words.dtype} "
                f"of shape {list(words.shape)}"
            )
        values = [int(value) for value in words.tolist()]
        raw = b"".join(value.to_bytes(8, "little", signed=True) for value in values[:_NUM_LIMBS])
        absmax = (
            torch.tensor([values[_NUM_LIMBS]], dtype=torch.int64, device="cpu")
            .view(torch.float64)
            .item()
        )
        return cls(
            sum_squares=int.from_bytes(raw, "little"),
            absmax=float(absmax),
            nonfinite=values[_NUM_LIMBS + 1],
        )


def _absmax_of(bits: int) -> float:
    if bits >= _NAN_BITS:
        return math.nan
    if bits == _INF_BITS:
        return math.inf
    # Not by reinterpreting: reading a subnormal float gives zero in a thread that flushes denormals.
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF | (0x800000 if exponent else 0)
    return math.ldexp(mantissa, max(exponent, 1) - 150)


def _checked(tensor: Tensor, name: str, dtypes: Sequence[torch.dtype]) -> Tensor:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(
            f"{name} must be a dense CPU tensor, not {tensor.layout} on {tensor.device}; copy it to the host first"
        )
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} has dtype {tensor.dtype}; the kernel takes {allowed}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} of shape {list(tensor.shape)} and strides {list(tensor.stride())} is not contiguous; "
            "pass .contiguous()"
        )
    return tensor


def _same_numel(first: Tensor, first_name: str, second: Tensor, second_name: str) -> int:
    if first.numel() != second.numel():
        raise ValueError(
            f"{first_name} has {first.numel()} elements and {second_name} has {second.numel()}; they must match"
        )
    return first.numel()


def _check_update(
    segments: Tensor,
    hyper: Tensor,
    places: Tensor | None,
    sources: Tensor | None,
    clip_value: float | None,
) -> None:
    """Refuse tables of an update that have not the right shape, and a bound that is none."""
    if clip_value is not None and not clip_value >= 0:
        raise ValueError(f"clip_value is {clip_value}; it must not be negative")
    _checked(segments, "segments", (torch.int64,))
    _checked(hyper, "hyper", (torch.float64,))
    if segments.dim() != 2 or segments.shape[1] != SEGMENT_COLUMNS:
        raise ValueError(
            f"segments has shape {list(segments.shape)}; it must be [num_segments, {SEGMENT_COLUMNS}]"
        )
    if hyper.dim() != 2 or hyper.shape[1] != HYPER_COLUMNS:
        raise ValueError(
            f"hyper has shape {list(hyper.shape)}; it must be [num_rows, {HYPER_COLUMNS}]"
        )
    for name, table, columns in (
        ("places", places, PLACE_COLUMNS),
        ("sources", sources, SOURCE_COLUMNS),
    ):
        if table is None:
            continue
        _checked(table, name, (torch.int64,))
        if table.shape != (segments.shape[0], columns):
            raise ValueError(
                f"{name} has shape {list(table.shape)}; it must be [{segments.shape[0]}, {columns}]"
            )


def _check_dtypes(
    gradient_dtype: torch.dtype, output_dtype: torch.dtype | None, moment_dtype: torch.dtype
) -> None:
    """Refuse dtypes that the update cannot read or write."""
    if gradient_dtype not in _DTYPE_CODES:
        raise TypeError(f"gradient_dtype is {gradient_dtype}; the kernel takes fp32, bf16 and fp16")
    if output_dtype is not None and output_dtype not in _DTYPE_CODES:
        raise TypeError(f"output_dtype is {output_dtype}; the kernel writes fp32, bf16 and fp16")
    if moment_dtype not in _MOMENT_CODES:
        raise TypeError(f"moment_dtype is {moment_dtype}; the kernel keeps fp32, bf16 and uint8")


_FLOATS = tuple(_DTYPE_CODES)
_FLOAT32 = (torch.float32,)


class Kernels:
    """A handle on the compiled kernels and on its own worker threads.

    The calling thread works too, so `threads=1` starts none. Several Python threads may call one handle: their
    jobs run one after the other, with the GIL released. In a child made by `os.fork` the handle starts
    threads of its own at its first use.

    Args:
        threads: number of threads a job may use, at least 1; default: the processors this process may run on.
        isa: "auto" or one of `available_isas()`; the results are the same, only the speed differs.

    Raises:
        ValueError: `threads` is below 1, or `isa` is unknown or not available on this machine.
    """

    def __init__(self, *, threads: int | None = None, isa: str = "auto") -> None:
        self._threads = threads if threads is not None else len(os.sched_getaffinity(0))
        if self._threads < 1:
            raise ValueError(f"threads is {threads}; it must be at least 1")
        self._native: _native.Kernels | None = _native.Kernels(self._threads, isa)
        self._isa = self._native.isa
        self._process = os.getpid()

    @property
    def threads(self) -> int:
        """Number of threads a job may use, the calling one included."""
        return self._threads

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return self._isa

    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Copies with a cast, fp32/bf16/fp16 to any of them, rounded to nearest even; NaN stays NaN.

        Raises:
            TypeError: a dtype is not fp32, bf16 or fp16.
            ValueError: a tensor is not a contiguous CPU tensor, or the numbers of elements differ.
        """
        _checked(destination, "destination", _FLOATS)
        _checked(source, "source", _FLOATS)
        numel = _same_numel(destination, "destination", source, "source")
        self._handle().copy(
            destination.data_ptr(),
            _DTYPE_CODES[destination.dtype],
            source.data_ptr(),
            _DTYPE_CODES[source.dtype],
            numel,
        )

    def accumulate(self, destination: Tensor, source: Tensor) -> None:
        """Adds `source` (fp32, bf16 or fp16) to `destination` (fp32), element by element.

        Raises:
            TypeError: `destination` is not fp32, or `source` not fp32, bf16 or fp16.
            ValueError: a tensor is not a contiguous CPU tensor, or the numbers of elements differ.
        """
        _checked(destination, "destination", _FLOAT32)
        _checked(source, "source", _FLOATS)
        numel = _same_numel(destination, "destination", source, "source")
        self._handle().accumulate(
            destination.data_ptr(), source.data_ptr(), _DTYPE_CODES[source.dtype], numel
        )

    def sum_ranks(self, destination: Tensor, parts: Sequence[Tensor], divisor: int) -> None:
        """Sums `parts` in list order in fp32, divides by `divisor` and rounds once to `destination`'s dtype.

        Raises:
            TypeError: a dtype is not fp32, bf16 or fp16.
            ValueError: `parts` is empty, `divisor` is below 1, a tensor is not a contiguous CPU tensor, or the
                numbers of elements differ.
        """
        _checked(destination, "destination", _FLOATS)
        if not parts:
            raise ValueError("parts is empty; sum_ranks needs at least one tensor")
        if divisor < 1:
            raise ValueError(f"divisor is {divisor}; it must be at least 1")
        for index, part in enumerate(parts):
            _checked(part, f"parts[{index}]", _FLOATS)
            _same_numel(destination, "destination", part, f"parts[{index}]")
        self._handle().sum_ranks(
            destination.data_ptr(),
            _DTYPE_CODES[destination.dtype],
            [part.data_ptr() for part in parts],
            [_DTYPE_CODES[part.dtype] for part in parts],
            divisor,
            destination.numel(),
        )

    def norm_partial(self, source: Tensor) -> NormPartial:
        """Exact sum of squares, largest magnitude and non-finite count of a fp32, bf16 or fp16 tensor.

        Raises:
            TypeError: the dtype is not fp32, bf16 or fp16.
            ValueError: not a contiguous CPU tensor.
        """
        _checked(source, "source", _FLOATS)
        limbs, absmax_bits, nonfinite = self._handle().norm_partial(
            source.data_ptr(), _DTYPE_CODES[source.dtype], source.numel()
        )
        total = 0
        for limb in reversed(limbs):
            total = total << 64 | limb
        return NormPartial(sum_squares=total, absmax=_absmax_of(absmax_bits), nonfinite=nonfinite)

    def update(  # noqa: PLR0913 - one call moves a whole table, and each setting is named
        self,
        rule: int,
        segments: Tensor,
        hyper: Tensor,
        *,
        gradient_dtype: torch.dtype,
        output_dtype: torch.dtype | None,
        scale: float,
        clip_value: float | None,
        split: bool = False,
        moment_dtype: torch.dtype = torch.float32,
        places: Tensor | None = None,
        sources: Tensor | None = None,
    ) -> None:
        """One optimizer step over a list of segments, in one pass over memory.

        The gradient used is `clamp(float32(gradient) * float32(scale), -clip_value, clip_value)`; the new
        master weight is rounded to `output_dtype` where a segment has an output.

        Args:
            rule: `Rule.native_id`.
            segments: int64 [num_segments, 7] on the CPU: the addresses of master (fp32), first and second state
                (fp32), gradient and output (0: none), the number of elements and the hyper row. Addresses need
                only the alignment of their element; the memory must stay alive during the call.
            hyper: float64 [num_rows, 16] on the CPU, rows made by `Rule.hyper`.
            gradient_dtype: fp32, bf16 or fp16.
            output_dtype: fp32, bf16, fp16, or None when nothing is to be written but master and states.
            scale: factor on the gradient, e.g. 1 / loss scale x clip coefficient.
            clip_value: bound on the magnitude of each gradient element after scaling, or None.
            split: the first address is of an int16 remainder, and the outputs (bf16) are read too: `zero_plugin.optim.split`.
            moment_dtype: what the states are kept as: fp32, bf16, or uint8 with exponents of their own.
            places: int64 [num_segments, 4] on the CPU, where they are not fp32: for each segment a number of its parameter, the
                segment's first element in that (a multiple of 16 for uint8), and the addresses of its exponents (else 0).
            sources: int64 [num_segments, 3] on the CPU: the addresses that master and states are read from, where they are not
                updated in place; what lies there stays as it is. Not with `split`, nor with states below fp32.

        Raises:
            TypeError: a dtype is not one of those above.
            ValueError: a table has the wrong shape, or a row cannot be right; nothing is written then.
        """
        _check_update(segments, hyper, places, sources, clip_value)
        _check_dtypes(gradient_dtype, output_dtype, moment_dtype)
        self._handle().update(
            rule,
            segments.data_ptr(),
            segments.shape[0],
            hyper.data_ptr(),
            hyper.shape[0],
            _DTYPE_CODES[gradient_dtype],
            -1 if output_dtype is None else _DTYPE_CODES[output_dtype],
            scale,
            clip_value,
            split,
            _MOMENT_CODES[moment_dtype],
            0 if places is None else places.data_ptr(),
            0 if sources is None else sources.data_ptr(),
        )

    def stream(self, segments: Tensor) -> None:
        """Moves the bytes of a bf16-in, bf16-out Adam step with hardly any arithmetic, as a yardstick.

        Reads gradient (2 bytes an element), master and both states (12), writes the same three (12) and the output (2);
        every value is left changed in its last bit.

        Args:
            segments: as for `update`, with both states and an output in every row.
        """
        _checked(segments, "segments", (torch.int64,))
        self._handle().stream(segments.data_ptr(), segments.shape[0])

    def close(self) -> None:
        """Joins the worker threads, after the job in hand; later calls raise EngineStateError. Idempotent."""
        native, self._native = self._native, None
        if native is not None and self._process == os.getpid():
            native.close()

    def __enter__(self) -> Kernels:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _handle(self) -> _native.Kernels:
        native = self._native
        if native is None:
            raise EngineStateError("this Kernels handle is closed; make a new one: Kernels()")
        if self._process != os.getpid():
            native = _native.Kernels(self._threads, self._isa)
            self._native, self._process = native, os.getpid()
        return native
