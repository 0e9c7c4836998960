"""A finished search as a reviewer sees it, made by hand."""

from __future__ import annotations

from typing import Any

from decoding.drafts import LayerSkip
from decoding.profile import DraftProfile, Interval, SearchCost, TargetIdentity
from studies.contract import TrialState
from tests.support.measured import measured
from tests.support.records import candidate, measurement, record
from tuner.measuring.machine import MachineNoise
from tuner.results import Provenance
from tuner.review.document import (
    MeasuredCandidate,
    SearchResult,
    StockComparison,
    StockContender,
)

QUIET = MachineNoise(plain_variation=0.02, load=1.0, cores=2, cost_error=0.02)
TRIALS = (
    record(1.4, number=0, notes={"predicted_speedup": 1.5}),
    record(1.2, number=1, blocks=(1, 5), notes={"predicted_speedup": 1.1}),
    record(None, number=2),
    record(0.8, number=3, state=TrialState.PRUNED, reason="slower than the best trial after 3 prompts"),
)


def stock(**over_it: float) -> StockComparison:
    """Return a comparison with stock contenders; each keyword is the profile's speed over a contender, `_` for `-`."""

    def contender(ratio: float) -> StockContender:
        return StockContender(
            description="generate",
            tokens_per_second=Interval(value=150 / ratio, ci95=(140 / ratio, 160 / ratio)),
            over_plain=Interval(value=1.5 / ratio, ci95=(1.4 / ratio, 1.6 / ratio)),
            end_to_end_over_plain=Interval(value=1.4 / ratio, ci95=(1.3 / ratio, 1.5 / ratio)),
            profile_over_it=Interval(value=ratio, ci95=(0.95 * ratio, 1.05 * ratio)),
            texts=6,
            identical=6,
            ties=0,
        )

    return StockComparison(
        num_prompts=6,
        plain_tokens_per_second=Interval(value=100.0, ci95=(95.0, 105.0)),
        contenders={"profile": contender(1.0), **{name.replace("_", "-"): contender(r) for name, r in over_it.items()}},
    )


def review(**changes: Any) -> SearchResult:
    """Return a search whose winner is 1.4 times as fast as plain decoding; `changes` override its fields."""
    draft = LayerSkip.blocks((2, 3))
    target = TargetIdentity(
        model="m", architecture="A", num_layers=6, dtype="float32", config_sha256="c" * 64, weights_sha256="w" * 64
    )
    values: dict[str, Any] = {
        "experiment": "tiny",
        "run_id": "f" * 32,
        "profile": DraftProfile(name="tiny", target=target, draft=draft, measured=measured()),
        "objection": None,
        "rivals": (
            MeasuredCandidate(
                trial="conf_layers/0",
                origin="conf_layers",
                candidate=candidate((2, 3)),
                measurement=measurement([1.3, 1.4, 1.5] * 5),
            ),
            MeasuredCandidate(
                trial="draft_length/1",
                origin="conf_layers",
                candidate=candidate((1, 5)),
                measurement=measurement([1.1, 1.2, 1.1] * 5),
            ),
        ),
        "race": (MeasuredCandidate.of(TRIALS[0]).model_copy(update={"measurement": measurement([1.4, 1.5])}),),
        "trials": TRIALS,
        "noise": QUIET,
        "ended": {"conf_layers": "4 trials done"},
        "stages": {"trials": 10.0, "race": 5.0},
        "cost": SearchCost(trials=4, seconds=12.0),
        "settings": {"model": "m", "dataset": "d"},
        "provenance": Provenance(
            revision="a" * 40,
            command="sdtune search --model m --dataset d",
            date="2026-11-23T00:00:00+00:00",
            device="a device",
            load=1.0,
            versions={"torch": "2"},
        ),
    }
    return SearchResult(**{**values, **changes})
