"""Tables on a terminal of 80 columns: every name is whole, and every figure is there."""

from __future__ import annotations

import re
from typing import Any

import pytest

from decoding.exit_heads import ExitFigures, HeadFacts, HeadTraining
from decoding.probe import Capabilities
from decoding.profile import Interval
from studies.measurement import BatchTexts, Measurement, PairedPrefill, PromptSample
from tests.support.paths import ROOT
from tests.support.records import record, sample
from tests.support.reviews import review
from tests.support.shown import check_readable, shown
from tuner.cli.doctor import capabilities_panel
from tuner.cli.show import exits_table
from tuner.review.document import MeasuredCandidate, StockComparison, StockContender
from tuner.review.tables import results_table
from tuner.tables import figures_table

LONG = "best ada_edl_published"
"""A name of two words, as a category may have."""


def of_tasks(factor: float) -> Measurement:
    """Six prompts of two tasks, with prefills."""
    prefill = PairedPrefill(plain_seconds=1, plain_tokens=1, draft_seconds=1.1, draft_tokens=1)
    ratios = {"summarization": [2.0, 2.2, 1.9], "humaneval": [1.5, 1.2, 1.4]}
    samples: list[PromptSample] = []
    for task, each in ratios.items():
        samples += [
            sample(factor * ratio, len(samples) + n, category=task, prefill=prefill) for n, ratio in enumerate(each)
        ]
    return Measurement(samples=tuple(samples))


def stock(value: float, description: str) -> StockContender:
    def about(value: float) -> Interval:
        return Interval(value=value, ci95=(0.9 * value, 1.1 * value))

    return StockContender(
        description=description,
        tokens_per_second=about(73.1 * value),
        over_plain=about(value),
        end_to_end_over_plain=about(0.9 * value),
        profile_over_it=about(1.88 / value),
        texts=4,
        identical=4,
        ties=0,
    )


RESULTS = """\
Held-out prompts: speed-up of decoding over plain, with its 95 % interval

                                              plain  accept    per
 setting                     speed-up  tok/s  tok/s    rate  round  identical
 ────────────────────────────────────────────────────────────────────────────
 plain decoding                  1.00
 joint              1.87 [1.47, 2.38]   10.0    5.3     80%   2.60        6/6
 conf_layers_tuned  1.53 [1.20, 1.95]   10.0    6.5     80%   2.60        6/6
 best               1.70 [1.34, 2.16]   10.0    5.9     80%   2.60        6/6
 ada_edl_published

End to end, prefill (time to first token, TTFT) included

                                              plain    TTFT
 setting                     speed-up  tok/s  tok/s      ms       over plain's
 ─────────────────────────────────────────────────────────────────────────────
 plain decoding                  1.00                                     1.00
 joint              1.37 [1.17, 1.60]    5.2    3.8  1100.0  1.10 [1.10, 1.10]
 conf_layers_tuned  1.20 [1.04, 1.39]    5.2    4.3  1100.0  1.10 [1.10, 1.10]
 best               1.29 [1.10, 1.50]    5.2    4.1  1100.0  1.10 [1.10, 1.10]
 ada_edl_published

By category of prompts

 setting, category       count           decoding         end to end  accepted
 ─────────────────────────────────────────────────────────────────────────────
 joint
   summarization             3  2.24 [1.86, 2.70]  1.54 [1.35, 1.75]  2.60 80%
   humaneval                 3  1.50 [1.14, 1.98]  1.19 [1.01, 1.41]  2.60 80%
   geometric mean               1.83 [1.64, 2.06]  1.36 [1.26, 1.45]
 conf_layers_tuned
   summarization             3  1.83 [1.52, 2.21]  1.35 [1.19, 1.52]  2.60 80%
   humaneval                 3  1.23 [0.93, 1.62]  1.06 [0.91, 1.24]  2.60 80%
   geometric mean               1.50 [1.34, 1.68]  1.20 [1.12, 1.28]
 best ada_edl_published
   summarization             3  2.03 [1.69, 2.45]  1.44 [1.27, 1.64]  2.60 80%
   humaneval                 3  1.37 [1.04, 1.80]  1.13 [0.96, 1.32]  2.60 80%
   geometric mean               1.67 [1.49, 1.87]  1.28 [1.19, 1.36]

transformers' own generation, all in turns on 4 of these prompts (plain
decoding: 73.1 tok/s)

 setting                    speed-up         end to end    profile over it
 ─────────────────────────────────────────────────────────────────────────
 profile           1.88 [1.69, 2.07]  1.69 [1.52, 1.86]
 hf                0.39 [0.35, 0.43]  0.35 [0.32, 0.39]  4.82 [4.34, 5.30]
 hf-prompt-lookup  0.44 [0.40, 0.48]  0.40 [0.36, 0.44]  4.27 [3.85, 4.70]

plain decoding          the whole model, token by token
joint                   skip layers 2, 3; 4 tokens a round
conf_layers_tuned       skip layers 2, 3; 4 tokens a round
best ada_edl_published  skip layers 2, 3; 4 tokens a round
profile                 the winner; 4 of 4 texts identical
hf                      generate(use_cache=True); 4 of 4 texts identical
hf-prompt-lookup        generate(prompt_lookup_num_tokens=10); 4 of 4 texts
                        identical
hf-static               left out: CUDA only
"""


def rival(study: str, measured: Measurement) -> MeasuredCandidate:
    return MeasuredCandidate.of(record(study=study)).model_copy(update={"measurement": measured})


def test_the_end_of_a_search() -> None:
    comparison = StockComparison(
        num_prompts=4,
        plain_tokens_per_second=Interval(value=73.1, ci95=(70, 76)),
        contenders={
            "profile": stock(1.88, "not said"),
            "hf": stock(0.39, "generate(use_cache=True)"),
            "hf-prompt-lookup": stock(0.44, "generate(prompt_lookup_num_tokens=10)"),
        },
        left_out={"hf-static": "CUDA only"},
    )
    rivals = (rival("joint", of_tasks(1.1)), rival("conf_layers_tuned", of_tasks(0.9)), rival(LONG, of_tasks(1.0)))
    assert shown(results_table(review(rivals=rivals, comparison=comparison))) == RESULTS


def test_the_end_of_a_search_for_batches_with_ties_and_high_speed_ups() -> None:
    batch = BatchTexts(count=16, identical=13, ties=3)
    samples = tuple(sample(ratio, n, identical=False, tie=True, batch=batch) for n, ratio in enumerate([11.5, 14.2]))
    table = results_table(review(rivals=(rival(LONG, Measurement(samples=samples)),)))
    check_readable(table, [("plain decoding", "1.00"), ("best", "12.85"), ("ada_edl_published", "+ 6 ties")])


def test_heads_and_capabilities() -> None:
    figures = ExitFigures(acceptance=0.51, agreement=0.62)
    values: dict[str, Any] = {"model": "m", "dataset": "d", "prompts_sha256": (), "num_texts": 1, "num_tokens": 1}
    values |= {"temperature": 0.0, "steps": 1, "seconds": 1.0, "device": "d", "versions": {}}
    training = HeadTraining(before=figures, after=figures, **values)
    facts = HeadFacts(
        exit_layer=126, num_layers=252, architecture="a", config_sha256="c", weights_sha256="w", training=training
    )
    check_readable(exits_table({126: facts}), [("126", "0.510")])
    blocks = tuple(range(0, 80, 2))
    found = Capabilities(
        "Llama", num_layers=80, num_parameters=10, dtype="float32", device="cpu", skippable_blocks=blocks
    )
    assert max(map(len, shown(capabilities_panel(found)).splitlines())) == 80


@pytest.mark.parametrize("width", [80, 100])
def test_a_table_that_is_too_wide_breaks_figures_and_keeps_names(width: int) -> None:
    table = figures_table("title", ("setting", "[/task]"), *("speed-up", "end to end", "over it", "identical"))
    table.add_row(LONG, "[/summarization]", *["1.88 [1.62, 2.16]"] * 3, "16/16")
    text = shown(table, width)
    assert "…" not in text
    for whole in ("ada_edl_published", "[/summarization]", "16/16"):
        assert whole in text
    assert len(re.findall(r"\b1\.88\b", text)) == 3


def test_every_table_is_made_by_the_shared_function() -> None:
    made = re.compile(r"\bTable(\.grid)?\((title|box|padding|\))")
    folders = ("tuner", "studies", "decoding")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if made.search(path.read_text())]
    assert not found, "use figures_table, facts_grid"
