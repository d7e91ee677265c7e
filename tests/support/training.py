"""One training loop for plain torch and for the engine, and what it leaves, to be compared bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from support.models import gpt_batch, make_gpt
from support.ranks import run_ranks
from zero_plugin.config import ZeroConfig
from zero_plugin.engine import ZeroEngine

PRELOAD = ("torch._dynamo", "torch.nn.parallel", "support.training")
"""What every rank needs and takes seconds to import."""

SMALL = 4096
"""A bucket size, in bytes, that cuts every model here into several blocks."""


def ranks(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` with slow imports done once for all tests of a pytest process."""
    return run_ranks(size, function, *args, **{"preload": PRELOAD, "deadline": 60.0, **options})


def config(**settings: Any) -> ZeroConfig:
    """Settings for tests: several blocks, few threads, a short deadline."""
    return ZeroConfig(**{"bucket_bytes": SMALL, "threads": 1, "timeout_seconds": 30.0, **settings})


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    """AdamW with settings at which weight decay shows."""
    return torch.optim.AdamW(parameters, **{"lr": 3e-3, "weight_decay": 0.1, **options})


@contextlib.contextmanager
def engine_for(
    model: nn.Module, optimizer: Any = None, /, **settings: Any
) -> Iterator[tuple[ZeroEngine, Any]]:
    """An engine that is closed at the end, and its optimizer."""
    optimizer = adamw(model.parameters()) if optimizer is None else optimizer
    engine = ZeroEngine(model, optimizer, config(**settings))
    try:
        yield engine, optimizer
    finally:
        engine.close()


@dataclass(kw_only=True)
class Outcome:
    """What a run left: one loss a micro-batch, one norm a step, the weights, and the optimizer's state."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run of the small GPT.

    Attributes:
        steps: optimizer steps.
        accumulate: micro-batches a step.
        clip: largest gradient norm, or None for no clipping.
        dtype: of the compute weights.
        optimizer: builds it.
        batch: sequences in a micro-batch.
        width: of the model; 44 gives 51 thousand parameters, 12 gives 3 thousand.
        layers: of the model.
    """

    steps: int = 20
    accumulate: int = 1
    clip: float | None = None
    dtype: torch.dtype = torch.float32
    optimizer: Callable[..., torch.optim.Optimizer] = adamw
    batch: int = 3
    width: int = 44
    layers: int = 2

    def model(self) -> Any:
        """The seeded model."""
        return make_gpt(self.dtype, width=self.width, layers=self.layers)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of everything in the state dict."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(recipe: Recipe, *, rank: int = 0, **settings: Any) -> Outcome:
    """Train under the engine."""
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    outcome = Outcome()
    with engine_for(model, optimizer, **settings) as (engine, _):
        for step in range(recipe.steps):
            for micro in range(recipe.accumulate):
                last = micro == recipe.accumulate - 1
                tokens = gpt_batch(step * recipe.accumulate + micro, rank=rank, batch=recipe.batch)
                with contextlib.nullcontext() if last else engine.no_sync():
                    loss = model(tokens)
                    engine.backward(loss / recipe.accumulate)
                outcome.losses.append(loss.detach().clone())
            bound = float("inf") if recipe.clip is None else recipe.clip
            outcome.norms.append(engine.clip_grad_norm_(bound))
            optimizer.step()
            optimizer.zero_grad()
        with engine.full_params():
            outcome.weights = snapshot(model)
        outcome.state = optimizer.state_dict()
        outcome.skipped = engine.skipped_steps
    return outcome


def train_plain(
    recipe: Recipe, *, wrap: Callable[[nn.Module], nn.Module] | None = None, rank: int = 0
) -> Outcome:
    """Train the same in plain torch, or in what `wrap` makes of the model."""
    model = recipe.model()
    forward: nn.Module = wrap(model) if wrap else model
    optimizer = recipe.optimizer(model.parameters())
    outcome = Outcome()
    for step in range(recipe.steps):
        for micro in range(recipe.accumulate):
            last = micro == recipe.accumulate - 1
            tokens = gpt_batch(step * recipe.accumulate + micro, rank=rank, batch=recipe.batch)
            quiet: Any = getattr(forward, "no_sync", contextlib.nullcontext)
            with contextlib.nullcontext() if last else quiet():
                loss = forward(tokens)
                (loss / recipe.accumulate).backward()
            outcome.losses.append(loss.detach().clone())
        bound = float("inf") if recipe.clip is None else recipe.clip
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), bound))
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights = snapshot(model)
    outcome.state = optimizer.state_dict()
    return outcome


def flatten(value: Any, place: str = "") -> dict[str, Any]:
    """A nest of dicts, lists and tensors as one flat dict with readable keys."""
    if isinstance(value, dict):
        pairs = [(f"{place}.{key}", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = [(f"{place}[{number}]", item) for number, item in enumerate(value)]
    else:
        return {place: value}
    return {name: leaf for key, item in pairs for name, leaf in flatten(item, key).items()}


def assert_same_bits(one: Any, other: Any, what: str = "") -> None:
    """Equal nests of equal bits (NaN and signed zeros included); the first difference is named."""
    left, right = flatten(one), flatten(other)
    assert left.keys() == right.keys(), f"{what}: {sorted(left.keys() ^ right.keys())[:6]}"
    for key, value in left.items():
        expected = right[key]
        if isinstance(value, Tensor):
            assert value.dtype == expected.dtype, f"{what}{key}: {value.dtype}, {expected.dtype}"
            assert value.shape == expected.shape, f"{what}{key}: {value.shape}, {expected.shape}"
            a, b = (
                item.detach().contiguous().view(-1).view(torch.uint8) for item in (value, expected)
            )
            if not torch.equal(a, b):
                worst = (value.double() - expected.double()).abs().max().item()
                raise AssertionError(f"{what}{key} differs by {worst:.3g}")
        else:
            assert value == expected, f"{what}{key}: {value!r}, {expected!r}"


def assert_same_outcome(one: Outcome, other: Outcome, what: str = "") -> None:
    """Losses, norms, weights and optimizer states of equal bits."""
    assert one.losses
    for name in ("losses", "norms", "weights", "state"):
        assert_same_bits(getattr(one, name), getattr(other, name), f"{what} {name}")


# The same script in plain torch and under the engine ----------------------------------------------------------------


def exact_sgd(parameters: Any, **options: Any) -> torch.optim.SGD:
    """SGD whose products are all by powers of two, so that no fused operation can round otherwise than torch."""
    return torch.optim.SGD(
        parameters, **{"lr": 0.125, "momentum": 0.5, "weight_decay": 2.0**-6, **options}
    )


def clip_exactly(model: nn.Module, bound: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` with the norm summed in fp64, as exact as the engine's."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    squares = [grad.double().square().sum() for grad in grads]
    norm = (torch.stack(squares).sum() if squares else torch.zeros(())).sqrt().float()
    factor = torch.clamp(bound / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor)
    return norm


@dataclass(kw_only=True)
class Session:
    """What a script trains with; `engine` is None in plain torch."""

    model: Any
    optimizer: Any
    engine: ZeroEngine | None = None
    notes: list[Any] = field(default_factory=list)

    def backward(self, loss: Tensor, **arguments: Any) -> None:
        """Backward as the engine's user writes it."""
        if self.engine is None:
            loss.backward(**arguments)
        else:
            self.engine.backward(loss, **arguments)

    def full_params(self, *, writeback: bool = False) -> Any:
        """Full weights inside; they always are in plain torch."""
        if self.engine is None:
            return contextlib.nullcontext()
        return self.engine.full_params(writeback=writeback)

    def weights(self) -> dict[str, Tensor]:
        """Copies of the present weights and buffers."""
        with self.full_params():
            return snapshot(self.model)

    def clip(self, bound: float) -> None:
        """Clip by norm and note the norm."""
        if self.engine is None:
            norm = clip_exactly(self.model, bound)
        else:
            norm = self.engine.clip_grad_norm_(bound)
        self.notes.append(norm)

    def update(self) -> None:
        """Step and clear."""
        self.optimizer.step()
        self.optimizer.zero_grad()


SETTINGS: tuple[dict[str, Any], ...] = (
    {"backend": "threads", "bucket_bytes": 256},
    {"stage": 0, "optimizer": "device", "gradients": "device", "backend": "inline"},
    {"stage": 1, "optimizer": "device", "backend": "chaos", "bucket_bytes": 512},
)
"""Unlike one another in stage, placement, backend and number of blocks."""

SHARDED: tuple[dict[str, Any], ...] = (
    {"stage": 3, "backend": "threads", "bucket_bytes": 256},
    {"stage": 3, "params": "host", "optimizer": "device", "backend": "inline", "prefetch_units": 0},
    {"stage": 3, "params": "host", "backend": "chaos", "bucket_bytes": 512, "prefetch_units": 3},
)
"""Stage 3, unlike one another in placement, backend, number of blocks and prefetch."""


def run_script(
    make_model: Callable[[], nn.Module],
    script: Callable[[Session], None],
    make_optimizer: Callable[..., Any] = exact_sgd,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a script in plain torch (`settings=None`) or under the engine; returns the weights and the notes."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    if settings is None:
        session = Session(model=model, optimizer=optimizer)
        script(session)
        return {"weights": snapshot(model), "notes": session.notes}
    with engine_for(model, optimizer, **settings) as (engine, _):
        session = Session(model=model, optimizer=optimizer, engine=engine)
        script(session)
        with engine.full_params():
            return {"weights": snapshot(model), "notes": session.notes}


def assert_like_plain_torch(
    make_model: Callable[[], nn.Module],
    script: Callable[[Session], None],
    make_optimizer: Callable[..., Any] = exact_sgd,
    settings: tuple[dict[str, Any], ...] = (*SETTINGS, *SHARDED),
) -> None:
    """The script leaves the same bits in plain torch and under the engine with every setting."""
    expected = run_script(make_model, script, make_optimizer)
    before = run_script(make_model, lambda session: None, make_optimizer)
    with contextlib.suppress(AssertionError):
        assert_same_bits(before, expected)
        raise RuntimeError("the script changed nothing, so it shows nothing")
    for chosen in settings:
        found = run_script(make_model, script, make_optimizer, chosen)
        assert_same_bits(found, expected, f"{chosen}: ")
