"""Bit-identity: no stage, placement, backend, thread count, bucket size or instruction set changes a result.

At one process all of them agree, with and without accumulation. At several ranks stage 2 always agrees with itself, and
all stages do without accumulation: with it, stage 2 rounds and reduces every micro-batch and the others their sum.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import gpt_batch
from support.training import (
    Outcome,
    Recipe,
    adamw,
    assert_same_bits,
    assert_same_outcome,
    engine_for,
    flatten,
    ranks,
    snapshot,
    train,
    train_plain,
)
from torch import Tensor

from zero_plugin.kernels import available_isas

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PLACEMENTS = [
    {"stage": stage, "optimizer": optimizer, "gradients": gradients}
    for stage, optimizer, gradients in itertools.product(
        (0, 1, 2), ("device", "host"), ("device", "host")
    )
]
# Turned over the placements, so that every value meets several of them.
BACKENDS = ("inline", "threads", "chaos")
THREADS = (1, 2, 4)
BUCKETS = (256, 4096, "32MiB")


def variations() -> list[dict[str, Any]]:
    """Every placement, with backends, threads, bucket sizes and instruction sets in turn."""
    isas = available_isas()
    return [
        {
            **placement,
            "backend": BACKENDS[number % 3],
            "threads": THREADS[(number // 3 + number) % 3],
            "bucket_bytes": BUCKETS[(number // 2) % 3],
            "instruction_set": isas[number % len(isas)],
            "backend_seed": number,
        }
        for number, placement in enumerate(PLACEMENTS)
    ]


def first_difference(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def test_variations_meet_every_value() -> None:
    chosen = variations()
    for name, values in (
        ("backend", BACKENDS),
        ("threads", THREADS),
        ("bucket_bytes", BUCKETS),
        ("instruction_set", available_isas()),
    ):
        assert {item[name] for item in chosen} == set(values)
    assert "scalar" in available_isas() or len(available_isas()) > 1


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_one_process_has_one_result(dtype: str, clip: float | None, accumulate: int) -> None:
    recipe = Recipe(
        steps=20 if accumulate == 1 else 7,
        clip=clip,
        accumulate=accumulate,
        dtype=DTYPES[dtype],
        width=12,
        layers=1,
    )
    scale: dict[str, Any] = {"loss_scale": 1024.0} if dtype == "fp16" else {}
    expected = train(recipe, backend="inline", **scale)
    assert expected.skipped == 0
    if clip is not None:
        assert all(norm > clip for norm in expected.norms), "nothing was clipped"
    for settings in variations():
        outcome = train(recipe, **settings, **scale)
        assert_same_outcome(outcome, expected, first_difference(settings))


def test_a_gpt_of_fifty_thousand_parameters_has_one_result_and_torchs_losses() -> None:
    recipe = Recipe(steps=20, clip=1.0)
    assert 45_000 < sum(p.numel() for p in recipe.model().parameters()) < 60_000
    expected = train(recipe, stage=0, optimizer="device", gradients="device", backend="inline")
    for settings in (
        {"stage": 2, "backend": "threads", "threads": 4, "bucket_bytes": "64KiB"},
        {"stage": 1, "backend": "chaos", "bucket_bytes": "1MiB", "optimizer": "device"},
        {"stage": 2, "overlap": False, "gradients": "device"},
    ):
        assert_same_outcome(train(recipe, **settings), expected, first_difference(settings))
    plain = train_plain(recipe)
    assert_close_losses(expected, plain)
    norms = torch.stack(expected.norms), torch.stack(plain.norms)
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_of_plain_torch(accumulate: int) -> None:
    recipe = Recipe(steps=20, width=12, layers=1, accumulate=accumulate, clip=0.5)
    assert_close_losses(train(recipe), train_plain(recipe))


def assert_close_losses(one: Outcome, other: Outcome) -> None:
    """Twenty steps within 1e-5; and the run did learn, so that they say something."""
    a, b = torch.stack(one.losses), torch.stack(other.losses)
    assert a[-1] < a[0]
    assert (a - b).abs().max().item() <= 1e-5


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "SGD", "Lion"])
def test_the_other_compiled_optimizers(name: str) -> None:
    from zero_plugin import Lion

    def build(parameters: Any) -> torch.optim.Optimizer:
        if name == "Lion":
            return Lion(parameters, lr=1e-3, weight_decay=0.1)
        if name == "SGD":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)
        return getattr(torch.optim, name)(parameters, lr=3e-3, weight_decay=0.1)

    recipe = Recipe(steps=6, width=12, layers=1, optimizer=build, dtype=torch.bfloat16, clip=1.0)
    expected = train(recipe, backend="inline")
    for settings in variations()[::3]:
        assert_same_outcome(train(recipe, **settings), expected, first_difference(settings))


def test_seeds_of_chaos_change_nothing() -> None:
    recipe = Recipe(steps=3, width=12, layers=1, accumulate=2, clip=0.5, dtype=torch.bfloat16)
    expected = train(recipe, backend="inline")
    for seed in range(8):
        outcome = train(recipe, backend="chaos", backend_seed=seed, bucket_bytes=1024)
        assert_same_outcome(outcome, expected, f"seed {seed}")


# Several ranks ------------------------------------------------------------------------------------------------------


def run_variations(
    rank: int, size: int, recipe: Recipe, variations: list[dict[str, Any]]
) -> list[Outcome]:
    """In a rank: the recipe under every setting; states stay behind where they are large."""
    return [train(recipe, rank=rank, **settings) for settings in variations]


def rank_variations(*, stages: tuple[int, ...]) -> list[dict[str, Any]]:
    chosen = [item for item in variations() if item["stage"] in stages]
    # Two threads a lane on every rank would only fight for the machine's cores.
    return [{**item, "threads": 1 + (number == 0)} for number, item in enumerate(chosen)]


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_stages_agree_on_several_ranks(size: int, dtype: str) -> None:
    recipe = Recipe(steps=4, width=12, layers=1, clip=0.5, dtype=DTYPES[dtype])
    settings = rank_variations(stages=(0, 1, 2))[:: 1 if size == 2 else 2]
    assert {item["stage"] for item in settings} == {0, 1, 2}
    results = ranks(size, run_variations, recipe, settings, deadline=100.0)
    expected = results[0][0]
    for number, chosen in enumerate(settings):
        assert_same_outcome(results[0][number], expected, first_difference(chosen))
    assert_ranks_agree(results)


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_accumulation_on_several_ranks(size: int) -> None:
    recipe = Recipe(steps=4, width=12, layers=1, clip=0.5, accumulate=3, dtype=torch.bfloat16)
    settings = rank_variations(stages=(2,)) + rank_variations(stages=(0, 1))[::2]
    results = ranks(size, run_variations, recipe, settings, deadline=100.0)
    for stages in ((2,), (0, 1)):
        same = [n for n, chosen in enumerate(settings) if chosen["stage"] in stages]
        for number in same:
            what = first_difference(settings[number])
            assert_same_outcome(results[0][number], results[0][same[0]], what)
    assert_ranks_agree(results)


def assert_ranks_agree(results: list[list[Outcome]]) -> None:
    """Weights, norms and states are the same on every rank; losses, of other data, are not."""
    for others in results[1:]:
        for mine, theirs in zip(results[0], others, strict=True):
            assert_same_bits(mine.weights, theirs.weights, "weights")
            assert_same_bits(mine.norms, theirs.norms, "norms")
            assert_same_bits(mine.state, theirs.state, "state")
            assert not torch.equal(torch.stack(mine.losses), torch.stack(theirs.losses))


# Against DistributedDataParallel --------------------------------------------------------------------------------------


def run_beside_ddp(rank: int, size: int, recipe: Recipe) -> tuple[Outcome, Outcome]:
    """In a rank: the same run under the engine and under DDP."""
    ours = train(recipe, rank=rank)
    plain = train_plain(recipe, rank=rank, wrap=torch.nn.parallel.DistributedDataParallel)
    return ours, plain


@pytest.mark.dist
@pytest.mark.parametrize(("size", "accumulate"), [(2, 1), (2, 3), (3, 1)])
def test_losses_of_ddp(size: int, accumulate: int) -> None:
    recipe = Recipe(steps=20, width=12, layers=1, clip=0.5, accumulate=accumulate)
    for ours, plain in ranks(size, run_beside_ddp, recipe, deadline=90.0):
        assert_close_losses(ours, plain)
        norms = torch.stack(ours.norms), torch.stack(plain.norms)
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0.0)


def gradients_beside_ddp(
    rank: int, size: int, recipe: Recipe
) -> list[dict[str, tuple[Tensor, Tensor, Tensor]]]:
    """In a rank, from the same weights each step: our averaged gradient, DDP's, and the mean of local magnitudes."""
    model, twin, alone = recipe.model(), recipe.model(), recipe.model()
    ddp = torch.nn.parallel.DistributedDataParallel(twin)
    found: list[dict[str, tuple[Tensor, Tensor, Tensor]]] = []
    with engine_for(model) as (engine, optimizer):
        for step in range(recipe.steps):
            tokens = gpt_batch(step, rank=rank)
            for other in (twin, alone):
                other.load_state_dict(model.state_dict())
                other.zero_grad()
            engine.backward(model(tokens))
            ddp(tokens).backward()
            alone(tokens).backward()
            with engine.full_grads():
                row: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
                for (name, ours), (_, theirs), (_, local) in zip(
                    model.named_parameters(),
                    twin.named_parameters(),
                    alone.named_parameters(),
                    strict=True,
                ):
                    assert ours.grad is not None
                    assert theirs.grad is not None
                    assert local.grad is not None
                    magnitude = local.grad.abs().double()
                    torch.distributed.all_reduce(magnitude)
                    row[name] = (ours.grad.clone(), theirs.grad.clone(), magnitude / size)
            found.append(row)
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3, 4])
def test_averaged_gradients_are_ddps_within_the_rounding_of_the_sums(size: int) -> None:
    # With u = 2^-24 and m the mean over ranks of |g_r|. Ours is fl(fl(g_0 + ... + g_(N-1)) / N): at most N - 1
    # roundings of partial sums, each at most N m, and one of the quotient: |ours - mean| <= N u m to first order.
    # DDP multiplies each g_r by fl(1 / N), two roundings relative to g_r / N, and adds in the order of its ring, N - 1
    # roundings of partial sums at most m: |ddp - mean| <= (2 + N - 1) u m. Together (2 N + 1) u m; one u more covers
    # the second order. For N = 2 and 4 every scaling is exact; for N = 2 the sum has one order, so bits are equal.
    results = ranks(size, gradients_beside_ddp, Recipe(steps=4, width=12, layers=1))
    unit = 2.0**-24
    for row in results[0]:
        for name, (ours, theirs, magnitude) in row.items():
            bound = (2 * size + 2) * unit * magnitude
            assert ((ours.double() - theirs.double()).abs() <= bound).all(), name
            if size == 2:
                assert torch.equal(ours, theirs), name


def steps_beside_ddp(rank: int, size: int, steps: int) -> list[dict[str, tuple[Tensor, ...]]]:
    """In a rank, from the same weights *and optimizer state* each step: (before, ours, DDP's) of every weight."""
    recipe = Recipe(width=12, layers=1)
    model, twin = recipe.model(), recipe.model()
    ddp = torch.nn.parallel.DistributedDataParallel(twin)
    other = adamw(twin.parameters())
    found: list[dict[str, tuple[Tensor, ...]]] = []
    with engine_for(model) as (engine, optimizer):
        for step in range(steps):
            tokens = gpt_batch(step, rank=rank)
            before = snapshot(model)
            twin.load_state_dict(before)
            other.load_state_dict(optimizer.state_dict())
            engine.backward(model(tokens))
            ddp(tokens).backward()
            optimizer.step()
            other.step()
            optimizer.zero_grad()
            other.zero_grad()
            theirs = snapshot(twin)
            found.append({n: (before[n], w, theirs[n]) for n, w in snapshot(model).items()})
    return found


@pytest.mark.dist
def test_each_step_is_ddps_within_one_ulp_of_the_weight_and_eight_of_the_update() -> None:
    # At two ranks the averaged gradients have equal bits (above), so a step from one state differs only by the
    # rounding inside the update: the bound, one ulp of the weight plus eight ulps of the update. (The state
    # is set back to ours each step: over a trajectory the model's curvature, and Adam's division by a
    # gradient that is mathematically zero, amplify any last bit, so no bound on the sum of steps would mean anything.)
    results = ranks(2, steps_beside_ddp, 20)
    for row in results[0]:
        for name, (before, ours, theirs) in row.items():
            update = (theirs - before).abs().double()
            ulp = torch.finfo(torch.float32).eps
            bound = ulp * theirs.abs().double() + 8 * ulp * update
            assert ((ours.double() - theirs.double()).abs() <= bound).all(), name


def test_flatten_names_what_differs() -> None:
    # The comparison above must be able to fail.
    one = {"a": [torch.zeros(2), 1.0]}
    assert list(flatten(one)) == [".a[0]", ".a[1]"]
    for other in ({"a": [-torch.zeros(2), 1.0]}, {"a": [torch.zeros(2), 2.0]}, {"b": []}):
        with pytest.raises(AssertionError):
            assert_same_bits(one, other)
    short = train(Recipe(steps=2, width=12, layers=1))
    longer = train(replace(Recipe(steps=2, width=12, layers=1), clip=0.1))
    with pytest.raises(AssertionError):
        assert_same_outcome(short, longer)
