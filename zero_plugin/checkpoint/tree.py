"""Nests of plain values and tensors as JSON and named tensors, and back. No pickle.

JSON keeps `None`, booleans, numbers, text, lists, and dicts with text for keys. What it lacks is written as a dict with one
key that begins with `$`: a tuple, a dict of other keys, bytes, a dtype, and a tensor. A tensor is named and lies in a file,
unless it is a single number.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_plugin.errors import CheckpointError

TENSOR = "$tensor"

_SCALARS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)


def encode(value: Any, tensors: dict[str, Tensor], place: str) -> Any:
    """A nest as JSON.

    Args:
        value: plain values and tensors.
        tensors: takes the tensors, detached, by their names.
        place: what the nest is called, for names and errors.

    Raises:
        CheckpointError: something in it is neither, named by its place.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _encode_array(value, tensors, place)
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, place)
    if isinstance(value, (list, tuple)):
        items = [encode(item, tensors, f"{place}.{number}") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    return _encode_scalar(value, place)


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What `encode` was given.

    Args:
        value: the JSON.
        tensor: gives a tensor by its name.

    Raises:
        CheckpointError: a mark is unknown.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value)) if len(value) == 1 else ""
    if not mark.startswith("$"):
        return {key: decode(item, tensor) for key, item in value.items()}
    return _decode_marked(mark, value[mark], tensor)


def _decode_marked(mark: str, inner: Any, tensor: Callable[[str], Tensor]) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        TENSOR: lambda: tensor(inner),
        "$scalar": lambda: torch.tensor(inner[1], dtype=getattr(torch, inner[0]), device="cpu"),
        "$array": lambda: tensor(inner).numpy(),
        "$tuple": lambda: tuple(decode(item, tensor) for item in inner),
        "$dict": lambda: {decode(key, tensor): decode(item, tensor) for key, item in inner},
        "$bytes": lambda: base64.b64decode(inner),
        "$dtype": lambda: getattr(torch, inner),
        "$device": lambda: torch.device(inner),
    }
    if mark not in makers:
        raise CheckpointError(
            f"the checkpoint holds a value marked {mark!r}, known are {', '.join(makers)}: it was written by a newer version "
            "of zero-plugin"
        )
    return makers[mark]()


def _encode_array(value: Any, tensors: dict[str, Tensor], place: str) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise _refusal(value, place)
        if value.dim() == 0 and value.dtype in _SCALARS:
            return {"$scalar": [str(value.dtype).removeprefix("torch."), value.item()]}
        tensors[place] = value.detach()
        return {TENSOR: place}
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, place)
    try:
        tensors[place] = torch.from_numpy(np.ascontiguousarray(value))
    except TypeError as error:
        raise _refusal(value, place) from error
    return {"$array": place}


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor], place: str) -> Any:
    texts = all(type(key) is str for key in value)
    marked = len(value) == 1 and texts and next(iter(value)).startswith("$")
    if texts and not marked:
        return {key: encode(item, tensors, f"{place}.{key}") for key, item in value.items()}
    return {
        "$dict": [
            [encode(key, tensors, f"{place}.key"), encode(item, tensors, f"{place}.{key}")]
            for key, item in value.items()
        ]
    }


def _encode_scalar(value: Any, place: str) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, PurePath):
        return str(value)
    for plain in (bool, int, float, str):
        # A subclass (an enum of texts, a framework's counter) is kept as what it stands for.
        if isinstance(value, plain):
            return plain(value)
    raise _refusal(value, place)


def _refusal(value: object, place: str) -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds tensors, numbers, text, lists, tuples and "
        "dicts of them; turn it into these, or leave it out"
    )
