"""Parameters that were cut while their model was built, before there was an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from zero_plugin.errors import ConfigError
from zero_plugin.sharding.guard import ReleasedParameter

if TYPE_CHECKING:
    from torch import Tensor

_RECORD = "_zero_precut"


class Builder(Protocol):
    """Who cut a parameter."""

    @property
    def is_open(self) -> bool:
        """Whether the model is still being built."""
        ...


@dataclass(kw_only=True, slots=True, eq=False)
class Precut:
    """What a parameter that was cut early has instead of memory.

    Attributes:
        part: [n] this rank's slice of the flattened weights.
        shards: ranks it was cut over.
        rank: which slice this is.
        place: class of the module and name in it, for messages.
        builder: keeps alive who cut it.
    """

    part: Tensor
    shards: int
    rank: int
    place: str
    builder: Builder


def record_of(parameter: Tensor) -> Precut | None:
    """A parameter's slice as it was last cut, also while its full weights are shown; None if it never was."""
    attributes: Any = parameter.__dict__
    return attributes.get(_RECORD)


def set_record(parameter: Tensor, record: Precut | None) -> None:
    """Note a parameter's slice; None: forget it."""
    attributes: Any = parameter.__dict__
    if record is None:
        attributes.pop(_RECORD, None)
    else:
        attributes[_RECORD] = record


def precut_of(parameter: Tensor) -> Precut | None:
    """The early slice of a parameter that has no memory, or None if its weights are elsewhere."""
    return record_of(parameter) if isinstance(parameter, ReleasedParameter) else None


def take_part(parameter: nn.Parameter) -> Tensor | None:
    """Take an early slice away; the parameter is a plain one without memory afterwards. None: there is none."""
    record = precut_of(parameter)
    if record is None:
        return None
    parameter.__class__ = nn.Parameter
    set_record(parameter, None)
    return record.part


def check_built_for_sharding(model: nn.Module, *, shards_parameters: bool) -> None:
    """Refuse a model that was built in shards where weights are whole.

    Raises:
        ConfigError: the engine does not shard parameters, or `init_context` has not ended.
    """
    for name, parameter in model.named_parameters():
        record = precut_of(parameter)
        if record is None:
            continue
        if record.builder.is_open:
            raise ConfigError(
                f"parameter {name!r} is being built inside zero_plugin.init_context: build the engine after the context"
            )
        if not shards_parameters:
            raise ConfigError(
                f"parameter {name!r} was built in shards by zero_plugin.init_context, and this engine keeps whole weights: "
                "set stage=3, or build the model outside the context"
            )


def check_same_ranks(
    named: Iterable[tuple[str, nn.Parameter]], *, sharded: set[int], shards: int, rank: int
) -> None:
    """Refuse early slices that are not the ones this rank needs.

    Args:
        named: names and parameters of the model.
        sharded: identities of the parameters that are in units.
        shards: ranks the engine cuts over.
        rank: this rank's place.

    Raises:
        ConfigError: the model was built by other ranks, or with a lower `persist_below`.
    """
    for name, parameter in named:
        record = precut_of(parameter)
        if record is None:
            continue
        if (record.shards, record.rank) != (shards, rank):
            raise ConfigError(
                f"parameter {name!r} was built as slice {record.rank} of {record.shards} and the engine needs slice {rank} "
                f"of {shards}: initialise torch.distributed before zero_plugin.init_context, and keep its ranks"
            )
        if id(parameter) not in sharded:
            raise ConfigError(
                f"parameter {name!r} with {parameter.numel():,} elements was built in shards, and persist_below asks to keep it "
                "whole: give zero_plugin.init_context the engine's own config"
            )


def empty_weights(
    shape: Iterable[int], dtype: torch.dtype, device: torch.device, *, requires_grad: bool = False
) -> Tensor:
    """A contiguous tensor of true shape whose storage is empty."""
    with torch._C.DisableTorchFunctionSubclass():
        found = torch.empty(tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad)
        found.untyped_storage().resize_(0)
    return found
