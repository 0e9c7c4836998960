"""A widened model computes what its source computes, whatever becomes wider, and its files are complete."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.drafts import EarlyExit, LayerSkip
from decoding.exit_heads import FEATURE_HEAD, file_sha256, head_name, read_facts
from decoding.fingerprint import fingerprint
from decoding.head_folder import HeadFolder
from decoding.target import Target
from decoding.text import Ending
from tests.support.families import build, liven
from tests.support.heads import training, write_heads
from tests.support.tiny import save_tiny_checkpoint, tiny_llama, tiny_target
from tuner.cli.main import main
from tuner.evaluation.models.layout import LayerMap
from tuner.evaluation.models.settings import Widening
from tuner.evaluation.models.widen import ORIGIN_KEY, describe, num_parameters, widen, widen_feature_head, widen_head
from tuner.evaluation.models.widths import PRESETS, WidenError, Widths, check_widths, complete_widths

SOURCE = Widths(32, 64, 4, 2, 8, 3, 64)  # of `tiny_llama(3)`
EVERYTHING = Widths(96, 200, 12, 3, 24, 4, 200)
GROWTHS = {
    "nothing": SOURCE,
    "states": replace(SOURCE, hidden_size=52),
    "neurons": replace(SOURCE, intermediate_size=101),
    "groups": replace(SOURCE, num_attention_heads=8),
    "key_value_heads": replace(SOURCE, hidden_size=36, num_attention_heads=6, num_key_value_heads=3),
    "longer_heads": replace(SOURCE, head_dim=32),
    "layers": replace(SOURCE, num_hidden_layers=5),
    "vocabulary": replace(SOURCE, hidden_size=36, vocab_size=201),
    "everything": EVERYTHING,
}


def some_tokens(vocabulary: int = 64) -> Tensor:
    return torch.randint(vocabulary, (3, 40), generator=torch.Generator().manual_seed(0))


def difference(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """The largest difference of two models' logits of the first one's tokens, relative to the largest logit."""
    tokens = some_tokens(one.config.vocab_size)
    with torch.no_grad():
        wanted, found = one(tokens).logits, other(tokens).logits[..., : one.config.vocab_size]
    return float((wanted - found).abs().max() / wanted.abs().max())


def without_padding(logits: Tensor, vocabulary: int = 64) -> Tensor:
    """Return the logits of the trained tokens; the other tokens must be far below the likeliest one."""
    if logits.shape[-1] > vocabulary:
        assert (logits[..., vocabulary:].amax(-1) < logits[..., :vocabulary].amax(-1) - 10).all()
    return logits[..., :vocabulary]


def greedy(model: PreTrainedModel) -> tuple[int, ...]:
    return plain_decoder(Target(model)).generate(Request((5, 9, 2), Ending(48))).tokens


@pytest.mark.parametrize("growth", GROWTHS)
def test_logits_and_greedy_text_are_the_source_s(growth: str) -> None:
    source = tiny_llama(3)
    wide = widen(source, GROWTHS[growth], dtype=torch.float32)
    assert Widths.of(wide.config) == GROWTHS[growth]
    assert difference(source, wide) < 1e-4
    assert greedy(wide) == greedy(source)


def test_biases_and_tied_embeddings_are_carried_over() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    )
    source = LlamaForCausalLM(config).eval()
    liven(source)
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    wide = widen(source, EVERYTHING, dtype=torch.float32)
    assert difference(source, wide) < 1e-4
    assert not wide.config.tie_word_embeddings
    assert wide.lm_head.weight is not wide.model.embed_tokens.weight
    assert source.config.tie_word_embeddings, "the source stays as it was"


def test_epsilon_matters_and_is_rescaled() -> None:
    source = tiny_llama(3)
    source.config.rms_norm_eps = 0.5
    source = LlamaForCausalLM(source.config).eval()
    liven(source)
    wide = widen(source, replace(EVERYTHING, vocab_size=64), dtype=torch.float32)
    assert wide.config.rms_norm_eps == pytest.approx(0.5 * 32 / 96)
    assert difference(source, wide) < 1e-4
    # The constant dimension that keeps padding down has a value of 2 here.
    padded = widen(source, EVERYTHING, dtype=torch.float32)
    assert padded.config.rms_norm_eps == pytest.approx((0.5 * 32 - 2**2) / 96)
    assert difference(source, padded) < 1e-4


def test_drafts_are_the_source_s_too() -> None:
    """Hidden states after every block equal the states of the source, so that skips and exits are unchanged."""
    source, tokens = tiny_target(4), some_tokens()[:1]
    wide = Target(widen(source.model, EVERYTHING, dtype=torch.float32))
    draft = LayerSkip(skip_attention=(1, 2), skip_mlp=(2,))
    logits = [
        target.draft_view(draft.skip_attention, draft.skip_mlp, keep_boundary=False).forward(
            tokens, target.new_cache(64), 0
        )
        for target in (source, wide)
    ]
    torch.testing.assert_close(without_padding(logits[1]), logits[0], rtol=1e-4, atol=1e-3)
    for ours, theirs in zip(source.logit_lens(tokens), wide.logit_lens(tokens), strict=True):
        torch.testing.assert_close(without_padding(theirs), ours, rtol=1e-4, atol=1e-3)


def test_no_weight_matrix_is_trivial() -> None:
    """Weights that meet only zeros are random; only silenced matrices and queries of longer heads hold zeros."""
    wide = widen(tiny_llama(2), replace(EVERYTHING, vocab_size=64), dtype=torch.float32)
    for name, parameter in wide.named_parameters():
        if name.split(".")[-2] not in ("embed_tokens", "o_proj", "down_proj", "q_proj"):
            assert (parameter != 0).all(), name
    assert (wide.model.layers[0].self_attn.q_proj.weight[:, 32:] != 0).all()


def test_bfloat16_mostly_agrees() -> None:
    source = tiny_llama(3)
    wide = widen(source, EVERYTHING)
    assert wide.dtype == torch.bfloat16
    with torch.no_grad():
        chosen = [without_padding(model(some_tokens()).logits).argmax(-1) for model in (source, wide)]
    agreement = (chosen[0] == chosen[1]).float().mean()
    assert agreement > 0.9


def test_seed_decides_the_random_weights_and_the_caller_s_stream_goes_on() -> None:
    source = tiny_llama(2)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, same, other = (widen(source, EVERYTHING, seed=seed) for seed in (0, 0, 1))
    assert torch.rand(1) == expected
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)


def test_head_of_an_exit_is_widened(tmp_path: Path) -> None:
    source = tiny_target(4)
    wide = Target(widen(source.model, EVERYTHING, dtype=torch.float32))
    write_heads(source, tmp_path, [2], training=training())
    (tmp_path / "wide").mkdir()
    path = widen_head(tmp_path / head_name(2), source, wide, tmp_path / "wide")
    assert path == tmp_path / "wide" / head_name(2)
    assert read_facts(path).training == training()
    tokens = some_tokens()
    logits = []
    for target, head in ((source, tmp_path / head_name(2)), (wide, path)):
        draft = EarlyExit(exit_layer=2, head=head.name, head_sha256=file_sha256(head))
        states, _ = target.exit_states(tokens, [2])
        logits.append(target.exit_logits(tokens, states[2], HeadFolder(target, head.parent).get(draft)))
    torch.testing.assert_close(without_padding(logits[1]), logits[0], rtol=1e-4, atol=1e-3)


def test_a_feature_head_is_widened(tmp_path: Path) -> None:
    """Two steps of every round: the second reads what the head itself put out."""
    source = tiny_target(4)
    wide = Target(widen(source.model, EVERYTHING, dtype=torch.float32))
    head = source.new_feature_head()
    with torch.no_grad():
        for parameter in head.block.parameters():  # as if trained: no part is as it began
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    path = widen_feature_head(head, source, wide, tmp_path)
    assert path == tmp_path / FEATURE_HEAD
    draft = HeadFolder(wide, tmp_path).feature_draft()
    assert draft is not None
    widened = HeadFolder(wide, tmp_path).feature_head(draft)
    tokens = some_tokens()
    logits = []
    for target, each in ((source, head), (wide, widened)):
        states, _ = target.last_states(tokens)
        with torch.no_grad():
            logits.append(torch.stack(list(target.unrolled_feature_head(tokens, states, each, 2))))
    torch.testing.assert_close(without_padding(logits[1]), logits[0], rtol=1e-3, atol=1e-2)
    padding = logits[1].softmax(-1)[..., 64:].sum(-1)
    assert padding.max() < 1e-3, "the vocabulary's padding is drafted no more than the model writes it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_tokens_are_never_chosen_whatever_the_state(dtype: torch.dtype) -> None:
    """Random states as large as any: the logit of padding is below the mean of the others, which the largest exceeds."""
    source = tiny_llama(2)
    wide = widen(source, EVERYTHING, dtype=dtype)
    states = torch.zeros(512, 96, dtype=dtype)
    stream = torch.Generator().manual_seed(0)
    states[:, :32] = torch.randn(512, 32, generator=stream) * torch.logspace(-2, 2, 512)[:, None]
    states[:, 32] = wide.model.embed_tokens.weight[0, 32]
    with torch.no_grad():
        logits = wide.lm_head(wide.model.norm(states)).float()
    trained, padding = logits[:, :64], logits[:, 64:]
    # The push is 2,048 over the root mean square of the 32 trained dimensions, up to the rounding of the mean row.
    assert (padding.amax(-1) < trained.mean(-1) - 15).all()
    assert (logits.argmax(-1) < 64).all()


def test_a_constant_dimension_is_seen_by_no_block() -> None:
    wide = widen(tiny_llama(2), EVERYTHING, dtype=torch.float32)
    value = wide.model.embed_tokens.weight[:, 32]
    assert (value == value[0]).all()
    assert value[0] > 0
    with torch.no_grad():
        states = wide(some_tokens(), output_hidden_states=True).hidden_states
    assert all((each[..., 32] == value[0]).all() for each in states[:-1])
    for layer in wide.model.layers:
        assert layer.input_layernorm.weight[32] == layer.post_attention_layernorm.weight[32] == 0


def test_sampling_is_the_source_s_up_to_rounding() -> None:
    source = tiny_llama(3)
    wide = widen(source, EVERYTHING, dtype=torch.float32)
    with torch.no_grad():
        wanted, found = (model(some_tokens()).logits.softmax(-1) for model in (source, wide))
    torch.testing.assert_close(found[..., :64], wanted, rtol=1e-3, atol=1e-5)
    assert found[..., 64:].sum(-1).max() < 1e-5


def test_added_layers_are_identities_spread_evenly() -> None:
    layers = LayerMap(24, 32)
    assert [layer for layer in range(32) if layer not in layers.trained] == [3, 7, 11, 15, 19, 23, 27, 31]
    assert sorted(layers.trained.values()) == list(range(24))
    assert [layers.depth(exit_layer) for exit_layer in (1, 2, 4, 6, 24)] == [1, 2, 5, 8, 32]
    wide = widen(tiny_llama(2), EVERYTHING, dtype=torch.float32)
    with torch.no_grad():
        states = wide(some_tokens(), output_hidden_states=True).hidden_states
    assert torch.equal(states[1], states[2])  # the states after the first trained layer and after the added one
    assert not torch.equal(states[2], states[3])


def test_exits_of_a_deeper_model_are_the_source_s(tmp_path: Path) -> None:
    source = tiny_target(2)
    wide = Target(widen(source.model, EVERYTHING, dtype=torch.float32))
    write_heads(source, tmp_path, [1], training=training())
    (tmp_path / "wide").mkdir()
    path = widen_head(tmp_path / head_name(1), source, wide, tmp_path / "wide")
    assert path.name == head_name(2)
    assert (read_facts(path).exit_layer, read_facts(path).num_layers) == (2, 4)
    logits = []
    for target, head, exit_layer in ((source, tmp_path / head_name(1), 1), (wide, path, 2)):
        draft = EarlyExit(exit_layer=exit_layer, head=head.name, head_sha256=file_sha256(head))
        states, _ = target.exit_states(some_tokens(), [exit_layer])
        module = HeadFolder(target, head.parent).get(draft)
        logits.append(target.exit_logits(some_tokens(), states[exit_layer], module))
    torch.testing.assert_close(without_padding(logits[1]), logits[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        (replace(EVERYTHING, hidden_size=24), "hidden_size 24 is smaller than the source's 32"),
        (replace(EVERYTHING, num_key_value_heads=5), "12 heads do not divide into 5"),
        (replace(EVERYTHING, hidden_size=100), "hidden_size 100 is not a multiple of 12 heads"),
        (replace(EVERYTHING, num_key_value_heads=12), "1 query heads share a key-value head, in the source 2"),
        (replace(EVERYTHING, head_dim=12), "head_dim 12 is not a multiple of the source's 8"),
        (replace(EVERYTHING, num_hidden_layers=1), "num_hidden_layers 1 is smaller than the source's 2"),
        (replace(SOURCE, vocab_size=65), "a larger vocabulary needs a larger hidden_size"),
    ],
)
def test_widths_that_hold_no_source_are_refused(widths: Widths, message: str) -> None:
    with pytest.raises(WidenError, match=message):
        widen(tiny_llama(2), widths)


def test_other_architectures_and_rotary_embeddings_are_refused() -> None:
    with pytest.raises(WidenError, match="only a LlamaForCausalLM can be widened, got a model of Qwen2Config"):
        widen(build("qwen2"), EVERYTHING)
    config = tiny_llama(2).config
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(WidenError, match="type default, not linear"):
        check_widths(config, EVERYTHING)
    check_widths(config, replace(EVERYTHING, head_dim=8))


def test_sizes_left_open_follow_from_the_others() -> None:
    config = tiny_llama(2).config
    assert complete_widths(config, "5b", {"head_dim": 64}) == Widths(4096, 14336, 32, 8, 64, 2, 64)
    assert complete_widths(config, "llama-8b-like", {}) == Widths(4096, 14336, 32, 8, 128, 32, 128256)
    given = {"hidden_size": 96, "intermediate_size": 100, "head_dim": None}
    assert complete_widths(config, None, given) == Widths(96, 100, 12, 6, 8, 2, 64)
    with pytest.raises(WidenError, match="needs a intermediate_size: give --intermediate-size or --preset"):
        complete_widths(config, None, {"hidden_size": 96})


DEMO = LlamaConfig(
    vocab_size=4096,
    hidden_size=160,
    intermediate_size=432,
    num_hidden_layers=24,
    num_attention_heads=5,
    head_dim=32,
)
LLAMA_8B = LlamaConfig(  # of meta-llama/Llama-3.1-8B
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


def on_meta(config: LlamaConfig) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def test_presets_are_as_large_as_they_are_called() -> None:
    models = {}
    for name in PRESETS:
        widths = complete_widths(DEMO, name, {})
        check_widths(DEMO, widths)
        models[name] = on_meta(LlamaConfig(**{**DEMO.to_dict(), **asdict(widths), "tie_word_embeddings": False}))
    sizes = {name: num_parameters(model) for name, model in models.items()}
    assert sizes["demo"] < 20e6
    assert 0.24e9 < sizes["250m"] < 0.26e9
    assert 5.0e9 < sizes["5b"] < 5.5e9, "24 of the 32 blocks of an 8B model"
    assert sizes["llama-8b-like"] == num_parameters(on_meta(LLAMA_8B)) == 8_030_261_248
    shapes = [
        {key: value.shape for key, value in each.state_dict().items()}
        for each in (models["llama-8b-like"], on_meta(LLAMA_8B))
    ]
    assert shapes[0] == shapes[1], "every matrix has the size of Llama-3.1-8B's, so a pass reads the same bytes"


def test_the_summary_names_the_true_size_and_what_is_idle() -> None:
    source = tiny_llama(3)
    said = describe(source, widen(source, EVERYTHING))
    assert said.endswith("B, 1 of 4 layers are identities, 136 of 200 tokens are padding)")
    assert "identities" not in describe(source, widen(source, GROWTHS["neurons"]))


def test_every_preset_is_an_option() -> None:
    assert set(PRESETS) == set(get_args(get_args(Widening.model_fields["preset"].annotation)[0]))


def test_command_writes_a_whole_folder(tmp_path: Path) -> None:
    folder, out = save_tiny_checkpoint(tmp_path / "source", 3), tmp_path / "wide"
    source = AutoModelForCausalLM.from_pretrained(folder)
    write_heads(Target(source), tmp_path / "heads", [1, 2])
    arguments = [
        "evaluate",
        "widen",
        "--model",
        str(folder),
        "--out",
        str(out),
        "--hidden-size",
        "64",
        "--intermediate-size",
        "96",
    ]
    done = CliRunner().invoke(main, [*arguments, "--dtype", "float32", "--heads", str(tmp_path / "heads")])
    assert done.exit_code == 0, done.output
    wide = AutoModelForCausalLM.from_pretrained(out)
    assert f"widened to {num_parameters(wide):,}" in " ".join(done.output.split())
    assert difference(source, wide) < 1e-4
    assert json.loads((out / "config.json").read_text())[ORIGIN_KEY] == {
        "weights_sha256": fingerprint(source).weights_sha256,
        "config_sha256": fingerprint(source).config_sha256,
        **asdict(SOURCE),
    }
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(folder).get_vocab()
    heads = HeadFolder(Target(wide), out / "heads")
    for exit_layer in (1, 2):
        name = head_name(exit_layer)
        heads.get(EarlyExit(exit_layer=exit_layer, head=name, head_sha256=file_sha256(out / "heads" / name)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads", "source", "wide"]
    again = CliRunner().invoke(main, arguments)
    assert (again.exit_code, again.stderr.strip()) == (2, f"sdtune: {out} exists; choose another --out")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden-size", "16", "--intermediate-size", "96"], "hidden_size 16 is smaller"),
        (["--hidden-size", "64"], "give --intermediate-size or --preset"),
        (["--preset", "250m", "--device", "nowhere"], "no device 'nowhere'"),
        (["--preset", "250m", "--heads", "."], "there is no exit head in"),
    ],
)
def test_command_refuses_in_one_line(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_checkpoint(tmp_path / "source", 2)
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(
        main, ["evaluate", "widen", "--model", str(folder), "--out", str(tmp_path / "wide"), *flags]
    )
    assert refused.exit_code == 2
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("sdtune: ")
    assert message in last
    assert not (tmp_path / "wide").exists()


def test_folders_without_a_llama_are_refused(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path / "qwen2")
    (tmp_path / "empty").mkdir()
    for name, message in (("qwen2", "only a LlamaForCausalLM"), ("empty", "cannot load the model")):
        arguments = [
            "evaluate",
            "widen",
            "--model",
            str(tmp_path / name),
            "--out",
            str(tmp_path / "wide"),
            "--preset",
            "250m",
        ]
        refused = CliRunner().invoke(main, arguments)
        assert refused.exit_code == 2
        assert message in refused.output
