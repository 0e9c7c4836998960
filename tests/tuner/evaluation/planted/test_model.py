"""Planted redundancy is what it says: redundant sublayers can all go, each important one is missed, grey ones lie between."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import AutoModelForCausalLM

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.fingerprint import fingerprint
from decoding.target import Target
from decoding.text import Ending
from tuner.cli.main import main
from tuner.evaluation.planted.model import (
    Planted,
    PlantedSets,
    agreement,
    draw_sets,
    plant,
    planted,
    prompts,
    silenced,
    singles,
)

PROMPT, TEXT = 16, 80  # tokens


def written(model: torch.nn.Module, num: int) -> Tensor:
    """Prompts with their greedy continuations: [num, PROMPT + TEXT]."""
    decoder = plain_decoder(Target(model))
    texts = [
        [*prompt, *decoder.generate(Request(prompt, Ending(TEXT))).tokens] for prompt in prompts(num, PROMPT, seed=1)
    ]
    return torch.tensor(texts)


@pytest.fixture(scope="module")
def twelve() -> Planted:
    return planted(12, seed=0)


@pytest.fixture(scope="module")
def texts(twelve: Planted) -> Tensor:
    return written(twelve.model, 5)


def costs(problem: Planted, texts: Tensor, skip: LayerSkip) -> list[float]:
    """Agreement without each sublayer of `skip` alone."""
    return [agreement(problem.model, texts, single, first=PROMPT) for single in singles(skip)]


def test_a_draft_without_all_that_is_redundant_is_nearly_always_right(twelve: Planted, texts: Tensor) -> None:
    assert agreement(twelve.model, texts, LayerSkip(), first=PROMPT) == 1.0
    assert agreement(twelve.model, texts, twelve.redundant, first=PROMPT) > 0.95


def test_each_sublayer_costs_what_its_kind_says(twelve: Planted, texts: Tensor) -> None:
    redundant, grey, important = (
        costs(twelve, texts, skip) for skip in (twelve.redundant, twelve.sets.grey, twelve.sets.important)
    )
    assert min(redundant) > 0.97
    assert min(grey) > 0.85
    assert max(grey) < 0.98
    assert max(important) < 0.85
    assert max(important) - min(important) > 0.3, "they are not all alike"


def test_thirty_two_layers_hold_the_same() -> None:
    problem = planted(32, seed=0)
    texts = written(problem.model, 3)
    assert agreement(problem.model, texts, problem.redundant, first=PROMPT) > 0.95
    some = singles(problem.sets.important)[::4]
    assert max(agreement(problem.model, texts, single, first=PROMPT) for single in some) < 0.9


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_seed_will_do(seed: int) -> None:
    problem = planted(12, seed=seed)
    texts = written(problem.model, 3)
    assert agreement(problem.model, texts, problem.redundant, first=PROMPT) > 0.95
    assert max(costs(problem, texts, problem.sets.important)) < 0.85


def test_logits_are_no_ties_and_texts_no_loops(twelve: Planted, texts: Tensor) -> None:
    with torch.no_grad():
        probabilities = twelve.model(texts).logits[:, PROMPT - 1 : -1].softmax(-1)
    entropy = torch.special.entr(probabilities).sum(-1).mean()
    assert 1.5 < entropy < 4.5
    for text in texts[:, PROMPT:].tolist():
        assert len(set(text)) > TEXT / 4
        assert max(Counter(zip(text, text[1:], text[2:], strict=False)).values()) <= TEXT / 8


def test_real_decoding_accepts_as_forecast(twelve: Planted, texts: Tensor) -> None:
    decoder = Decoder(Target(twelve.model), twelve.redundant, Fixed(max_tokens=4))
    for text in texts.tolist():
        generation = decoder.generate(Request(text[:PROMPT], Ending(TEXT)))
        assert list(generation.tokens) == text[PROMPT:]
        assert generation.num_accepted / generation.num_drafted > 0.85


def test_silence_is_what_skipping_computes_and_leaves_the_model_unchanged(twelve: Planted, texts: Tensor) -> None:
    skip, target = twelve.sets.important, Target(twelve.model)
    before = twelve.model(texts[:1]).logits
    with silenced(twelve.model, skip):
        silent = twelve.model(texts[:1]).logits[0, -1:]
    view = target.draft_view(skip.skip_attention, skip.skip_mlp, keep_boundary=False)
    torch.testing.assert_close(view.forward(texts[:1], target.new_cache(128), 0), silent)
    with pytest.raises(KeyboardInterrupt), silenced(twelve.model, skip):
        raise KeyboardInterrupt
    assert torch.equal(twelve.model(texts[:1]).logits, before)


def test_sets_are_drawn_by_the_seed_inside_the_stack() -> None:
    sets = draw_sets(12, seed=3)
    assert sets == draw_sets(12, seed=3)
    assert sets.redundant != draw_sets(12, seed=4).redundant
    kinds = [singles(skip) for skip in (sets.redundant, sets.grey, sets.important)]
    assert [len(kind) for kind in kinds] == [11, 2, 11]
    assert len({skip.describe() for kind in kinds for skip in kind}) == 24, "each sublayer is of one kind"
    assert not {0, 11} & {*sets.redundant.skip_attention, *sets.redundant.skip_mlp, *sets.grey.skip_attention}
    assert sets.redundant.skip_attention != sets.redundant.skip_mlp


def test_what_was_asked_for_is_planted_and_the_caller_s_stream_goes_on() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    model = plant(6, [1, 3], [2], seed=0, grey_mlp=[4])
    assert torch.rand(1) == expected
    assert fingerprint(model) == fingerprint(plant(6, [1, 3], [2], seed=0, grey_mlp=[4]))
    assert fingerprint(model) != fingerprint(plant(6, [1, 3], [2], seed=1, grey_mlp=[4]))
    texts = written(model, 3)
    assert agreement(model, texts, LayerSkip(skip_attention=(1, 3), skip_mlp=(2,)), first=PROMPT) > 0.95
    assert agreement(model, texts, LayerSkip(skip_mlp=(1,)), first=PROMPT) < 0.85


def test_prompts_are_random_token_ids() -> None:
    drawn = prompts(5, 12, seed=0)
    assert drawn == prompts(5, 12, seed=0) != prompts(5, 12, seed=1)
    assert len(set(drawn)) == 5
    assert all(len(prompt) == 12 and 0 <= min(prompt) <= max(prompt) < 256 for prompt in drawn)
    assert max(prompts(1, 50, seed=0, vocabulary_size=3)[0]) == 2


@pytest.mark.parametrize(
    ("redundant", "grey", "message"),
    [
        ([0, 1, 2], [], "some, but not all, sublayers of blocks 0 to 2; got: skip 0-2"),
        ([3], [], "blocks 0 to 2; got: skip 3"),
        ([1], [1], "2 sublayers are both redundant and grey"),
    ],
)
def test_impossible_sets_are_refused(redundant: list[int], grey: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plant(3, redundant, redundant, seed=0, grey_attention=grey, grey_mlp=grey)


def test_command_writes_model_and_sets(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        main, ["evaluate", "planted-model", "--num-layers", "6", "--seed", "2", "--out", str(tmp_path / "planted")]
    )
    assert done.exit_code == 0, done.output
    sets = PlantedSets.model_validate_json((tmp_path / "planted" / "planted.json").read_text())
    problem = planted(6, seed=2)
    assert sets == problem.sets
    assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path / "planted")) == fingerprint(problem.model)
    again = CliRunner().invoke(main, ["evaluate", "planted-model", "--out", str(tmp_path / "planted")])
    assert (again.exit_code, again.stderr) == (2, f"sdtune: {tmp_path / 'planted'} exists; choose another --out\n")
    refused = CliRunner().invoke(
        main, ["evaluate", "planted-model", "--num-layers", "2", "--out", str(tmp_path / "two")]
    )
    assert refused.exit_code == 2
    assert "sdtune: 2 redundant and 2 grey sublayers do not leave an important one" in refused.output
    assert not (tmp_path / "two").exists()
