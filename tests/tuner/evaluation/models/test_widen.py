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
from decoding.exit_heads import file_sha256, head_name, read_facts
from decoding.fingerprint import fingerprint
from decoding.head_folder import HeadFolder
from decoding.target import Target
from decoding.text import Ending
from tests.support.families import build, liven
from tests.support.heads import training, write_heads
from tests.support.tiny import save_tiny_checkpoint, tiny_llama, tiny_target
from tuner.cli.main import main
from tuner.evaluation.models.settings import Widening
from tuner.evaluation.models.widen import (
    ORIGIN_KEY,
    PRESETS,
    WidenError,
    Widths,
    check_widths,
    complete_widths,
    num_parameters,
    widen,
    widen_head,
)

SOURCE = Widths(32, 64, 4, 2, 8)  # of `tiny_llama`
EVERYTHING = Widths(96, 200, 12, 3, 24)
GROWTHS = {
    "nothing": SOURCE,
    "states": replace(SOURCE, hidden_size=52),
    "neurons": replace(SOURCE, intermediate_size=101),
    "groups": replace(SOURCE, num_attention_heads=8),
    "key_value_heads": replace(SOURCE, hidden_size=36, num_attention_heads=6, num_key_value_heads=3),
    "longer_heads": replace(SOURCE, head_dim=32),
    "everything": EVERYTHING,
}


def some_tokens(vocabulary: int = 64) -> Tensor:
    return torch.randint(vocabulary, (3, 40), generator=torch.Generator().manual_seed(0))


def difference(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """The largest difference of two models' logits, relative to the largest logit."""
    tokens = some_tokens(one.config.vocab_size)
    with torch.no_grad():
        wanted, found = one(tokens).logits, other(tokens).logits
    return float((wanted - found).abs().max() / wanted.abs().max())


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
    wide = widen(source, EVERYTHING, dtype=torch.float32)
    assert wide.config.rms_norm_eps == pytest.approx(0.5 * 32 / 96)
    assert difference(source, wide) < 1e-4


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
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-3)
    for ours, theirs in zip(source.logit_lens(tokens), wide.logit_lens(tokens), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-3)


def test_no_weight_matrix_is_trivial() -> None:
    """Weights that meet only zeros are random; only silenced matrices and queries of longer heads hold zeros."""
    wide = widen(tiny_llama(2), EVERYTHING, dtype=torch.float32)
    for name, parameter in wide.named_parameters():
        if name.split(".")[-2] not in ("embed_tokens", "o_proj", "down_proj", "q_proj"):
            assert (parameter != 0).all(), name
    assert (wide.model.layers[0].self_attn.q_proj.weight[:, 32:] != 0).all()


def test_bfloat16_mostly_agrees() -> None:
    source = tiny_llama(3)
    wide = widen(source, EVERYTHING)
    assert wide.dtype == torch.bfloat16
    with torch.no_grad():
        agreement = (source(some_tokens()).logits.argmax(-1) == wide(some_tokens()).logits.argmax(-1)).float().mean()
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
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        (replace(EVERYTHING, hidden_size=24), "hidden_size 24 is smaller than the source's 32"),
        (replace(EVERYTHING, num_key_value_heads=5), "12 heads do not divide into 5"),
        (replace(EVERYTHING, hidden_size=100), "hidden_size 100 is not a multiple of 12 heads"),
        (replace(EVERYTHING, num_key_value_heads=12), "1 query heads share a key-value head, in the source 2"),
        (replace(EVERYTHING, head_dim=12), "head_dim 12 is not a multiple of the source's 8"),
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
    assert complete_widths(config, "8b", {"head_dim": 64}) == replace(PRESETS["8b"], head_dim=64)
    given = {"hidden_size": 96, "intermediate_size": 100, "head_dim": None}
    assert complete_widths(config, None, given) == Widths(96, 100, 12, 6, 8)
    with pytest.raises(WidenError, match="needs a intermediate_size: give --intermediate-size or --preset"):
        complete_widths(config, None, {"hidden_size": 96})


def test_presets_are_as_large_as_they_are_called() -> None:
    demo = LlamaConfig(
        vocab_size=4096,
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=24,
        num_attention_heads=5,
        head_dim=32,
    )
    sizes = {}
    for name, widths in PRESETS.items():
        check_widths(demo, widths)
        with torch.device("meta"):
            wide = LlamaForCausalLM(LlamaConfig(**{**demo.to_dict(), **asdict(widths)}))
        sizes[name] = num_parameters(wide)
    assert 0.24e9 < sizes["250m"] < 0.26e9
    assert 5.0e9 < sizes["8b"] < 5.5e9, "24 of the 32 blocks of an 8B model"


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
