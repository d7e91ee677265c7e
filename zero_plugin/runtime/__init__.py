"""Lanes that move bytes while the framework computes, and the buffers they use."""

from __future__ import annotations

from zero_plugin.runtime.backend import Backend, Lane, LaneKind, Memory
from zero_plugin.runtime.buffers import Lease, LeaseState, SlabPool
from zero_plugin.runtime.io import ByteStore, Read, Write
from zero_plugin.runtime.operations import (
    Accumulate,
    Collective,
    Copy,
    NormPartials,
    Operation,
    Snapshot,
    SumRanks,
    Update,
    Zero,
)
from zero_plugin.runtime.select import BackendName, create_backend
from zero_plugin.runtime.threads import Latency
from zero_plugin.runtime.ticket import Ticket, TicketState

__all__ = [
    "Accumulate",
    "Backend",
    "BackendName",
    "ByteStore",
    "Collective",
    "Copy",
    "Lane",
    "LaneKind",
    "Latency",
    "Lease",
    "LeaseState",
    "Memory",
    "NormPartials",
    "Operation",
    "Read",
    "SlabPool",
    "Snapshot",
    "SumRanks",
    "Ticket",
    "TicketState",
    "Update",
    "Write",
    "Zero",
    "create_backend",
]
