"""`ZeroMonitor` of `lightning.pytorch`."""

from __future__ import annotations

from lightning.pytorch import Callback

from zero_plugin.integrations._lightning.monitor import MonitorCallback


class ZeroMonitor(MonitorCallback, Callback):
    """Gives each step's tier bytes, moved bytes and seconds to the logger; see `MonitorCallback`."""
