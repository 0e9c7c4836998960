"""What is recommended from what was confirmed: flags, a schedule, and warnings."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from decoding.drafts import LayerSkip
from decoding.profile import DraftProfile, TargetIdentity
from studies.measurement import BatchTexts, Measurement, PromptSample
from tests.support.records import measurement
from tests.support.shown import check_readable, shown
from tuner.engines.bench import LoadFigures
from tuner.engines.contract import Served
from tuner.engines.methods import EXPORTED, Method
from tuner.export.schedule import proved
from tuner.tune.costs import PlainOr, Setting
from tuner.tune.report import Tuned, tuned_table


def _figures(*plain_seconds: float, identical: bool = True, sequences: int = 2) -> LoadFigures:
    """Rounds of 10 tokens that take a draft a second each."""
    samples = tuple(
        PromptSample(
            prompt=number,
            plain_seconds=seconds,
            plain_tokens=10,
            draft_seconds=1.0,
            draft_tokens=10,
            rounds=5,
            drafted=10,
            accepted=5,
            identical=identical,
            batch=BatchTexts(count=2, identical=2 * identical, ties=0),
        )
        for number, seconds in enumerate(plain_seconds)
    )
    return LoadFigures(sequences, Measurement(samples=samples))


def _flags(num_tokens: int, schedule: Any) -> tuple[str, ...]:
    return (
        f"--tokens={num_tokens}",
        *([] if schedule is None else [f"--schedule={[list(each) for each in schedule]}"]),
    )


DRAFT = Method(EXPORTED, "profile", (1, 4, 8), _flags, has_schedule=True, runs_model=True)


def _tuned(chosen: Mapping[int, PlainOr], confirmed: Mapping[int, LoadFigures], **changes: Any) -> Tuned:
    target = TargetIdentity(
        model="m", architecture="A", num_layers=6, dtype="float32", config_sha256="c", weights_sha256="w"
    )
    values: dict[str, Any] = {
        "config": None,
        "program": SimpleNamespace(title="vLLM"),
        "profile": DraftProfile(name="p", target=target, draft=LayerSkip.blocks((2, 3))),
        "version": "0.32",
        "served": Served("m", "float32", Path("out")),
        "costs": SimpleNamespace(measured=[], predicted=lambda setting, number: 1.5),
        "failed": {},
        "num_servers": 3,
        "search_seconds": 60.0,
        "seconds": 90.0,
        "fingerprint": "f",
    }
    return Tuned(chosen=chosen, confirmed=confirmed, **values | changes)


def _shown(found: Tuned) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(tuned_table(found))
    return cast(io.StringIO, console.file).getvalue()


def test_faster_is_what_lies_above_1_with_its_interval_and_has_no_other_text() -> None:
    assert proved(_figures(1.3, 1.31, 1.32).measurement)
    assert not proved(_figures(0.8, 4.0, 1.2).measurement)
    assert not proved(_figures(0.9, 0.9).measurement)
    assert not proved(_figures(2.0, 2.0, identical=False).measurement)


def test_the_schedule_drafts_where_that_is_proved() -> None:
    chosen = {1: Setting(DRAFT, 8), 4: Setting(DRAFT, 4), 8: None}
    found = _tuned(chosen, {1: _figures(1.5, 1.5), 4: _figures(0.8, 4.0), 8: _figures(0.7, 0.7)})
    (use,) = found.uses()
    assert use[1] == "--tokens=8 '--schedule=[[1, 1, 8], [2, 8, 0]]'"
    schedule = found.schedule()
    assert schedule is not None
    assert schedule.entries == ((1, 1, 8), (2, 8, 0))
    assert [(each.num_tokens, each.speedup is None) for each in schedule.loads] == [(8, False), (0, True), (0, True)]
    text = _shown(found)
    assert "1 sequence: 8 tokens; from 2: plain decoding" in text
    assert "8 side by side, a server with the whole schedule is slower than one without a draft" in text
    assert text.count("slower than one without") == 1


def test_only_the_export_of_a_profile_has_a_schedule_to_export() -> None:
    confirmed = {1: _figures(1.5, 1.5)}
    assert _tuned({1: Setting(DRAFT, 8)}, confirmed, profile=None).schedule() is None
    plugin = Method("the profile by the plugin", "profile", (8,), _flags, has_schedule=True, runs_model=True)
    assert _tuned({1: Setting(plugin, 8)}, confirmed).schedule() is None


def test_without_a_schedule_each_load_has_flags_of_its_own() -> None:
    ngrams = Method("n-grams of 3", "n-grams", (4, 8), _flags)
    chosen = {1: Setting(ngrams, 8), 4: Setting(ngrams, 4), 8: Setting(ngrams, 4)}
    found = _tuned(chosen, {1: _figures(1.5, 1.5), 4: _figures(1.2, 1.2), 8: _figures(0.8, 4.0)}, profile=None)
    assert found.uses() == [
        ("1 sequence: 8 tokens; from 2: plain decoding", "--tokens=8"),
        ("1 to 3 sequences: plain decoding; 4: 4 tokens; from 5: plain decoding", "--tokens=4"),
    ]


def test_the_table_is_readable_in_80_columns() -> None:
    figures = LoadFigures(2, measurement([1.2, 1.5, 1.4] * 40))
    found = _tuned({1: Setting(DRAFT, 8), 128: Setting(DRAFT, 4)}, {1: figures, 128: figures})
    check_readable(tuned_table(found), [("1", "the profile's"), ("128", "the profile's")])
    assert "120/120" in shown(tuned_table(found))


@pytest.mark.parametrize("confirmed", [{1: _figures(0.8, 4.0)}, {}])
def test_nothing_is_recommended_that_is_not_proved(confirmed: Mapping[int, LoadFigures]) -> None:
    found = _tuned({1: Setting(DRAFT, 8) if confirmed else None}, confirmed)
    assert found.uses() == []
    assert "no draft: none is proved to be faster at any of these numbers of requests" in _shown(found)
