"""A machine in the numbers that placement depends on: sizes and rates, from a file, a name or a measurement."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from zero_plugin.config import parse_bytes
from zero_plugin.errors import ConfigError

_SIZES = ("device_bytes", "host_bytes", "nvme_bytes")
_COUNTS = ("devices", "machines")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One kind of machine, and how many of them.

    Sizes are bytes (`"24GiB"` in a file), rates are bytes a second and are those that are reached, not those on the box.

    Raises:
        ConfigError: a number is negative, or a rate that is divided by is 0.
    """

    name: str
    """For people."""

    devices: int = 1
    """Ranks of a machine: its accelerators; processes on a machine without."""

    machines: int = 1
    """How many machines there are."""

    device_bytes: int = 0
    """Memory of one device."""

    host_bytes: int = 0
    """Memory of one machine."""

    nvme_bytes: int = 0
    """Free space on one machine's fast disks; 0 for none."""

    flops: float = 1e12
    """Operations a second of one device, as achieved at real shapes without traffic."""

    device_bandwidth: float = 1e11
    """Of a device's memory: an update on the device is bound by it."""

    down: float = 1e10
    """One device to host while the other way is busy too."""

    up: float = 1e10
    """Host to one device, likewise."""

    host_link: float = 0.0
    """All links of a machine together, one way; 0: `devices` times a link."""

    update: float = 1e10
    """Memory traffic of the compiled optimizer on one machine, 28 bytes a parameter."""

    nvme_read: float = 0.0
    """All disks of a machine together, while they are written to as well; 0 where there is none."""

    nvme_write: float = 0.0
    """Likewise."""

    nvme_read_alone: float = 0.0
    """While nothing is written; 0: as `nvme_read`."""

    nvme_write_alone: float = 0.0
    """While nothing is read; 0: as `nvme_write`."""

    collective: float = 1e10
    """What one rank sends in a collective within a machine."""

    reduce: float = 0.0
    """What one rank sends in a reduction of gradients within a machine; 0: as `collective`."""

    network: float = 1e9
    """What one rank sends in a collective across machines."""

    norm: float = 0.0
    """Bytes of gradients a rank takes the exact norm of; 0: not counted."""

    gather: float = 0.0
    """Weights copied into memory that the allocator has just given, as a gather does; 0: as `up`."""

    launch_seconds: float = 2e-5
    """Fixed cost of a reduced and updated block."""

    unit_seconds: float = 0.0
    """Fixed cost of one gather and release of a unit; 0: as `launch_seconds`."""

    tile_seconds: float = 0.0
    """Fixed cost of a block whose states and gradients lie in files, beside `launch_seconds`."""

    step_seconds: float = 0.0
    """Fixed cost of a step."""

    device_is_host: bool = False
    """Whether "device" memory is the machine's own (a run on CPUs): both tiers then share `host_bytes`."""

    def __post_init__(self) -> None:
        """Check every number."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "device_is_host"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"hardware {self.name!r}: {field.name}={value!r} is not a number")
            if not 0 <= value < math.inf:
                raise ConfigError(
                    f"hardware {self.name!r}: {field.name}={value!r} must be 0 or more, and finite"
                )
        for name in _COUNTS:
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(
                    f"hardware {self.name!r}: {name}={getattr(self, name)!r} must be a whole number above 0"
                )
        for name in ("flops", "device_bandwidth", "down", "up", "update", "collective", "network"):
            if getattr(self, name) == 0:
                raise ConfigError(
                    f"hardware {self.name!r}: {name}=0: give the rate in units a second"
                )

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.devices * self.machines

    @property
    def link_up(self) -> float:
        """Host to device, for each device of a machine when all are at work."""
        return self._shared(self.up)

    @property
    def link_down(self) -> float:
        """Device to host, likewise."""
        return self._shared(self.down)

    @property
    def between_ranks(self) -> float:
        """What a rank sends in a collective over all ranks."""
        return self._over_all(self.collective)

    @property
    def reduced_between_ranks(self) -> float:
        """What a rank sends in a reduction over all ranks."""
        return self._over_all(self.reduce or self.collective)

    def _over_all(self, rate: float) -> float:
        return rate if self.machines == 1 else min(rate, self.network)

    def _shared(self, link: float) -> float:
        return min(link, self.host_link / self.devices) if self.host_link else link

    def with_world(self, world_size: int) -> Hardware:
        """The same machines for another number of ranks.

        Raises:
            ConfigError: the ranks do not fill whole machines.
        """
        if type(world_size) is not int or world_size < 1:
            raise ConfigError(f"world={world_size!r} must be a whole number above 0")
        if world_size <= self.devices:
            return replace(self, devices=world_size, machines=1)
        if world_size % self.devices:
            raise ConfigError(
                f"world={world_size} does not fill machines of {self.devices} devices ({self.name}): give a multiple, or a "
                "hardware file with other 'devices'"
            )
        return replace(self, machines=world_size // self.devices)

    def to_json(self) -> str:
        """As a file of `--hardware`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, source: str) -> Hardware:
        """Read what a file holds.

        Raises:
            ConfigError: a key is unknown or a value is wrong.
        """
        known = [field.name for field in fields(cls)]
        given: dict[str, Any] = dict(values)
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"{source}: unknown key {key!r}: {hint}")
        for key in _SIZES:
            if key in given:
                given[key] = parse_bytes(given[key], f"{source}: {key}")
        given.setdefault("name", source)
        return cls(**given)

    @classmethod
    def load(cls, source: str | Path) -> Hardware:
        """A file, or the name of a machine that comes with the package.

        Raises:
            ConfigError: there is neither, or the file is not what it should be.
        """
        text: str
        path = Path(source)
        if path.is_file():
            text = path.read_text(encoding="utf-8")
        elif str(source) in shipped():
            folder = resources.files("zero_plugin.machine") / "shipped"
            text = (folder / f"{source}.json").read_text(encoding="utf-8")
        else:
            raise ConfigError(
                f"hardware {str(source)!r} is neither a file nor one of {', '.join(shipped())}"
            )
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{source} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{source} holds a {type(found).__name__}: an object is needed")
        return cls.from_mapping(found, source=path.stem)


def shipped() -> list[str]:
    """Names of the machines that come with the package."""
    folder = resources.files("zero_plugin.machine") / "shipped"
    return sorted(
        item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json")
    )
