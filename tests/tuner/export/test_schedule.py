"""A measured schedule: its ranges, the file that it comes from, and an export that follows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from decoding.drafts import Draft, LayerSkip
from decoding.profile import DraftProfile, Interval
from tests.support.profiles import save_profile
from tests.support.refusals import refused
from tuner.cli.main import main
from tuner.errors import ExportError
from tuner.export.schedule import MeasuredSchedule, ScheduledLoad, join_ranges, read_schedule

SKIP = LayerSkip.blocks((2, 3, 4))


@pytest.mark.parametrize(
    ("chosen", "entries"),
    [
        pytest.param({1: 4, 2: 4}, ((1, 2, 4), (3, 3, 0)), id="nothing is drafted above the largest number"),
        pytest.param({1: 8, 4: 4, 8: 0}, ((1, 1, 8), (2, 4, 4), (5, 8, 0)), id="the smaller of both in between"),
        pytest.param({1: 0, 4: 2, 5: 3}, ((1, 3, 0), (4, 4, 2), (5, 5, 3), (6, 6, 0)), id="also if it comes first"),
        pytest.param({8: 2, 4: 2}, ((1, 3, 0), (4, 8, 2), (9, 9, 0)), id="nothing below the smallest number"),
        pytest.param({1: 0, 8: 0}, ((1, 8, 0),), id="nothing pays"),
        pytest.param({1: 0}, ((1, 1, 0),), id="one number"),
    ],
)
def test_ranges_join_what_was_measured(chosen: Mapping[int, int], entries: tuple[tuple[int, int, int], ...]) -> None:
    found = join_ranges(dict(chosen))
    assert found == entries
    for number, tokens in chosen.items():
        assert [each for first, last, each in found if first <= number <= last] == [tokens]


def _schedule(profile: DraftProfile, chosen: dict[int, int], **changes: Any) -> MeasuredSchedule:
    faster = Interval(value=1.25, ci95=(1.1, 1.4))
    loads = tuple(
        ScheduledLoad(
            sequences=number,
            num_tokens=tokens,
            speedup=faster if tokens else None,
            scheduled=Interval(value=0.9, ci95=(0.8, 1.0)),
        )
        for number, tokens in chosen.items()
    )
    values = {
        "engine": "vLLM",
        "engine_version": "0.32.0",
        "date": "2026-11-24",
        "target_weights_sha256": profile.target.weights_sha256,
        "draft": profile.draft.model_dump(mode="json"),
        "entries": join_ranges(chosen),
        "loads": loads,
    }
    return MeasuredSchedule.model_validate(values | changes)


Export = Callable[..., Result]


@pytest.fixture
def export(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    """Write a profile and `engine.json` with a schedule, and export the profile with it."""
    monkeypatch.chdir(tmp_path)

    def run(chosen: dict[int, int], *flags: str, draft: Draft = SKIP, to: str = "vllm", **changes: Any) -> Result:
        save_profile(Path("profile.yaml"), checkpoint, draft)
        schedule = _schedule(DraftProfile.load(Path("profile.yaml")), chosen, **changes)
        Path("engine.json").write_text(json.dumps({"schedule": schedule.model_dump(mode="json")}))
        command = ["export", "profile.yaml", "--to", to, "--out", "out", "--overwrite", "--schedule", "engine.json"]
        return CliRunner().invoke(main, [*command, *flags])

    return run


def _settings() -> Any:
    return json.loads(Path("out/speculative_config.json").read_text())


def test_vllm_gets_the_schedule_and_losses_say_how_it_was_measured(export: Export) -> None:
    done = export({1: 3, 4: 1, 8: 0})
    assert done.exit_code == 0, done.output
    assert _settings()["num_speculative_tokens"] == 3
    assert _settings()["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 4, 1], [5, 8, 0]]
    losses = Path("out/LOSSES.md").read_text()
    assert "Measured in vLLM 0.32.0 on 2026-11-24" in losses
    assert "1 side by side: 3 tokens, 1.25 [1.10, 1.40] over plain decoding" in losses
    assert "8 side by side: plain decoding; the whole schedule there 0.90 [0.80, 1.00]" in losses
    assert "1 sequences" not in losses
    assert "always" not in losses
    assert "2 to 4: 1 token; from 5: plain decoding" in losses
    assert "Predicted" not in losses


def test_what_does_not_fit_the_export_is_refused(export: Export) -> None:
    refused(export({1: 3}, to="trtllm"), "measured in vLLM", "TensorRT-LLM")
    refused(export({1: 3}, to="llama.cpp", engine="llama.cpp"), "llama.cpp has no schedule", "--draft-tokens")
    refused(export({1: 3}, target_weights_sha256="other"), "another draft or model")
    refused(export({1: 0}, to="llama.cpp", engine="llama.cpp"), "no draft is faster", "llama.cpp")
    refused(export({1: 0}), "no draft is faster", "vLLM")
    refused(export({1: 3}, "--draft-tokens", "2"), "--schedule", "without --draft-tokens")
    refused(export({1: 3}, to="folder"), "--to folder", "--schedule")
    assert not Path("out").exists()


def test_a_file_without_a_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot be read"):
        read_schedule(tmp_path / "missing.json")
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"drafts": {}}))
    with pytest.raises(ExportError, match=r"holds no schedule: sdtune tune --profile"):
        read_schedule(path)
    values = {
        "engine": "vLLM",
        "engine_version": "1",
        "date": "d",
        "target_weights_sha256": "w",
        "draft": {},
        "loads": [],
    }
    path.write_text(json.dumps({"schedule": values | {"entries": [[1, 3, 4], [5, 8, 0]]}}))
    with pytest.raises(ExportError, match="without gaps"):
        read_schedule(path)
