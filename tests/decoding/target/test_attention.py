"""Grouped-query attention: transformers' results without repeating the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations import sdpa_attention

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.target import Target
from decoding.target.attention import GROUPED, grouped_attention, sdpa_attention_forward
from decoding.text import Ending
from tests.support.families import build


class Attention(nn.Module):
    """The attributes of an attention module that the function reads."""

    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize(("texts", "width"), [(1, 1), (2, 4)])
@pytest.mark.parametrize("form", ["boolean", "additive", "none"])
def test_outputs_equal_transformers(texts: int, width: int, form: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(texts, heads, length, 8) for heads, length in ((6, width), (2, 11), (2, 11)))
    allowed = torch.rand(texts, 1, width, 11) < 0.7
    allowed[..., 0] = True
    masks = {"boolean": allowed, "additive": torch.where(allowed, 0.0, -1e9), "none": None}
    settings: dict[str, Any] = {"scaling": 0.3, "is_causal": False if form == "none" else None}
    arguments = Attention(), query, key, value, masks[form]
    found, expected = (each(*arguments, **settings)[0] for each in (grouped_attention, sdpa_attention_forward))
    assert found.shape == (texts, width, 6, 8)
    torch.testing.assert_close(found, expected)


def test_keys_are_not_repeated_while_a_draft_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated: list[tuple[int, ...]] = []
    genuine = sdpa_attention.repeat_kv

    def watched(states: Tensor, times: int) -> Tensor:
        repeated.append(tuple(states.shape))
        return genuine(states, times)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", watched)
    model = build("llama")
    request = Request((5, 17, 33, 8), Ending(20))
    draft, rule = LayerSkip.blocks((2, 3)), Fixed(max_tokens=3)
    text = Decoder(Target(model), draft, rule).generate(request).tokens
    assert repeated == []
    monkeypatch.setattr("decoding.target.target.with_grouped_attention", lambda block, sublayer: block)
    assert Decoder(Target(model), draft, rule).generate(request).tokens == text
    assert repeated, "as transformers does on its own"


def test_the_model_keeps_its_own_attention() -> None:
    model = build("llama")
    before = [(id(block.self_attn), block.self_attn.config._attn_implementation) for block in model.model.layers]
    target = Target(model)
    plain_decoder(target).generate(Request((5, 17, 33), Ending(8)))
    after = [(id(block.self_attn), block.self_attn.config._attn_implementation) for block in model.model.layers]
    assert before == after
    assert model.config._attn_implementation == "sdpa"
    own = [getattr(block, "self_attn").config._attn_implementation for block in target.stack]  # noqa: B009
    assert set(own) == {GROUPED}
