r"""Train a small Llama from scratch on news, with the HF Trainer.

    accelerate launch --config_file examples/huggingface/zero_offload.yaml \
        examples/huggingface/train_causal_lm.py --output_dir outputs/news --max_steps 100

There is nothing of zero-plugin in this script. The YAML selects it; with another YAML, or none, the same script trains
under DDP or alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from news import blocks, small_llama, tokenizer
from transformers import (
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class DataArguments:
    """What the model reads."""

    articles: int = field(default=400, metadata={"help": "news articles to read"})
    length: int = field(default=128, metadata={"help": "tokens in a training example"})
    width: int = field(default=128, metadata={"help": "hidden size of the model"})


def main() -> None:
    """Train, evaluate, save."""
    parser = HfArgumentParser((TrainingArguments, DataArguments))  # pyright: ignore[reportArgumentType]
    arguments, data = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    words = tokenizer()
    examples = blocks(words, articles=data.articles, length=data.length)
    held_out = len(examples) // 20 + 1
    trainer = Trainer(
        model=small_llama(len(words), width=data.width),
        args=arguments,
        train_dataset=examples[held_out:],
        eval_dataset=examples[:held_out],
        data_collator=default_data_collator,
        processing_class=words,
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
