"""Predictions of feature heads: recorded steps are those of real rounds, and later steps have recordings of their own."""

from __future__ import annotations

from pathlib import Path

import torch

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed, RoundCosts
from decoding.drafts import FeatureHeadDraft
from decoding.head_folder import HeadFolder
from decoding.text import Ending
from studies.prediction.replay import Recording, TargetText, replay
from studies.prediction.survey import Survey
from tests.support.feature_heads import disturbed_feature_head, write_feature_head
from tests.support.tiny import tiny_target

PROMPTS = ((3, 9, 27, 14, 42, 5), (8, 2, 2, 31))
COSTS = RoundCosts(draft_step=0.25, verify=(1.0, 1.1, 1.3))


def test_replayed_rounds_are_those_of_real_decoding(tmp_path: Path) -> None:
    target = tiny_target(4)
    heads = HeadFolder(target, tmp_path)
    draft: FeatureHeadDraft = write_feature_head(target, tmp_path, disturbed_feature_head(target))
    texts = [plain_decoder(target).generate(Request(prompt, Ending(40))).tokens for prompt in PROMPTS]
    recordings = Survey(target, PROMPTS, texts, heads=heads).record(draft)
    assert [len(recording.later) for recording in recordings] == [5, 5]
    for length in (1, 3, 5):
        decoder = Decoder(target, draft, Fixed(max_tokens=length), heads=heads)
        real = [decoder.generate(Request(prompt, Ending(40))) for prompt in PROMPTS]
        replayed = replay(Fixed(max_tokens=length), recordings, COSTS)
        assert replayed.rounds == sum(len(each.rounds) for each in real)
        assert replayed.draft_passes == sum(each.num_drafted for each in real)
    assert sum(each.num_accepted for each in real) > 4


def test_a_step_is_judged_by_its_own_recording() -> None:
    likely = torch.eye(4)[[0, 1, 2, 3, 0, 1]] * 9
    wrong = likely.roll(1, dims=-1)
    recording = Recording.of_steps(TargetText.of(likely), [likely, likely, wrong])
    assert recording.agreement == recording.step(1).agreement == 1.0
    assert recording.step(2).agreement == recording.step(7).agreement == 0.0
    # Of six tokens each round of three drafts has two accepted; the target adds one.
    replayed = replay(Fixed(max_tokens=3), [recording], COSTS)
    assert replayed.rounds == 2
