"""Functions of the libraries that we override or call: a release that lacks one is refused by name, and nothing else is asked of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.trainer_runs import arguments, llama, plain_process, ranks, select, trainer_for

from zero_plugin import errors
from zero_plugin.integrations._huggingface import checks


def of_accelerate(_rank: int, _size: int) -> None:
    from accelerate import Accelerator

    for name, parameters in checks._METHODS.items():
        lacking = type("Accelerator", (Accelerator,), {name: None if not parameters else _bare})
        if not parameters:
            lacking = type(
                "Accelerator",
                (),
                {n: getattr(Accelerator, n) for n in checks._METHODS if n != name},
            )
        with pytest.raises(errors.FrameworkError, match=rf"has no Accelerator\.{name}\("):
            checks.check_supported(lacking)
    checks.check_supported(Accelerator)


def _bare(self: Any) -> None:
    del self


def of_transformers(_rank: int, _size: int, folder: Path) -> None:
    from transformers import Trainer

    from zero_plugin.integrations._huggingface import trainer as ours

    plain_process()
    select({"stage": 1})
    made = trainer_for(llama(), arguments(folder))
    assert isinstance(made, ours.ZeroTrainer)
    for name, parameters in ours._METHODS.items():
        # A release whose method is there and takes nothing that we pass, or is not there.
        members = {name: _bare} if parameters else {}
        lacking: Any = type("Trainer", (Trainer,), members)
        if not parameters:
            lacking = type(
                "Trainer", (), {n: getattr(Trainer, n) for n in ours._METHODS if n != name}
            )
        stand_in = object.__new__(lacking)
        stand_in.__dict__.update(made.__dict__)
        with pytest.raises(errors.FrameworkError, match=rf"has no Trainer\.{name}\("):
            ours.adopt(stand_in)
    made.accelerator.free_memory()


@pytest.mark.dist
def test_a_release_of_accelerate_that_changed_is_named() -> None:
    ranks(1, of_accelerate)


@pytest.mark.dist
def test_a_release_of_transformers_that_changed_is_named(tmp_path: Path) -> None:
    ranks(1, of_transformers, tmp_path)
