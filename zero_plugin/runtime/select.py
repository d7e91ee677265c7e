"""Choosing a backend by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from zero_plugin.errors import ConfigError
from zero_plugin.runtime.execution import Services
from zero_plugin.runtime.inline import InlineBackend
from zero_plugin.runtime.threads import ThreadsBackend

if TYPE_CHECKING:
    import torch

    from zero_plugin.runtime.backend import Backend
    from zero_plugin.runtime.operations import KernelSet
    from zero_plugin.runtime.threads import LatencyModel
    from zero_plugin.runtime.topology import HostPlace
    from zero_plugin.trace import Ledger, Trace

BackendName = Literal["auto", "inline", "threads", "chaos", "cuda"]


def create_backend(  # noqa: PLR0913 - one call names all of it, by keyword
    name: BackendName,
    *,
    device: torch.device,
    kernels: KernelSet,
    trace: Trace | None,
    ledger: Ledger,
    seed: int = 0,
    latency: LatencyModel = None,
    place: HostPlace | None = None,
) -> Backend:
    """Makes the backend called `name`.

    Args:
        name: "auto" is "cuda" on a CUDA device and "threads" elsewhere.
        device: What the framework computes on.
        kernels: The compiled kernels; closed by their owner, after the backend.
        trace: Event log, or None.
        ledger: Byte counters.
        seed: Of the delays, for "chaos".
        place: Which processors and memory of the host to use, or None for any.
        latency: Modelled time of operations, for all lanes or by lane name; "threads" and "chaos".

    Raises:
        ConfigError: The name is unknown, or does not fit the device or the latency.
    """
    services = Services(kernels=kernels, ledger=ledger, trace=trace, place=place)
    if name == "auto":
        name = "cuda" if device.type == "cuda" else "threads"
    if latency is not None and name not in ("threads", "chaos"):
        raise ConfigError(f"backend {name!r} cannot model a latency; use 'threads' or 'chaos'")
    if name == "cuda":
        if device.type != "cuda":
            raise ConfigError(
                f"backend 'cuda' needs a CUDA device and was given {device}; use 'auto'"
            )
        from zero_plugin.runtime.cuda import CudaBackend

        return CudaBackend(services=services, device=device)
    if device.type == "cuda":
        raise ConfigError(f"backend {name!r} cannot serve {device}; use 'auto' or 'cuda'")
    if name == "inline":
        return InlineBackend(services=services)
    if name == "threads":
        return ThreadsBackend(services=services, latency=latency)
    if name == "chaos":
        from zero_plugin.runtime.chaos import ChaosBackend

        return ChaosBackend(services=services, seed=seed, latency=latency)
    raise ConfigError(
        f"unknown backend {name!r}; choose 'auto', 'inline', 'threads', 'chaos' or 'cuda'"
    )
