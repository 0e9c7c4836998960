"""Views of a model: correct results, shared weights, and no traces on the model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from decoding.decode import Request, speculative
from decoding.draft_length import Fixed
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import LayerSkip
from decoding.errors import UnsupportedModelError
from decoding.target import DraftView, ResumeView, Target
from decoding.target.states import logit_lens, sublayer_outputs
from decoding.text import Ending
from tests.support.families import (
    GROUPED,
    NUM_LAYERS,
    PROMISED,
    SUPPORTED,
    WINDOW,
    build,
    make,
    some_tokens,
    target_of,
)

FAMILIES = list(SUPPORTED)
EVERY_LAYER = range(NUM_LAYERS)
LENGTH = 2 * WINDOW


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def ids_of(length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.tensor([some_tokens(length, seed)])


def full_logits(target: Target, ids: Tensor) -> Tensor:
    return target.forward(ids, target.new_cache(ids.shape[1]), 0)


def draft_logits(target: Target, ids: Tensor, attention: list[int], mlp: list[int]) -> Tensor:
    """Logits after the last token."""
    view = DraftView(target, attention, mlp, keep_boundary=False)
    return view.run(ids, target.new_cache(ids.shape[1]), 0).logits


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# --- what is found --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_and_mlp_of_every_block_are_found(family: str) -> None:
    target = target_of(family)
    assert target.num_layers == NUM_LAYERS
    for block, attention, mlp in zip(target.blocks, target.anatomy.attention, target.anatomy.mlp, strict=True):
        assert attention is not None
        assert mlp is not None
        assert "att" in attention.name
        assert mlp.name == "mlp"
        assert isinstance(getattr(block, attention.name), nn.Module)


def test_refused_model_is_left_as_it_was() -> None:
    model = build("gemma4_shared")
    before = traces(model)
    with pytest.raises(UnsupportedModelError):
        Target(model)
    assert traces(model) == before


# --- the whole model ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_pass_gives_the_logits_of_the_model_in_one_piece_or_in_several(family: str) -> None:
    target, ids = target_of(family), ids_of()
    expected = target.model(ids).logits[0]
    assert_close(full_logits(target, ids), expected)
    cache = target.new_cache(LENGTH)
    for start, stop in ((0, 5), (5, 6), (6, 10), (10, LENGTH)):
        assert_close(target.forward(ids[:, start:stop], cache, start), expected[start:stop])


@pytest.mark.parametrize("family", FAMILIES)
def test_last_position_alone_is_the_last_row(family: str) -> None:
    target, ids = target_of(family), ids_of()
    last = target.forward(ids, target.new_cache(LENGTH), 0, last_only=True)
    assert last.shape == (1, target.config.vocab_size)
    assert_close(last, full_logits(target, ids)[-1:])


class KeepsAllLogits(LlamaForCausalLM):
    """A family that does not support `logits_to_keep`."""

    def forward(self, *args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_last_position_alone_is_the_last_row_of_a_family_that_gives_all() -> None:
    ids = ids_of()
    expected = full_logits(target_of("llama"), ids)[-1:]
    model = build("llama")
    model.__class__ = KeepsAllLogits
    target = Target(model)
    assert_close(target.forward(ids, target.new_cache(LENGTH), 0, last_only=True), expected)
    assert_close(draft_logits(target, ids, [], []), expected)


# --- views that skip ------------------------------------------------------------------------------------------------------

# Per family, the linear layers that write a block's attention and MLP into the residual stream.
WRITERS = {
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "gemma3": ("self_attn.o_proj", "mlp.down_proj"),
    "gpt_neox_parallel": ("attention.dense", "mlp.dense_4h_to_h"),
}


def silenced(family: str, attention: list[int], mlp: list[int]) -> PreTrainedModel:
    """Return the model with its skipped sublayers writing zeros: the same function at full cost."""
    model = build(family)
    blocks = Target(model).blocks
    for layers, writer in ((attention, WRITERS[family][0]), (mlp, WRITERS[family][1])):
        for index in layers:
            for parameter in blocks[index].get_submodule(writer).parameters():
                parameter.zero_()
    return model


SKIPS = {
    "attention": ([1, 3], []),
    "mlp": ([], [0, 4]),
    "blocks": ([2, 3], [2, 3]),
    "mixed": ([0, 2], [2, 4]),
    "everything": ([*EVERY_LAYER], [*EVERY_LAYER]),
}


@pytest.mark.parametrize("family", WRITERS)
def test_skipped_sublayers_write_nothing_into_the_residual_stream(family: str) -> None:
    target, ids = target_of(family), ids_of()
    for skipped in SKIPS.values():
        expected = silenced(family, *skipped)(ids).logits[0, -1:]
        assert_close(draft_logits(target, ids, *skipped), expected)
        assert not torch.allclose(full_logits(target, ids)[-1:], expected, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_skipped_attention_leaves_its_cache_alone(family: str) -> None:
    target = target_of(family)
    for attention, mlp in ([1, 3], []), ([2], [2]), ([], [0, 4]):
        cache = target.new_cache(LENGTH)
        DraftView(target, attention, mlp, keep_boundary=False).run(ids_of(), cache, 0)
        assert cache.updates_per_layer == [int(index not in attention) for index in EVERY_LAYER]


def test_block_without_an_mlp_module_can_be_skipped_whole_only() -> None:
    # OPT keeps its MLP's two matrices in the block itself.
    target = Target(make("OPT", ffn_dim=48, word_embed_proj_dim=32))
    ids = ids_of()
    assert torch.isfinite(draft_logits(target, ids, [1, 2], [2, 1])).all()
    with pytest.raises(UnsupportedModelError, match="block 1 has no separate MLP module that it runs without: only"):
        DraftView(target, [], [1], keep_boundary=False)
    with pytest.raises(UnsupportedModelError, match="block 0 has no separate mlp module whose output could be read"):
        sublayer_outputs(target, ids)


def delegate(module: nn.Module) -> None:
    """Replace `forward` on the module itself by a partial that holds it, as accelerate does for a `device_map`."""

    def through_hook(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*args, **kwargs)

    old = module.forward
    vars(module)["_old_forward"] = old
    module.forward = functools.update_wrapper(functools.partial(through_hook, module), old)


def test_views_of_a_model_with_replaced_forwards_skip_all_the_same() -> None:
    ids = ids_of()
    plain, hooked = Target(build("llama")), build("llama")
    for module in hooked.modules():
        delegate(module)
    target = Target(hooked)
    assert torch.equal(full_logits(target, ids), full_logits(plain, ids))
    for attention, mlp in SKIPS.values():
        assert torch.equal(draft_logits(target, ids, attention, mlp), draft_logits(plain, ids, attention, mlp))


# --- views that resume ------------------------------------------------------------------------------------------------------


def joined(states: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return the boundary states [.., width, hidden] of consecutive passes; each has some."""
    return torch.cat([each for each in states if each is not None], dim=-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_pass_resumed_after_the_prefix_equals_the_whole_pass(family: str) -> None:
    target, ids = target_of(family), ids_of(LENGTH + 1)
    half, width = LENGTH // 2, LENGTH - LENGTH // 2
    whole = full_logits(target, ids)
    for boundary, known in itertools.product(range(1, NUM_LAYERS), (width, width - 1)):
        draft = DraftView(target, [boundary], [boundary], keep_boundary=True)
        resume = ResumeView(target, boundary)
        cache = target.new_cache(LENGTH + 1)
        target.forward(ids[:, :half], cache, 0)
        # Token by token, as a draft does.
        drafted = range(half, half + known)
        states = joined([draft.run(ids[:, each : each + 1], cache, each).states for each in drafted])
        assert_close(resume.run(ids[:, half:LENGTH], cache, half, states).logits, whole[half:LENGTH])
        # And every layer's cache is filled as by the whole pass.
        assert_close(target.forward(ids[:, LENGTH:], cache, LENGTH), whole[LENGTH:])


def test_resumed_pass_runs_the_prefix_on_unknown_positions_only() -> None:
    target, ids = target_of("llama"), ids_of()
    draft, resume = DraftView(target, [2], [2], keep_boundary=True), ResumeView(target, 2)
    for known, prefix_updates in ((4, 0), (3, 1)):
        cache = target.new_cache(LENGTH)
        target.forward(ids[:, :4], cache, 0)
        states = joined([draft.run(ids[:, 4 : 4 + known], cache, 4).states])
        before = cache.updates_per_layer
        resume.run(ids[:, 4:8], cache, 4, states)
        made = [after - earlier for after, earlier in zip(cache.updates_per_layer, before, strict=True)]
        assert made == [prefix_updates] * 2 + [1] * 3


# --- what the confidences read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_neox_parallel", "mixtral"])
def test_embedding_and_sublayer_outputs_add_up_to_the_last_hidden_state(family: str) -> None:
    target, ids = target_of(family), ids_of()
    model = target.model
    outputs = sublayer_outputs(target, ids)
    assert len(outputs) == NUM_LAYERS
    stream = model.get_input_embeddings()(ids)[0]
    for attention, mlp in outputs:
        assert attention.shape == mlp.shape == (LENGTH, 32)
        stream = stream + attention + mlp
    inner = getattr(model, target.anatomy.path[0])
    norm = inner.final_layer_norm if family.startswith("gpt_neox") else inner.norm
    assert_close(model.get_output_embeddings()(norm(stream)), full_logits(target, ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_logit_lens_equals_a_model_cut_after_each_block(family: str) -> None:
    target, ids = target_of(family), ids_of()
    lenses = list(logit_lens(target, ids))
    assert [lens.shape for lens in lenses] == [(LENGTH, target.config.vocab_size)] * NUM_LAYERS
    assert torch.equal(lenses[-1], full_logits(target, ids))
    for index, lens in enumerate(lenses[:-1]):
        later = [*EVERY_LAYER][index + 1 :]
        assert_close(lens[-1:], draft_logits(target, ids, later, later))


# --- how wide a pass may be -----------------------------------------------------------------------------------------------------

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [8.0] * 4,
    "factor": 12.8,
    "original_max_position_embeddings": 20,
}


def test_pass_does_not_straddle_the_change_of_a_long_rope() -> None:
    target = Target(build("phi3", rope_parameters=LONG, original_max_position_embeddings=20))
    assert [target.widest_pass(start) for start in (5, 19, 20, 50)] == [15, 1, None, None]


def test_pass_beyond_the_length_of_a_dynamic_rope_has_one_position() -> None:
    target = Target(build("llama", rope_parameters=DYNAMIC, max_position_embeddings=20))
    assert [target.widest_pass(start) for start in (5, 19, 20, 50)] == [15, 1, 1, 1]


# --- no residue -----------------------------------------------------------------------------------------------------------------

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_backward_hooks")


def traces(model: PreTrainedModel) -> dict[str, Any]:
    """The modules of a model, their attributes, hooks and weights, and the configuration."""
    return {
        "modules": {name: (id(module), type(module), module.training) for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "children": {name: [*module._modules] for name, module in model.named_modules()},
        "hooks": {name: [len(getattr(m, table)) for table in HOOK_TABLES] for name, m in model.named_modules()},
        "weights": {name: (id(w), w.data_ptr(), w.sum().item()) for name, w in model.named_parameters()},
        "buffers": {name: (b.data_ptr(), b.sum().item()) for name, b in model.named_buffers()},
        "state": {name: tensor.data_ptr() for name, tensor in model.state_dict().items()},
        "configuration": model.config.to_dict(),
        "logits": model(ids_of()).logits.flatten().tolist(),
    }


def decode_speculatively(target: Target) -> None:
    for skip in (LayerSkip.blocks((2, 3)), LayerSkip(skip_attention=(0,), skip_mlp=(4,))):
        for prefix_reuse in (True, False):
            drafter = LayerSkipDrafter(target, skip, prefix_reuse=prefix_reuse)
            list(speculative(target, drafter, Fixed(max_tokens=3).controller(), Request(some_tokens(4), Ending(6))))


def stop_in_the_middle(target: Target) -> None:
    drafter = LayerSkipDrafter(target, LayerSkip.blocks((2, 3)))
    steps = speculative(target, drafter, Fixed(max_tokens=3).controller(), Request(some_tokens(4), Ending(9)))
    next(steps)
    next(steps)
    steps.close()


def fail_in_a_pass(target: Target) -> None:
    too_small = target.new_cache(2)
    for use in (
        lambda: target.forward(ids_of(), too_small, 0),
        lambda: DraftView(target, [1], [1], keep_boundary=True).run(ids_of(), too_small, 0),
        lambda: ResumeView(target, 1).run(ids_of(4), too_small, 0, torch.zeros(1, 4, 32)),
    ):
        with pytest.raises(ValueError, match="the cache holds 2 positions"):
            use()
    with pytest.raises(IndexError):
        sublayer_outputs(target, ids_of() + 1_000)


USES: dict[str, Callable[[Target], object]] = {
    "speculative decoding": decode_speculatively,
    "a text not written to its end": stop_in_the_middle,
    "sublayer outputs": lambda target: sublayer_outputs(target, ids_of()),
    "a logit lens not read to its end": lambda target: next(logit_lens(target, ids_of())),
    "passes that fail": fail_in_a_pass,
}


@pytest.mark.parametrize("family", sorted(PROMISED))
def test_use_leaves_the_model_unchanged(family: str) -> None:
    model = build(family)
    before, target = traces(model), Target(model)
    for use in USES.values():
        use(target)
        assert traces(model) == before, use


def test_model_without_the_configured_number_of_blocks_is_refused() -> None:
    model = make("Llama", **GROUPED)
    model.model.layers = model.model.layers[:3]
    with pytest.raises(UnsupportedModelError, match=f"has no list of {NUM_LAYERS} decoder blocks"):
        Target(model)
