"""
Compiled kernels of zero-plugin. Use zero_plugin.kernels, which checks what it passes in.
"""

from collections.abc import Sequence

SEGMENT_COLUMNS: int = 7

HYPER_COLUMNS: int = 16

def available_isas() -> list[str]:
    """Instruction sets compiled in that this machine has, best last."""

class Kernels:
    """Kernels of one instruction set on own worker threads."""

    def __init__(self, threads: int, isa: str) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    def copy(
        self, destination: int, destination_dtype: int, source: int, source_dtype: int, numel: int
    ) -> None: ...
    def accumulate(self, destination: int, source: int, source_dtype: int, numel: int) -> None: ...
    def sum_ranks(
        self,
        destination: int,
        destination_dtype: int,
        parts: Sequence[int],
        part_dtypes: Sequence[int],
        divisor: int,
        numel: int,
    ) -> None: ...
    def norm_partial(
        self, source: int, source_dtype: int, numel: int
    ) -> tuple[list[int], int, int]: ...
    def update(
        self,
        rule: int,
        segments: int,
        num_segments: int,
        hyper: int,
        num_rows: int,
        gradient_dtype: int,
        output_dtype: int,
        scale: float,
        clip_value: float | None,
    ) -> None: ...
    def stream(self, segments: int, num_segments: int) -> None: ...
    def close(self) -> None: ...
