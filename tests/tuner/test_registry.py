"""Profiles in the model registry, read back through MLflow's own client and by `load_decoder`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from click.testing import CliRunner, Result

from decoding.deploy import load_decoder
from decoding.deploy.registry import fetch_profile
from decoding.drafts import LayerSkip
from decoding.errors import ExitHeadError, ProfileError
from decoding.profile import DraftProfile, Interval, Measured, ProfileOrigin, TargetIdentity
from decoding.target import Target
from tests.support.heads import write_heads
from tests.support.profiles import measured
from tuner.cli.main import main
from tuner.errors import ConfigError
from tuner.registry import Promotion, log_profile, objection, promote
from tuner.tracking import DatasetInput, Tracker

Write = Callable[..., Path]
SKIP = LayerSkip(skip_attention=(2, 3), skip_mlp=(3,))
PROMPT = torch.tensor([[5, 17, 33, 8]])


@pytest.fixture
def uri(workplace: Path) -> str:
    return f"sqlite:///{workplace.parent / 'mlflow.db'}"


@pytest.fixture
def client(uri: str) -> Any:
    return mlflow.MlflowClient(tracking_uri=uri)


@pytest.fixture
def promoted(uri: str) -> Callable[..., Promotion]:
    def promote_(source: Path | str, name: str = "tiny", why: str = "it is faster", **settings: Any) -> Promotion:
        return promote(str(source), name, why=why, by="an engineer", tracking_uri=uri, **settings)

    return promote_


def _figures(value: float, low: float, high: float) -> Measured:
    return measured().model_copy(update={"speedup": Interval(value=value, ci95=(low, high))})


BUSY = _figures(1.7, 1.6, 1.8).model_copy(update={"noise": ("load 9",)})


def test_profile_goes_through_the_registry_with_its_head(
    write_profile: Write, target: Target, promoted: Callable[..., Promotion], client: Any, uri: str, workplace: Path
) -> None:
    """Fetched once per version, by alias and by number, without touching the store's own files."""
    path = write_profile(write_heads(target, workplace, [3])[3], measured=_figures(1.5, 1.4, 1.6))
    found = promoted(path)
    assert (found.address, found.version, found.replaced) == ("models:/tiny@champion", "1", None)
    version = client.get_model_version_by_alias("tiny", "champion")
    assert version.tags["by"] == "an engineer"
    assert version.tags["why"] == version.description == "it is faster"
    assert [version.tags[f"sdtune.speedup{end}"] for end in ("", "_low", "_high")] == ["1.5", "1.4", "1.6"]
    model = client.get_logged_model(version.tags["sdtune.model_id"])
    assert (model.model_type, str(model.status)) == ("sdtune-profile", "READY")
    fetched = fetch_profile(found.address, tracking_uri=uri, folder=workplace / "fetched")
    assert fetch_profile("models:/tiny/1", tracking_uri=uri, folder=workplace / "fetched") == fetched
    assert DraftProfile.load(fetched) == DraftProfile.load(path)
    assert len(list(fetched.parent.iterdir())) == 2
    assert not list(fetched.parent.parent.glob(".partial-*"))
    decoder = load_decoder(found.address, tracking_uri=uri, folder=workplace / "fetched")
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 9}
    plain = target.model.generate(PROMPT, **settings)
    assert torch.equal(target.model.generate(PROMPT, custom_generate=decoder, **settings), plain)


def test_profile_of_a_search_is_a_model_of_its_run(
    write_profile: Write, promoted: Callable[..., Promotion], client: Any, uri: str, workplace: Path
) -> None:
    """By the id of the run, and by a profile that names the run."""
    tracker = Tracker.open(uri, "tiny", run_id=None, params={}, dataset=DatasetInput("d", "f" * 64, "d"))
    origin = ProfileOrigin(created="today", study="joint", mlflow_run_id=tracker.run_id)
    path = write_profile(SKIP, measured=_figures(1.5, 1.4, 1.6), provenance=origin)
    with pytest.raises(ConfigError, match="has no profile"):
        promoted(tracker.run_id)
    model_id = log_profile(uri, tracker.run_id, DraftProfile.load(path), workplace)
    promoted(tracker.run_id)
    version = client.get_model_version_by_alias("tiny", "champion")
    assert (version.tags["sdtune.model_id"], version.run_id) == (model_id, tracker.run_id)
    assert "tiny" in client.get_logged_model(model_id).tags["mlflow.modelVersions"]
    promoted(path)
    version = client.get_model_version_by_alias("tiny", "champion")
    assert version.run_id == tracker.run_id
    assert version.tags["sdtune.model_id"] != model_id
    write_profile(
        SKIP, measured=_figures(1.5, 1.4, 1.6), provenance=origin.model_copy(update={"mlflow_run_id": "0" * 32})
    )
    promoted(path)
    run = client.get_run(client.get_model_version_by_alias("tiny", "champion").run_id)
    assert client.get_experiment(run.info.experiment_id).name == "sdtune-promoted"
    assert run.info.status == "FINISHED"


@pytest.mark.parametrize(
    ("figures", "other", "words"),
    [
        (None, "w", "has no measured speed-up"),
        (_figures(1.1, 0.9, 1.3), "w", r"1.10 \[0.90, 1.30\], does not lie above 1"),
        (_figures(1.49, 1.4, 1.6), "w", r"1.49 \[1.40, 1.60\], is 0.7% below the champion's, 1.50 \[1.40, 1.60\]"),
        (
            BUSY,
            "w",
            r"the machine was busy when its speed-up, 1.70 \[1.60, 1.80\], was measured \(load 9\): measure again",
        ),
        (_figures(1.5, 1.4, 1.6), "0", "another model"),
        (_figures(1.5, 1.3, 1.7), "w", None),
    ],
    ids=["plain", "not above 1", "below the champion", "busy", "another model", "as fast"],
)
def test_a_weaker_challenger_is_refused(figures: Measured | None, other: str, words: str | None) -> None:
    target = TargetIdentity(
        model="m", architecture="A", num_layers=6, dtype="float32", config_sha256="c", weights_sha256="w"
    )
    profile = DraftProfile(name="p", target=target, draft=SKIP, measured=figures)
    champion = {
        "sdtune.speedup": "1.5",
        "sdtune.speedup_low": "1.4",
        "sdtune.speedup_high": "1.6",
        "sdtune.target": other,
    }
    found = objection(profile, champion)
    assert found is None if words is None else re.search(words, str(found))


def test_what_cannot_be_promoted_is_said_in_one_line(
    write_profile: Write, promoted: Callable[..., Promotion], target: Target, workplace: Path
) -> None:
    with pytest.raises(ConfigError, match="neither a profile nor the id of a run"):
        promoted("nothing.yaml")
    with pytest.raises(ConfigError, match="no name 'a/b'"):
        promoted(write_profile(SKIP), name="a/b")
    draft = write_heads(target, workplace, [3])[3]
    path = write_profile(draft, measured=_figures(1.5, 1.4, 1.6))
    (workplace / str(draft.head)).unlink()
    with pytest.raises(ExitHeadError, match="belongs beside the profile"):
        promoted(path)


def test_what_cannot_be_fetched_is_said_in_one_line(uri: str, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, words in (
        ("models:/tiny", "give models:/NAME@ALIAS or models:/NAME/VERSION"),
        ("models:/nobody@champion", "cannot fetch models:/nobody@champion from the MLflow registry"),
    ):
        with pytest.raises(ProfileError, match=words) as refused:
            load_decoder(address, tracking_uri=uri)
        assert "\n" not in str(refused.value)
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(ProfileError, match=r"pip install -e '\.\[registry\]' in sdtune's checkout"):
        load_decoder("models:/tiny@champion", tracking_uri=uri)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_commands_promote_and_read_addresses(
    write_profile: Write, uri: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_profile(SKIP, measured=_figures(1.5, 1.4, 1.6))
    given = ("promote", str(path), "--name", "tiny", "--why", "bench of today", "--tracking-uri", uri)
    found = _run(*given)
    assert found.exit_code == 0, found.output
    assert "models:/tiny@champion" in found.output
    assert "1.50 [1.40, 1.60]" in found.output
    assert f'load_decoder("models:/tiny@champion", tracking_uri="{uri}")' in "".join(found.output.split("\n"))
    write_profile(SKIP, measured=_figures(1.2, 1.1, 1.3))
    refused = _run(*given)
    assert refused.exit_code == 2
    assert "is 20.0% below the champion's" in refused.stderr
    assert "--force promotes it anyway" in refused.stderr
    write_profile(SKIP, measured=_figures(1.65, 1.6, 1.7))
    better = " ".join(_run(*given).output.split())
    assert "speedup 1.65 [1.60, 1.70] champion 1.50 [1.40, 1.60], version 1 difference 10.0% above" in better
    write_profile(SKIP, measured=_figures(1.5, 1.4, 1.6))
    assert _run(*given, "--force").exit_code == 0
    write_profile(SKIP, measured=_figures(1.2, 1.1, 1.3))
    assert _run(*given, "--force", "--alias", "trial").exit_code == 0
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    shown = _run("show", "models:/tiny@champion")
    assert shown.exit_code == 0, shown.output
    assert "1.50" in shown.output
