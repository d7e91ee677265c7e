"""Ranks that do different things, against an oracle that plays all ranks in plain torch, bit for bit.

The oracle takes each rank's gradient of each backward alone, adds them in rank order in fp32, divides, adds up the
backwards in order, and steps torch's optimizer. A rank without a gradient counts as zero where another has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import BranchMLP, NormMLP, OddMLP, TinyMLP, mlp_loss
from support.training import (
    assert_same_bits,
    engine_for,
    exact_sgd,
    ranks,
    snapshot,
)
from torch import Tensor, nn

from zero_plugin.engine import ZeroEngine
from zero_plugin.errors import CollectiveMismatchError, LaneError, NonFiniteGradientError

pytestmark = pytest.mark.dist

Losses = Callable[[nn.Module, int, int, int], list[Tensor]]
"""(model, step, rank, size) -> the losses of one rank's backwards in one step."""

SETTINGS: tuple[dict[str, Any], ...] = (
    {"bucket_bytes": 256},
    {"stage": 1, "optimizer": "device", "backend": "chaos", "bucket_bytes": 512},
    {"stage": 0, "gradients": "device", "backend": "inline"},
)


FEW_BLOCKS: tuple[dict[str, Any], ...] = (
    {"bucket_bytes": 4096},
    {"stage": 1, "optimizer": "device", "backend": "chaos", "bucket_bytes": 4096},
    {"stage": 0, "gradients": "device", "backend": "threads", "bucket_bytes": 4096},
)
"""Blocks that fit the two bucket buffers together, so that no backward waits for another rank."""

MANY_BLOCKS: tuple[dict[str, Any], ...] = tuple(
    {**item, "bucket_bytes": 256, "timeout_seconds": 6.0} for item in FEW_BLOCKS
)
"""More blocks than buffers: a rank waits in its backward for ranks that run none."""

UNEVEN = pytest.mark.parametrize("blocks", ["FEW_BLOCKS", "MANY_BLOCKS"])


class Oracle:
    """All ranks, played in one process.

    Args:
        model: a twin of the model.
        optimizer: its optimizer.
        deferred: local sums are reduced once a step (`no_sync` at stages 0 and 1), not every backward.
    """

    def __init__(self, model: nn.Module, optimizer: Any, *, deferred: bool = False) -> None:
        self.model = model
        self.optimizer = optimizer
        self.deferred = deferred

    def step(self, losses: Losses, step: int, size: int) -> None:
        """One optimizer step of `size` ranks."""
        rounds = [self._local(losses, step, rank, size) for rank in range(size)]
        for parameter in self.model.parameters():
            parameter.grad = self._total(parameter, rounds, size)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def _local(self, losses: Losses, step: int, rank: int, size: int) -> list[dict[int, Tensor]]:
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        found: list[dict[int, Tensor]] = []
        for loss in losses(self.model, step, rank, size):
            self.model.zero_grad()
            loss.backward()
            grads = {id(p): p.grad.clone() for p in self.model.parameters() if p.grad is not None}
            if self.deferred and found:
                for key, grad in grads.items():
                    found[0][key] = found[0][key] + grad if key in found[0] else grad
            else:
                found.append(grads)
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return found

    def _total(self, parameter: nn.Parameter, rounds: list[Any], size: int) -> Tensor | None:
        total: Tensor | None = None
        for number in range(max(map(len, rounds), default=0)):
            parts = [
                local[number].get(id(parameter)) if number < len(local) else None
                for local in rounds
            ]
            if all(part is None for part in parts):
                continue
            mean = torch.zeros_like(parameter)
            for part in parts:
                mean = mean + (torch.zeros_like(parameter) if part is None else part)
            mean = mean / size
            total = mean if total is None else total + mean
        return total


def compare(
    rank: int,
    size: int,
    factory: Callable[[], nn.Module],
    losses: Losses,
    settings: dict[str, Any],
    steps: int,
    make_optimizer: Callable[..., Any] = exact_sgd,
) -> dict[str, Tensor]:
    """In a rank: train under the engine beside the oracle; raises at the first step that differs."""
    settings = dict(settings)
    deferred = settings.pop("deferred", False)
    torch.manual_seed(0)
    twin = factory()
    torch.manual_seed(0 if rank == 0 else 17 + rank)
    model = factory()
    optimizer = make_optimizer(model.parameters())
    oracle = Oracle(twin, make_optimizer(twin.parameters()), deferred=deferred)
    with engine_for(model, optimizer, broadcast_buffers=False, **settings) as (engine, _):
        assert_same_bits(snapshot(model), snapshot(twin), "rank 0's weights at the start: ")
        for step in range(steps):
            for loss in losses(model, step, rank, size):
                if deferred:
                    with engine.no_sync():
                        engine.backward(loss)
                else:
                    engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            oracle.step(losses, step, size)
            assert_same_bits(snapshot(model), snapshot(twin), f"step {step}, {settings}: ")
    return snapshot(model)


def compare_all(rank: int, size: int, *args: Any) -> list[dict[str, Tensor]]:
    """In a rank: `compare` under each of the given settings (the third argument)."""
    factory, losses, several, *rest = (
        here(item) if isinstance(item, str) else item for item in args
    )
    return [compare(rank, size, factory, losses, settings, *rest) for settings in several]


def here(name: str) -> Any:
    """Functions travel to ranks by name: a rank loads this file under a name that pickle cannot import."""
    return globals()[name]


def check(size: int, *args: Any) -> None:
    names = (item.__name__ if callable(item) else item for item in args)
    results = ranks(size, compare_all, *names)
    for others in results[1:]:
        assert_same_bits(others, results[0])


# Scenarios ------------------------------------------------------------------------------------------------------------


def one_each(model: nn.Module, step: int, rank: int, size: int) -> list[Tensor]:
    return [mlp_loss(model, step, rank=rank)]


def other_experts(model: nn.Module, step: int, rank: int, size: int) -> list[Tensor]:
    """Ranks use other experts; the third is used by nobody at first and by one rank later; at step 2 nobody runs."""
    if step == 2:
        return []
    chosen = (rank % 2,) if step < 3 else (2,) if rank == 1 else (0, 1)
    return [mlp_loss(model, step, *chosen, rank=rank)]


def other_counts(model: nn.Module, step: int, rank: int, size: int) -> list[Tensor]:
    """Rank r runs (r + step) % 3 backwards, so each runs none at times."""
    count = (rank + step) % 3
    return [mlp_loss(model, 10 * step + micro, micro % 3, rank=rank) for micro in range(count)]


def only_one_rank(model: nn.Module, step: int, rank: int, size: int) -> list[Tensor]:
    return [mlp_loss(model, step, 0, 2, rank=rank)] if rank == step % size else []


@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_frozen_unused_and_zero_sized_parameters(size: int) -> None:
    check(size, OddMLP, one_each, SETTINGS, 3)


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_absent_on_some_ranks_count_as_zero(size: int) -> None:
    check(size, BranchMLP, other_experts, SETTINGS, 5)


@UNEVEN
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_other_numbers_of_backwards(size: int, blocks: str) -> None:
    check(size, BranchMLP, other_counts, here(blocks), 4)


@UNEVEN
def test_one_rank_runs_and_the_others_do_not(blocks: str) -> None:
    check(3, BranchMLP, only_one_rank, here(blocks), 4)


@UNEVEN
@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_sums_locally_and_reduces_once(stage: int, blocks: str) -> None:
    settings = [{**here(blocks)[0], "stage": stage, "deferred": True}]
    check(2, BranchMLP, other_counts, settings, 4)


def test_no_sync_at_stage_2_reduces_every_backward() -> None:
    def in_order(settings: dict[str, Any]) -> list[list[dict[str, Tensor]]]:
        return ranks(2, plain_run, settings)

    assert_same_bits(in_order({"quiet": True}), in_order({"quiet": False}))


def plain_run(rank: int, size: int, settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """In a rank: two micro-batches a step, the first inside `no_sync` when told so."""
    torch.manual_seed(0)
    model = TinyMLP()
    found: list[dict[str, Tensor]] = []
    with engine_for(model, stage=2) as (engine, optimizer):
        for step in range(3):
            if settings["quiet"]:
                with engine.no_sync():
                    engine.backward(mlp_loss(model, 2 * step, rank=rank))
            else:
                engine.backward(mlp_loss(model, 2 * step, rank=rank))
            engine.backward(mlp_loss(model, 2 * step + 1, rank=rank))
            optimizer.step()
            optimizer.zero_grad()
            found.append(snapshot(model))
    return found


def rmsprop(parameters: Any) -> torch.optim.RMSprop:
    return torch.optim.RMSprop(parameters, lr=0.01, momentum=0.9)


def test_an_optimizer_without_a_compiled_rule() -> None:
    check(3, OddMLP, one_each, SETTINGS[:2], 3, rmsprop)


def low_precision_uneven(rank: int, size: int) -> dict[str, Tensor]:
    """In a rank: bf16 at stage 1; rank 0 runs two backwards (the first in no_sync), rank 1 only one."""
    torch.manual_seed(0)
    model = TinyMLP().bfloat16()
    inputs = torch.ones(2, 7, dtype=torch.bfloat16)
    with engine_for(model, stage=1) as (engine, optimizer):
        for _ in range(2):
            if rank == 0:
                with engine.no_sync():
                    engine.backward(model(inputs).sum())
            engine.backward(model(inputs * (rank + 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(model)


def test_uneven_accumulation_of_low_precision_gradients() -> None:
    one, other = ranks(2, low_precision_uneven)
    assert_same_bits(one, other)


def clear_one_optimizer(
    rank: int, size: int, blocks: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """In a rank: rank 0 alone runs a backward; one optimizer is cleared, the other steps."""
    torch.manual_seed(0)
    model, twin = TinyMLP(), TinyMLP()
    twin.load_state_dict(model.state_dict())
    parts = [exact_sgd(model.first.parameters()), exact_sgd(model.second.parameters())]
    other = exact_sgd(twin.second.parameters())
    with engine_for(model, parts, **blocks) as (engine, _):
        if rank == 0:
            engine.backward(mlp_loss(model, 0))
        parts[0].zero_grad()
        norm = engine.clip_grad_norm_(float("inf"), optimizer=parts[1])
        parts[1].step()
    mlp_loss(twin, 0).backward()
    for parameter in twin.second.parameters():
        assert parameter.grad is not None
        parameter.grad /= size
    expected = nn.utils.clip_grad_norm_(twin.second.parameters(), float("inf"))
    other.step()
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0.0)
    return norm, snapshot(model), snapshot(twin)


@UNEVEN
def test_clearing_one_optimizer_keeps_the_gradients_of_another(blocks: str) -> None:
    for _, weights, expected in ranks(2, clear_one_optimizer, {**here(blocks)[0]}):
        assert_same_bits(weights, expected)


def frozen_later(rank: int, size: int) -> dict[str, Tensor]:
    """In a rank: a layer is frozen, then trained, then frozen; a group is added; beside the oracle."""
    torch.manual_seed(0)
    model, twin = TinyMLP(), TinyMLP()
    twin.load_state_dict(model.state_dict())
    optimizer, other = exact_sgd(model.second.parameters()), exact_sgd(twin.second.parameters())
    oracle = Oracle(twin, other)
    with engine_for(model, optimizer, bucket_bytes=128) as (engine, _):
        for step in range(6):
            if step == 2:
                for net, item in ((model, optimizer), (twin, other)):
                    item.add_param_group({"params": list(net.first.parameters()), "lr": 0.25})
            if step == 4:
                for net in (model, twin):
                    net.second.requires_grad_(False)
            engine.backward(mlp_loss(model, step, rank=rank))
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
            oracle.step(one_each, step, size)
            assert_same_bits(snapshot(model), snapshot(twin), f"step {step}")
    return snapshot(model)


def test_freezing_and_growing_at_two_ranks() -> None:
    one, other = ranks(2, frozen_later)
    assert_same_bits(one, other)


def user_writes(rank: int, size: int) -> dict[str, Tensor]:
    """In a rank: weights are clamped on all ranks; on one rank a write is seen by all."""
    torch.manual_seed(0)
    model = TinyMLP()
    with engine_for(model, exact_sgd(model.parameters()), bucket_bytes=128) as (engine, optimizer):
        for step in range(3):
            engine.backward(mlp_loss(model, step, rank=rank))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.125, 0.125)
        engine.backward(mlp_loss(model, 3, rank=rank))
        optimizer.step()
        # One step from clamped weights cannot leave them at what they were before the clamp.
        assert max(p.abs().max().item() for p in model.parameters()) < 0.25
    return snapshot(model)


def test_writes_of_weights_at_two_ranks() -> None:
    one, other = ranks(2, user_writes)
    assert_same_bits(one, other)


# Buffers, non-finite values, states -------------------------------------------------------------------------------------


def buffers_beside_ddp(rank: int, size: int) -> None:
    """In a rank: running statistics and losses of the engine and of DDP."""
    torch.manual_seed(0)
    model, twin = NormMLP(), NormMLP()
    twin.load_state_dict(model.state_dict())
    ddp = nn.parallel.DistributedDataParallel(twin)
    other = exact_sgd(twin.parameters())
    with engine_for(model, exact_sgd(model.parameters())) as (engine, optimizer):
        for step in range(4):
            engine.backward(mlp_loss(model, step, rank=rank))
            mlp_loss(ddp, step, rank=rank).backward()
            assert_same_bits(
                dict(model.named_buffers()), dict(twin.named_buffers()), f"step {step}"
            )
            optimizer.step()
            optimizer.zero_grad()
            other.step()
            other.zero_grad()
            # Two ranks: DDP's average has our bits.
            assert_same_bits(snapshot(model), snapshot(twin), f"step {step}")


def test_buffers_are_rank_0s_as_under_ddp() -> None:
    ranks(2, buffers_beside_ddp)


def bad_on_one_rank(rank: int, size: int, nonfinite: str) -> tuple[int, str, dict[str, Tensor]]:
    """In a rank: rank 1's loss is infinite at step 1."""
    torch.manual_seed(0)
    model = TinyMLP()
    said = ""
    with engine_for(model, nonfinite=nonfinite, bucket_bytes=256) as (engine, optimizer):
        for step in range(3):
            loss = mlp_loss(model, step, rank=rank)
            before = snapshot(model)
            engine.backward(loss * float("inf") if (rank, step) == (1, 1) else loss)
            try:
                optimizer.step()
            except (NonFiniteGradientError, RuntimeWarning) as error:
                said = str(error)
            if step == 1:
                assert_same_bits(snapshot(model), before)
            optimizer.zero_grad()
        return engine.skipped_steps, said, snapshot(model)


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_non_finite_gradient_of_one_rank_stops_all(nonfinite: str) -> None:
    results = ranks(2, bad_on_one_rank, nonfinite)
    assert [result[0] for result in results] == [1, 1]
    assert_same_bits(results[0][2], results[1][2])
    if nonfinite == "raise":
        assert all("NaN or infinite" in result[1] for result in results)


def save_and_resume(rank: int, size: int, saved: Any, first: int, last: int) -> Any:
    """In a rank: steps first..last from a saved state, all ranks on the same data, so that sizes can be compared."""
    torch.manual_seed(rank)
    model = OddMLP()
    optimizer = exact_sgd(model.parameters())
    with engine_for(model, optimizer, bucket_bytes=256) as (engine, _):
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for step in range(first, last):
            # The mean of equal gradients over 2 or 4 ranks is the gradient, exactly.
            engine.backward(mlp_loss(model, step))
            optimizer.step()
            optimizer.zero_grad()
        only = engine.optimizer_state_dict(optimizer, rank0_only=True)
        state = optimizer.state_dict()
        assert bool(only) == (rank == 0)
        if rank == 0:
            assert_same_bits(only, state)
            assert_same_bits(engine.full_state_dict(), snapshot(model))
        else:
            assert engine.full_state_dict() == {}
        return snapshot(model), state


def test_state_moves_between_numbers_of_ranks() -> None:
    whole = ranks(2, save_and_resume, None, 0, 4)
    assert_same_bits(whole[0], whole[1])
    half = ranks(2, save_and_resume, None, 0, 2)
    for size in (1, 2, 4):
        resumed = ranks(size, save_and_resume, half[0], 2, 4)
        for result in resumed:
            assert_same_bits(result, whole[0], f"{size} ranks: ")


def foreign_states(rank: int, size: int) -> Any:
    """In a rank: the state dict of an optimizer without a rule whose state has a scalar of its own (`mu_product`)."""
    torch.manual_seed(0)
    model, twin = OddMLP(), OddMLP()
    twin.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.NAdam(net.parameters(), lr=0.01) for net in (model, twin))
    with engine_for(model, optimizer, bucket_bytes=256) as (engine, _):
        for step in range(2):
            engine.backward(mlp_loss(model, step))
            optimizer.step()
            optimizer.zero_grad()
            mlp_loss(twin, step).backward()
            other.step()
            other.zero_grad()
        return optimizer.state_dict()["state"], other.state_dict()["state"]


def test_states_of_an_optimizer_without_a_rule_are_whole_on_every_rank() -> None:
    # Equal data on two ranks: the state is plain torch's, also of a parameter of which a rank holds nothing.
    for state, expected in ranks(2, foreign_states):
        assert_same_bits(state, expected)


# Ranks that disagree ----------------------------------------------------------------------------------------------------


def one_steps_alone(rank: int, size: int) -> str:
    """In a rank: rank 1 leaves out a step."""
    torch.manual_seed(0)
    model = TinyMLP()
    engine = ZeroEngine(
        model, optimizer := exact_sgd(model.parameters()), settings_of(timeout_seconds=5.0)
    )
    try:
        for step in range(2):
            engine.backward(mlp_loss(model, step, rank=rank))
            if (rank, step) != (1, 1):
                optimizer.step()
            optimizer.zero_grad()
        engine.full_grads().__enter__()
    except Exception as error:  # noqa: BLE001 - what is raised is the result
        return type(error).__name__
    finally:
        engine.close()
    return "nothing"


def settings_of(**settings: Any) -> Any:
    from support.training import config

    return config(**settings)


def test_a_rank_that_leaves_out_a_step_is_an_error_on_every_rank_and_no_hang() -> None:
    found = ranks(2, one_steps_alone, deadline=40.0)
    assert set(found) <= {
        CollectiveMismatchError.__name__,
        LaneError.__name__,
        "CollectiveTimeoutError",
    }
