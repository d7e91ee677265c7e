"""`ZeroOffloadPlugin`: `Accelerator(zero_plugin=ZeroOffloadPlugin(stage=3, params="host"))`. See docs/accelerate.md.

Importing this module also makes `Accelerator` take `zero_plugin=` where the automatic registration is switched off.
"""

from __future__ import annotations

from zero_plugin.integrations._huggingface import entry
from zero_plugin.integrations._huggingface.plugin import ZeroOffloadPlugin

__all__ = ["ZeroOffloadPlugin"]

entry.enter_accelerate()
