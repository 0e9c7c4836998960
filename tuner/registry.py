"""Profiles in MLflow's model registry: logged with their run, registered, and promoted to an alias.

What is logged is the deployable folder, a profile with the heads of its draft, as a LoggedModel of the search's run.
`decoding.deploy.registry` fetches it. The store is opened by `tuner.tracking`.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from decoding.deploy.registry import PROFILE_NAME
from decoding.exit_heads import check_head_file
from decoding.profile import DraftProfile, Interval
from tuner.errors import ConfigError, PromotionError
from tuner.tracking import KIND_TAG, experiment_named, opened_store

MODEL_TYPE = "sdtune-profile"
CHAMPION = "champion"
PROMOTED_EXPERIMENT = "sdtune-promoted"
"""Experiment of profiles whose search is not in the store."""

MODEL_TAG = "sdtune.model_id"
"""Tag of a version with the id of its LoggedModel, which a local registry does not keep."""

_VERSIONS_TAG = "mlflow.modelVersions"
"""MLflow's tag of a LoggedModel with its versions in the registry, which its pages show."""

_SPEEDUP, _LOW, _HIGH = "sdtune.speedup", "sdtune.speedup_low", "sdtune.speedup_high"
_TARGET = "sdtune.target"


@dataclass(frozen=True)
class Promotion:
    """A version of a registered profile that has got an alias."""

    address: str
    """Address for `load_decoder`."""
    version: str
    speedup: Interval | None
    replaced: str | None
    """Version that had the alias before, or None."""
    champion: Interval | None = None
    """Speed-up of that version, as it was measured then; None if sdtune did not promote it or it has none."""


def log_profile(tracking_uri: str, run_id: str, profile: DraftProfile, folder: Path) -> str:
    """Log a profile and the files of its draft, which are in `folder`, as a LoggedModel of a run; return the model's id.

    Raises `TrackingError` if the store cannot be used.
    """
    with opened_store(tracking_uri) as mlflow:
        client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        experiment_id = client.get_run(run_id).info.experiment_id
        return _log(client, experiment_id, run_id, profile, folder)


def promote(
    source: str,
    name: str,
    *,
    why: str,
    by: str,
    tracking_uri: str,
    alias: str = CHAMPION,
    force: bool = False,
) -> Promotion:
    """Register a profile and give it the alias; `source` is the id of a search's run or the path of a profile.

    `why` and `by` (who decided) are kept as tags, beside the interval of the speed-up. Raises `PromotionError` unless the interval
    lies above 1, if the machine was busy when it was measured, and if it is less than that of the profile with the alias or for
    another model; not with `force`. Raises
    `ConfigError` for a source or a name that cannot be used, `ExitHeadError` for a head that is missing or altered, and
    `TrackingError` if the store cannot be used.
    """
    if re.fullmatch(r"[^/:@]+", name) is None:
        raise ConfigError(f"the registry takes no name {name!r}: leave out the characters / : @")
    with opened_store(tracking_uri) as mlflow:
        client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        profile, model_id = (
            (DraftProfile.load(Path(source)), None)
            if Path(source).exists()
            else _of_run(mlflow, client, source, tracking_uri)
        )
        champion = _champion(mlflow, client, name, alias)
        tags_of_champion = None if champion is None else dict(champion.tags)
        refused = objection(profile, tags_of_champion)
        if refused is not None and not force:
            raise PromotionError(f"not promoted: {refused}; --force promotes it anyway")
        model_id = model_id or _log_file(mlflow, client, profile, Path(source).parent)
        if champion is None and not client.search_registered_models(f"name = '{name}'"):
            client.create_registered_model(name)
        tags = {**_facts(profile), MODEL_TAG: model_id, "by": by, "why": why}
        model = client.get_logged_model(model_id)
        # Not the address models:/ID, nor a model without a run: a local registry would look for it in MLflow's default store.
        version = client.create_model_version(
            name, model.artifact_location, run_id=model.source_run_id, tags=tags, description=why, model_id=model_id
        )
        versions = [*json.loads(model.tags.get(_VERSIONS_TAG, "[]")), {"name": name, "version": str(version.version)}]
        client.set_logged_model_tags(model.model_id, {_VERSIONS_TAG: json.dumps(versions)})
        client.set_registered_model_alias(name, alias, version.version)
    return Promotion(
        f"models:/{name}@{alias}",
        str(version.version),
        None if profile.measured is None else profile.measured.speedup,
        None if champion is None else str(champion.version),
        _speedup(tags_of_champion or {}),
    )


def objection(profile: DraftProfile, champion: dict[str, str] | None) -> str | None:
    """Return why a profile should not be promoted over the champion with these tags, or None."""
    if profile.measured is None:
        return f"profile {profile.name!r} has no measured speed-up"
    speedup = profile.measured.speedup
    if speedup.ci95[0] <= 1:
        return f"the interval of its speed-up, {speedup}, does not lie above 1"
    if profile.measured.noise:
        signs = "; ".join(profile.measured.noise)
        return f"the machine was busy when its speed-up, {speedup}, was measured ({signs}): measure again"
    if champion is None:
        return None
    if (known := _speedup(champion)) is None:
        return "the champion has no speed-up to compare with: sdtune did not promote it"
    if champion[_TARGET] != profile.target.weights_sha256:
        return "the champion is for another model, or other weights: choose another --name"
    if speedup.value < known.value:
        return f"its speed-up, {speedup}, is {lead(speedup, known)} the champion's, {known}"
    return None


def lead(speedup: Interval, known: Interval) -> str:
    """Return how far a speed-up lies above another one, or below it, in words."""
    difference = speedup.value / known.value - 1
    return f"{abs(difference):.1%} {'below' if difference < 0 else 'above'}"


def _speedup(tags: dict[str, str]) -> Interval | None:
    if _LOW not in tags:
        return None
    return Interval(value=float(tags[_SPEEDUP]), ci95=(float(tags[_LOW]), float(tags[_HIGH])))


def _of_run(mlflow: Any, client: Any, run_id: str, tracking_uri: str) -> tuple[DraftProfile, str]:
    """Return the latest profile that was logged with a run, and the id of its LoggedModel."""
    if re.fullmatch(r"[0-9a-f]{32}", run_id) is None:
        raise ConfigError(f"{run_id} is neither a profile nor the id of a run")
    run = client.get_run(run_id)
    models = client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run_id}'")
    model = next((each for each in models if each.model_type == MODEL_TYPE), None)
    if model is None:
        raise ConfigError(f"the run {run_id} has no profile: it is no finished search; give the profile")
    with TemporaryDirectory() as folder:
        uri = f"{model.artifact_location}/{PROFILE_NAME}"
        path = mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=folder, tracking_uri=tracking_uri)
        return DraftProfile.load(path), str(model.model_id)


def _champion(mlflow: Any, client: Any, name: str, alias: str) -> Any:
    try:
        return client.get_model_version_by_alias(name, alias)
    except mlflow.exceptions.MlflowException as cause:
        if cause.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        return None


def _log_file(mlflow: Any, client: Any, profile: DraftProfile, folder: Path) -> str:
    """Log a profile on disk with its search's run, or with a run of its own if the store lacks that one."""
    run_id = None if profile.provenance is None else profile.provenance.mlflow_run_id
    if run_id is not None:
        try:
            return _log(client, client.get_run(run_id).info.experiment_id, run_id, profile, folder)
        except mlflow.exceptions.MlflowException as cause:
            if cause.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    experiment_id = experiment_named(client, PROMOTED_EXPERIMENT, str(client.tracking_uri))
    run_id = str(client.create_run(experiment_id, run_name=profile.name, tags={KIND_TAG: "promotion"}).info.run_id)
    model_id = _log(client, experiment_id, run_id, profile, folder)
    client.set_terminated(run_id)
    return model_id


def _log(client: Any, experiment_id: str, run_id: str, profile: DraftProfile, folder: Path) -> str:
    for name, sha256 in profile.draft.files.items():
        check_head_file(folder / name, sha256)
    model = client.create_logged_model(
        experiment_id,
        name=re.sub(r"[^\w-]", "-", profile.name),
        source_run_id=run_id,
        tags=_facts(profile),
        params={"draft": profile.draft.describe()[:250], "draft_length": profile.draft_length.describe()[:250]},
        model_type=MODEL_TYPE,
    )
    with TemporaryDirectory() as bundle:
        profile.save(Path(bundle) / PROFILE_NAME)
        for name in profile.draft.files:
            shutil.copy(folder / name, bundle)
        client.log_model_artifacts(model.model_id, bundle)
    client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)


def _facts(profile: DraftProfile) -> dict[str, str]:
    facts = {_TARGET: profile.target.weights_sha256, "sdtune.model": profile.target.model}
    if profile.measured is None:
        return facts
    speedup = profile.measured.speedup
    return facts | {
        _SPEEDUP: str(speedup.value),
        _LOW: str(speedup.ci95[0]),
        _HIGH: str(speedup.ci95[1]),
        "sdtune.device": profile.measured.device,
    }
