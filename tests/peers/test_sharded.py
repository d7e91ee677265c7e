"""Reports about sharded parameters: memory at the start, branches that differ, weights loaded by other libraries.

The number in a name or docstring is the case's number in docs/differences.md; cases that are not here are covered by
the tests named there.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lightning_runs import PRELOAD, make_trainer
from support.lightning_runs import ranks as lightning_ranks
from support.models import BranchMLP, TinyMLP, features, make, mlp_loss
from support.training import adamw, assert_same_bits, engine_for, exact_sgd, ranks, snapshot
from torch import nn

import zero_plugin
from zero_plugin import ZeroConfig
from zero_plugin.errors import BudgetError


def test_14_a_device_smaller_than_the_model() -> None:
    """14: with stage 3 and offload the whole model still went to the device at the start.

    Built in shards, it never lies there whole: units come and go under a limit of half its bytes.
    """
    width, layers = 64, 12
    nbytes = 4 * layers * width * (width + 1)
    settings: dict[str, Any] = {"stage": 3, "params": "host", "device_limit": nbytes // 2}
    with zero_plugin.init_context(ZeroConfig(threads=1, **settings)):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    with engine_for(model, adamw(model.parameters()), **settings) as (engine, optimizer):
        for _ in range(2):
            engine.backward(model(torch.ones(2, width)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            assert sum(engine.memory()["device"].values()) <= nbytes // 2
        sharded: Any = engine._sharded
        assert sharded.gatherer.peak_bytes <= nbytes // 2
    plain = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    with pytest.raises(BudgetError, match="device_limit"):
        engine_for(plain, adamw(plain.parameters()), **settings).__enter__()


def other_branch(rank: int, size: int, stage: int) -> Any:
    """Every rank trains the expert of its own number."""
    model = make(BranchMLP)
    with engine_for(model, exact_sgd(model.parameters()), stage=stage) as (engine, optimizer):
        for step in range(3):
            engine.backward(mlp_loss(model, step, rank, rank=rank))
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(model)


@pytest.mark.dist
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_29_ranks_in_other_branches_train_where_weights_are_whole(stage: int) -> None:
    """29: at stages 1 and 2 the connection was reset. An absent gradient counts as zero.

    (At stage 3 it hung; here it is an error that names both: tests/engine/test_stage3_ranks.py.)
    """
    plain = make(BranchMLP)
    optimizer = exact_sgd(plain.parameters())
    for step in range(3):
        for rank in range(2):
            (mlp_loss(plain, step, rank, rank=rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in ranks(2, other_branch, stage):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6)


def evaluates_and_trains(rank: int, size: int) -> Any:
    model = make(TinyMLP)
    counts = (3, 7)
    outputs: list[torch.Tensor] = []
    with engine_for(model, exact_sgd(model.parameters()), stage=3) as (engine, optimizer):
        for step in range(3):
            with torch.no_grad(), engine.full_params():
                outputs = [model(features(number)) for number in range(counts[rank])]
            engine.backward(mlp_loss(model, step, rank=rank))
            optimizer.step()
            optimizer.zero_grad()
        with engine.full_params():
            return snapshot(model), outputs[0]


@pytest.mark.dist
def test_31_and_32_ranks_that_evaluate_other_numbers_of_batches() -> None:
    """31: generation that stops early on one rank hung. 32: so did what followed an uneven validation."""
    first, second = ranks(2, evaluates_and_trains)
    assert_same_bits(first[0], second[0])
    assert torch.equal(first[1], second[1])


def tuned(rank: int, size: int, folder: str, name: str, in_shards: bool) -> dict[str, Any]:
    import lightning.pytorch as pl
    import transformers

    transformers.utils.logging.disable_progress_bar()

    class Tuned(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network: Any = None

        def configure_model(self) -> None:
            if self.network is not None:
                return
            with (
                zero_plugin.init_context(ZeroConfig(stage=3))
                if in_shards
                else contextlib.nullcontext()
            ):
                self.network = transformers.GPT2LMHeadModel.from_pretrained(folder)
            self.network.train()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.network(input_ids=batch[0], labels=batch[0]).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.125)

    trainer = make_trainer(pl, name, size, max_steps=2)
    tokens = torch.randint(0, 33, (8, 8), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(tokens)
    module = Tuned()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_55_from_pretrained_inside_configure_model(size: int, tmp_path: Path) -> None:
    """55: loading a pretrained model there failed with weights of size 0. In and outside of `init_context`."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 33, "n_positions": 8, "n_embd": 12, "n_layer": 2}
    options: dict[str, Any] = {"n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    tokens: dict[str, Any] = {"attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    start: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **options, **tokens))
    start.save_pretrained(tmp_path)
    folder = str(tmp_path)
    preload = (*PRELOAD, "transformers.models.gpt2.modeling_gpt2")
    expected = lightning_ranks(size, tuned, folder, "zero_2", False, preload=preload)[0]
    assert not torch.equal(expected["network.transformer.wpe.weight"], start.transformer.wpe.weight)
    for in_shards in (False, True):
        for found in lightning_ranks(size, tuned, folder, "zero_3", in_shards, preload=preload):
            assert_same_bits(found, expected)
