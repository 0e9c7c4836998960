"""Weights that move or change after passes were recorded and copied: what is decoded next is the model's own output."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import Draft, LayerSkip
from decoding.errors import UnsupportedModelError
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.eager import RunnerFactory
from decoding.runners.static import StaticRunner
from decoding.runners.tape import Tapes
from decoding.target import Target
from decoding.target.weights import ModelWeights
from tests.support.fake_graphs import FakeGraphs
from tests.support.families import build
from tests.support.recorded_decoding import requests
from tests.support.recorders import unchecked

(REQUEST,) = requests([(5, 8)])
DRAFT, RULE = LayerSkip(skip_attention=(0,), skip_mlp=(1,)), Fixed(max_tokens=3)
QUANTISED = LayerSkip(bits=8)


@pytest.fixture(autouse=True)
def without_checks() -> Iterator[None]:
    with unchecked():
        yield


@pytest.fixture
def lm_heads_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small ones, in int8 for the most likely token."""
    monkeypatch.setattr("decoding.kernels.choice.MIN_REFINED", 0)


def graphs() -> RunnerFactory:
    return functools.partial(StaticRunner, compiled=False, buckets=GPU_BUCKETS, recorder=FakeGraphs())


def tapes() -> RunnerFactory:
    """Tapes of uncompiled blocks: the operators are the same ones, and nothing is compiled."""
    return functools.partial(StaticRunner, compiled=False, recorder=Tapes())


RUNNERS: dict[str, Callable[[], RunnerFactory]] = {"graphs": graphs, "tapes": tapes}
"""Factories, as a recorder serves one target."""


def scaled(model: PreTrainedModel, seed: int = 3) -> dict[str, Tensor]:
    """Return other values for the weights, of another output."""
    stream = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.3 * value.std() * torch.randn(value.shape, generator=stream)
        if value.ndim > 1
        else value.clone()
        for name, value in model.state_dict().items()
    }


@torch.no_grad()
def away_and_back(model: PreTrainedModel) -> None:
    """What `.to("cpu")` and `.to("cuda")` do: `data` is another tensor twice."""
    held = []
    for tensor in (*model.parameters(), *model.buffers()):
        held.append(tensor.data)
        tensor.data = tensor.data.clone()
    del held


def assigned(model: PreTrainedModel) -> None:
    model.load_state_dict(scaled(model), assign=True)


def loaded(model: PreTrainedModel) -> None:
    model.load_state_dict(scaled(model))


def rebound(model: PreTrainedModel) -> None:
    for index, layer in enumerate(model.model.layers):
        layer.mlp.up_proj.weight = nn.Parameter(scaled(model)[f"model.layers.{index}.mlp.up_proj.weight"] * 3)


def rebound_data(model: PreTrainedModel) -> None:
    for name, value in scaled(model).items():
        model.get_parameter(name).data = value


def merged_in_place(model: PreTrainedModel) -> None:
    """As PEFT merges: torch counts no change."""
    for name, value in scaled(model).items():
        model.get_parameter(name).data.copy_(value)


def merged_safely(model: PreTrainedModel) -> None:
    """As PEFT merges with `safe_merge`, into some layers only."""
    for layer in model.model.layers:
        weight = layer.self_attn.o_proj.weight
        weight.data = weight.data.clone() * -3


def rebound_buffer(model: PreTrainedModel) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq * 0.5


CHANGES = [
    away_and_back,
    assigned,
    loaded,
    rebound,
    rebound_data,
    merged_in_place,
    merged_safely,
    rebound_buffer,
]


def tiny() -> PreTrainedModel:
    return build("llama", num_hidden_layers=2)


def text_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Return what the model writes by a target that has never been used."""
    return plain_decoder(Target(model)).generate(REQUEST).tokens


def decoders(target: Target) -> list[Decoder]:
    drafts: list[Draft] = [DRAFT, QUANTISED]
    return [plain_decoder(target), *(Decoder(target, draft, RULE) for draft in drafts)]


@pytest.mark.parametrize(
    ("runner", "change"),
    [
        *(("graphs", change) for change in CHANGES),
        *(("tapes", change) for change in (away_and_back, merged_in_place)),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_after_a_change_every_decoder_writes_what_the_model_writes(
    runner: str, change: Callable[[PreTrainedModel], None], request: pytest.FixtureRequest
) -> None:
    if runner != "graphs":  # there is no copy on a GPU
        request.getfixturevalue("lm_heads_are_copied")
    model = tiny()
    made = decoders(Target(model, RUNNERS[runner]()))
    before = text_of(model)
    assert [decoder.generate(REQUEST).tokens for decoder in made] == [before] * len(made)
    change(model)
    after = text_of(model)
    if change is not away_and_back:
        assert after != before, "the change is seen"
    assert [decoder.generate(REQUEST).tokens for decoder in made] == [after] * len(made)
    if change is assigned:
        assert [each.tokens for each in made[1].generate_batch([REQUEST] * 2).generations] == [after] * 2


class Adapted(nn.Module):
    """A linear layer with an adapter, as PEFT has it: once merged, the adapter's own products are left out."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.merged = base, list[str]()
        down, up = torch.randn(2, base.in_features), torch.randn(base.out_features, 2) / 2
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, values: Tensor) -> Tensor:
        own: Tensor = self.base_layer(values)
        return own if self.merged else own + values @ self.down.t() @ self.up.t()

    @torch.no_grad()
    def merge(self) -> None:
        self.base_layer.weight.data += self.up @ self.down
        self.merged.append("default")


@pytest.mark.parametrize("runner", ["graphs", "tapes"])
def test_an_adapter_that_was_recorded_is_not_added_again_after_it_was_merged_in_place(runner: str) -> None:
    torch.manual_seed(3)
    model = tiny()
    adapted = [Adapted(layer.self_attn.v_proj) for layer in model.model.layers]
    for layer, each in zip(model.model.layers, adapted, strict=True):
        layer.self_attn.v_proj = each
    decoder = plain_decoder(Target(model, RUNNERS[runner]()))
    with_adapter = decoder.generate(REQUEST).tokens
    assert with_adapter == text_of(model) != text_of(tiny())
    for each in adapted:
        each.merge()
    assert decoder.generate(REQUEST).tokens == text_of(model) == with_adapter


def num_recorded(target: Target) -> int:
    recorded: int = target.runner._recorder.num_recorded  # type: ignore[attr-defined]
    return recorded


def test_without_a_change_nothing_is_recorded_again() -> None:
    target = Target(tiny(), graphs())
    decoder = plain_decoder(target)
    decoder.generate(REQUEST)
    recorded = num_recorded(target)
    target.model.requires_grad_(False).eval()
    decoder.generate(REQUEST)
    assert num_recorded(target) == recorded > 0


def test_prepared_sequences_are_prepared_again_after_a_change() -> None:
    target = Target(tiny(), graphs())
    decoder = Decoder(target, DRAFT, RULE)
    for change in (None, assigned):
        if change is not None:
            change(target.model)
        decoder.prepare(5, 16)
        recorded = num_recorded(target)
        decoder.generate(REQUEST)
        assert num_recorded(target) == recorded


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.to(torch.float64), "weights of the model were float32 .* and are float64 .*: make a new"),
        (lambda model: model.to("meta"), "on cpu, and are .* on meta: make a new target"),
        (
            lambda model: setattr(model, "lm_head", copy.deepcopy(model.lm_head)),
            "modules of the model were replaced: make",
        ),
    ],
    ids=["precision", "device", "module"],
)
def test_a_model_that_needs_a_new_target_is_refused(change: Callable[[PreTrainedModel], object], message: str) -> None:
    model = tiny()
    decoder = plain_decoder(Target(model, graphs()))
    decoder.generate(REQUEST)
    change(model)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=message):
            decoder.generate(REQUEST)


def test_another_device_s_values_are_compared_too() -> None:
    """The values are read by torch there; on the host it computes the same."""
    model = tiny()
    weights = ModelWeights(model)
    host = torch.device("cpu")
    before = weights._sample_on(host)
    assert weights._sample_on(host) == before != []
    model.model.layers[1].mlp.down_proj.weight.data += 0.1
    assert weights._sample_on(host) != before


def test_weights_that_lie_across_cache_lines_are_moved_once_and_stay_tied() -> None:
    model = build("llama", tie_word_embeddings=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for weight in model.parameters():  # as in a mapped file
        memory = torch.empty(weight.numel() + 16)
        at = 2 + (-memory.data_ptr() % 64) // 4
        weight.data = memory[at : at + weight.numel()].view_as(weight).copy_(weight.data)
    plain = plain_decoder(Target(model))
    text = plain.generate(REQUEST).tokens
    fast = plain_decoder(Target(model, graphs()))
    places = {name: weight.data_ptr() for name, weight in model.named_parameters(remove_duplicate=False)}
    assert not any(place % 64 for place in places.values())
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert fast.generate(REQUEST).tokens == plain.generate(REQUEST).tokens == text
    Target(model, graphs())
    assert places == {name: weight.data_ptr() for name, weight in model.named_parameters(remove_duplicate=False)}
