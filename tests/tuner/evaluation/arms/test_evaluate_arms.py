"""The choice of arms beside each arm alone, while text and load change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from decoding.arms.arm import Arm
from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.text import Ending
from tests.support.tiny import tiny_target
from tuner.errors import ConfigError
from tuner.evaluation.arms import run
from tuner.evaluation.arms.run import CHOICE, PhaseSamples, ScriptPhase, measure, summary
from tuner.progress import Unwatched


def requests(count: int) -> list[Request]:
    return [Request([1 + index, 2, 3], Ending(12)) for index in range(count)]


def test_every_contender_decodes_every_round_and_the_choice_goes_on_from_phase_to_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    arms = [Arm(f"skip {each}", Decoder(target, LayerSkip.blocks((each,)), Fixed(max_tokens=2))) for each in (1, 2)]
    choices = []
    original = run.decode_side_by_side

    def decode(decoder: object, given: object, level: int) -> object:
        if not isinstance(decoder.chooser, run.Always):  # type: ignore[attr-defined]
            choices.append(decoder)
        return original(decoder, given, level)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "decode_side_by_side", decode)
    found = measure(
        arms, [ScriptPhase("prose", 1, requests(3)), ScriptPhase("code", 2, requests(5))], 4, 2, Unwatched()
    )
    names = {CHOICE, "plain", "skip 1", "skip 2"}
    assert [{name: len(works) for name, works in each.works.items()} for each in found] == [dict.fromkeys(names, 4)] * 2
    assert not any(each.num_different for each in found)
    assert len(choices) == 8
    assert len(set(map(id, choices))) == 1, "one choice, which keeps what it has learned"
    assert all(set(each.windows) <= names for each in found)
    assert sum(found[1].windows.values()) > 0


def test_the_choice_is_compared_with_the_best_arm_after_the_delay_and_with_plain_decoding_from_the_start() -> None:
    works = {
        CHOICE: [(4.0, 10), *[(1.0, 10)] * 3],
        "plain": [(2.0, 10)] * 4,
        "fast": [(1.0, 11)] * 4,
        "slow": [(3.0, 10)] * 4,
    }
    row = summary(PhaseSamples(ScriptPhase("prose", 8, requests(1)), works, 0, Counter({"fast": 3})))
    assert row["best_arm"] == "fast"
    assert row["choice_over_best"]["value"] == pytest.approx(10 / 11)
    assert row["choice_over_plain"]["value"] == pytest.approx((40 / 7) / (10 / 2))
    assert row["delay_rounds"] == 1


def test_a_wrong_text_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    arm = Arm("skip", Decoder(tiny_target(), LayerSkip.blocks((2,)), Fixed(max_tokens=2)))
    texts = iter([[1], [1], *[[1], [1], [2]] * 4])  # two that warm up
    monkeypatch.setattr(run, "decode_side_by_side", lambda *_: (1.0, [next(texts)]))
    (found,) = measure([arm], [ScriptPhase("prose", 1, requests(1))], 4, 1, Unwatched())
    assert found.num_different >= 4


@pytest.mark.parametrize("given", ["prose.jsonl", "prose.jsonl@", "@4", "prose.jsonl@0", "prose.jsonl@many"])
def test_a_phase_needs_a_file_and_a_number(given: str) -> None:
    with pytest.raises(ConfigError, match="such as prose"):
        run._written(given)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text('{"prompt": ""}\n')
    with pytest.raises(ConfigError, match="has no prompt"):
        run._written(f"{path}@1")
