"""Tiny random models and tokenizers, built by the tests that use them."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from decoding.target import Target

WORDS = [f"w{index}" for index in range(62)]


def tiny_llama(
    num_layers: int = 6, *, seed: int = 0, vocab_size: int = 64, eos_token_id: int | None = None
) -> LlamaForCausalLM:
    """Build a float32 Llama whose deeper blocks matter less, so that some drafts are accepted but not all."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=0,
            eos_token_id=eos_token_id,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
        for index, block in enumerate(model.model.layers):
            for matrix in (block.self_attn.o_proj, block.mlp.down_proj):
                matrix.weight.mul_(0.6**index)
    return model.eval()


def tiny_target(num_layers: int = 6, **options: int) -> Target:
    """Return a `tiny_llama` as a target."""
    return Target(tiny_llama(num_layers, **options))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a word-level tokenizer of the words w0 ... w61 and two special tokens, fitting `tiny_llama`."""
    vocabulary = {word: index for index, word in enumerate(["<bos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", unk_token="<unk>")


def save_tiny_checkpoint(folder: Path, num_layers: int = 6, *, seed: int = 0) -> Path:
    """Write a model folder with `save_pretrained`."""
    tiny_llama(num_layers, seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_tiny_prompts(path: Path, count: int = 24) -> Path:
    """Write a .jsonl of distinct prompts of the tiny tokenizer's words, with a group column."""
    lines = []
    for index in range(count):
        words = " ".join(WORDS[(index * 7 + position * (index + 3)) % len(WORDS)] for position in range(4 + index % 5))
        lines.append(f'{{"prompt": "{words}", "file": "file{index // 2}.py"}}')
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
