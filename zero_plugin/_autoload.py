"""The entry point that makes `Trainer(strategy="zero_offload")` work after a bare `pip install`.

torch calls `autoload` at the end of `import torch` (entry-point group `torch.backends`). It imports nothing: it puts one
finder on `sys.meta_path`, which adds our names to a Lightning registry right after the module that holds the registry
has run. A process that never imports Lightning pays for one set lookup an import, and one that never asks for our
names behaves as without us. `ZERO_PLUGIN_AUTOLOAD=0` turns it off; `register` is the explicit route. See docs/autoload.md.

This file is also installed next to the package, as the top-level module `_zero_plugin_autoload`: an entry point that
cannot be imported makes `import torch` itself fail, and that copy stays importable when an editable checkout is
deleted or broken. So nothing here may import the rest of the package except where a failure is caught.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SWITCH = "ZERO_PLUGIN_AUTOLOAD"

# Each of the first four modules holds one registry of strategy names. The two spellings of each framework are different
# modules with different classes, and both are usually installed. The next two hold the loader of `load_from_checkpoint`,
# which takes our folders then. The others hold the few functions of Accelerate and
# transformers in which a run that asks for us is noticed (docs/accelerate.md).
TARGETS = frozenset(
    {
        "lightning.pytorch.strategies",
        "pytorch_lightning.strategies",
        "lightning.fabric.strategies",
        "lightning_fabric.strategies",
        "lightning.pytorch.core.saving",
        "pytorch_lightning.core.saving",
        "accelerate.accelerator",
        "accelerate.commands.config.config_args",
        "accelerate.commands.config.config",
        "accelerate.commands.config.default",
        "accelerate.commands.estimate",
        "accelerate.commands.launch",
        "transformers.modeling_utils",
        "transformers.trainer",
    }
)

PROGRAMS = frozenset({"accelerate.commands.estimate", "accelerate.commands.launch"})
"""Targets that are also run by `python -m`, where Python runs their code under another name and imports nothing."""


def autoload() -> None:
    """Called by torch at the end of its import; never raises."""
    try:
        if os.environ.get(SWITCH, "1").strip().lower() not in ("0", "false", "off", "no"):
            install()
    except Exception as error:  # noqa: BLE001 - whatever leaves here would become a failed `import torch`
        report(error)


def register() -> None:
    """Make the strategy names known to every Lightning spelling, imported already or later.

    Needed only where the automatic registration is switched off. Works in any order with the imports of torch and
    Lightning, and may be called more than once.

    Raises:
        Exception: whatever kept a registry that is already loaded from taking the names.
    """
    install(strict=True)


def register_here_and_in_children() -> None:
    """Do what `register` does, and switch the automatic registration on in the processes that this one starts."""
    os.environ[SWITCH] = "1"
    register()


def install(*, strict: bool = False) -> None:
    """Put the finder in place, and register with what is imported already.

    Args:
        strict: raise what goes wrong with a registry that is already there, instead of reporting it.
    """
    if not any(getattr(finder, "of_zero_plugin", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    for name in TARGETS:
        module = sys.modules.get(name)
        if module is None:
            continue
        if is_running(module):
            watch_half_imported(module)
        elif strict:
            register_strategies(module)
        else:
            try_to_register(module)


class Finder:
    """Finds a target as everyone else does, and has it followed by a registration."""

    of_zero_plugin = True

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give for a target; None for every other module."""
        if name not in TARGETS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if find is None or getattr(finder, "of_zero_plugin", False):
                continue
            spec: ModuleSpec | None = find(name, path, target)
            if spec is not None:
                watch_loader(spec)
                return spec
        return None


def watch_loader(spec: ModuleSpec) -> None:
    """Have the module of `spec` followed by a registration; its spec and loader stay what they are."""
    loader: Any = spec.loader
    run = getattr(loader, "exec_module", None)
    if run is None:
        return

    def exec_module(module: ModuleType) -> None:
        if (
            module.__spec__ is not spec
        ):  # a loader may serve several modules, as a zip archive's does
            run(module)
            return
        del loader.exec_module
        vars(loader).pop("get_code", None)
        run(module)
        try_to_register(module)

    try:
        loader.exec_module = exec_module
        if spec.name in PROGRAMS:
            run_imported(loader, spec.name)
    except AttributeError as error:  # a loader with slots, or one that gives no code
        report(error)


def run_imported(loader: Any, name: str) -> None:
    """Have `python -m` import a program and call its `main`, so that it is entered as by every other way."""
    plain = loader.get_code

    def get_code(wanted: str) -> Any:
        if wanted != name:
            return plain(wanted)
        return compile(f"from {name} import main\nmain()\n", f"<{name}>", "exec")

    loader.get_code = get_code


def is_running(module: ModuleType) -> bool:
    """Whether the module's own code is still being executed."""
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def watch_half_imported(module: ModuleType) -> None:
    """Register at the first use of a module whose code has ended.

    When torch is first imported from inside a target, the finder comes too late for that target. Its class is then
    swapped for one that registers, and swaps back, at the first attribute access after the module's code has ended.
    """
    plain = type(module)
    if getattr(plain, "of_zero_plugin", False):
        return

    class Watched(plain):
        of_zero_plugin = True

        def __getattribute__(self, attribute: str) -> Any:
            spec = plain.__getattribute__(self, "__spec__")
            if not getattr(spec, "_initializing", False) and type(self) is Watched:
                self.__class__ = plain  # pyright: ignore[reportAttributeAccessIssue]
                try_to_register(self)
            return plain.__getattribute__(self, attribute)

    module.__class__ = Watched


def try_to_register(module: ModuleType) -> None:
    """Register, and report a failure instead of raising it into someone else's import."""
    try:
        register_strategies(module)
    except Exception as error:  # noqa: BLE001 - a broken checkout must not break `import lightning`
        report(error)


def register_strategies(module: ModuleType) -> None:
    """Add the strategy names to the registry that `module` holds, or enter it as it needs."""
    if module.__name__.partition(".")[0] in ("accelerate", "transformers"):
        from zero_plugin.integrations._huggingface import entry

        entry.enter(module)
        return
    from zero_plugin.integrations import registration

    registration.register_strategies(module)


def report(error: BaseException) -> None:
    """Log why the names are not there, and how to silence this."""
    import logging

    logging.getLogger("zero_plugin").warning(
        "zero-plugin could not register its strategies (%s: %s): reinstall it, or set %s=0",
        type(error).__name__,
        error,
        SWITCH,
    )
