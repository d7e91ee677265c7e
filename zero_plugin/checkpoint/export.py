"""A checkpoint as one model's weights: for `from_pretrained`, for `torch.load`, for Lightning. No GPU, no training script.

The weights are those after every update, also one that was delayed when the checkpoint was saved. They are read and written
in pieces, so that memory does not grow with the model.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from zero_plugin.checkpoint.format import BUFFER, BY_NAME, WEIGHT, Entry
from zero_plugin.checkpoint.index import Catalog
from zero_plugin.checkpoint.loading import verify
from zero_plugin.checkpoint.shardfile import (
    Part,
    RangeReader,
    header_of,
    pieces_of,
    sync_folder,
    write_file,
)
from zero_plugin.errors import CheckpointError

Form = Literal["hf", "torch", "lightning"]

SHARD_BYTES = 5 << 30
"""Most bytes of one file of an export for `from_pretrained`, as there."""

Progress = Callable[[int], None]


def export(
    directory: str | Path,
    target: str | Path,
    *,
    form: Form,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda _: None,
) -> list[Path]:
    """Write a checkpoint's weights in another form.

    Args:
        directory: the checkpoint.
        target: `hf`: a new folder; else a new file.
        form: `hf`: safetensors, their index and the model's configuration. `torch`: a state dict for `torch.load`. `lightning`: the
            same in a file for `load_from_checkpoint`, with the hyper-parameters that were saved.
        dtype: of the weights; None: as they were computed with.
        progress: told the bytes written.

    Returns:
        The files written.

    Raises:
        CheckpointError: the checkpoint is damaged, or the target is there already.
    """
    catalog = Catalog.open(directory)
    path = Path(target)
    if path.exists():
        raise CheckpointError(f"{path} is there already: name a new place, or remove it")
    verify(catalog, progress=progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Under its own name there is never half of it.
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(6)}")
    reader = RangeReader()
    try:
        if form == "hf":
            _export_hf(catalog, partial, dtype, reader, progress)
        else:
            _export_torch(catalog, partial, dtype, reader, progress, whole=form == "lightning")
        partial.rename(path)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        raise
    finally:
        reader.close()
    sync_folder(path.parent)
    return sorted(path.iterdir()) if path.is_dir() else [path]


def weights(catalog: Catalog) -> dict[str, Entry]:
    """Parameters and buffers by their names in the model, each tied weight once."""
    found = {
        name: catalog.master(name)
        for name in catalog.parameters
        if math.prod(catalog.shape(WEIGHT, name))
    }
    return found | {name: catalog.entry(BUFFER, name) for name in catalog.index["buffers"]}


def _dtype_of(catalog: Catalog, name: str, entry: Entry, wanted: torch.dtype | None) -> torch.dtype:
    if name not in catalog.parameters:
        return entry.dtype
    own = BY_NAME[catalog.parameters[name]["dtype"]]
    return own if wanted is None or not own.is_floating_point else wanted


def _part(
    catalog: Catalog, name: str, entry: Entry, dtype: torch.dtype, reader: RangeReader
) -> Part:
    def read(start: int, stop: int) -> Tensor:
        piece = torch.empty(stop - start, dtype=entry.dtype, device="cpu")
        catalog.fill(reader, entry, start, piece)
        return piece.to(dtype)

    return Part(name=name, dtype=dtype, shape=entry.shape, read=read)


# Hugging Face --------------------------------------------------------------------------------------------------------


def _export_hf(
    catalog: Catalog, path: Path, dtype: torch.dtype | None, reader: RangeReader, progress: Progress
) -> None:
    described: dict[str, Any] | None = catalog.index["hf"]
    prefix = "" if described is None else described["prefix"]
    parts = [
        _part(
            catalog,
            name.removeprefix(prefix),
            entry,
            _dtype_of(catalog, name, entry, dtype),
            reader,
        )
        for name, entry in weights(catalog).items()
        if name.startswith(prefix)
    ]
    path.mkdir()
    if described is not None:
        for key in ("config", "generation_config"):
            if key in described:
                (path / f"{key}.json").write_text(described[key])
    groups = _grouped(parts)
    places: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = (
            "model.safetensors"
            if len(groups) == 1
            else f"model-{number:05}-of-{len(groups):05}.safetensors"
        )
        header = header_of(group, {"format": "pt"})
        write_file(path / name, header, pieces_of(group), progress=progress)
        places |= {part.name: name for part in group}
    if len(groups) > 1:
        total = sum(part.nbytes for part in parts)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _grouped(parts: Sequence[Part]) -> list[list[Part]]:
    groups: list[list[Part]] = [[]]
    filled = 0
    for part in parts:
        if groups[-1] and filled + part.nbytes > SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += part.nbytes
    return groups


# torch ---------------------------------------------------------------------------------------------------------------


def _export_torch(
    catalog: Catalog,
    path: Path,
    dtype: torch.dtype | None,
    reader: RangeReader,
    progress: Progress,
    *,
    whole: bool,
) -> None:
    """Write the file with room for the data, then the data: `torch.save` alone would want everything in memory."""
    entries = weights(catalog)
    dtypes = {name: _dtype_of(catalog, name, entry, dtype) for name, entry in entries.items()}
    _write_frame(catalog, path, entries, dtypes, reader, whole=whole)
    # The same file, read without its data, says where each tensor's bytes begin.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        found: dict[str, Any] = torch.load(path, weights_only=False)
    if whole:
        found = found["state_dict"]
    with path.open("r+b", buffering=0) as file:
        for name, entry in entries.items():
            storage: Any = found[name].untyped_storage()
            file.seek(storage._checkpoint_offset)  # noqa: SLF001 - what torch.load keeps for this purpose
            part = _part(catalog, name, entry, dtypes[name], reader)
            for piece in pieces_of([part]):
                array: Any = piece.numpy()
                view = memoryview(array)
                while view:
                    view = view[file.write(view) :]
                progress(len(piece))
        os.fsync(file.fileno())


def _write_frame(
    catalog: Catalog,
    path: Path,
    entries: dict[str, Entry],
    dtypes: dict[str, torch.dtype],
    reader: RangeReader,
    *,
    whole: bool,
) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    extra: Any = catalog.nest(catalog.index["extra"], reader) if whole else None
    states = {
        name: catalog.nest(value, reader) for name, value in catalog.index["extra_states"].items()
    }
    with FakeTensorMode():
        tensors: dict[str, Any] = {
            name: torch.empty(entry.shape, dtype=dtypes[name], device="cpu")
            for name, entry in entries.items()
        }
    for name, described in catalog.parameters.items():
        if name not in tensors:
            tensors[name] = torch.empty(described["shape"], dtype=BY_NAME[described["dtype"]])
    for name, first in catalog.index["aliases"].items():
        tensors[name] = tensors[first]
    tensors |= states
    content = tensors
    if whole:
        kept = extra if isinstance(extra, dict) else {}
        content = {**kept, "state_dict": tensors}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(content, path)
