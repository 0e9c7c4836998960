"""A model's capabilities, found by running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MoshiConfig,
    MoshiForCausalLM,
)

from decoding import probe as probing
from decoding.cache.kv_cache import KVCache
from decoding.errors import UnsupportedModelError
from decoding.probe import probe
from decoding.runners.contract import Outputs
from decoding.target import ResumeView, Target
from decoding.target.soundness import CONTEXT_TOKENS
from tests.support.families import NUM_LAYERS, PROMISED, REFUSED, build, dbrx, liven, make
from tests.support.tiny import tiny_llama


class Remembering(nn.Module):
    """Adds part of the previous call's output, kept in a buffer, to the current one."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.mlp(hidden) + self.last
        self.last = output.mean()
        return output


@pytest.mark.parametrize("family", sorted(PROMISED))
def test_everything_in_the_promised_families_can_be_skipped(family: str) -> None:
    found = probe(build(family))
    every = tuple(range(NUM_LAYERS))
    assert found.refusal is None
    assert (found.skippable_blocks, found.skippable_attention, found.skippable_mlp) == (every, every, every)
    assert found.prefix_reuse
    fewer = probe(build(family), every_part=False)
    assert (fewer.refusal, fewer.prefix_reuse, fewer.skippable_blocks) == (None, True, every[1::2])


def test_a_short_probe_finds_the_blocks_that_can_be_skipped_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = probing.check_skips

    def refusing_3(target: Target, attention: Sequence[int], mlp: Sequence[int]) -> None:
        if 3 in attention:
            raise UnsupportedModelError("it does not run without block 3")
        honest(target, attention, mlp)

    monkeypatch.setattr(probing, "check_skips", refusing_3)
    found = probe(tiny_llama(), every_part=False)
    assert found.refusal is None
    assert found.skippable_blocks == tuple(index for index in range(found.num_layers or 0) if index != 3)


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_whose_cache_cannot_roll_back_is_refused_with_the_reason(family: str) -> None:
    found = probe(build(family))
    assert found.refusal is not None
    assert REFUSED[family][2] in found.refusal
    assert "\n" not in found.refusal
    assert not found.is_supported


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_probing_leaves_the_model_as_it_was(family: str) -> None:
    model = build(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    config = model.config.to_dict()
    attributes = {name: set(module.__dict__) for name, module in modules.items()}
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    logits = model(ids).logits
    probe(model)
    assert dict(model.named_modules()) == modules
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    assert model.config.to_dict() == config
    assert torch.equal(model(ids).logits, logits)
    model(ids).logits.sum().backward()  # no weight or buffer has become an inference tensor


def test_a_cache_that_does_not_roll_back_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVCache.cover

    def forgetful(self: KVCache, start: int, width: int) -> None:
        """Every pass that returns to an earlier position reads one token more than it should."""
        again = start < getattr(self, "furthest", 0)
        self.furthest = max(start + width, getattr(self, "furthest", 0))
        honest(self, start + 1 if again else start, width)

    monkeypatch.setattr(KVCache, "cover", forgetful)
    found = probe(tiny_llama())
    assert found.refusal is not None
    assert "does not roll back" in found.refusal


def test_state_kept_outside_the_cache_is_detected() -> None:
    model = tiny_llama()
    block = model.model.layers[5]
    block.mlp = Remembering(block.mlp)
    found = probe(model)
    assert found.refusal is not None
    assert "state outside the cache" in found.refusal
    assert "\n" not in found.refusal


def test_a_draft_that_changes_the_output_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that is right on the few tokens of the checks, but wrong later on."""
    honest = ResumeView.run

    def wrong(self: ResumeView, ids: Tensor, cache: KVCache, start: int, states: Tensor) -> Outputs:
        outputs = honest(self, ids, cache, start, states)
        return Outputs(outputs.logits.flip(-1), outputs.states) if start > CONTEXT_TOKENS else outputs

    monkeypatch.setattr(ResumeView, "run", wrong)
    found = probe(tiny_llama())
    assert found.refusal is not None
    assert "differs from plain decoding at token" in found.refusal


def test_a_model_that_attends_to_later_tokens_is_refused() -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(num_hidden_layers=3, num_attention_heads=4, **sizes)).eval()
    liven(model)
    found = probe(model)
    assert found.refusal is not None
    assert "a token attends to later tokens" in found.refusal


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, LlamaModel])
def test_a_model_without_next_token_logits_is_refused_in_one_line(kind: type[LlamaModel]) -> None:
    config = tiny_llama().config
    config.pad_token_id = 0
    found = probe(kind(config).eval())
    assert found.refusal is not None
    assert "\n" not in found.refusal
    assert not found.is_supported


def test_a_model_that_cannot_resume_loses_prefix_reuse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ResumeView, *args: Any) -> Outputs:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(ResumeView, "run", fails)
    found = probe(tiny_llama())
    assert found.refusal is None
    assert not found.prefix_reuse


@pytest.mark.parametrize("width", [2, 1])
def test_what_a_foreign_model_raises_is_a_refusal_of_one_line(width: int) -> None:
    """Passes of two, of several and of one token: the first checks, those of the cache, and decoding itself."""

    class OddError(Exception):
        pass

    model = tiny_llama()

    def raises(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] == width:
            raise OddError("the patcher\nis missing")

    model.model.register_forward_pre_hook(raises, with_kwargs=True)
    found = probe(model)
    assert found.refusal is not None
    assert found.refusal.startswith("LlamaForCausalLM does not ")
    assert found.refusal.endswith(": OddError: the patcher is missing")


def test_lists_inside_a_block_are_not_the_blocks() -> None:
    """A block of LongCat-Flash has two attentions in a list: with one block, that list is as long as the configuration says."""
    sizes = {"num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "moe_topk": 2}
    heads = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    settings = {**sizes, **heads, "num_key_value_heads": 4, "head_dim": 8, "zero_expert_num": 1}
    found = probe(make("LongcatFlash", num_hidden_layers=2, **settings))
    assert found.refusal is not None
    assert "no list of 2 decoder blocks" in found.refusal


def test_attention_that_returns_the_residual_stream_is_not_offered() -> None:
    found = probe(dbrx())
    assert found.is_supported
    assert (found.skippable_attention, found.skippable_mlp) == ((), (0, 1, 2, 3))
    assert found.skippable_blocks == (0, 1, 2, 3)


def test_a_sliding_window_kept_by_the_cache_alone_is_refused() -> None:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    torch.manual_seed(0)
    config = MoshiConfig(**sizes, head_dim=8, ffn_dim=48, sliding_window=6, max_position_embeddings=64)
    found = probe(MoshiForCausalLM(config).eval())
    assert found.refusal is not None
    assert "keeps its sliding window by dropping positions from the cache" in found.refusal


@pytest.mark.parametrize(("family", "dtype"), [("gemma3", torch.float16), ("mistral", torch.bfloat16)])
def test_a_sliding_window_kept_by_masks_is_found_in_any_precision(family: str, dtype: torch.dtype) -> None:
    """Two equal tokens have equal values: attention over one or both of them differs by rounding only."""
    Target(build(family).to(dtype)).checks.cache()
