"""The states of this process's random number generators: torch's on the CPU and on the device, Python's, and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zero_plugin.errors import CheckpointError


def capture(device: torch.device) -> dict[str, Any]:
    """All states, as plain values and tensors."""
    version, words, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(place),
            int(has_gauss),
            float(cached),
        ],
    }
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state(device)
    return found


def restore(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore all states that were captured.

    Raises:
        CheckpointError: one is not what this Python, torch or NumPy keeps.
    """
    try:
        torch.set_rng_state(state["torch"])
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        name, keys, place, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, cached))
        if device.type != "cpu" and "device" in state:
            torch.get_device_module(device).set_rng_state(state["device"], device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint's random states cannot be used here ({error}): they were saved by another version of Python, torch "
            "or NumPy; seed anew after loading with random_states=False"
        ) from error
