"""Surveys: what a draft would do in rounds of decoding, all rounds at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from decoding.cache import rounds_cache
from decoding.cache.rounds_cache import MemoryLimits
from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.draft_length import Controller
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafters.prompt_lookup import look_up
from decoding.drafts import EarlyExit, LayerSkip, PromptLookup
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.target import Target
from decoding.target.states import exit_states
from decoding.text import Ending, TokenSequence
from studies.prediction.predictor import Predictor
from studies.prediction.proposals import cosine_skips
from studies.prediction.survey import JoinedSurvey, Survey
from tests.support.costs import made_up_costs
from tests.support.fake_8b import PeakBytes
from tests.support.heads import write_heads
from tests.support.tiny import tiny_target
from tuner.export.checkpoint import write_checkpoint
from tuner.export.shape import DraftShape

NUM_LAYERS = 6
PROMPTS = ((3, 9, 27, 14, 42, 5), (8, 2, 2, 31), (50, 17, 33, 4, 21, 60, 7, 12))
SKIPS = [LayerSkip.blocks([2, 4]), LayerSkip(skip_attention=(1, 3)), LayerSkip(skip_mlp=(2, 3, 5))]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(NUM_LAYERS)


@pytest.fixture(scope="module")
def texts(target: Target) -> list[tuple[int, ...]]:
    lengths = (24, 17, 1)  # the last has nothing to predict
    return [
        plain_decoder(target).generate(Request(prompt, Ending(length))).tokens
        for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]


@torch.inference_mode()
def first_drafts(
    target: Target, skip: LayerSkip, prompt: Sequence[int], text: Sequence[int], position: int
) -> list[int]:
    """Return the draft of a real drafter in the round after `position` tokens of the continuation."""
    written = [*prompt, *text[:position]]
    held, cache = TokenSequence(written, len(written) + 5, target.device), target.new_cache(len(written) + 5)
    target.forward(held.span(0, held.length), cache, 0)
    cache.length = held.length - 1
    draft = LayerSkipDrafter(target, skip).draft(held, cache, Controller(4), Request([0], Ending(9)), 4)
    return held.span(held.length, held.length + draft.num_tokens)[0].tolist()


@pytest.mark.parametrize("skip", SKIPS, ids=lambda skip: skip.describe())
def test_recorded_rounds_are_rounds_of_a_real_drafter(
    target: Target, texts: list[tuple[int, ...]], skip: LayerSkip
) -> None:
    recordings = Survey(target, PROMPTS, texts, depth=4).record(skip)
    assert [len(recording.matches) for recording in recordings] == [23, 16]
    for prompt, text, recording in zip(PROMPTS, texts, recordings, strict=False):
        for position in range(1, len(text) - 4, 4):
            drafted = first_drafts(target, skip, prompt, text, position)
            right = [token == known for token, known in zip(drafted, text[position : position + 4], strict=True)]
            # A real draft follows the sequence up to its first mistake; later drafts differ.
            tested = right.index(False) + 1 if False in right else 4
            assert list(recording.matches[position - 1 : position - 1 + tested]) == right[:tested]
    assert 0.1 < recordings[0].agreement < 1.0


@pytest.mark.parametrize(("temperature", "exit_layer"), [(0.0, 2), (0.8, 4)])
def test_exit_is_the_skip_of_all_later_blocks(
    target: Target, texts: list[tuple[int, ...]], exit_layer: int, temperature: float
) -> None:
    survey = Survey(target, PROMPTS, texts, decoding=Decoding(temperature=temperature), seed=3)
    early = EarlyExit(exit_layer=exit_layer)
    by_exit, by_skip = survey.record_all([early, early.skipped(NUM_LAYERS)])
    for one, other in zip(by_exit, by_skip, strict=True):
        assert one.matches == other.matches
        assert one.acceptance == pytest.approx(other.acceptance, abs=1e-4)
        assert [s.entropy for s in one.seen] == pytest.approx([s.entropy for s in other.seen], abs=1e-3)


def test_draft_of_the_whole_model_is_always_right(target: Target, texts: list[tuple[int, ...]]) -> None:
    for temperature in (0.0, 1.0):
        recordings = Survey(target, PROMPTS, texts, decoding=Decoding(temperature=temperature)).record(LayerSkip())
        assert all(recording.agreement == 1.0 for recording in recordings)
        assert [recording.acceptance for recording in recordings] == pytest.approx([1.0, 1.0], abs=1e-4)


def test_depth_changes_what_a_draft_reads_of_its_own_only(target: Target, texts: list[tuple[int, ...]]) -> None:
    shallow, deep = (Survey(target, PROMPTS, texts, depth=depth).record(SKIPS[1]) for depth in (1, 8))
    assert shallow[0].matches[::8] == deep[0].matches[::8]
    assert [s.entropy for s in shallow[0].seen] != pytest.approx([s.entropy for s in deep[0].seen], abs=1e-6)


@pytest.mark.parametrize("limits", [MemoryLimits(kept=0), MemoryLimits(kept=0, gathered=0)])
def test_survey_in_little_memory_records_the_same(
    target: Target, texts: list[tuple[int, ...]], limits: MemoryLimits
) -> None:
    exits = [EarlyExit(exit_layer=layer) for layer in (4, 2, 5)]
    drafts = [exits[0], SKIPS[0], exits[1], exits[2], exits[0]]
    roomy = Survey(target, PROMPTS, texts).record_all(drafts)
    tight = Survey(target, PROMPTS, texts, exits=[EarlyExit(exit_layer=2), EarlyExit(exit_layer=4)], limits=limits)
    for one, other in zip(roomy, tight.record_all(drafts), strict=True):
        assert [each.matches for each in one] == [each.matches for each in other]
        assert [each.acceptance for each in one] == pytest.approx([each.acceptance for each in other], abs=1e-4)
    assert cosine_skips(tight, [1, 2, 3]) == cosine_skips(Survey(target, PROMPTS, texts), [1, 2, 3])


def test_all_exits_share_a_pass_although_the_states_of_their_prompts_would_not_fit(
    target: Target, texts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = list[int]()

    def noted(of: Target, token_ids: torch.Tensor, *args: object, **kwargs: object) -> object:
        passes.append(token_ids.shape[1])
        return exit_states(of, token_ids, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("studies.prediction.survey.exit_states", noted)
    exits = [EarlyExit(exit_layer=layer) for layer in range(1, NUM_LAYERS)]
    written = sum(len(text) - 1 for text in texts)
    limits = MemoryLimits(kept=len(exits) * written * target.config.hidden_size * target.dtype.itemsize)
    survey = Survey(target, PROMPTS, texts, exits=exits, limits=limits)
    predictor = Predictor(survey, made_up_costs(target, 4), max_tokens=4)
    predictor.best_first(exits)
    assert len(passes) == len(survey.indices), "the first pass over each sequence has the states of all"
    scarce = Survey(target, PROMPTS, texts, limits=replace(limits, kept=limits.kept // 2))
    passes.clear()
    Predictor(scarce, made_up_costs(target, 4), max_tokens=4).best_first(exits)
    assert len(passes) == 3 * len(survey.indices), "two at a time"


def test_trained_head_is_recorded_through_its_file(
    target: Target, texts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    drafts = write_heads(target, tmp_path, [NUM_LAYERS - 1])
    survey = Survey(target, PROMPTS, texts, heads=HeadFolder(target, tmp_path))
    assert all(recording.agreement == 1.0 for recording in survey.record(drafts[NUM_LAYERS - 1]))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_surveys_joined_are_one_of_all_texts(target: Target, temperature: float) -> None:
    prompts = (*PROMPTS, (9, 9, 1))
    texts = [plain_decoder(target).generate(Request(prompt, Ending(12))).tokens for prompt in prompts]
    texts[1] = texts[1][:1]
    decoding = Decoding(temperature=temperature)
    whole = Survey(target, prompts, texts, decoding=decoding, seed=3)
    # The second text is passed over: the first of the other survey is the second of all that are read.
    first = Survey(target, prompts[:2], texts[:2], decoding=decoding, seed=3, exits=[EarlyExit(exit_layer=2)])
    joined = JoinedSurvey(
        first,
        Survey(target, prompts[2:], texts[2:], decoding=decoding, seed=3 + 1, exits=[EarlyExit(exit_layer=2)]),
        num_given=2,
    )
    assert joined.indices == whole.indices == (0, 2, 3)
    assert joined.mean_context == pytest.approx(whole.mean_context)
    for draft in (SKIPS[1], EarlyExit(exit_layer=2), EarlyExit(exit_layer=4)):
        assert [r.matches for r in joined.record(draft)] == [r.matches for r in whole.record(draft)]
        assert joined.record(draft)[0] is first.record(draft)[0]
    guess = partial(look_up, source=PromptLookup(max_ngram=2, min_ngram=1))
    assert joined.copies(guess, 4) == whole.copies(guess, 4)


@torch.inference_mode()
def test_contexts_stay_below_a_quarter_of_the_weights(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the context for each round may take several times the memory of a small model."""
    monkeypatch.setattr(rounds_cache, "LEAST_KEPT", 0)
    monkeypatch.setattr(rounds_cache, "LEAST_IN_A_PASS", 0)
    prompts, texts = [(5,) * 40] * 20, [(7,) * 41] * 20
    survey = Survey(target, prompts, texts)
    with PeakBytes(target.model) as memory:
        rounds, _ = survey.rounds
    assert len(rounds.chunks) > 1
    known = 20 * 76 * target.num_layers * 2 * 2 * 8 * 4
    assert memory.peak < 3 * known + sum(weight.nbytes for weight in target.model.parameters())


@torch.inference_mode()
def test_logits_of_a_few_rounds_at_a_time_are_compared(target: Target) -> None:
    prompts, texts = [(5, 9)] * 24, [tuple(range(1, 42))] * 24
    logits_bytes = 40 * target.config.vocab_size * 4
    in_chunks = Survey(target, prompts, texts, limits=MemoryLimits(returned=2 * logits_bytes))
    at_once = Survey(target, prompts, texts)
    assert [len(survey.rounds[0].chunks) for survey in (in_chunks, at_once)] == [12, 1]
    peaks, recorded = [], []
    for survey in (in_chunks, at_once):
        with PeakBytes(target.model) as memory:
            recorded.append(survey.record(SKIPS[0]))
        peaks.append(memory.peak)
    assert peaks[0] < peaks[1] - 20 * logits_bytes
    assert [each.matches for each in recorded[0]] == [each.matches for each in recorded[1]]


@torch.inference_mode()
def test_a_copy_with_keys_of_its_own_drafts_otherwise_than_decoding_unless_it_is_the_first_blocks(
    target: Target, texts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    here, copied = (Survey(target, PROMPTS, texts, own_keys=own) for own in (False, True))
    draft = SKIPS[0]
    assert copied.record(draft)[0] != here.record(draft)[0]
    write_checkpoint(target, DraftShape((0, 1, 3, 5), has_head=False, num_target_layers=NUM_LAYERS), None, tmp_path)
    copy = AutoModelForCausalLM.from_pretrained(tmp_path)
    for prompt, text, logits in zip(PROMPTS, texts, copied.skip_logits(draft), strict=False):
        expected = copy(torch.tensor([[*prompt, *text[:-1]]])).logits[0, len(prompt) :]
        assert torch.allclose(logits, expected, atol=1e-4)
    first = LayerSkip.blocks([3, 4, 5])
    assert [each.matches for each in copied.record(first)] == [each.matches for each in here.record(first)]
    assert [each.has_targets_keys(NUM_LAYERS) for each in (first, draft, EarlyExit(exit_layer=2))] == [
        True,
        False,
        True,
    ]
