"""The index of a checkpoint: made by rank 0 from what it knows and from every file's header, and looked things up in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_plugin.checkpoint import folder, tree
from zero_plugin.checkpoint.format import (
    BUFFER,
    BY_NAME,
    DTYPES,
    MASTER,
    VALUE,
    WEIGHT,
    Entry,
    Piece,
    split_slice_name,
)
from zero_plugin.checkpoint.shardfile import RangeReader, Written, read_header
from zero_plugin.errors import CheckpointError

RANK_VALUES = "zero_plugin"
"""Key of a file's metadata that holds the rank's own values as JSON."""


def complete(
    content: Mapping[str, Any], files: Mapping[str, Written], place: Path, values: Sequence[Any]
) -> dict[str, Any]:
    """The whole index.

    Args:
        content: what rank 0 knows: parameters, optimizers, extras.
        files: each rank's file.
        place: the folder they lie in.
        values: each rank's own values.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for name in files:
        stored, _ = read_header(place / name)
        for key, item in stored.items():
            tensor, start, stop = split_slice_name(key)
            entry = tensors.setdefault(tensor, {"dtype": DTYPES[item.dtype], "slices": []})
            entry["slices"].append([name, start, stop, item.offset])
    for entry in tensors.values():
        entry["slices"].sort(key=lambda piece: piece[1])
    return {
        **content,
        "files": {
            name: {"bytes": item.nbytes, "crc32": f"{item.checksum:08x}"}
            for name, item in files.items()
        },
        "ranks": list(values),
        "tensors": dict(sorted(tensors.items())),
    }


def stamp() -> dict[str, Any]:
    """When and by what a checkpoint is written."""
    now = time.time_ns()
    try:
        version = metadata.version("zero-plugin")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    return {
        "saved": datetime.fromtimestamp(now / 1e9, timezone.utc).isoformat(timespec="seconds"),
        "saved_ns": now,
        "written_by": f"zero-plugin {version}, torch {torch.__version__}",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalog:
    """A checkpoint to read from.

    Attributes:
        path: the folder.
        index: the whole index.
    """

    path: Path
    index: Mapping[str, Any]

    @classmethod
    def open(cls, directory: str | Path) -> Catalog:
        """Find a checkpoint.

        Raises:
            CheckpointError: there is none, or its index is damaged.
        """
        path, index = folder.find(directory)
        return cls(path=path, index=index)

    @property
    def size(self) -> int:
        """Ranks that wrote it."""
        return int(self.index["world_size"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What is known of each parameter."""
        return self.index["parameters"]

    @property
    def has_optimizer(self) -> bool:
        """Whether masters and optimizer states were saved."""
        return bool(self.index["optimizers"])

    def has(self, kind: str, name: str) -> bool:
        """Whether there are elements of a tensor."""
        return f"{kind}/{name}" in self.index["tensors"]

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        if kind == BUFFER:
            return tuple(self.index["buffers"][name]["shape"])
        if name in self.parameters:
            return tuple(self.parameters[name]["shape"])
        # A value is in one piece, whose header says its shape.
        piece = self.index["tensors"][f"{kind}/{name}"]["slices"][0]
        return read_header(self.path / piece[0])[0][f"{kind}/{name}[{piece[1]}:{piece[2]}]"].shape

    def entry(self, kind: str, name: str) -> Entry:
        """Where a tensor lies.

        Raises:
            CheckpointError: it is not there, or its slices do not cover it.
        """
        key = f"{kind}/{name}"
        found = self.index["tensors"].get(key)
        if found is None:
            raise CheckpointError(f"{self.path} holds no {key!r}: it was not saved")
        pieces = tuple(
            Piece(file=file, start=start, stop=stop, offset=offset)
            for file, start, stop, offset in found["slices"]
        )
        entry = Entry(
            key=key, dtype=BY_NAME[found["dtype"]], shape=self.shape(kind, name), pieces=pieces
        )
        place = 0
        for piece in pieces:
            if piece.start != place:
                break
            place = piece.stop
        if place != entry.numel:
            raise CheckpointError(
                f"{self.path} holds {place:,} of the {entry.numel:,} elements of {key!r}: the index is damaged or was edited"
            )
        return entry

    def master(self, name: str) -> Entry:
        """Where a parameter's fp32 master lies, else its compute weights."""
        return self.entry(MASTER if self.has(MASTER, name) else WEIGHT, name)

    def weight(self, name: str) -> Entry:
        """Where a parameter's compute weights lie; where they are not there, they are the rounded master."""
        return self.entry(WEIGHT if self.has(WEIGHT, name) else MASTER, name)

    def fill(self, reader: RangeReader, entry: Entry, start: int, view: Tensor) -> None:
        """Read a range of a tensor, from all files that have a part of it.

        Args:
            reader: reads.
            entry: the tensor.
            start: first element.
            view: flat; its size is the range's.
        """
        stop = start + view.numel()
        for piece in entry.pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                offset = piece.offset + (first - piece.start) * entry.dtype.itemsize
                reader.fill(
                    self.path / piece.file, offset, view[first - start : last - start], entry.dtype
                )

    def tensor(self, kind: str, name: str, reader: RangeReader) -> Tensor:
        """A whole tensor in host memory."""
        entry = self.entry(kind, name)
        found = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.fill(reader, entry, 0, found.view(-1))
        return found

    def nest(self, value: Any, reader: RangeReader) -> Any:
        """A nest of values and tensors as it was saved."""
        return tree.decode(value, lambda name: self.tensor(VALUE, name, reader))
