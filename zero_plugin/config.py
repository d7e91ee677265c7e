"""Every setting, in one frozen value that is checked when it is made.

The ZeRO stage is resolved here into three booleans (`shards_optimizer`, `shards_gradients`, `shards_parameters`);
nothing below this module says "stage".
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from typing_extensions import Self

from zero_plugin.errors import ConfigError, UnknownSettingError

Tier = Literal["device", "host", "nvme"]
"""Where a state lies: the accelerator's memory, host memory, or files."""

NonFinite = Literal["skip", "raise", "propagate"]
"""What a NaN or infinite gradient does to a step."""

BackendName = Literal["auto", "inline", "threads", "chaos", "cuda"]
"""Which lanes carry asynchronous work; `auto` is `cuda` on CUDA and `threads` elsewhere."""

DTypeName = Literal["fp32", "bf16", "fp16"]

MomentDType = Literal["fp32", "bf16", "int8"]
"""What optimizer states beside the master are kept as; `int8`: a byte an element and one for each 16 of them."""

_LONGEST = 1e7
"""Seconds; about four months."""

_BYTE_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _BYTE_UNITS[f"{_prefix}ib"] = 1024**_power
    _BYTE_UNITS[f"{_prefix}b"] = 1000**_power


def parse_bytes(value: int | str, name: str = "size") -> int:
    """Read a byte count such as `8589934592`, `"8GiB"` or `"500 MB"`.

    Args:
        value: a number of bytes, or a number with a unit (B, kB, KiB, MB, MiB, GB, GiB, TB, TiB).
        name: what the value is, for the error.

    Raises:
        ConfigError: the value is negative, or is not a number with a known unit.
    """
    if type(value) not in (int, str):
        raise ConfigError(
            f"{name}={value!r} is not a byte count: give bytes or a string such as '8GiB'"
        )
    if isinstance(value, int):
        number, unit = float(value), ""
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2].lower() not in _BYTE_UNITS:
            raise ConfigError(
                f"{name}={value!r} is not a byte count: give bytes or a string such as '8GiB'"
            )
        number, unit = float(match[1]), match[2].lower()
    if number < 0:
        raise ConfigError(f"{name}={value!r} is negative: a byte count is 0 or more")
    return int(number * _BYTE_UNITS[unit])


def _check_names(config: type, settings: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(config)]
    for key, value in settings.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"known settings are {', '.join(known)}"
            )
            raise UnknownSettingError(f"unknown setting {key!r} (value {value!r}): {hint}")


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What is sharded, where each state lies, and how a step treats numbers.

    All fields are keyword-only and checked at construction. Defaults are those of plain torch where torch has one: no
    clipping, reduction and accumulation of low-precision gradients in fp32, no loss scaling.

    Raises:
        ConfigError: a value is unknown or out of range, two values contradict each other, or this version does not
            support the combination. Nothing is replaced quietly.
    """

    stage: int = 2
    """0: nothing sharded; 1: optimizer states; 2: and gradients; 3: and parameters."""

    params: Tier = "device"
    """Tier of the compute weights."""

    optimizer: Tier = "host"
    """Tier of the fp32 master weights and moments, and where the update is computed."""

    device_fraction: float = 0.0
    """With `optimizer="host"`: most of the states, 0 to 1, that stay on the device and are updated there at the same time."""

    gradients: Tier = "host"
    """Tier of the reduced gradients."""

    activations: Tier = "device"
    """Tier of the inputs of activation checkpoints, between forward and backward."""

    nvme_path: str | Path | tuple[str | Path, ...] | None = None
    """Folder or folders for the `nvme` tier."""

    device_limit: int | str | None = None
    """Most bytes of device memory the engine's own states and buffers may take."""

    host_limit: int | str | None = None
    """Most bytes of host memory the engine's own states and buffers may take."""

    pinned_limit: int | str | None = None
    """Most bytes of host memory that may be pinned; on CUDA devices, where host states and buffers are."""

    nvme_limit: int | str | None = None
    """Most bytes on the `nvme` tier."""

    nvme_engine: Literal["auto", "uring", "threads"] = "auto"
    """How files are read and written: `auto` takes io_uring where the system allows it, else a pool of threads."""

    nvme_buffer_bytes: int | str = "256MiB"
    """Host memory that states on `nvme` pass through, in four slabs."""

    nvme_cache_bytes: int | str = 0
    """Host memory for states on `nvme` that stay between steps and are neither read nor written."""

    nvme_checksum: bool = False
    """Check that what is read from `nvme` is what was written there."""

    split_master: bool = False
    """Stage 3: keep the fp32 master of bf16 weights as a 16-bit remainder beside them; see `docs/placements.md`."""

    moment_dtype: MomentDType = "fp32"
    """Keep the optimizer's moments in less memory, rounded stochastically; see `docs/placements.md`."""

    overlap: bool = True
    """Move bytes on lanes beside the computation. False: every operation runs where it is issued."""

    speculate: bool = False
    """Begin each block's update inside backward, before it is known to hold, and undo it exactly where it does not."""

    undo_bytes: int | str | None = None
    """Host memory for what `speculate` may have to undo; blocks beyond it wait for the step. None: all it takes."""

    update_in_backward: bool = False
    """With `nonfinite="propagate"` and without clipping: update each block inside backward, for good; `step()` shows it."""

    nonfinite: NonFinite = "skip"
    """`skip` the step and warn, `raise`, or `propagate` the value into the weights as plain torch does."""

    nonfinite_patience: int = 50
    """Consecutive skipped steps, without a loss scale left to lower, after which the run stops with an error."""

    delayed_update: bool = False
    """Apply each update beside the next step's forward and backward, which see weights one update older (ZeRO-Offload)."""

    delayed_update_warmup: int = 40
    """The step whose update is the first to be delayed; those before it are plain."""

    trace: str | Path | None = None
    """File that a Chrome trace of every lane is written to when the engine closes."""

    reduce_dtype: DTypeName = "fp32"
    """Dtype on the wire of a gradient reduction; sums are always formed in fp32."""

    gradient_dtype: DTypeName | None = None
    """Dtype of a reduced gradient on its way to its tier. None: the parameter's own."""

    bucket_bytes: int | str = "32MiB"
    """Gradient bytes (in `reduce_dtype`) that are reduced and moved together."""

    persist_below: int = 0
    """Stage 3: parameters with fewer elements than this stay gathered."""

    prefetch_units: int = 1
    """Stage 3: how many units are gathered ahead of their use."""

    prefetch_bytes: int | str | None = None
    """Stage 3: most bytes of full weights gathered ahead. None: `prefetch_units` times the largest unit."""

    max_unit_bytes: int | str | None = None
    """Stage 3: a larger unit is split at its children, or refused where ranks may run different ones. None: no limit."""

    debug_poison: bool = False
    """Stage 3: keep the memory of released weights, filled with NaN, so that whoever kept a handle on it notices."""

    loss_scale: float | Literal["dynamic"] | None = None
    """Factor on the loss, a power of two, or `dynamic` for fp16. None: 1."""

    broadcast_buffers: bool = True
    """Send rank 0's buffers to all ranks before each training forward, as DistributedDataParallel does."""

    backend: BackendName = "auto"
    """Which lanes carry asynchronous work."""

    backend_seed: int = 0
    """Seed of the `chaos` backend's delays."""

    threads: int | None = None
    """Threads of the compiled optimizer. None: the physical cores this process may use, shared among local ranks."""

    bind_threads: bool = True
    """Where there are several memory nodes or threads a core: bind the update to physical cores and slabs to one node."""

    instruction_set: str = "auto"
    """Instruction set of the compiled kernels, for tests; every one gives the same bits."""

    timeout_seconds: float = 1800.0
    """Longest wait for another rank."""

    def __post_init__(self) -> None:
        """Check every field, then the combinations."""
        self._check_choices()
        self._check_numbers()
        self._check_speculation()
        self._check_in_backward()
        self._check_combinations()

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        """Refuse what is not a setting, naming the nearest one, before the dataclass would with less to say."""
        if values:
            raise UnknownSettingError(
                f"ZeroConfig takes settings by name, not {values[0]!r}: for example ZeroConfig(stage=2)"
            )
        _check_names(cls, settings)
        return super().__new__(cls)

    @classmethod
    def auto(cls, model: Any, **options: Any) -> ZeroConfig:
        """The cheapest placement of a model on this machine and its ranks, measured and planned; all ranks call it.

        Args:
            model: the `torch.nn.Module` that will be trained.
            **options: of `zero_plugin.plan`: `batch`, `seq`, `accumulate`, `inputs`, `nvme`, limits, and fields that are fixed.

        Raises:
            BudgetError: nothing fits; says by how much, and what would help.
            ConfigError: an option is wrong.
        """
        # By name: this module is a leaf, and planning needs the whole engine.
        found: ZeroConfig = import_module("zero_plugin.planner.auto").auto_config(model, **options)
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ZeroConfig:
        """Build a config from a mapping such as a YAML block.

        Raises:
            ConfigError: a key is not a field, with the nearest field named.
        """
        return cls(**{str(key): value for key, value in values.items()})

    @property
    def shards_optimizer(self) -> bool:
        """Whether each rank holds only its part of master weights and moments."""
        return self.stage >= 1

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are reduced at every micro-batch and only the own part is kept."""
        return self.stage >= 2

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank holds only its part of the compute weights."""
        return self.stage >= 3

    def limit(self, tier: Tier) -> int | None:
        """The byte limit of a tier, or None."""
        value = {"device": self.device_limit, "host": self.host_limit, "nvme": self.nvme_limit}[
            tier
        ]
        return None if value is None else parse_bytes(value, f"{tier}_limit")

    @property
    def nvme_paths(self) -> tuple[str | Path, ...]:
        """`nvme_path` as a tuple; empty where nothing lies on `nvme`."""
        value = self.nvme_path
        if value is None:
            return ()
        return (value,) if isinstance(value, (str, Path)) else tuple(value)

    @property
    def nvme_buffer_size(self) -> int:
        """`nvme_buffer_bytes` as a number of bytes."""
        return parse_bytes(self.nvme_buffer_bytes, "nvme_buffer_bytes")

    @property
    def nvme_cache_size(self) -> int:
        """`nvme_cache_bytes` as a number of bytes."""
        return parse_bytes(self.nvme_cache_bytes, "nvme_cache_bytes")

    @property
    def prefetch_limit(self) -> int | None:
        """`prefetch_bytes` as a number of bytes, or None."""
        value = self.prefetch_bytes
        return None if value is None else parse_bytes(value, "prefetch_bytes")

    @property
    def unit_limit(self) -> int | None:
        """`max_unit_bytes` as a number of bytes, or None."""
        value = self.max_unit_bytes
        return None if value is None else parse_bytes(value, "max_unit_bytes")

    @property
    def undo_size(self) -> int | None:
        """`undo_bytes` as a number of bytes, or None."""
        return None if self.undo_bytes is None else parse_bytes(self.undo_bytes, "undo_bytes")

    @property
    def holds_updates(self) -> bool:
        """Whether masters may be ahead of the compute weights between steps, so that they need memory of their own."""
        return self.delayed_update or self.speculate or self.update_in_backward

    @property
    def bucket_size(self) -> int:
        """`bucket_bytes` as a number of bytes."""
        return parse_bytes(self.bucket_bytes, "bucket_bytes")

    def _check_choices(self) -> None:
        choices: dict[str, tuple[object, ...]] = {
            "stage": (0, 1, 2, 3),
            "params": get_args(Tier),
            "optimizer": get_args(Tier),
            "gradients": get_args(Tier),
            "activations": get_args(Tier),
            "nonfinite": get_args(NonFinite),
            "reduce_dtype": get_args(DTypeName),
            "gradient_dtype": (*get_args(DTypeName), None),
            "moment_dtype": get_args(MomentDType),
            "backend": get_args(BackendName),
            "nvme_engine": ("auto", "uring", "threads"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if isinstance(value, bool) or value not in allowed:
                listed = ", ".join(repr(choice) for choice in allowed)
                hint = ": for CPU memory use 'host'" if value == "cpu" else ""
                raise ConfigError(f"{name}={value!r} is not one of {listed}{hint}")
        for name in (
            "overlap",
            "speculate",
            "update_in_backward",
            "bind_threads",
            "delayed_update",
            "broadcast_buffers",
            "nvme_checksum",
            "debug_poison",
            "split_master",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")

    def _check_numbers(self) -> None:
        for name in (
            "device_limit",
            "host_limit",
            "pinned_limit",
            "nvme_limit",
            "prefetch_bytes",
            "max_unit_bytes",
            "nvme_buffer_bytes",
            "nvme_cache_bytes",
            "undo_bytes",
        ):
            value = getattr(self, name)
            if value is not None:
                parse_bytes(value, name)
        if parse_bytes(self.bucket_bytes, "bucket_bytes") < 64:
            raise ConfigError(
                f"bucket_bytes={self.bucket_bytes!r} is below 64 bytes: the default is '32MiB'"
            )
        counts = {
            "nonfinite_patience": self.nonfinite_patience,
            "delayed_update_warmup": self.delayed_update_warmup,
            "threads": 1 if self.threads is None else self.threads,
        }
        for name, value in counts.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number above 0")
        self._check_gather()
        if type(self.backend_seed) is not int:
            raise ConfigError(f"backend_seed={self.backend_seed!r} must be a whole number")
        if (
            type(self.timeout_seconds) not in (int, float)
            or not 0 < self.timeout_seconds <= _LONGEST
        ):
            raise ConfigError(
                f"timeout_seconds={self.timeout_seconds!r} must be a number above 0 and at most {_LONGEST:g}"
            )
        if type(self.trace) not in (str, type(None)) and not isinstance(self.trace, Path):
            raise ConfigError(f"trace={self.trace!r} must be the path of a file to write, or None")
        self._check_loss_scale()

    def _check_loss_scale(self) -> None:
        scale = self.loss_scale
        if scale is None or scale == "dynamic":
            return
        if isinstance(scale, (bool, str)) or not 0 < scale < math.inf:
            raise ConfigError(
                f"loss_scale={scale!r} must be a positive power of two, 'dynamic' or None"
            )
        mantissa, _ = (
            float(scale).as_integer_ratio() if scale >= 1 else (1 / float(scale)).as_integer_ratio()
        )
        if mantissa & (mantissa - 1):
            raise ConfigError(
                f"loss_scale={scale!r} is not a power of two, so that unscaling would round every gradient: "
                "give a power of two such as 65536, or 'dynamic'"
            )

    def _check_in_backward(self) -> None:
        if not self.update_in_backward:
            return
        if self.nonfinite != "propagate":
            raise ConfigError(
                f"update_in_backward=True needs nonfinite='propagate', not {self.nonfinite!r}: an update that has run inside "
                "backward cannot be skipped; use speculate=True to have it undone"
            )
        if self.optimizer != "host":
            raise ConfigError(
                f"update_in_backward=True needs optimizer='host', not {self.optimizer!r}"
            )
        for name in ("speculate", "delayed_update", "split_master"):
            if getattr(self, name):
                raise ConfigError(
                    f"update_in_backward=True contradicts {name}=True: leave one of the two out"
                )

    def _check_speculation(self) -> None:
        if not self.speculate:
            if self.undo_bytes is not None:
                raise ConfigError(
                    f"undo_bytes={self.undo_bytes!r} has no effect without speculate=True: leave it out"
                )
            return
        if self.optimizer != "host":
            raise ConfigError(
                f"speculate=True needs optimizer='host', not {self.optimizer!r}: only there are old states kept to be brought back"
            )
        for name in ("delayed_update", "split_master"):
            if getattr(self, name):
                raise ConfigError(
                    f"speculate=True contradicts {name}=True: leave one of the two out"
                )

    def _check_fraction(self) -> None:
        value = self.device_fraction
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise ConfigError(f"device_fraction={value!r} must be a number from 0 to 1")
        if not value:
            return
        if self.optimizer != "host":
            raise ConfigError(
                f"device_fraction={value!r} needs optimizer='host', not {self.optimizer!r}: it is the part of the host's states "
                "that stays on the device"
            )
        if self.gradients == "nvme":
            raise ConfigError(
                f"device_fraction={value!r} is not supported with gradients='nvme': set gradients='host' or 'device'"
            )
        if self.split_master:
            raise ConfigError(
                f"device_fraction={value!r} contradicts split_master=True, which is not supported on the device: leave one out"
            )

    def _check_below_stage_3(self) -> None:
        if self.shards_parameters:
            return
        if self.params != "device":
            raise ConfigError(
                f"params={self.params!r} needs stage=3: below it every rank keeps the whole weights on its device; set "
                "stage=3, or params='device'"
            )
        defaults = {
            "persist_below": 0,
            "prefetch_units": 1,
            "prefetch_bytes": None,
            "max_unit_bytes": None,
            "debug_poison": False,
        }
        for name, default in defaults.items():
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} has no effect below stage 3: leave it out, or set stage=3"
                )

    def _check_split(self) -> None:
        if not self.split_master:
            return
        if not self.shards_parameters:
            raise ConfigError(
                "split_master=True needs stage=3: the master's upper half is the rank's shard of the weights, and below stage 3 "
                "weights are not sharded; set stage=3, or split_master=False"
            )
        if self.optimizer == "device":
            raise ConfigError(
                "split_master=True is not supported with optimizer='device': set optimizer='host' or 'nvme'"
            )
        if self.delayed_update:
            raise ConfigError(
                "split_master=True is not supported with delayed_update=True: the compute weights, which hold half of the master, "
                "are one step behind it; leave one of the two out"
            )

    def _check_nvme(self) -> None:
        if "nvme" in (self.params, self.optimizer, self.gradients, self.activations):
            if not self.nvme_paths:
                raise ConfigError(
                    "a state is placed on 'nvme' and nvme_path is not set: name a folder on a fast local disk, or several"
                )
            return
        defaults = {
            "nvme_path": None,
            "nvme_limit": None,
            "nvme_engine": "auto",
            "nvme_buffer_bytes": "256MiB",
            "nvme_cache_bytes": 0,
            "nvme_checksum": False,
        }
        for name, default in defaults.items():
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} has no effect: no state is placed on 'nvme'; "
                    f"leave {name} out or place a state there"
                )

    def _check_gather(self) -> None:
        for name in ("persist_below", "prefetch_units"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name}={value!r} must be a whole number, 0 or more")

    def _check_combinations(self) -> None:
        self._check_below_stage_3()
        self._check_split()
        self._check_fraction()
        self._check_nvme()
        if self.delayed_update and self.optimizer == "device":
            raise ConfigError(
                "delayed_update=True has no use with optimizer='device': the update would take turns with the computation it is "
                "to hide behind; set optimizer='host' or 'nvme', or leave delayed_update out"
            )
        if self.delayed_update_warmup != 40 and not self.delayed_update:
            raise ConfigError(
                f"delayed_update_warmup={self.delayed_update_warmup!r} has no effect without delayed_update: leave it out"
            )
        if not self.overlap and self.backend not in ("auto", "inline"):
            raise ConfigError(
                f"overlap=False contradicts backend={self.backend!r}: without overlap every operation runs inline; "
                "leave backend out"
            )
        if self.nonfinite == "propagate" and self.loss_scale == "dynamic":
            raise ConfigError(
                "nonfinite='propagate' contradicts loss_scale='dynamic': a dynamic scale finds its value by skipping "
                "the steps that overflow; use nonfinite='skip'"
            )
