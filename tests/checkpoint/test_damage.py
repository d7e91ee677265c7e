"""Every kind of damage and misfit is refused with an error that names file, key, wanted and found, and changes nothing."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import build, state_of, train
from support.models import OddMLP, TinyMLP, make
from support.ranks import run_ranks
from support.training import PRELOAD, adamw, assert_same_bits, config, engine_for
from torch import nn

from zero_plugin import ZeroEngine
from zero_plugin.cli import main
from zero_plugin.errors import CheckpointError

FILE = "rank-00000-of-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one rank; to be copied."""
    folder = tmp_path_factory.mktemp("saved")
    model, _, engine = build(folder)
    train(model, engine, range(2))
    engine.save_checkpoint(folder / "ck", extra={"step": 2})
    engine.close()
    return folder / "ck"


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def flip(at: float) -> Callable[[Path], None]:
    def change(content: bytearray) -> None:
        content[int(at * (len(content) - 1))] ^= 4

    return lambda ck: edit(ck / FILE, change)


def rewrite_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def act(ck: Path) -> None:
        index = json.loads((ck / "index.json").read_text())
        change(index)
        (ck / "index.json").write_text(json.dumps(index))

    return act


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (
        lambda ck: os.truncate(ck / FILE, 1000),
        rf"{FILE} has 1,000 bytes, wanted [\d,]+",
    ),
    "longer": (
        lambda ck: edit(ck / FILE, lambda content: content.extend(b"x")),
        rf"{FILE} has [\d,]+ bytes, wanted [\d,]+",
    ),
    "empty": (lambda ck: os.truncate(ck / FILE, 0), rf"{FILE} has 0 bytes, wanted [\d,]+"),
    "first bit": (flip(0.0), rf"{FILE} has checksum [0-9a-f]{{8}}, wanted [0-9a-f]{{8}}"),
    "middle bit": (flip(0.6), rf"{FILE} has checksum [0-9a-f]{{8}}, wanted [0-9a-f]{{8}}"),
    "last bit": (flip(1.0), rf"{FILE} has checksum [0-9a-f]{{8}}, wanted [0-9a-f]{{8}}"),
    "missing": (lambda ck: (ck / FILE).unlink(), rf"{FILE} is missing, wanted [\d,]+ bytes"),
    "renamed": (lambda ck: (ck / FILE).rename(ck / "other.safetensors"), rf"{FILE} is missing"),
    "no index": (lambda ck: (ck / "index.json").unlink(), r"index\.json cannot be read"),
    "cut index": (
        lambda ck: os.truncate(ck / "index.json", 300),
        r"index\.json is no JSON .*damaged",
    ),
    "bit of the index": (
        lambda ck: edit(ck / "index.json", lambda c: c.__setitem__(c.index(b'"step": 2') + 8, 51)),
        r"index\.json has checksum [0-9a-f]{8}, wanted [0-9a-f]{8}",
    ),
    "foreign version": (
        rewrite_index(lambda index: index.update(version=99)),
        r"index\.json has version 99, this zero-plugin reads version 1",
    ),
    "foreign format": (
        rewrite_index(lambda index: index.update(format="other")),
        r"index\.json has format 'other', wanted 'zero-plugin checkpoint'",
    ),
    "another file": (
        lambda ck: (ck / FILE).write_bytes(b"x" * (ck / FILE).stat().st_size),
        rf"{FILE} has checksum",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_nothing_is_changed(kind: str, saved: Path, tmp_path: Path) -> None:
    damage, message = DAMAGES[kind]
    ck = tmp_path / "ck"
    shutil.copytree(saved, ck)
    damage(ck)
    model, _, engine = build(tmp_path, stage=3)
    train(model, engine, range(1))
    before = state_of(engine)
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(ck)
    assert_same_bits(state_of(engine), before)
    train(model, engine, range(1, 2))  # The run goes on.
    engine.close()


@pytest.mark.parametrize("kind", DAMAGES)
def test_verify_says_the_same(
    kind: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ck = tmp_path / "ck"
    shutil.copytree(saved, ck)
    assert main(["checkpoint", "verify", str(ck)]) == 0
    capsys.readouterr()
    DAMAGES[kind][0](ck)
    assert main(["checkpoint", "verify", str(ck)]) == 2
    shown = capsys.readouterr().err
    assert FILE in shown or "index.json" in shown
    target = tmp_path / "out"
    assert main(["checkpoint", "export", str(ck), str(target)]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck"]


# ------------------------------------------------------------------ what does not fit


class Renamed(OddMLP):
    """`OddMLP` with a parameter under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.third = self.second
        del self.second

    def forward(self, features: Any) -> Any:
        return self.third(torch.tanh(self.first(features))) * self.scale


class Wider(OddMLP):
    """`OddMLP` with another shape, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(13, 6)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, features: Any) -> Any:
        return self.second(torch.tanh(self.first(features))) * self.scale


MISFITS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], list[str]]] = {
    "renamed": (
        Renamed,
        lambda model: adamw(model.parameters()),
        [
            "parameter 'third.weight' is not in the checkpoint",
            "the checkpoint's parameter 'second.weight' is not in the model",
        ],
    ),
    "reshaped": (
        Wider,
        lambda model: adamw(model.parameters()),
        [
            "parameter 'second.weight' has shape (5, 13) in the checkpoint and (6, 13) here",
            "buffer 'count' is not in the checkpoint",
        ],
    ),
    "another optimizer": (
        OddMLP,
        lambda model: torch.optim.Adagrad(model.parameters()),
        ["optimizer 0 (Adagrad) keeps sum, the saved AdamW kept exp_avg, exp_avg_sq"],
    ),
    "another number of groups": (
        OddMLP,
        lambda model: adamw(
            [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:]}]
        ),
        ["optimizer 0 (AdamW) has 2 param groups, the saved one had 1"],
    ),
    "a group without a parameter": (
        OddMLP,
        lambda model: adamw(list(model.parameters())[1:]),
        ["param group 0 of optimizer 0 (AdamW) has 7 parameters, the saved one had 8"],
    ),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_misfit_is_refused_or_listed(
    kind: str, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_model, build_optimizer, messages = MISFITS[kind]
    model = make(build_model)
    with engine_for(model, build_optimizer(model)) as (engine, _):
        before = state_of(engine)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(saved)
        assert all(message in str(caught.value) for message in messages), caught.value
        assert "strict=False" in str(caught.value)
        assert_same_bits(state_of(engine), before)
        with caplog.at_level(logging.WARNING):
            assert engine.load_checkpoint(saved, strict=False) == {"step": 2}
        assert all(message in caplog.text for message in messages), caplog.text
        loaded = state_of(engine)["weights"]["first.weight"]
        assert not torch.equal(loaded, before["weights"]["first.weight"])
        engine.backward(model(torch.ones(2, 7)).sum())
        engine.step()


def test_a_checkpoint_without_an_optimizer_of_several(saved: Path) -> None:
    model = make(TinyMLP)
    optimizers = [adamw(model.first.parameters()), adamw(model.second.parameters())]
    with (
        ZeroEngine(model, optimizers, config()) as engine,
        pytest.raises(CheckpointError, match="has 1 optimizers, here are 2"),
    ):
        engine.load_checkpoint(saved)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nothing", r"nothing does not exist"),
        (".", r"is not a checkpoint of zero-plugin: it holds the checkpoints ck"),
        ("ck/index.json", r"index\.json is a file, wanted the folder of a checkpoint: name .*ck"),
        (".ck.partial-0123456789ab", r"left by a save that did not end"),
    ],
)
def test_another_place_is_named(place: str, message: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "ck")
    shutil.copytree(saved, tmp_path / ".ck.partial-0123456789ab")
    _, _, engine = build(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(tmp_path / place)
    engine.close()


# ------------------------------------------------------------------ one rank finds it, all say it


def one_rank_sees_damage(rank: int, size: int, folder: Path) -> str:
    model, _, engine = build(folder, stage=3)
    train(model, engine, range(1))
    engine.save_checkpoint(folder / "ck")
    if rank == 0:
        path = folder / "ck" / "rank-00001-of-00002.safetensors"
        os.truncate(path, path.stat().st_size - 1)
    engine._resources.control.exchange(torch.zeros(1), label="damaged")
    before = state_of(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder / "ck")
    assert_same_bits(state_of(engine), before)
    train(model, engine, range(1, 2))
    engine.close()
    return str(caught.value)


@pytest.mark.dist
def test_damage_that_one_rank_finds_is_an_error_of_all(tmp_path: Path) -> None:
    for message in run_ranks(2, one_rank_sees_damage, tmp_path, preload=PRELOAD):
        assert "failed on rank 1: " in message
        assert "rank-00001-of-00002.safetensors has" in message
