"""Reports about checkpoints: other numbers of ranks, moments that vanish, tied weights, torn and half-written ones.

The number in a name is the case's number in docs/differences.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Case, build, rows, state_of, train
from support.models import OddMLP, make, make_gpt
from support.ranks import run_ranks
from support.training import PRELOAD, adamw, assert_same_bits, config, engine_for

from zero_plugin import ZeroEngine
from zero_plugin.checkpoint.imports import import_checkpoint
from zero_plugin.checkpoint.plain import read_state_dict
from zero_plugin.cli import main
from zero_plugin.errors import CheckpointError

# 33: another number of ranks, and another stage ------------------------------------------------------------------------


def save_at(rank: int, size: int, folder: Path, stage: int) -> Any:
    model, _, engine = build(folder, stage=stage)
    train(model, engine, range(3))
    engine.save_checkpoint(folder / "ck")
    state = state_of(engine)
    engine.close()
    return state


def load_at(rank: int, size: int, folder: Path, stage: int) -> Any:
    _, _, engine = build(folder, stage=stage)
    engine.load_checkpoint(folder / "ck")
    state = state_of(engine)
    engine.close()
    return state


@pytest.mark.dist
@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 2), (1, 3)), ((1, 1), (2, 3)), ((2, 3), (3, 1))], ids=str
)
def test_33_any_number_of_ranks_and_any_stage_loads(
    saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    wanted = run_ranks(saved[0], save_at, tmp_path, saved[1], preload=PRELOAD)[0]
    found = run_ranks(loaded[0], load_at, tmp_path, loaded[1], preload=PRELOAD)[0]
    assert_same_bits(found, wanted)


# 34, 37: a resume that begins anew, or loses what lies on NVMe ---------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_34_and_37_a_resume_is_the_run_it_resumes(tier: str, tmp_path: Path) -> None:
    """Losses, moments and step counts, also of states in files, where the other system's come back empty."""

    def losses(model: Any, engine: ZeroEngine, steps: range) -> list[float]:
        found: list[float] = []
        for step in steps:
            loss = model(rows(step, 0, 1)).square().mean()
            found.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
        return found

    case = Case(1, 3, tier)
    model, optimizer, engine = build(tmp_path, case)
    losses(model, engine, range(4))
    engine.save_checkpoint(tmp_path / "ck")
    wanted = losses(model, engine, range(4, 8)), optimizer.state_dict()
    engine.close()
    model, optimizer, engine = build(tmp_path, case)
    engine.load_checkpoint(tmp_path / "ck")
    assert all(int(entry["step"]) == 4 for entry in optimizer.state_dict()["state"].values())
    found = losses(model, engine, range(4, 8)), optimizer.state_dict()
    engine.close()
    assert found[0] == wanted[0]
    assert_same_bits(found[1], wanted[1])


# 35: a plain checkpoint lacks a converter's metadata --------------------------------------------------------------------


def test_35_a_plain_file_needs_no_metadata(tmp_path: Path) -> None:
    model = make(OddMLP)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    import_checkpoint(tmp_path / "plain.pt", tmp_path / "ck")
    other = make(OddMLP, seed=1)
    with engine_for(other) as (engine, _):
        engine.load_checkpoint(tmp_path / "ck", weights_only=True)
        assert_same_bits(engine.full_state_dict(), model.state_dict())


# 36: a second save to one place -----------------------------------------------------------------------------------------


def test_36_a_second_save_to_one_place_replaces_the_first(tmp_path: Path) -> None:
    model, _, engine = build(tmp_path, Case(1, 3, "nvme"))
    train(model, engine, range(1))
    engine.save_checkpoint(tmp_path / "ck")
    train(model, engine, range(1, 3))
    engine.save_checkpoint(tmp_path / "ck")
    wanted = state_of(engine)
    engine.close()
    _, _, engine = build(tmp_path)
    engine.load_checkpoint(tmp_path / "ck")
    assert_same_bits(state_of(engine), wanted)
    engine.close()


# 38: the key of a tied weight is missing after conversion ----------------------------------------------------------------


def test_38_a_tied_weight_has_both_names_everywhere(tmp_path: Path) -> None:
    model = make_gpt(width=12)
    with engine_for(model, stage=3) as (engine, _):
        engine.save_checkpoint(tmp_path / "ck")
    assert (
        main(
            ["checkpoint", "export", str(tmp_path / "ck"), str(tmp_path / "w.pt"), "--to", "torch"]
        )
        == 0
    )
    exported = torch.load(tmp_path / "w.pt", weights_only=True)
    assert exported.keys() == model.state_dict().keys() == read_state_dict(tmp_path / "ck").keys()
    assert exported["head.weight"].data_ptr() == exported["tokens.weight"].data_ptr()
    plain = make_gpt(width=12, seed=1)
    plain.load_state_dict(exported)
    other = make_gpt(width=12, seed=2)
    with engine_for(other, stage=2) as (engine, _):
        engine.load_checkpoint(tmp_path / "ck")
        assert other.head.weight is other.tokens.weight
        assert_same_bits(engine.full_state_dict(), plain.state_dict())


# 40, 42: folders and files, evaluation without an optimizer: tests/lightning/test_folders.py -----------------------------


def test_40_a_file_inside_and_a_folder_above_are_named(tmp_path: Path) -> None:
    _, _, engine = build(tmp_path)
    engine.save_checkpoint(tmp_path / "run" / "step-1")
    for place, message in (
        ("run/step-1/index.json", r"is a file, wanted the folder of a checkpoint: name .*step-1"),
        ("run", r"is not a checkpoint of zero-plugin: it holds the checkpoints step-1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            engine.load_checkpoint(tmp_path / place)
    engine.close()


# 41: its own objects are refused by the safe loader ----------------------------------------------------------------------


def test_41_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    model, _, engine = build(tmp_path)
    train(model, engine, range(1))
    engine.save_checkpoint(tmp_path / "ck", extra={"epoch": 1})
    engine.close()
    for path in (tmp_path / "ck").iterdir():
        content = path.read_bytes()
        assert path.suffix in (".json", ".safetensors")
        assert not content.startswith((b"PK", b"\x80"))
    assert main(["checkpoint", "verify", str(tmp_path / "ck")]) == 0


# 43: no `latest` means training from scratch, with a warning ------------------------------------------------------------


def test_43_nothing_to_load_is_an_error(tmp_path: Path) -> None:
    model = make(OddMLP)
    with ZeroEngine(model, adamw(model.parameters()), config()) as engine:
        with pytest.raises(CheckpointError, match="does not exist"):
            engine.load_checkpoint(tmp_path / "ck")
        (tmp_path / "ck").mkdir()
        with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
            engine.load_checkpoint(tmp_path / "ck")
