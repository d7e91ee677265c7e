"""Managed parameters, the blocks they form, and the moves between full parameters and a block's chunks.

A *block* is the set of parameters that is reduced, updated and gathered together. Its gradient bucket, its optimizer
states and its all-gather share one `ChunkLayout`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zero_plugin.errors import OptimizerError, ParameterError
from zero_plugin.sharding.layout import ChunkLayout, Slice, group_by_bytes, lay_out

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(kw_only=True, slots=True, eq=False)
class ManagedParameter:
    """A trainable parameter that the engine reduces, updates and publishes.

    Attributes:
        index: position among the managed parameters, the same on every rank.
        name: its (first) qualified name in the model.
        parameter: the user's own object; its identity never changes.
        optimizer: index of the optimizer it belongs to.
        alias: flat tensor over the parameter's storage with a version counter of its own, so that publishing does not
            look like a write of the user's.
        shape: shape when it was taken on.
    """

    index: int
    name: str
    parameter: nn.Parameter
    optimizer: int
    alias: Tensor = field(init=False)
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Take the first alias."""
        self.shape = tuple(self.parameter.shape)
        self.refresh_alias()

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self.parameter.numel()

    @property
    def moved(self) -> bool:
        """Whether `parameter.data` was replaced since the alias was made."""
        return self.alias.data_ptr() != self.parameter.data_ptr()

    def check_unchanged(self) -> None:
        """Refuse a parameter whose dtype, device or shape is not what the states were laid out for.

        Raises:
            ParameterError: it was converted, moved or reshaped.
        """
        parameter, alias = self.parameter, self.alias
        if parameter.dtype != alias.dtype or parameter.device != alias.device:
            raise ParameterError(
                f"parameter {self.name!r} was {alias.dtype} on {alias.device} when the engine was built and is now "
                f"{parameter.dtype} on {parameter.device}: convert or move the model before building the engine, or "
                "close it and build a new one"
            )
        if tuple(parameter.shape) != self.shape:
            raise ParameterError(
                f"parameter {self.name!r} had shape {self.shape} when the engine was built and now has "
                f"{tuple(parameter.shape)}: change the model before building the engine, or close it and build a new one"
            )

    def refresh_alias(self) -> None:
        """Make the parameter contiguous and aligned in a storage of its own, and take an alias of it.

        The linear layers of torch give other bits at unaligned addresses, and safetensors refuses parameters that are
        views of one buffer.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            data = self.parameter.data
            owns_storage = (
                data.is_contiguous()
                and data.storage_offset() == 0
                and data.untyped_storage().nbytes() == data.numel() * data.element_size()
                and data.data_ptr() % 64 == 0
            )
            if not owns_storage or data.is_inference():
                self.parameter.data = data.clone(memory_format=torch.contiguous_format)
                data = self.parameter.data
            alias: Tensor = torch.empty(0, dtype=data.dtype, device=data.device)
            self.alias = alias.set_(data.untyped_storage(), 0, (data.numel(),), (1,))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Parameters of one optimizer and one dtype that move together.

    Attributes:
        index: position among the blocks, the same on every rank; forward order.
        parameters: members in layout order.
        layout: where each member lies in a chunk.
        dtype: dtype of the compute weights.
        device: device of the compute weights.
        optimizer: index of the optimizer.
        rank: which chunk of the layout this rank holds.
    """

    index: int
    parameters: tuple[ManagedParameter, ...]
    layout: ChunkLayout
    dtype: torch.dtype
    device: torch.device
    optimizer: int
    rank: int

    @property
    def chunk(self) -> int:
        """Elements of this rank's chunk."""
        return self.layout.chunk

    @property
    def name(self) -> str:
        """For traces and errors: the first and last member."""
        first, last = self.parameters[0].name, self.parameters[-1].name
        return (
            f"block {self.index} ({first})"
            if first == last
            else f"block {self.index} ({first} .. {last})"
        )

    def own_slice(self, position: int) -> Slice:
        """This rank's part of member `position`."""
        return self.layout.slices[position][self.rank]

    def own_view(self, chunk: Tensor, position: int) -> Tensor:
        """The part of a chunk that holds this rank's slice of member `position`."""
        offset = self.layout.offsets[position]
        return chunk.narrow(0, offset, self.own_slice(position).numel)

    def padding_views(self, chunk: Tensor) -> list[Tensor]:
        """The parts of a chunk that belong to no member; they must be zero for norms to be taken of whole chunks."""
        views: list[Tensor] = []
        for position, (offset, slot) in enumerate(
            zip(self.layout.offsets, self.layout.slots, strict=True)
        ):
            used = self.own_slice(position).numel
            if used < slot:
                views.append(chunk.narrow(0, offset + used, slot - used))
        end = self.layout.end
        if end < self.chunk:
            views.append(chunk.narrow(0, end, self.chunk - end))
        return views


def collect_parameters(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    known: Iterable[ManagedParameter] = (),
) -> list[ManagedParameter]:
    """Find the trainable parameters of the optimizers, in model order, and check all of them first.

    Args:
        model: the module whose names are used.
        optimizers: torch optimizers built on the model's parameters.
        known: parameters managed already; they are checked against but not returned.

    Returns:
        The parameters not yet managed, numbered after `known`.

    Raises:
        OptimizerError: an optimizer holds a tensor that is not a parameter of the model.
        ParameterError: a parameter is non-leaf, in two optimizers, or of an unsupported layout, device or dtype.
    """
    names = {
        id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=True)
    }
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        seen: set[int] = set()
        for group_number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                place = f"optimizer {number} ({type(optimizer).__name__}), group {group_number}, position {position}"
                _check_member(parameter, names, place)
                if id(parameter) in seen or id(parameter) in owner:
                    raise ParameterError(
                        f"parameter {names[id(parameter)]!r} appears twice ({place}): "
                        "give each parameter to one group of one optimizer"
                    )
                seen.add(id(parameter))
                owner[id(parameter)] = number
    managed = {id(item.parameter) for item in known}
    found = [
        (name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=True)
        if parameter.requires_grad and id(parameter) in owner and id(parameter) not in managed
    ]
    for name, parameter in found:
        _check_dtype(name, parameter)
    _check_disjoint([*((item.name, item.parameter) for item in known), *found])
    return [
        ManagedParameter(
            index=len(managed) + i, name=name, parameter=parameter, optimizer=owner[id(parameter)]
        )
        for i, (name, parameter) in enumerate(found)
    ]


def _check_member(parameter: object, names: dict[int, str], place: str) -> None:
    if not isinstance(parameter, Tensor):
        raise ParameterError(
            f"{place} holds a {type(parameter).__name__}: an optimizer takes tensors"
        )
    if not parameter.is_leaf:
        raise ParameterError(
            f"{place} holds a non-leaf tensor of shape {tuple(parameter.shape)}: it is computed from other tensors, so "
            "it has no gradient of its own; give the optimizer model.parameters()"
        )
    if isinstance(parameter, nn.UninitializedParameter):
        raise ParameterError(
            f"{place} holds an uninitialised parameter of a lazy module: run one batch through the model before building "
            "the optimizer and the engine"
        )
    if id(parameter) not in names:
        raise OptimizerError(
            f"{place} holds a tensor of shape {tuple(parameter.shape)} that is not a parameter of the model: build the "
            "optimizer on this model's parameters(), after any step that replaces them"
        )


def _check_disjoint(found: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share memory: each would have a master of its own, and the last write would win."""
    extents: list[tuple[int, int, str]] = []
    for name, parameter in found:
        if parameter.numel():
            last = sum(
                (n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True)
            )
            start = parameter.data_ptr()
            extents.append((start, start + (last + 1) * parameter.element_size(), name))
    extents.sort()
    for (_, stop, first), (start, _, second) in itertools.pairwise(extents):
        if start < stop:
            raise ParameterError(
                f"parameters {first!r} and {second!r} share memory: to tie weights, assign the same Parameter object to "
                "both places; else give each a tensor of its own (clone)"
            )


def _check_dtype(name: str, parameter: nn.Parameter) -> None:
    if parameter.dtype not in SUPPORTED_DTYPES:
        raise ParameterError(
            f"parameter {name!r} has dtype {parameter.dtype}: trainable parameters must be float32, bfloat16 or "
            "float16; convert it or set requires_grad=False"
        )
    if parameter.layout != torch.strided:
        raise ParameterError(
            f"parameter {name!r} has layout {parameter.layout}: only dense parameters can be sharded"
        )
    if parameter.device.type == "meta":
        raise ParameterError(
            f"parameter {name!r} is on the meta device: materialise the model before the engine"
        )
    if parameter.is_inference():
        raise ParameterError(
            f"parameter {name!r} was made under torch.inference_mode, so autograd cannot track it: build the model "
            "outside of it"
        )
    if getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype):
        raise ParameterError(
            f"parameter {name!r} has grad_dtype {parameter.grad_dtype} and dtype {parameter.dtype}: the engine sums "
            "gradients in fp32 itself; leave grad_dtype alone"
        )
    if type(parameter) is not nn.Parameter and type(parameter.data) is not Tensor:
        raise ParameterError(
            f"parameter {name!r} is a {type(parameter).__name__}, a tensor subclass with a storage of its own kind: "
            "train it frozen (requires_grad=False) or convert it to a plain tensor"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlace:
    """This rank's place among the shards.

    Attributes:
        shards: ranks each parameter is cut over; 1 when optimizer states are not sharded.
        rank: which shard this rank holds.
        world_size: number of ranks; an unsharded chunk is padded so that each can reduce a part.
    """

    shards: int
    rank: int
    world_size: int


def form_blocks(
    parameters: Sequence[ManagedParameter],
    place: ShardPlace,
    *,
    wire_bytes: int,
    limit: int,
    first_index: int = 0,
) -> list[Block]:
    """Group parameters into blocks of at most `limit` bytes of reduced gradient.

    Args:
        parameters: in forward (registration) order.
        place: over how many ranks, and which part is ours.
        wire_bytes: bytes of an element on the wire.
        limit: bytes of a block; a larger parameter is a block of its own.
        first_index: index of the first new block.
    """
    keys = [(item.optimizer, item.parameter.dtype, item.parameter.device) for item in parameters]
    groups = group_by_bytes([item.numel * wire_bytes for item in parameters], keys, limit)
    return [
        Block(
            index=first_index + number,
            parameters=tuple(parameters[i] for i in members),
            layout=lay_out(
                [parameters[i].numel for i in members],
                place.shards,
                multiple=place.world_size // place.shards,
            ),
            dtype=parameters[members[0]].parameter.dtype,
            device=parameters[members[0]].parameter.device,
            optimizer=parameters[members[0]].optimizer,
            rank=place.rank,
        )
        for number, members in enumerate(groups)
    ]


def pack(block: Block, position: int, source: Tensor | None, buffer: Tensor) -> None:
    """Write member `position` into every rank's chunk of `buffer`; padding and an absent member become zero.

    Args:
        block: the block being packed.
        position: which member.
        source: the full tensor, any shape and floating dtype, or None for zeros.
        buffer: [shards, chunk], the wire dtype.
    """
    layout = block.layout
    slot = buffer.narrow(1, layout.offsets[position], layout.slots[position])
    if source is None:
        slot.zero_()
        return
    flat = source.reshape(-1)
    if layout.is_even(position):
        slot.copy_(flat.view(layout.shards, -1))
        return
    for rank, part in enumerate(layout.slices[position]):
        slot[rank, : part.numel].copy_(flat[part.start : part.stop])
        slot[rank, part.numel :].zero_()


def unpack_pairs(
    block: Block, gathered: Tensor, position: int, full: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Copies (destination, source) that rebuild member `position` from every rank's chunk.

    Args:
        block: the block that was gathered.
        gathered: [shards, chunk].
        position: which member.
        full: [numel], flat.
    """
    layout = block.layout
    offset = layout.offsets[position]
    return [
        (full.narrow(0, part.start, part.numel), gathered[rank].narrow(0, offset, part.numel))
        for rank, part in enumerate(layout.slices[position])
        if part.numel
    ]


def rebuild(block: Block, gathered: Tensor) -> list[Tensor]:
    """Full CPU tensors of every member, in their own shapes.

    Args:
        block: the block.
        gathered: [shards, chunk], every rank's chunk.
    """
    fulls: list[Tensor] = []
    for position, member in enumerate(block.parameters):
        full = torch.empty(member.numel, dtype=gathered.dtype, device="cpu")
        for target, part in unpack_pairs(block, gathered, position, full):
            target.copy_(part)
        fulls.append(full.view(member.parameter.shape))
    return fulls
