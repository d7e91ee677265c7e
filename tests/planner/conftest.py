"""Shared by the tests of the planner."""

from __future__ import annotations

import pytest

from zero_plugin.machine.hardware import Hardware


@pytest.fixture
def desktop() -> Hardware:
    return Hardware.load("rtx-4090")
