"""Trains three steps under DeepSpeed and saves its checkpoint, with its own idea of weights and moments beside it.

Run by test_imports.py in each of two processes, in a Python that has DeepSpeed.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """A tied weight, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 6)
        self.first = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("seen", torch.arange(3.0))
        self.second = nn.Linear(7, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.frozen = nn.Parameter(torch.full((5,), 0.25), requires_grad=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(self.tokens(tokens).mean(1)))
        return self.head(self.second(torch.tanh(hidden)))


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Matrices with weight decay, the rest without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )


def main(folder: Path, stage: int) -> None:
    """Train and save."""
    deepspeed: Any = importlib.import_module("deepspeed")
    utils: Any = importlib.import_module("deepspeed.utils")

    # It would compile a collective of its own for minutes; gloo does without.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend="gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = Net()
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=settings)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        tokens = torch.randint(13, (2, 4), generator=generator)
        engine.backward(engine(tokens).float().square().mean())
        engine.step()
    engine.save_checkpoint(str(folder))
    if stage < 3:
        # Linked before the first step, when there were no states.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    reference: dict[str, object] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            reference[name] = {
                "master": utils.safe_get_full_fp32_param(parameter).clone(),
                "exp_avg": utils.safe_get_full_optimizer_state(parameter, "exp_avg").clone(),
                "exp_avg_sq": utils.safe_get_full_optimizer_state(parameter, "exp_avg_sq").clone(),
            }
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        reference["module"] = {
            name: value.detach().clone() for name, value in model.state_dict().items()
        }
        if rank == 0:
            torch.save(reference, folder / "reference.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
