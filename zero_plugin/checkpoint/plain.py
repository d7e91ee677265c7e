"""A checkpoint's weights for a plain model, without an engine: to evaluate, or to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_plugin.checkpoint.export import weights
from zero_plugin.checkpoint.folder import find
from zero_plugin.checkpoint.format import BY_NAME, INDEX
from zero_plugin.checkpoint.index import Catalog
from zero_plugin.checkpoint.loading import verify
from zero_plugin.checkpoint.shardfile import RangeReader
from zero_plugin.errors import CheckpointError


def folder_of(path: str | Path) -> Path | None:
    """The checkpoint that a path names, by its folder or by a file in it; None if it is none of ours."""
    place = Path(path)
    if place.is_file() and (place.parent / INDEX).exists():
        place = place.parent
    elif not place.is_dir() or not (place / INDEX).exists():
        return None
    try:
        return find(place)[0]
    except CheckpointError as error:
        # Another program's index.json.
        if "wanted 'zero-plugin checkpoint'" in str(error):
            return None
        raise


def read_state_dict(directory: str | Path) -> dict[str, Any]:
    """All weights and buffers as a state dict in host memory; tied weights share theirs."""
    catalog = Catalog.open(directory)
    verify(catalog)
    reader = RangeReader()
    try:
        found: dict[str, Any] = {}
        for name, described in catalog.parameters.items():
            dtype = BY_NAME[described["dtype"]]
            found[name] = torch.empty(described["shape"], dtype=dtype, device="cpu")
        for name, entry in weights(catalog).items():
            if name not in found:
                found[name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
            _fill(catalog, name, found[name], reader)
        for name, first in catalog.index["aliases"].items():
            found[name] = found[first]
        for name, value in catalog.index["extra_states"].items():
            found[name] = catalog.nest(value, reader)
        return found
    finally:
        reader.close()


def read_extra(directory: str | Path) -> Any:
    """What was given to the save as `extra`."""
    catalog = Catalog.open(directory)
    reader = RangeReader()
    try:
        return catalog.nest(catalog.index["extra"], reader)
    finally:
        reader.close()


def fill_module(directory: str | Path, module: nn.Module, *, strict: bool = True) -> list[str]:
    """Read weights and buffers straight into a plain module.

    Args:
        directory: the checkpoint.
        module: parameters with memory, on any device.
        strict: whether names must agree.

    Returns:
        The names that are in one of the two only.

    Raises:
        CheckpointError: names do not agree and `strict` is set, or a shape differs; nothing is changed then.
    """
    catalog = Catalog.open(directory)
    verify(catalog)
    entries, aliases = weights(catalog), catalog.index["aliases"]
    saved = {*catalog.parameters, *entries, *aliases, *catalog.index["extra_states"]}
    own: dict[str, Any] = module.state_dict(keep_vars=True)
    differing = sorted(saved ^ own.keys())
    if differing and strict:
        raise CheckpointError(
            f"{catalog.path} does not fit {type(module).__name__}: only in one of them are "
            f"{', '.join(map(repr, differing[:6]))}; build what was saved, or pass strict=False"
        )
    for name, value in own.items():
        source = aliases.get(name, name)
        if source in entries and tuple(value.shape) != entries[source].shape:
            raise CheckpointError(
                f"{name!r} has shape {entries[source].shape} in {catalog.path} and {tuple(value.shape)} in "
                f"{type(module).__name__}: build what was saved"
            )
    reader = RangeReader()
    try:
        with torch.no_grad():
            for name, value in own.items():
                source = aliases.get(name, name)
                if source in entries:
                    _fill(catalog, source, value.detach(), reader)
            for prefix, part in module.named_modules():
                name = f"{prefix}._extra_state".lstrip(".")
                if name in catalog.index["extra_states"] and name in own:
                    part.set_extra_state(catalog.nest(catalog.index["extra_states"][name], reader))
    finally:
        reader.close()
    return differing


def _fill(catalog: Catalog, name: str, target: Tensor, reader: RangeReader) -> None:
    entry = catalog.master(name) if name in catalog.parameters else catalog.entry("buffer", name)
    flat = target.reshape(-1)
    catalog.fill(reader, entry, 0, flat)
    if flat.data_ptr() != target.data_ptr() and flat.numel():
        target.copy_(flat.view(target.shape))
    torch.autograd.graph.increment_version(target)
