"""Accelerate's own test script where parameters are sharded: what `accelerate test` starts then, in each process.

The script compares the weights of each model right after training it, rank by rank. A sharded weight is gathered by all ranks, so
reading one there is refused. Here the script's Accelerator closes the engines before it hands a model out, as `free_memory` does,
and every rank has whole weights. Everything else in it is Accelerate's.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_plugin.integrations._huggingface.plugin import ZeroOffloadPlugin, as_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCRIPT = "accelerate.test_utils.scripts.test_script"


def replace(arguments: Any, block: Mapping[str, Any]) -> None:
    """Start this module in place of Accelerate's test script, if that is what is launched and parameters may be sharded.

    Args:
        arguments: of `accelerate launch`; changed.
        block: of the config file.
    """
    wanted = (*_SCRIPT.split(".")[:-1], "test_script.py")
    if Path(str(arguments.training_script)).parts[-len(wanted) :] != wanted:
        return
    plugin = ZeroOffloadPlugin(**as_settings(block))
    if plugin.options is not None or plugin.config.shards_parameters:
        arguments.training_script, arguments.module = __name__, True


def main() -> None:
    """Run the script."""
    script: Any = import_module(_SCRIPT)
    stock: Any = script.Accelerator

    class Whole(stock):
        def unwrap_model(self, model: Any, **options: Any) -> Any:
            self.free_memory()
            return super().unwrap_model(model, **options)

    script.Accelerator = Whole
    try:
        script.main()
    finally:
        script.Accelerator = stock


if __name__ == "__main__":
    main()
