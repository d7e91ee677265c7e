"""The format: one safetensors file a rank, and an index that says where every element of every tensor lies.

A tensor is kept as flat slices. A slice is a tensor of its own in one rank's file, named `kind/name[start:stop]`; the index
lists the slices of each tensor with their byte offsets, so that a reader needs no other file's header.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zero_plugin.errors import CheckpointError

FORMAT = "zero-plugin checkpoint"
VERSION = 1
INDEX = "index.json"

MASTER = "master"
"""Kind of an fp32 master weight."""
WEIGHT = "weight"
"""Kind of a compute weight that has no master: frozen, or saved without its optimizer."""
BUFFER = "buffer"
"""Kind of a module's buffer."""
VALUE = "value"
"""Kind of a tensor inside a nest: extras, random states, a pending update."""
STATE = "state."
"""Kinds of optimizer states begin so."""

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""safetensors' names of dtypes."""

BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A slice of a flattened tensor in a file.

    Attributes:
        file: name of the file in the folder.
        start: first element of the tensor.
        stop: one past the last.
        offset: byte of the file where it begins.
    """

    file: str
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        key: `kind/name`.
        dtype: of its elements.
        shape: of the whole.
        pieces: by their start; they cover every element once.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        count = 1
        for size in self.shape:
            count *= size
        return count


def file_name(rank: int, size: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:05}-of-{size:05}.safetensors"


def slice_name(key: str, start: int, stop: int) -> str:
    """Name of a slice in its file."""
    return f"{key}[{start}:{stop}]"


def split_slice_name(name: str) -> tuple[str, int, int]:
    """The tensor, start and stop of a slice's name."""
    key, _, place = name.rpartition("[")
    start, _, stop = place.rstrip("]").partition(":")
    return key, int(start), int(stop)


def seal_index(content: Mapping[str, Any]) -> bytes:
    """The index as bytes, with a checksum of itself."""
    body = {"format": FORMAT, "version": VERSION, **content}
    lines = [f'"checksum": "{_checksum(body)}"']
    lines += [f"{json.dumps(key)}: {_lines(value)}" for key, value in body.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _lines(value: Any) -> str:
    """JSON with one line for each entry: to be read and compared by people too."""
    if isinstance(value, dict) and value:
        inner = ",\n  ".join(
            f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()
        )
        return "{\n  " + inner + "\n }"
    if isinstance(value, list) and value:
        return "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
    return json.dumps(value)


def open_index(raw: bytes, where: str) -> dict[str, Any]:
    """The index of `seal_index`.

    Args:
        raw: the file's bytes.
        where: its path, for errors.

    Raises:
        CheckpointError: it is not an index, of another version, or damaged.
    """
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(
            f"{where} is no JSON ({error}): it is damaged; load another checkpoint"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        seen = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise CheckpointError(
            f"{where} has format {seen!r}, wanted {FORMAT!r}: it is not a checkpoint of zero-plugin"
        )
    if found.get("version") != VERSION:
        raise CheckpointError(
            f"{where} has version {found.get('version')!r}, this zero-plugin reads version {VERSION}: load it with the version "
            "that wrote it"
        )
    wanted = found.pop("checksum", None)
    got = _checksum(found)
    if wanted != got:
        raise CheckpointError(
            f"{where} has checksum {got}, wanted {wanted}: it is damaged or was edited; load another checkpoint"
        )
    return found


def _checksum(body: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True, separators=(',', ':')).encode()):08x}"
