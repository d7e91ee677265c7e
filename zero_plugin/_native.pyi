"""
Compiled kernels of zero-plugin. Use zero_plugin.kernels, which checks what it passes in.
"""

from collections.abc import Sequence

SEGMENT_COLUMNS: int = 7

HYPER_COLUMNS: int = 16

PLACE_COLUMNS: int = 4
SOURCE_COLUMNS: int = 3

GROUP: int = 16

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
        split: bool,
        moments: int,
        places: int,
        sources: int,
    ) -> None: ...
    def stream(self, segments: int, num_segments: int) -> None: ...
    def close(self) -> None: ...

class IoEngine:
    """Reads and writes of files, many at once."""

    def __init__(self, kind: str, queue_depth: int, block_bytes: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def registration(self) -> str: ...
    def add_file(self, descriptor: int, alignment: int) -> int: ...
    def register_memory(self, address: int, nbytes: int) -> None: ...
    def transfer(
        self, requests: Sequence[tuple[bool, int, int, int, int]]
    ) -> tuple[int, bool, int, int, int, int] | None:
        """
        Requests are (write, file, offset, address, bytes). None when all ended, else (file, write, offset, wanted, got, errno) of the first that failed; errno 0 is the file's end.
        """

    def close(self) -> None: ...

def direct_alignment(descriptor: int) -> tuple[int, int]:
    """
    What direct I/O asks of (addresses, offsets); zeros where the system does not say.
    """

def file_system(descriptor: int) -> str:
    """Name of the file system that an open file lies on."""

def crc32c(address: int, nbytes: int, portable: bool = False) -> int:
    """CRC-32C of memory; portable: by table."""

def block_sums(address: int, nbytes: int, block: int, sums: int) -> None:
    """Writes one uint32 sum, never 0, for each block of memory."""

def first_mismatch(address: int, nbytes: int, block: int, sums: int) -> int:
    """First block whose sum is not the one kept (0: not looked at), or -1."""
