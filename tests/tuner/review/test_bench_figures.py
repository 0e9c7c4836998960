"""The comparison with stock generation, from a bench on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.reviews import review
from tuner.errors import ConfigError
from tuner.review.document import read_comparison
from tuner.review.verdict import verdict


def _bench(**changes: Any) -> dict[str, Any]:
    def figures(over_it: float) -> dict[str, Any]:
        ratio = {"value": over_it, "ci95": [0.9 * over_it, 1.1 * over_it]}
        whole = {"over_plain": ratio}
        facts = {"description": "d", "tokens_per_second": ratio, "over_plain": ratio, "profile_over_it": ratio}
        return {**facts, "end_to_end": whole, "texts": 6, "identical": 6, "ties": 0}

    found = {
        "profile": "tiny",
        "counted": [0, 1],
        "left_out": {"hf-static": "no device"},
        "contenders": {"profile": figures(1.0), "plain": figures(1.5), "hf": figures(0.5)},
    }
    return {**found, **changes}


def _write(folder: Path, found: Any) -> Path:
    path = folder / "bench.json"
    path.write_text(json.dumps(found))
    return path


def test_contenders_of_a_bench_decide_with(tmp_path: Path) -> None:
    comparison = read_comparison(_write(tmp_path, _bench()), "tiny")
    assert set(comparison.contenders) == {"profile", "hf"}
    assert comparison.num_prompts == 2
    assert "hf is faster" in verdict(review(comparison=comparison)).headline


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (_bench(profile="other"), "a bench of the profile 'other', not of 'tiny'"),
        (_bench(contenders={}), "is no bench.json"),
        ([], "is no bench.json"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, found: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_comparison(_write(tmp_path, found), "tiny")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_comparison(tmp_path / "none.json", "tiny")
