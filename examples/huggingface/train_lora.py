r"""Train LoRA adapters on news, with PEFT and the HF Trainer.

    accelerate launch --config_file examples/huggingface/zero_3_offload.yaml \
        examples/huggingface/train_lora.py --model outputs/news --output_dir outputs/news-lora --max_steps 50

`from_pretrained` loads the base model straight into shards, because the YAML asks for stage 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from news import blocks, tokenizer
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    """The base model and its adapters."""

    model: str = field(metadata={"help": "folder of the base model"})
    rank: int = field(default=8, metadata={"help": "rank of the adapters"})
    articles: int = field(default=200, metadata={"help": "news articles to read"})
    length: int = field(default=128, metadata={"help": "tokens in a training example"})


def main() -> None:
    """Train and save the adapters."""
    parser = HfArgumentParser((TrainingArguments, ModelArguments))  # pyright: ignore[reportArgumentType]
    arguments, options = parser.parse_args_into_dataclasses()
    set_seed(arguments.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    adapters = LoraConfig(
        r=options.rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, adapters)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=blocks(tokenizer(), articles=options.articles, length=options.length),
        data_collator=default_data_collator,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
