"""Collectives over point-to-point messages, with results that no bucket, unit or stage can change.

A reduce-scatter sends every peer its row and adds the rows received in rank order in fp32, divides and rounds
once. gloo's own reduce-scatter moves twice the bytes and sums in an order given by the place in the buffer. The rows
arrive in pieces, double-buffered: one piece is summed while the next is on its way, and the workspace stays
the same however large the bucket is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_plugin.runtime.operations import KernelSet, copy_tensor
from zero_plugin.sharding.channel import Channel, Pending
from zero_plugin.sharding.header import Call

PIECE_BYTES = 4 << 20
_ALIGNMENT = 64
_CPU = torch.device("cpu")


class Workspace:
    """Host buffers kept between calls; each grows to the largest size asked for and stays."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, all buffers together."""
        return sum(buffer.numel() for buffer in self._buffers.values())

    def take(self, name: str, nbytes: int) -> Tensor:
        """The first `nbytes` bytes of the buffer `name`, as uint8; its old contents are lost."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return buffer[:nbytes]

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """A host buffer of the tensor's shape and dtype."""
        nbytes = tensor.numel() * tensor.element_size()
        return self.take(name, nbytes).view(tensor.dtype).view(tensor.shape)

    def close(self) -> None:
        """Frees every buffer."""
        self._buffers.clear()


class PeerCollectives:
    """Reduce-scatter, all-gather and all-reduce of host tensors; others go through host memory.

    Args:
        channel: the sequence these collectives belong to.
        kernels: does the sums and copies; None: plain torch, with the same bits.
    """

    def __init__(self, *, channel: Channel, kernels: KernelSet | None) -> None:
        self._channel = channel
        self._kernels = kernels
        self._workspace = Workspace()

    def use_kernels(self, kernels: KernelSet | None) -> None:
        """Sums and copies go through `kernels` from now on."""
        self._kernels = kernels

    @property
    def workspace_bytes(self) -> int:
        """Bytes of host memory kept between calls."""
        return self._workspace.nbytes

    @property
    def header_bytes(self) -> int:
        """Bytes a rank sends to each other one ahead of a collective."""
        return self._channel.message_bytes

    def reduce_scatter(self, output: Tensor, rows: Tensor, call: Call) -> None:
        """Sets output [n] to mean over ranks of their rows[rank]; rows is [size, n]."""
        with self._channel.collective(call):
            shard = self._host("output", output)
            self._reduce(shard, self._staged("input", rows))
            self._deliver(output, shard)

    def all_gather(self, output: Tensor, shard: Tensor, call: Call) -> None:
        """Sets output [size, n] to every rank's shard [n]."""
        with self._channel.collective(call):
            rows = self._host("output", output)
            self._gather(rows, self._staged("input", shard))
            self._deliver(output, rows)

    def all_reduce(self, output: Tensor, rows: Tensor, call: Call) -> None:
        """Sets output [size, n] to mean over ranks of rows [size, n], with `reduce_scatter`'s bits."""
        with self._channel.collective(call):
            result = self._host("output", output)
            shard = result[self._channel.rank]
            self._reduce(shard, self._staged("input", rows))
            self._gather(result, shard)
            self._deliver(output, result)

    def verify(self) -> None:
        """Nothing is left to check: headers agree before bytes move."""

    def close(self) -> None:
        """Closes the channel and frees the workspace."""
        self._channel.close()
        self._workspace.close()

    # ------------------------------------------------------------------ host memory

    def _host(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor, or a host buffer to stand for it."""
        return tensor if tensor.device == _CPU else self._workspace.like(name, tensor)

    def _staged(self, name: str, tensor: Tensor) -> Tensor:
        host = self._host(name, tensor)
        return host if host is tensor else host.copy_(tensor)

    def _deliver(self, output: Tensor, host: Tensor) -> None:
        if host is not output:
            output.copy_(host)

    # ------------------------------------------------------------------ the two halves

    def _reduce(self, shard: Tensor, rows: Tensor) -> None:
        channel = self._channel
        numel, itemsize = shard.numel(), rows.element_size()
        piece = PIECE_BYTES // itemsize
        row_bytes = _round_up(min(piece, numel) * itemsize)
        parts = self._workspace.take("parts", 2 * len(channel.peers) * row_bytes)
        parts = parts.view(2, len(channel.peers), row_bytes)
        sends: list[Pending] = []

        def post(index: int) -> list[Pending]:
            begin, end = index * piece, min(numel, (index + 1) * piece)
            slot = parts[index % 2, :, : (end - begin) * itemsize].view(rows.dtype)
            receives = [channel.receive(peer, slot[i]) for i, peer in enumerate(channel.peers)]
            sends.extend(channel.send(peer, rows[peer, begin:end]) for peer in channel.peers)
            return receives

        count = -(-numel // piece)
        coming = post(0) if count else []
        for index in range(count):
            here, coming = coming, post(index + 1) if index + 1 < count else []
            channel.finish(here)
            begin, end = index * piece, min(numel, (index + 1) * piece)
            terms = [message.tensor for message in here]
            terms.insert(channel.rank, rows[channel.rank, begin:end])
            self._average(shard[begin:end], terms)
        channel.finish(sends)

    def _gather(self, rows: Tensor, shard: Tensor) -> None:
        if shard.numel() == 0:
            return
        own = rows[self._channel.rank]
        if own.data_ptr() != shard.data_ptr():
            if self._kernels is None:
                own.copy_(shard)
            else:
                copy_tensor(self._kernels, own, shard)
        self._channel.share(rows, shard)

    def _average(self, output: Tensor, terms: Sequence[Tensor]) -> None:
        if self._kernels is not None and output.dtype != torch.float64:
            self._kernels.sum_ranks(output, terms, self._channel.size)
            return
        total = terms[0].to(torch.promote_types(torch.float32, terms[0].dtype), copy=True)
        for term in terms[1:]:
            total.add_(term)
        output.copy_(total.div_(self._channel.size))


def broadcast(
    channel: Channel, tensors: Sequence[Tensor], *, source: int, workspace: Workspace
) -> int:
    """Overwrites every rank's tensors with the source's; returns the bytes this rank sent.

    Args:
        channel: the sequence this collective belongs to.
        tensors: the same shapes and dtypes on every rank, on any device.
        source: the rank whose contents count.
        workspace: holds the staging buffer, of at most `PIECE_BYTES`.
    """
    flats, backs = _flatten(tensors, copy_contents=channel.rank == source)
    total = sum(flat.numel() for flat in flats)
    spec = ";".join(f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in tensors)
    digest = hashlib.blake2b(spec.encode(), digest_size=11).hexdigest()
    call = Call(
        kind="broadcast", tag=source, numel=total, dtypes=digest, label=f"{len(tensors)} tensors"
    )
    with channel.collective(call):
        for batch in _batches(flats):
            _spread(channel, batch, source=source, workspace=workspace)
    for tensor, flat in backs:
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    return total * len(channel.peers) if channel.rank == source else 0


def _flatten(
    tensors: Sequence[Tensor], *, copy_contents: bool
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Every tensor as bytes, and what to copy back where the bytes are not the tensor's own."""
    flats: list[Tensor] = []
    backs: list[tuple[Tensor, Tensor]] = []
    for tensor in tensors:
        plain = tensor.detach()
        whole = (
            plain
            if plain.is_contiguous()
            else torch.empty_like(plain, memory_format=torch.contiguous_format)
        )
        flat = whole.view(-1).view(torch.uint8)
        if whole is not plain:
            if copy_contents:
                whole.copy_(plain)
            else:
                backs.append((plain, flat))
        flats.append(flat)
    return flats, backs


def _batches(flats: Sequence[Tensor]) -> list[list[Tensor]]:
    """The bytes cut and grouped so that each group has at most `PIECE_BYTES`."""
    batches: list[list[Tensor]] = []
    room = 0
    for flat in flats:
        begin = 0
        while begin < flat.numel():
            if room == 0:
                batches.append([])
                room = PIECE_BYTES
            end = min(flat.numel(), begin + room)
            batches[-1].append(flat[begin:end])
            room -= end - begin
            begin = end
    return batches


def _spread(channel: Channel, batch: list[Tensor], *, source: int, workspace: Workspace) -> None:
    total = sum(part.numel() for part in batch)
    direct = len(batch) == 1 and batch[0].device == _CPU
    staging = batch[0] if direct else workspace.take("broadcast", total)
    sizes = [part.numel() for part in batch]
    if channel.rank != source:
        channel.finish([channel.receive(source, staging)])
        if not direct:
            for part, piece in zip(batch, staging.split(sizes), strict=True):
                part.copy_(piece)
        return
    if not direct:
        for part, piece in zip(batch, staging.split(sizes), strict=True):
            piece.copy_(part)
    channel.finish([channel.send(peer, staging) for peer in channel.peers])


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
