"""Tables of a finished search: on a terminal, and as CSV."""

from __future__ import annotations

import csv

import pytest

from decoding.draft_length import AdaEdl, BetaThompson, Fixed, RoundCosts
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PromptLookup
from studies.contract import Candidate, TrialState
from studies.measurement import BatchTexts, Measurement, PairedPrefill, PromptSample
from tests.support.records import candidate, measurement, record, sample
from tests.support.reviews import review
from tests.support.shown import shown
from tuner.review.document import MeasuredCandidate
from tuner.review.tables import NOTHING, results_table, trial_params, trials_csv


def test_the_csv_has_a_line_for_each_trial_and_a_column_for_everything() -> None:
    records = [
        record(1.3, number=1, blocks=(1, 5), notes={"lambda": 0.05}),
        record(None, number=2),
        record(0.8, number=3, state=TrialState.PRUNED, reason="slower"),
        record(1.3, number=4, blocks=(1, 5), repeat_of=1),
        record(1.4, number=0, study="draft_length", candidate=candidate((1, 5), AdaEdl())),
    ]
    rows = list(csv.DictReader(trials_csv(records).splitlines()))
    assert [row["state"] for row in rows] == ["COMPLETE", "FAIL", "PRUNED", "COMPLETE", "COMPLETE"]
    assert float(rows[0]["tuning_speedup"]) == pytest.approx(1.3)
    assert (rows[0]["skip_mlp"], rows[0]["note.lambda"]) == ("1,5", "0.05")
    assert (rows[1]["reason"], rows[1]["tuning_speedup"]) == ("it broke", "")
    assert (rows[3]["repeat_of"], rows[4]["rule.gamma"]) == ("1", "0.2")


def measured(*samples: PromptSample, study: str = "joint", number: int = 0) -> MeasuredCandidate:
    made = MeasuredCandidate.of(record(number=number, study=study))
    return made.model_copy(update={"measurement": Measurement(samples=samples)})


def text_of(*rivals: MeasuredCandidate) -> str:
    return shown(results_table(review(rivals=rivals)), 100)


def of_category(name: str, ratios: list[float], first: int, *, prefill: float = 1.0) -> list[PromptSample]:
    """Samples of a category whose candidate takes `prefill` times plain decoding's seconds for the prompt."""
    charged = PairedPrefill(plain_seconds=1.0, plain_tokens=1, draft_seconds=prefill, draft_tokens=1)
    return [sample(ratio, first + n, category=name, prefill=charged) for n, ratio in enumerate(ratios)]


def test_the_final_tables_show_end_to_end_and_each_category() -> None:
    samples = (*of_category("coding", [3.0, 3.1], 0), *of_category("translation", [0.9, 1.0], 2))
    lines = [" ".join(line.split()) for line in text_of(measured(*samples)).splitlines()]
    whole = Measurement(samples=samples).end_to_end
    assert whole is not None
    assert f"joint {whole.speedup_interval()} 5.5 {whole.plain.tokens_per_second:.1f} 1000.0 1.00 [1.00, 1.00]" in lines
    assert any(line.startswith("coding 2 3.05 [") for line in lines)
    assert any(line.startswith("geometric mean 1.70 [") for line in lines)
    assert f"translation {NOTHING}" in lines
    assert f"coding {NOTHING}" not in lines


@pytest.mark.parametrize(("ratio", "prefill", "says_so"), [(1.0, 1.0, True), (1.5, 9.0, True), (1.5, 1.0, False)])
def test_the_final_tables_say_if_nothing_beats_plain_decoding(ratio: float, prefill: float, says_so: bool) -> None:
    assert (NOTHING in text_of(measured(*of_category("coding", [ratio] * 3, 0, prefill=prefill)))) is says_so


def test_the_final_table_of_batches_says_so_and_counts_prompts() -> None:
    batch = BatchTexts(count=4, identical=3, ties=1)
    samples = (sample(r, n, identical=False, tie=True, batch=batch) for n, r in enumerate([1.2, 1.3]))
    text = text_of(measured(*samples))
    for words in ("Held-out prompts in batches of 4:", "6/8", "+ 2 ties"):
        assert words in text
    assert "batches" not in text_of(measured(*measurement([1.2, 1.4]).samples))


def test_a_rival_on_fewer_prompts_has_the_winners_figure_on_them() -> None:
    winner = measured(*measurement([1.2, 1.3, 1.4]).samples)
    rival = measured(*measurement([1.1, 1.2]).samples, study="draft_length", number=1)
    assert "on 2 prompts, where the winner has 1.25" in " ".join(text_of(winner, rival).split())


def test_columns_of_a_draft_are_its_settings() -> None:
    def columns(draft: EarlyExit | PromptLookup | LayerSkip) -> dict[str, object]:
        return trial_params(record(candidate=Candidate(draft=draft, draft_length=Fixed())))

    head = columns(EarlyExit(exit_layer=4, head="demo.exit_head_4.safetensors", head_sha256="a" * 64))
    assert (head["kind"], head["exit_layer"], head["exit_head"]) == ("early_exit", 4, "block")
    assert not [key for key in head if key.startswith("lookup")]
    assert columns(EarlyExit(exit_layer=4))["exit_head"] == "none"
    alone = columns(PromptLookup(max_ngram=4))
    assert (alone["kind"], alone["lookup.max_ngram"], alone["lookup.min_ngram"]) == ("prompt_lookup", 4, 1)
    first = columns(LayerSkip(skip_mlp=(3,), lookup=Lookup(min_ngram=2, max_tokens=7)))
    assert (first["kind"], first["lookup.min_ngram"], first["lookup.max_tokens"]) == ("layer_skip", 2, 7)


@pytest.mark.parametrize("costs", [None, RoundCosts(draft_step=0.2, verify=(1.0, 1.1))])
def test_columns_of_an_adaptive_rule_are_its_settings_only(costs: RoundCosts | None) -> None:
    params = trial_params(record(candidate=candidate((1,), BetaThompson(costs=costs, forgetting=0.96))))
    assert params["rule.forgetting"] == 0.96
    assert not {"rule.costs", "rule.prior"} & set(params)
