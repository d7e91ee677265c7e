r"""Train a small Llama on news in a loop of one's own, with Accelerate.

accelerate launch --config_file examples/huggingface/zero_offload.yaml \
        examples/huggingface/accelerate_loop.py --steps 50 --output outputs/loop
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from news import blocks, small_llama, tokenizer
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_linear_schedule_with_warmup


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--articles", type=int, default=200)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    set_seed(0)
    words = tokenizer()
    examples = blocks(words, articles=options.articles, length=options.length)
    loader = DataLoader(
        examples,
        batch_size=options.batch_size,
        shuffle=True,
        collate_fn=default_data_collator,
    )
    model = small_llama(len(words), width=options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 5, options.steps)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    step = 0
    while step < options.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm: Any = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    step += 1
                    accelerator.print(f"step {step} loss {loss.item():.4f} norm {norm.item():.3f}")
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step == options.steps:
                break
    accelerator.save_state(f"{options.output}/state")
    accelerator.save_model(model, options.output)
    accelerator.end_training()


if __name__ == "__main__":
    main()
