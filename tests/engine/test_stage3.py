"""Stage 3: sharded weights give the bits of stage 0 at one process and of stage 2 at several, and bounded memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.models import gpt_batch, make_gpt
from support.training import (
    Recipe,
    adamw,
    assert_same_bits,
    assert_same_outcome,
    engine_for,
    ranks,
    snapshot,
    train,
)
from torch import nn

from zero_plugin.errors import ConfigError

BACKENDS = ("inline", "threads", "chaos")
PLACEMENTS = [
    {"stage": 3, "params": params, "optimizer": optimizer, "gradients": gradients}
    for params, optimizer, gradients in itertools.product(("device", "host"), repeat=3)
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def variations(count: int = len(PLACEMENTS)) -> list[dict[str, Any]]:
    return [
        {
            **PLACEMENTS[number % len(PLACEMENTS)],
            "backend": BACKENDS[number % 3],
            "bucket_bytes": (256, 4096, "32MiB")[(number // 2) % 3],
            "prefetch_units": (1, 0, 2, 3)[number % 4],
            "persist_below": (0, 50)[number % 2],
            "backend_seed": number,
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_one_process_has_the_bits_of_stage_0(
    dtype: str, clip: float | None, accumulate: int
) -> None:
    recipe = Recipe(
        steps=20 if accumulate == 1 else 7,
        clip=clip,
        accumulate=accumulate,
        dtype=DTYPES[dtype],
        width=12,
    )
    expected = train(recipe, stage=0, backend="inline")
    for settings in variations():
        assert_same_outcome(train(recipe, **settings), expected, str(settings))


def hugging_face(kind: str, checkpoint: str) -> Any:
    """A small Llama, or a small GPT-2 with its tied head; no dropout."""
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        options: dict[str, Any] = {"n_positions": 16, "n_embd": 24, "n_layer": 3, "n_head": 2}
        dropout: dict[str, Any] = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        model: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=67, bos_token_id=0, eos_token_id=0, **options, **dropout
            )
        )
        assert model.lm_head.weight is model.transformer.wte.weight
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=67,
                hidden_size=24,
                intermediate_size=56,
                num_hidden_layers=3,
                num_attention_heads=2,
                num_key_value_heads=1,
            )
        )
    model.train()
    if checkpoint != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    return model


def train_hugging_face(kind: str, checkpoint: str, steps: int, **settings: Any) -> dict[str, Any]:
    model = hugging_face(kind, checkpoint)
    losses: list[float] = []
    with engine_for(model, **settings) as (engine, optimizer):
        for step in range(steps):
            for micro in range(2):
                tokens = gpt_batch(2 * step + micro)
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                engine.backward(loss)
                losses.append(loss.item())
            engine.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        with engine.full_params():
            weights = snapshot(model)
        sharded = engine._sharded
        peak = sharded.gatherer.peak_bytes if sharded else 0
    return {"losses": losses, "weights": weights, "peak": peak}


@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_have_the_bits_of_stage_0(kind: str, checkpoint: str) -> None:
    steps = 20 if checkpoint == "none" else 8
    expected = train_hugging_face(kind, checkpoint, steps, stage=0, backend="inline")
    for settings in variations(4):
        found = train_hugging_face(kind, checkpoint, steps, **settings)
        for key in ("losses", "weights"):
            assert_same_bits(found[key], expected[key], f"{settings} {key}")


@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_gathered_weights_are_bounded(kind: str, checkpoint: str, depth: int) -> None:
    model = hugging_face(kind, checkpoint)
    with engine_for(model, stage=3, params="host", prefetch_units=depth) as (engine, optimizer):
        sharded: Any = engine._sharded
        gatherer = sharded.gatherer
        for step in range(5):
            tokens = gpt_batch(step)
            engine.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)
            assert gatherer.gathered_bytes == 0
            optimizer.step()
            optimizer.zero_grad()
        # Nothing of these models' roots stays gathered through the forward: embeddings and heads are units of their own.
        assert 0 < gatherer.peak_bytes <= (depth + 1) * gatherer.largest_unit_bytes
        assert gatherer.largest_unit_bytes < sum(p.numel() * 4 for p in model.parameters()) / 2


def rank_outcome(rank: int, size: int, recipe: Recipe, settings: dict[str, Any]) -> Any:
    return train(recipe, rank=rank, **settings)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_several_ranks_have_the_bits_of_stage_2(size: int, dtype: str) -> None:
    recipe = Recipe(steps=6, accumulate=2, clip=0.5, dtype=DTYPES[dtype], width=12, batch=1)
    expected = ranks(size, rank_outcome, recipe, {"stage": 2, "backend": "threads"})
    for number in {2: (1, 3, 4), 3: (2,), 4: (7,)}[size]:
        settings = variations()[number]
        found = ranks(size, rank_outcome, recipe, settings)
        for one, other in zip(found, expected, strict=True):
            assert_same_outcome(one, other, str(settings))


LEARNING = 3
"""Steps after which the order of units is known; before, a wrong guess may gather a unit for nothing."""


def counted(rank: int, size: int, steps: int) -> dict[str, Any]:
    model = make_gpt(width=16, layers=3)
    before: Any = None
    with engine_for(model, stage=3, params="host", prefetch_units=1) as (engine, optimizer):
        for step in range(LEARNING + steps):
            if step == LEARNING:
                before = engine.ledger()
            engine.backward(model(gpt_batch(step, rank=rank)))
            optimizer.step()
            optimizer.zero_grad()
        after = engine.ledger()
        sharded: Any = engine._sharded
        units = [
            (unit.name, sum(block.layout.shards * block.chunk for block in unit.blocks))
            for unit in sharded.units
        ]
    return {"moved": {key: after[key] - before[key] for key in after}, "units": units}


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_collective_bytes_are_at_most_three_times_the_parameters(size: int) -> None:
    """One gather a use: forward, and backward where autograd saved the weight. A first and a last use in a row share one."""
    steps = 4
    for found in ranks(size, counted, steps):
        sizes = dict(found["units"])
        padded = sum(sizes.values())
        blocks = sum(count for name, count in sizes.items() if name.startswith("blocks"))
        share = 4 * (size - 1) / size
        moved = found["moved"]
        assert moved["reduce_scatter"] == steps * padded * share
        # The tied embedding is gathered for the head again; neither embedding's weight is needed for its own gradient.
        # The final norm and the blocks are gathered in forward and in backward.
        twice = blocks + sizes["norm"]
        expected = twice * 2 + sizes["tokens"] * 2 + sizes["places"]
        assert moved["all_gather"] == steps * expected * share
        assert moved["reduce_scatter"] + moved["all_gather"] <= 3 * steps * padded * share
        assert moved["host_to_device"] >= steps * expected * 4 // size


def test_stage_3_settings_are_checked() -> None:
    model = nn.Linear(4, 4)
    for settings in (
        {"stage": 2, "params": "host"},
        {"stage": 2, "persist_below": 3},
        {"stage": 3, "prefetch_units": -1},
        {"stage": 3, "prefetch_bytes": "many"},
        {"stage": 3, "max_unit_bytes": "much"},
        {"stage": 2, "max_unit_bytes": "1GiB"},
        {"stage": 3, "debug_poison": 1},
        {"stage": 2, "debug_poison": True},
    ):
        with pytest.raises(ConfigError, match=list(settings)[-1]), engine_for(model, **settings):
            pass


def test_memory_says_where_the_weights_are() -> None:
    model = make_gpt(torch.bfloat16)
    psi = sum(p.numel() for p in model.parameters())
    with engine_for(model, adamw(model.parameters()), stage=3, params="host") as (engine, _):
        memory = engine.memory()
        sharded: Any = engine._sharded
        padded = sum(b.chunk for unit in sharded.units for b in unit.blocks)
        assert psi <= padded <= psi + 16 * 40
        assert memory["device"]["params"] == 0
        assert memory["host"]["params"] == 2 * padded
        assert memory["host"]["master"] == 4 * padded
        with engine.full_params():
            assert engine.memory()["device"]["params"] == 2 * psi
    assert snapshot(model).keys() == make_gpt().state_dict().keys()


def test_split_units_have_the_bits_of_stage_0_and_bound_what_is_gathered() -> None:
    recipe = Recipe(steps=4, width=12, accumulate=2, clip=0.5)
    expected = train(recipe, stage=0)
    settings: dict[str, Any] = {"stage": 3, "params": "host", "max_unit_bytes": 4000}
    assert_same_outcome(train(recipe, **settings), expected)
    model = recipe.model()
    with engine_for(model, **settings) as (engine, optimizer):
        sharded: Any = engine._sharded
        for step in range(3):
            engine.backward(model(gpt_batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        assert sharded.gatherer.largest_unit_bytes <= 4000
        assert sharded.gatherer.peak_bytes <= 2 * 4000


@pytest.mark.dist
def test_split_units_at_two_processes() -> None:
    recipe = Recipe(steps=3, width=12)
    expected = ranks(2, rank_outcome, recipe, {"stage": 2})
    found = ranks(2, rank_outcome, recipe, {"stage": 3, "max_unit_bytes": 4000})
    for one, other in zip(found, expected, strict=True):
        assert_same_outcome(one, other)


class _Counted(dict[int, Any]):
    """The units that are here; counts how many are looked at."""

    looked_at = 0

    def values(self) -> Any:
        self.looked_at += len(self)
        return super().values()


class _Uncounted(list[Any]):
    """All units; going through them is not for every call."""

    def __iter__(self) -> Any:
        raise AssertionError("went through every unit of the model")


def test_what_a_unit_costs_does_not_depend_on_how_many_there_are() -> None:
    looked_at: list[int] = []
    here = _Counted()
    for layers in (4, 12):
        model = make_gpt(width=12, layers=layers)
        with engine_for(model, adamw(model.parameters()), stage=3) as (engine, optimizer):
            sharded: Any = engine._sharded
            gatherer = sharded.gatherer
            for step in range(5):
                if step == 3:
                    here = gatherer._here._units = _Counted(gatherer._here._units)
                    gatherer.units = _Uncounted(gatherer.units)
                engine.backward(model(gpt_batch(step)))
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model(gpt_batch(step))
            looked_at.append(here.looked_at)
            gatherer.units = list.copy(gatherer.units)
    small, large = looked_at
    assert 0 < large < 3 * small
