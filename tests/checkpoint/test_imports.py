"""Checkpoints of other systems become ours: equal weights and moments, and a run that goes on."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import build, rows, state_of, train
from support.foreign import write_deepspeed
from support.models import NormMLP, OddMLP, TinyMLP, make
from support.ranks import run_ranks
from support.training import PRELOAD, adamw, assert_same_bits, engine_for

from zero_plugin.checkpoint.imports import import_checkpoint
from zero_plugin.checkpoint.plain import read_state_dict
from zero_plugin.cli import main
from zero_plugin.errors import CheckpointError


def plain_run(steps: range, model: Any, optimizer: Any) -> None:
    for step in steps:
        model(rows(step, 0, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained() -> tuple[Any, Any]:
    model = make(OddMLP)
    optimizer = adamw(model.parameters())
    plain_run(range(3), model, optimizer)
    return model, optimizer


FORMS = {
    "script": lambda m, o: {"model": m, "optimizer": o, "epoch": 3},
    "lightning": lambda m, o: {"state_dict": m, "optimizer_states": [o], "global_step": 3},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_torch_run_goes_on(form: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save(FORMS[form](model.state_dict(), optimizer.state_dict()), tmp_path / "run.pt")
    assert main(["checkpoint", "import", str(tmp_path / "run.pt"), str(tmp_path / "ck")]) == 0
    other, ours, engine = build(tmp_path, stage=3)
    extra = engine.load_checkpoint(tmp_path / "ck")
    assert extra == ({"epoch": 3} if form == "script" else {"global_step": 3})
    assert_same_bits(state_of(engine)["weights"], model.state_dict())
    found = engine.optimizer_state_dict(ours)["state"]
    for number, entry in optimizer.state_dict()["state"].items():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found[number][key], entry[key]), (number, key)
    plain_run(range(3, 5), model, optimizer)
    train(other, engine, range(3, 5))
    for name, value in engine.full_state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], atol=1e-6), name
    engine.close()


def test_weights_alone_begin_anew(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    save_model(model, str(tmp_path / "weights.safetensors"))
    for number, name in enumerate(("weights.pt", "weights.safetensors")):
        place = import_checkpoint(tmp_path / name, tmp_path / f"ck-{number}")
        other, ours, engine = build(tmp_path, stage=2)
        train(other, engine, range(2))
        with pytest.raises(CheckpointError, match="saved without optimizer states"):
            engine.load_checkpoint(place)
        engine.load_checkpoint(place, weights_only=True)
        assert_same_bits(state_of(engine)["weights"], model.state_dict())
        assert engine.optimizer_state_dict(ours)["state"] == {}
        fresh_optimizer = adamw(model.parameters())
        copy = make(OddMLP)
        copy.load_state_dict(model.state_dict())
        with engine_for(copy, adamw(copy.parameters()), stage=1) as (fresh, _):
            train(copy, fresh, range(2))
            train(other, engine, range(2))
            assert_same_bits(state_of(engine), state_of(fresh))
        del fresh_optimizer
        engine.close()


def test_buffers_of_a_foreign_file_find_their_place(tmp_path: Path) -> None:
    model = make(NormMLP)
    optimizer = adamw(model.parameters())
    plain_run(range(2), model, optimizer)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "run.pt")
    import_checkpoint(tmp_path / "run.pt", tmp_path / "ck")
    other = make(NormMLP, seed=1)
    with engine_for(other) as (engine, _):
        engine.load_checkpoint(tmp_path / "ck")
        assert_same_bits(engine.full_state_dict(), model.state_dict())


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch trapped",)


def test_nothing_of_a_pickle_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(2)}, "trap": Trap()}, "run.pt")
    with pytest.raises(
        CheckpointError, match=r"run\.pt cannot be read as tensors and plain values"
    ):
        import_checkpoint("run.pt", "ck")
    folder = tmp_path / "ds"
    folder.mkdir()
    torch.save({"module": {}, "trap": Trap()}, folder / "mp_rank_00_model_states.pt")
    optimizer = {"optimizer_state_dict": {"partition_count": 1, "trap": Trap()}}
    torch.save(optimizer, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="no fp32 partitions"):
        import_checkpoint(folder, "ck")
    dcp = tmp_path / "dcp"
    dcp.mkdir()
    (dcp / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="trust=True"):
        import_checkpoint(dcp, "ck")
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "holds a list, wanted a state dict"),
        ({"a": 1, "b": "x"}, "holds 'a', 'b', and no state dict among them"),
    ],
)
def test_other_files_are_named(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "x.pt", tmp_path / "ck")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="neither safetensors, nor DeepSpeed's"):
        import_checkpoint(tmp_path / "empty", tmp_path / "ck")
    with pytest.raises(CheckpointError, match="does not exist"):
        import_checkpoint(tmp_path / "nothing", tmp_path / "ck")


# ------------------------------------------------------------------ FSDP


def fsdp_run(rank: int, size: int, folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make(TinyMLP)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = adamw(model.parameters())
    for step in range(3):
        model(rows(step, rank, size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = get_state_dict(model, optimizer)
    dcp.save({"model": sharded[0], "optim": sharded[1]}, checkpoint_id=str(folder / "fsdp"))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_state_dict(model, optimizer, options=options)
    return full if rank == 0 else None


@pytest.mark.dist
def test_an_fsdp_checkpoint_has_equal_weights_and_moments(tmp_path: Path) -> None:
    preload = (*PRELOAD, "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict")
    weights, optimizer = run_ranks(2, fsdp_run, tmp_path, preload=preload, deadline=90)[0]
    import_checkpoint(tmp_path / "fsdp", tmp_path / "ck", trust=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "fsdp"]
    model = make(TinyMLP, seed=1)
    with engine_for(model, stage=3) as (engine, ours):
        engine.load_checkpoint(tmp_path / "ck")
        assert_same_bits(engine.full_state_dict(), weights)
        found = engine.optimizer_state_dict(ours)["state"]
        for number, (name, _) in enumerate(model.named_parameters()):
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[number][key], optimizer["state"][name][key]), (name, key)
            assert int(found[number]["step"]) == 3


# ------------------------------------------------------------------ DeepSpeed

DEEPSPEED = os.environ.get("ZERO_PLUGIN_DEEPSPEED_PYTHON", sys.executable)
"""A Python with DeepSpeed; docs/checkpoints.md records a run."""

SCRIPT = Path(__file__).with_name("deepspeed_run.py")


def has_deepspeed() -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
    return subprocess.run([DEEPSPEED, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_its_layout_is_read_where_it_is_not_installed(stage: int, tmp_path: Path) -> None:
    wanted = write_deepspeed(tmp_path / "ds", stage, parameters=5, side=9)
    place = import_checkpoint(tmp_path / "ds", tmp_path / "ck")
    (file,) = place.glob("*.safetensors")
    stored = load_file(file)
    for name, entry in wanted.items():
        numel = entry["master"].numel()
        for key, value in entry.items():
            kind = "master" if key == "master" else f"state.{key}"
            assert torch.equal(stored[f"{kind}/{name}[0:{numel}]"], value.flatten()), (name, key)
    index = json.loads((place / "index.json").read_text())
    assert {entry["step"] for entry in index["parameters"].values()} == {4}
    assert {entry["dtype"] for entry in index["parameters"].values()} == {"BF16"}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not has_deepspeed(), reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deepspeed_checkpoint_has_equal_weights_and_moments(stage: int, tmp_path: Path) -> None:
    from support.ranks import free_port

    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [DEEPSPEED, str(SCRIPT), str(tmp_path / "ds"), str(stage)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "DS_ACCELERATOR": "cpu",
            },
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=280) for process in ranks] == [0, 0]
    check_deepspeed(tmp_path / "ds", tmp_path / "ck")


def check_deepspeed(source: Path, target: Path) -> None:
    import_checkpoint(source, target)
    reference = torch.load(source / "reference.pt", weights_only=True)
    namespace: dict[str, Any] = {"__name__": "net"}
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), namespace)
    model = namespace["Net"]().to(torch.bfloat16)
    optimizer = namespace["make_optimizer"](model)
    with engine_for(model, optimizer, stage=3) as (engine, ours):
        engine.load_checkpoint(target)
        state = engine.optimizer_state_dict(ours)
        number_of = {
            id(p): number
            for number, p in enumerate(p for g in ours.param_groups for p in g["params"])
        }
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            entry = state["state"][number_of[id(parameter)]]
            for key in ("master", "exp_avg", "exp_avg_sq"):
                assert torch.equal(entry[key].float(), reference[name][key].float()), (name, key)
            assert int(entry["step"]) == 3
        assert [group["weight_decay"] for group in ours.param_groups] == [0.1, 0.0]
        weights = engine.full_state_dict()
    for name, value in reference["module"].items():
        assert torch.equal(weights[name].float(), value.float()), name
    assert read_state_dict(target).keys() == weights.keys()
