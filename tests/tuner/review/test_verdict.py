"""Ship or not, and the descriptions that say so."""

from __future__ import annotations

import csv

import pytest

from decoding.drafts import PlainDecoding
from decoding.profile import Interval, StockFigures
from studies.contract import TrialState
from tests.support.measured import measured
from tests.support.records import measurement, record, sample
from tests.support.reviews import QUIET, review, stock
from tuner.review.document import SearchResult
from tuner.review.markdown import MOST_NAME, search_note, trial_note, trial_run_name
from tuner.review.page import report_page
from tuner.review.shipping import Shipping, shipping
from tuner.review.tables import samples_csv
from tuner.review.verdict import verdict


def test_a_confirmed_speedup_ships_with_its_interval() -> None:
    found = verdict(review(comparison=stock(hf=1.6, hf_prompt_lookup=1.2)))
    assert found.ship
    assert found.headline.startswith("Ship: 1.40 [1.35, 1.45] times as fast")
    assert any("`hf-prompt-lookup`" in reason for reason in found.reasons)
    assert found.cautions == ()


def test_a_refused_winner_does_not_ship_and_the_reason_is_named() -> None:
    plain = review().profile.model_copy(update={"draft": PlainDecoding(), "measured": None})
    found = verdict(review(objection="its 95 % interval does not lie above 1", profile=plain))
    assert not found.ship
    assert found.headline.startswith("Do not ship: decode plainly. Its 95 % interval does not lie above 1")


def test_a_profile_that_stock_generation_surely_beats_does_not_ship() -> None:
    assert verdict(review(comparison=stock(hf=0.97))).ship, "an interval that holds 1 decides nothing"
    found = verdict(review(comparison=stock(hf=0.8, hf_prompt_lookup=0.7)))
    assert not found.ship
    assert "hf-prompt-lookup is faster" in found.headline


def test_a_busy_machine_shows_where_the_verdict_is_read() -> None:
    noise = QUIET.model_copy(update={"waiting": 0.4})
    found = verdict(review(noise=noise))
    assert found.shipping is Shipping.MEASURE_AGAIN
    assert found.headline.startswith("Ship, but measure again: the machine was busy. 1.40 [1.35, 1.45] times as fast")
    assert search_note(review(noise=noise), profile_path="p.yaml").startswith(f"## {Shipping.MEASURE_AGAIN}")
    assert f'<p class="verdict again">{Shipping.MEASURE_AGAIN}' in report_page(review(noise=noise))
    assert verdict(review(noise=noise, objection="it is slower")).shipping is Shipping.DO_NOT_SHIP
    assert verdict(review(noise=noise, comparison=stock(hf=0.8))).shipping is Shipping.DO_NOT_SHIP


def test_a_profile_says_the_same_as_its_search() -> None:
    profile = review().profile
    over_hf = {"hf": StockFigures(prompts=6, profile_over_it=Interval(value=0.8, ci95=(0.7, 0.9)))}
    for figures, expected in (
        (measured(), Shipping.SHIP),
        (measured(noise=("the load average reached 9 on 2 cores",)), Shipping.MEASURE_AGAIN),
        (measured(stock=over_hf), Shipping.DO_NOT_SHIP),
        (None, Shipping.DO_NOT_SHIP),
    ):
        assert shipping(profile.model_copy(update={"measured": figures})) is expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": QUIET.model_copy(update={"plain_variation": 0.3})}, "varied by 30%"),
        ({"noise": QUIET.model_copy(update={"load": 7.0})}, "load average reached 7.0 on 2 cores"),
        ({"noise": QUIET.model_copy(update={"cost_error": 0.5})}, "within 50% only"),
        ({"cuts": ("confirmed on 6 of 24 held-out prompts",)}, "6 of 24"),
        ({"cautions": ("The exit head was trained on other.jsonl.",)}, "other.jsonl"),
    ],
)
def test_reasons_for_care_are_named(changes: dict[str, object], words: str) -> None:
    assert any(words in caution for caution in verdict(review(**changes)).cautions)


def test_ties_few_prompts_and_an_equal_rival_are_reasons_for_care() -> None:
    made = review()
    tied = made.rivals[0].measurement.samples[0].model_copy(update={"identical": False, "tie": True})
    first = made.rivals[0].model_copy(update={"measurement": measurement([1.2, 1.4])})
    first = first.model_copy(
        update={"measurement": first.measurement.model_copy(update={"samples": (tied, sample(1.4, 1))})}
    )
    second = made.rivals[1].model_copy(update={"measurement": measurement([1.3, 1.3])})
    cautions = verdict(review(rivals=(first, second))).cautions
    assert [
        any(word in each for each in cautions) for word in ("equal logits", "over 2 prompts only", "not clearly slower")
    ] == [
        True,
        True,
        True,
    ]


def test_the_description_has_table_snippet_and_resume_command() -> None:
    note = search_note(review(comparison=stock(hf=1.6)), profile_path="out/p.yaml")
    assert note.startswith("## Ship")
    assert "| **conf_layers/0** | 1.40 [1.35, 1.45] |" in note
    assert "| hf | 0.94 [0.87, 1.00] |" in note
    assert 'load_decoder("out/p.yaml")' in note
    assert f"sdtune promote {'f' * 32} --name tiny" in note
    assert "sdtune search --model m --dataset d" in note


def test_a_description_without_a_profile_to_load_has_no_snippet() -> None:
    plain = review().profile.model_copy(update={"draft": PlainDecoding(), "measured": None})
    assert "load_decoder" not in search_note(review(profile=plain, objection="it is slower"), profile_path="p.yaml")


@pytest.mark.parametrize(
    ("made", "name", "note"),
    [
        (record(1.2, number=7), "conf_layers/7: skip layers 2,3", "Speed-up of decoding on 2 tuning prompts: 1.20"),
        (
            record(0.8, state=TrialState.PRUNED, reason="slower"),
            "conf_layers/0 (pruned): ",
            "which is no failure: slower",
        ),
        (record(None), "conf_layers/0 (failed): ", "**Failed**: it broke"),
        (record(1.2, number=4, repeat_of=1), "conf_layers/4: ", "same candidate as conf_layers/1"),
    ],
)
def test_trials_are_described(made: object, name: str, note: str) -> None:
    assert trial_run_name(made).startswith(name)  # type: ignore[arg-type]
    assert len(trial_run_name(made, won=True)) <= MOST_NAME  # type: ignore[arg-type]
    assert note in trial_note(made)  # type: ignore[arg-type]


def test_samples_are_tables_with_a_line_per_prompt() -> None:
    made = review()
    rows = list(csv.DictReader(samples_csv(made.rivals).splitlines()))
    assert len(rows) == 30
    assert float(rows[0]["speedup"]) == pytest.approx(1.3)
    assert len(list(csv.DictReader(samples_csv(made.race).splitlines()))) == 2


def test_the_document_survives_json() -> None:
    made = review(comparison=stock(hf=1.6))
    assert SearchResult.model_validate_json(made.model_dump_json(by_alias=True)) == made
