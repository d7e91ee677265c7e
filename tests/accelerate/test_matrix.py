"""One script under plain DDP and under us: every shape at every stage and placement, and resumed from its own checkpoint.

A launch runs the script once on stock Accelerate, and then once for each placement. `--placements all` tries every placement with
every shape; without it each placement meets one shape at two processes, and half of them meet one at one.
"""

from __future__ import annotations

import gc
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.accelerate_runs import accelerator_for, sgd
from support.trainer_runs import (
    MODELS,
    Run,
    assert_same,
    bound_of_norms,
    examples,
    labelled,
    minilm,
    plain_process,
    ranks,
)

TIERS = ("device", "host", "nvme")
PLACEMENTS: list[dict[str, Any]] = [
    *(
        {"stage": stage, "optimizer": optimizer, "gradients": gradients}
        for stage, optimizer, gradients in itertools.product((1, 2), TIERS, TIERS)
    ),
    *(
        {"stage": 3, "params": params, "optimizer": optimizer, "gradients": gradients}
        for params, optimizer, gradients in itertools.product(TIERS, repeat=3)
    ),
]
SHAPES = (*MODELS, "minilm")
STEPS, SAVED_AFTER = 4, 2


def drawn(shape: str, size: int, *, everything: bool) -> list[dict[str, Any]]:
    """The placements that a shape meets: all, or its share of a deck that is shuffled with a fixed seed.

    MiniLM, whose runs take seconds, gets two of its own.
    """
    if everything:
        return PLACEMENTS
    deck = list(PLACEMENTS)
    random.Random(size).shuffle(deck)
    deck = deck if size == 2 else deck[::2]
    if shape == "minilm":
        return [item for item in deck if item["stage"] != 3][:1] + [
            item for item in deck if item["stage"] == 3 and "nvme" in item.values()
        ][:1]
    return deck[SHAPES.index(shape) :: len(MODELS)]


def test_every_placement_meets_a_shape_at_each_size() -> None:
    assert len(PLACEMENTS) == 45
    one, two = (
        [str(item) for shape in MODELS for item in drawn(shape, size, everything=False)]
        for size in (1, 2)
    )
    assert sorted(two) == sorted(map(str, PLACEMENTS))
    assert len(one) == len(set(one)) == 23
    assert all(len(drawn("minilm", size, everything=False)) == 2 for size in (1, 2))


def script(
    name: str, settings: dict[str, Any] | None, folder: Path, *, resume: bool = False
) -> tuple[Run, list[float]]:
    """Train, evaluate, save and go on, or resume; also the exact norm of the gradients of a stock run."""
    run, exact = Run(), []
    real = name == "minilm"
    with accelerator_for(settings) as accelerator:
        torch.manual_seed(7 if resume else 0)
        model = minilm() if real else MODELS[name]()
        run.norm_bound = bound_of_norms(model)
        data = labelled if real else examples
        optimizer = sgd(model.parameters(), lr=2.0**-10 if real else 2.0**-4)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        count = STEPS * 2 * accelerator.num_processes
        loaders = [
            torch.utils.data.DataLoader(data(number, seed=seed), batch_size=2)  # pyright: ignore[reportArgumentType]
            for number, seed in ((count, 0), (4, 1))
        ]
        model, optimizer, schedule, loader, held_out = accelerator.prepare(
            model, optimizer, schedule, *loaders
        )
        if resume:
            accelerator.load_state(str(folder))
            loader = accelerator.skip_first_batches(loader, SAVED_AFTER)
        for step, batch in enumerate(loader, SAVED_AFTER if resume else 0):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if settings is None:
                squares = [
                    p.grad.double().square().sum() for p in model.parameters() if p.grad is not None
                ]
                exact.append(float(torch.stack(squares).sum().sqrt()))
            norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.logs.append(
                {
                    "loss": float(accelerator.gather(loss.detach().reshape(1)).mean()),
                    "grad_norm": float(norm),
                    "learning_rate": schedule.get_last_lr()[0],
                }
            )
            if step + 1 == SAVED_AFTER:
                accelerator.save_state(str(folder))
        model.eval()
        with torch.no_grad():
            found = [accelerator.gather(model(**batch).loss.reshape(1)) for batch in held_out]
        run.logs.append({"eval_loss": float(torch.cat(found).mean())})
        state = accelerator.get_state_dict(model)
        run.weights = {key.removeprefix("module."): value.clone() for key, value in state.items()}
    return run, exact


def compared(rank: int, _size: int, folder: Path, name: str, placements: list[Any]) -> None:
    plain_process()
    stock, exact = script(name, None, folder / "stock")
    assert stock.weights
    for number, placement in enumerate(placements):
        settings = {**placement, "bucket_bytes": "8MiB" if name == "minilm" else 4096}
        if "nvme" in placement.values():
            settings["nvme_path"] = str(folder / "nvme")
            settings["nvme_buffer_bytes"] = "128MiB" if name == "minilm" else "1MiB"
        place = folder / str(number)
        ours, _ = script(name, settings, place)
        again, _ = script(name, settings, place, resume=True)
        try:
            assert_same(stock, ours)
            # Ours is the exact norm of the same gradients, rounded once.
            norms = [entry["grad_norm"] for entry in ours.logs if "grad_norm" in entry]
            assert norms == pytest.approx(exact, rel=2.0**-23, abs=0)
            assert again.logs == ours.logs[SAVED_AFTER:]
            assert again.weights.keys() == ours.weights.keys()
            for key, value in again.weights.items():
                assert torch.equal(value, ours.weights[key]), key
        except AssertionError as error:
            raise AssertionError(f"{name} on rank {rank} at {placement}: {error}") from error
    gc.collect()  # an optimizer keeps its states after `free_memory`, and with them their file


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_script_has_the_numbers_of_plain_ddp(
    tmp_path: Path, shape: str, size: int, every_placement: bool
) -> None:
    placements = drawn(shape, size, everything=every_placement)
    (tmp_path / "nvme").mkdir()
    ranks(
        size, compared, tmp_path, shape, placements, deadline=3500.0 if every_placement else 300.0
    )
    left = [item for item in (tmp_path / "nvme").rglob("*") if item.is_file()]
    assert all(item.stat().st_size <= 4096 for item in left)
