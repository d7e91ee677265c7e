"""The names users rely on change only on purpose: a change here is a change of the documented surface."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

import zero_plugin

PUBLIC = [
    *("Lion", "ZeroConfig", "ZeroEngine", "ZeroError", "__version__", "errors"),
    *("init_context", "plan", "register", "tile_linears", "tiled_cross_entropy"),
]

CONFIG_FIELDS = [
    *("stage", "params", "optimizer", "device_fraction", "gradients", "activations"),
    *("nvme_path", "device_limit", "host_limit", "pinned_limit", "nvme_limit"),
    *("nvme_engine", "nvme_buffer_bytes", "nvme_cache_bytes", "nvme_checksum", "split_master"),
    "moment_dtype",
    *(
        "overlap",
        "speculate",
        "undo_bytes",
        "update_in_backward",
        "nonfinite",
        "nonfinite_patience",
    ),
    *("delayed_update", "delayed_update_warmup", "trace"),
    *("reduce_dtype", "gradient_dtype", "bucket_bytes"),
    *("persist_below", "prefetch_units", "prefetch_bytes", "max_unit_bytes", "debug_poison"),
    *("loss_scale", "broadcast_buffers"),
    *("backend", "backend_seed", "threads", "bind_threads", "instruction_set", "timeout_seconds"),
]

ENGINE_METHODS = {
    *("backward", "step", "zero_grad", "clip_grad_norm_", "no_sync", "full_params", "full_grads"),
    *(
        "drain",
        "layer_first",
        "save_checkpoint",
        "load_checkpoint",
        "full_state_dict",
        "memory",
        "ledger",
        "close",
    ),
}
LATER_ENGINE_METHODS: set[str] = set()
"""Named in the architecture, and not built yet."""


def test_package_exports_exactly_these_names() -> None:
    assert zero_plugin.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_export_is_there(name: str) -> None:
    assert getattr(zero_plugin, name) is not None
    assert name in dir(zero_plugin)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'ZeroEngin'"):
        _ = zero_plugin.ZeroEngin


def test_config_has_exactly_these_fields() -> None:
    assert [field.name for field in dataclasses.fields(zero_plugin.ZeroConfig)] == CONFIG_FIELDS


def test_config_is_frozen_and_keyword_only() -> None:
    config = zero_plugin.ZeroConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        zero_plugin.ZeroConfig(2)  # pyright: ignore[reportCallIssue]


def test_engine_has_the_documented_methods() -> None:
    absent = {name for name in ENGINE_METHODS if not hasattr(zero_plugin.ZeroEngine, name)}
    assert absent <= LATER_ENGINE_METHODS


@pytest.mark.parametrize(
    "statement",
    [
        "import zero_plugin",
        "import zero_plugin.errors",
        "import zero_plugin.config",
        "import zero_plugin.cli",
    ],
)
def test_import_does_not_load_torch(statement: str) -> None:
    # torch imports us at the end of its own import: importing it back would be a circle
    code = f"{statement}\nimport sys\nprint(sorted(n for n in sys.modules if n in ('torch', 'numpy', 'lightning')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
