"""A tiny model, prompts, and an MLflow store that is made once (its migrations take seconds) and copied for each test."""

from __future__ import annotations

import fcntl
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import Engine, create_engine, event, text
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.draft_length import DraftLengthRule, Fixed
from decoding.drafts import Draft
from decoding.fingerprint import fingerprint
from decoding.probe import Capabilities, probe
from decoding.profile import DraftProfile, TargetIdentity
from decoding.target import Target
from tests.support.commands import SearchCommand, command_line
from tests.support.postgres import postgres
from tests.support.quick_search import measure_costs_once
from tests.support.tiny import save_tiny_checkpoint, write_tiny_prompts
from tuner.cli.main import main
from tuner.inputs.reader import READER
from tuner.tracking import DatasetInput, Tracker


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def target(checkpoint: Path) -> Target:
    """The model of the checkpoint."""
    return Target(AutoModelForCausalLM.from_pretrained(checkpoint).eval())


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="session", autouse=True)
def _data_read_offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the process that reads datasets ask no hub and leave nothing in the user's cache: it takes both from here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield
        READER.close()


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Let SQLite leave it to the system when a commit reaches the disk: only a power failure would tell the difference.

    A search commits hundreds of times, and waits several milliseconds each time. Processes that tests start do wait.
    """

    def relax(connection: object, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", relax)
    yield
    event.remove(Engine, "connect", relax)


@pytest.fixture(scope="session")
def _tracking_template(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Make the store once for all workers: their temporary folders are side by side."""
    own = tmp_path_factory.getbasetemp()
    folder = own if worker_id == "master" else own.parent
    path = folder / "mlflow-template.db"
    with (folder / "mlflow-template.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            making = folder / "mlflow-template-making.db"
            dataset = DatasetInput("made once", "0" * 64, "nowhere")
            Tracker.open(f"sqlite:///{making}", "template", run_id=None, params={}, dataset=dataset).close("FINISHED")
            making.rename(path)
    return path


@pytest.fixture(scope="session")
def _found_by_probes() -> dict[object, Capabilities]:
    return {}


@pytest.fixture(autouse=True)
def probed_once(monkeypatch: pytest.MonkeyPatch, _found_by_probes: dict[object, Capabilities]) -> None:
    """Let the first search of a model probe it: dozens search the same tiny one, and the probe decodes more than a trial."""

    def find(model: PreTrainedModel, *, every_part: bool) -> Capabilities:
        key = (fingerprint(model), model.dtype, model.config._attn_implementation, every_part)
        if key not in _found_by_probes:
            _found_by_probes[key] = probe(model, every_part=every_part)
        return _found_by_probes[key]

    monkeypatch.setattr("tuner.search.task.probe", find)


@pytest.fixture
def quick_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at no costs."""
    measure_costs_once(monkeypatch)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, _tracking_template: Path, quick_costs: None) -> Path:
    """An empty current folder, with an MLflow store in the folder above it."""
    shutil.copy(_tracking_template, tmp_path / "mlflow.db")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # The libraries read HF_HUB_OFFLINE once, when they are imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return here


@pytest.fixture
def write_profile(workplace: Path, target: Target, checkpoint: Path) -> Callable[..., Path]:
    """A function that writes a profile of the tiny model into the current folder; `parts` are further keys."""

    def write(draft: Draft, rule: DraftLengthRule = Fixed(), name: str = "p.yaml", **parts: Any) -> Path:  # noqa: B008 - frozen
        model = fingerprint(target.model)
        facts = {"config_sha256": model.config_sha256, "weights_sha256": model.weights_sha256}
        profile = DraftProfile(
            name="p",
            target=TargetIdentity(
                model=str(checkpoint), architecture="LlamaForCausalLM", num_layers=6, dtype="float32", **facts
            ),
            draft=draft,
            draft_length=rule,
            **parts,
        )
        profile.save(workplace / name)
        return workplace / name

    return write


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Engine]:
    with postgres() as url:
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        yield engine
        engine.dispose()


@pytest.fixture
def postgres_url(postgres_server: Engine) -> str:
    """Address of an empty PostgreSQL database of the test's own: tests run in any order."""
    name = f"test_{uuid4().hex}"
    with postgres_server.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    return postgres_server.url.set(database=name).render_as_string(hide_password=False)


@pytest.fixture
def drawn_pictures() -> None:
    """Let `run_search` draw its pictures, which takes half a second each."""


@pytest.fixture
def plain_reviews(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches write no page, which takes a second."""
    monkeypatch.setattr("tuner.search.outcome.report_page", lambda result: "no report")


@pytest.fixture
def run_search(
    workplace: Path,
    checkpoint: Path,
    prompts_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> SearchCommand:
    """`sdtune search` on the tiny model; keyword arguments override or (None) remove flags."""
    monkeypatch.setattr("tuner.search.race.MOST_PASSES", 1)  # more would only reduce the noise of the clock
    if "drawn_pictures" not in request.fixturenames:
        request.getfixturevalue("plain_reviews")
    small = _small_config(workplace.parent)

    def run(*switches: str, **changes: str | None) -> Result:
        settings: dict[str, str | None] = {
            "model": str(checkpoint),
            "dataset": str(prompts_file),
            "config": str(small),
            "tracking_uri": f"sqlite:///{workplace.parent / 'mlflow.db'}",
            **changes,
        }
        return CliRunner().invoke(main, [*command_line("search", settings), *switches])

    return run


def _small_config(folder: Path) -> Path:
    """Write sizes with two prompts a trial and two left for the race, and one token more than a bench needs."""
    path = folder / "small.yaml"
    path.write_text(
        "max_new_tokens: 10\ntuning_prompts: 4\nheld_out_prompts: 4\nprompts_per_trial: 2\ntrials: 3\nfinalists: 2\n"
        "group_column: file\nexperiment: tiny\ndistill: never\nstock: false\nstudy: [conf_layers, exit_layer, draft_length]\n"
    )
    return path
