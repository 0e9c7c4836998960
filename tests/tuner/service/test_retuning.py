"""From reports of production to a search that is run again and a champion that is replaced, with planted costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient
from transformers import AutoModelForCausalLM

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.drafts import Draft
from decoding.exit_heads import file_sha256, head_name
from decoding.profile import DraftProfile, Interval
from decoding.rounds import Round
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate
from tests.support.drifting import PROFILE, SERVER, SimulatedServer, Traffic
from tests.support.profiles import measured
from tests.support.service import until, working
from tuner.cli.main import main
from tuner.config import SearchConfig
from tuner.drift.contract import MOST_REPORTED, ObservationReport, ObservedText, Promised
from tuner.evaluation.hardening.priced_search import STUDIES, SearchPlace
from tuner.evaluation.planted.model import VOCABULARY_SIZE, prompts
from tuner.measuring.clock import PriceList
from tuner.registry import Promotion, promote
from tuner.search.champion import ChampionOutcome
from tuner.search.steps import UnsavedSteps
from tuner.search.storage import StudyStore
from tuner.service import retuning
from tuner.service.admission import OF_THE_SERVICE, Allowed, identity
from tuner.service.app import ServiceSettings, create_service
from tuner.service.contract import JobResult, Retuning, SearchRequest
from tuner.service.drift import DriftWatch, RetuningPolicy
from tuner.service.jobs import Jobs, retuned_id
from tuner.service.retuning import RetunedSearch, concluded
from tuner.service.worker import WorkerSettings, run_job

ROOT_JOB = "0123456789abcdef"
PROMISED = Promised(name=PROFILE, speedup=1.5, low=1.4, high=1.6)


def _reports(name: str, *, speedup: float, start: int = 0, windows: int = 1100) -> Iterator[dict[str, Any]]:
    """Reports of a server whose profile has this name and, in production, this speed-up."""
    served = []
    for _, window in SimulatedServer(None, seed=0).serve(Traffic(windows, speedup=speedup)):
        arm = name if window.arm == PROFILE else window.arm
        facts = {"arm": arm, "context": None, "number": window.number + start, "ended": window.ended + start}
        served.append({**window.model_dump(mode="json"), **facts})
    for first in range(0, windows, MOST_REPORTED):
        yield {"server": SERVER, "windows": served[first : first + MOST_REPORTED], "requests": []}


def test_a_profile_that_lost_its_speed_is_tuned_again_and_its_successor_promoted(
    place: SearchPlace, jobs: Jobs, plain_reviews: None
) -> None:
    """What the champion drafts with has become expensive; the second search is told of it and finds another draft."""
    tracking = f"sqlite:///{place.database('tracking')}"
    champions: list[Draft] = []

    def price(draft: Draft, record: Round) -> float:
        return 1.0 + record.num_drafted * (1.5 if draft in champions else 0.3)

    def run(job: str, config: Mapping[str, Any], settings: WorkerSettings, known: Jobs) -> JobResult:
        return run_job(job, config, settings, known, prices=PriceList(price))

    studies = {"conf_layers": {**STUDIES["conf_layers"], "max_trials": 3}}
    whole = place.config("none", study=["conf_layers"], studies=studies).model_dump(mode="json", exclude_unset=True)
    request = SearchRequest(config={key: value for key, value in whole.items() if key not in OF_THE_SERVICE})
    allowed = Allowed([str(place.folder / "model")], [str(place.folder / "prompts.jsonl")])
    policy = RetuningPolicy(retune=True, promote=True)
    app = create_service(jobs, ServiceSettings(allowed, place.folder / "searches", policy=policy))
    with working(place.folder, jobs, run), TestClient(app) as client:
        first = client.post("/v1/searches", json=request.model_dump(mode="json")).json()["id"]
        until(lambda: jobs.find(first).state.is_over)
        champion = jobs.result(first)
        assert champion is not None
        assert champion.promised is not None
        champions.append(Candidate.model_validate(champion.winner).draft)
        promote(champion.mlflow_run, "tiny", why="the first", by="an engineer", tracking_uri=tracking)
        states = []
        for report in _reports(champion.promised.name, speedup=0.7):
            states.append(client.post("/v1/observations", json={"search": first, **report}).json())
        second = retuned_id(first, 1)
        assert (states[0]["verdict"], states[0]["retuning"]) == ("below", f"submitted {second}")
        known = jobs.retuning(second)
        assert known is not None
        assert known.has_same_data
        assert states[1]["retuning"] in (f"{second} is queued", f"{second} is running")
        assert client.get(f"/v1/searches/{second}").json()["retuned_from"] == first
        until(lambda: jobs.find(second).state.is_over)
        found = jobs.result(second)
        assert found is not None, jobs.find(second).error
        assert found.winner != champion.winner
        assert found.contest is not None
        assert found.contest.over_champion is not None
        assert found.contest.over_champion.ci95[0] > 1
        assert (found.contest.champion, found.contest.reason) == (first, None)
        assert found.contest.promoted == ["models:/tiny@champion"]
        version = mlflow.MlflowClient(tracking_uri=tracking).get_model_version_by_alias("tiny", "champion")
        assert (version.run_id, version.tags["by"]) == (found.mlflow_run, "sdtune service")
        assert f"times the speed of {first}, in turns on held-out prompts" in version.tags["why"]
        records = _known_trials(jobs, second)
        assert records[0] == champion.winner, "the champion is measured first"
        assert len(records) > 1
        again = client.post("/v1/observations", json={"search": first, **report}).json()
        assert again["retuning"].startswith(f"{second} was submitted 0.0 hours ago, and is finished: ")
        assert found.promised is not None
        for later in _reports(found.promised.name, speedup=found.promised.speedup * 1.2, start=5000):
            new = client.post("/v1/observations", json={"search": first, **later}).json()
        assert (new["verdict"], new["promised"]["name"]) == ("holds", found.promised.name)
        assert [client.get(f"/v1/searches/{job}").json()["drift"] for job in (first, second)] == ["below", "holds"]
        page = client.get(f"/searches/{second}").text
        assert "Promoted: models:/tiny@champion" in page
        assert f"/searches/{first}" in page
        assert "In production" in client.get(f"/searches/{first}").text
    assert len(jobs.latest()) == 2
    assert DraftProfile.load(place.folder / "searches" / second / "profile.yaml").draft.drafts


def test_texts_of_production_are_replayed_first_and_order_what_is_measured(
    place: SearchPlace, jobs: Jobs, plain_reviews: None, quick_costs: None
) -> None:
    def run(job: str, config: Mapping[str, Any], settings: WorkerSettings, known: Jobs) -> JobResult:
        return run_job(
            job, config, settings, known, prices=PriceList(lambda draft, record: 1 + 0.3 * record.num_drafted)
        )

    asked = prompts(3, 12, seed=99)
    plain = plain_decoder(Target(AutoModelForCausalLM.from_pretrained(place.folder / "model")))
    written = [plain.generate(Request(prompt, Ending(10))).tokens for prompt in asked]
    sampled = (*written[2][:-1], (written[2][-1] + 1) % VOCABULARY_SIZE)
    texts = [
        {"number": number + 1, "prompt": prompt, "continuation": continuation}
        for number, (prompt, continuation) in enumerate(zip(asked, [*written[:2], sampled], strict=True))
    ]
    studies = {"conf_layers": {**STUDIES["conf_layers"], "max_trials": 2}}
    whole = place.config("none", study=["conf_layers"], studies=studies).model_dump(mode="json", exclude_unset=True)
    config = {key: value for key, value in whole.items() if key not in OF_THE_SERVICE}
    allowed = Allowed([str(place.folder / "model")], [str(place.folder / "prompts.jsonl")])
    policy = RetuningPolicy(retune=True, most_texts=10)
    app = create_service(jobs, ServiceSettings(allowed, place.folder / "searches", policy=policy))
    with working(place.folder, jobs, run), TestClient(app) as client:
        first = client.post("/v1/searches", json={"config": config}).json()["id"]
        until(lambda: jobs.find(first).state.is_over)
        champion = jobs.result(first)
        assert champion is not None, jobs.find(first).error
        assert champion.promised is not None
        reports = _reports(champion.promised.name, speedup=0.7)
        state = client.post("/v1/observations", json={"search": first, **next(reports), "texts": texts}).json()
        second = retuned_id(first, 1)
        assert state["retuning"] == f"submitted {second}, which replays 3 texts first"
        until(lambda: jobs.find(second).state.is_over)
        found = jobs.find(second)
        assert found.replay is not None, found.error
        assert (found.replay.texts, found.replay.left_out) == (2, 1), "one is not what the model writes"
        origins = [each.origin for each in found.replay.predicted]
        assert {"champion", "lookup"} <= set(origins)
        speedups = [each.predicted_speedup for each in found.replay.predicted]
        assert speedups == sorted(speedups, reverse=True)
        measured_first = [Candidate.model_validate(each) for each in _known_trials(jobs, second)]
        described = [f"{each.draft.describe()}; {each.draft_length.describe()}" for each in measured_first]
        predicted = [each.description for each in found.replay.predicted]
        order = [predicted.index(each) for each in described]
        assert len(order) > 1
        assert order[0] == 0
        assert order == sorted(order), "measured in the order of the predictions"
        assert "Predicted on texts of production" in client.get(f"/searches/{second}").text
        result = client.get(f"/v1/searches/{second}/result").text
    spelled = " ".join(f"w{token}" for token in asked[0])
    ids = ", ".join(map(str, asked[0]))
    files = [path for path in place.folder.rglob("*") if path.is_file() and not path.name.startswith("service.db")]
    assert any(path.name == "mlflow.db" for path in files)
    held = [path.read_bytes() for path in files] + [result.encode()]
    assert not any(text.encode() in each for each in held for text in (spelled, ids, ids.replace(" ", "")))


def _known_trials(jobs: Jobs, job: str) -> list[Any]:
    """The candidates of the warm start, as plain data."""
    store = StudyStore(jobs.database, f"model-prompts-{job}")
    stored = store.find("warm_start")
    assert stored is not None
    found = [each.candidate.model_dump(mode="json") for each in stored.records()]
    store.close()
    return found


def _finished(job: str, config: Mapping[str, Any], settings: WorkerSettings, jobs: Jobs) -> JobResult:
    return JobResult(profile="", claims_speedup=True, rows=[], report="", mlflow_run="run", promised=PROMISED)


def test_one_search_at_a_time_with_a_pause_between_and_only_if_asked_for(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n')
    config = {"model": str(tmp_path / "model"), "dataset": str(tmp_path / "d.jsonl")}
    allowed = Allowed([str(tmp_path / "model")], [str(tmp_path / "d.jsonl")])
    root = identity(SearchConfig.model_validate(config), "default")
    with working(tmp_path, jobs, _finished):
        jobs.submit(root, config, "default")
        until(lambda: jobs.find(root).state.is_over)
    head = tmp_path / root / "heads" / head_name(3)
    head.parent.mkdir(parents=True)
    head.write_bytes(b"a head")
    app = create_service(jobs, ServiceSettings(allowed, tmp_path))
    with TestClient(app) as client:
        for report in _reports(PROFILE, speedup=1.1):
            state = client.post("/v1/observations", json={"search": root, **report}).json()
    assert state["retuning"] == "nothing: the service was started without --retune"
    assert len(jobs.latest()) == 1

    def report_to(policy: RetuningPolicy, allowed: Allowed, hours: float = 0.0) -> str | None:
        created = max(job.created_seconds for job in jobs.latest())
        watch = DriftWatch(jobs, policy, allowed, tmp_path, now=lambda: created + hours * 3600)
        return watch.report(ObservationReport(search=root, **report)).retuning

    policy = RetuningPolicy(retune=True, pause_seconds=7200)
    refused = report_to(policy, Allowed([], []))
    assert refused is not None
    assert refused.startswith("not accepted any more: model: ")
    first, second = retuned_id(root, 1), retuned_id(root, 2)
    assert report_to(policy, allowed) == f"submitted {first}"
    assert jobs.retuning(first) == Retuning(root=root, champion=root, has_same_data=True, promote=False)
    assert jobs.heads(first) == {head.name: file_sha256(head)}
    assert report_to(policy, allowed, hours=100) == f"{first} is queued"
    jobs.cancel(first)
    assert (
        report_to(policy, allowed, hours=1.5) == f"{first} was submitted 1.5 hours ago, and is cancelled: 0.5 to wait"
    )
    (tmp_path / "d.jsonl").write_text('{"prompt": "another"}\n')
    assert report_to(policy, allowed, hours=2.5) == f"submitted {second}"
    assert [job.id for job in jobs.lineage(root)] == [root, first, second]
    again = jobs.retuning(second)
    assert again is not None
    assert (again.has_same_data, jobs.heads(second)) == (False, None), "heads may know what is held out now"


@pytest.mark.parametrize(("temperature", "most_texts", "replays"), [(0.0, 5, True), (0.8, 5, False), (0.0, 0, False)])
def test_greedy_texts_are_replayed_for_greedy_searches_of_a_service_that_takes_texts(
    jobs: Jobs, tmp_path: Path, temperature: float, most_texts: int, replays: bool
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n')
    config = {"model": str(tmp_path / "model"), "dataset": str(tmp_path / "d.jsonl"), "temperature": temperature}
    root = identity(SearchConfig.model_validate(config), "default")
    with working(tmp_path, jobs, _finished):
        jobs.submit(root, config, "default")
        until(lambda: jobs.find(root).state.is_over)
    (report, *_) = _reports(PROFILE, speedup=1.1)
    text = ObservedText(number=1, prompt=(5,), continuation=(6, 7))
    earlier = ObservationReport(search=root, server=SERVER, windows=[], requests=[], texts=[text])
    jobs.observations.keep(root, earlier, most_texts=5)
    allowed = Allowed([str(tmp_path / "model")], [str(tmp_path / "d.jsonl")])
    watch = DriftWatch(jobs, RetuningPolicy(retune=True, most_texts=most_texts), allowed, tmp_path)
    done = watch.report(ObservationReport(search=root, **report)).retuning
    assert done == f"submitted {retuned_id(root, 1)}{', which replays 1 texts first' if replays else ''}"
    known = jobs.retuning(retuned_id(root, 1))
    assert known is not None
    assert known.replays is replays


def _search(reason: str | None = None, *, promote: bool = True) -> RetunedSearch:
    given = Retuning(root=ROOT_JOB, champion=ROOT_JOB, has_same_data=True, promote=promote)
    return RetunedSearch(given, {}, (), None, "0" * 32, reason)


FASTER = ChampionOutcome(over_champion=Interval(value=1.2, ci95=(1.1, 1.3)))
SLOWER = ChampionOutcome(over_champion=Interval(value=1.0, ci95=(0.9, 1.1)), reason="the interval does not lie above 1")


@pytest.mark.parametrize(
    ("search", "outcome", "reason"),
    [
        (_search(), SLOWER, "the interval does not lie above 1"),
        (_search("its head cannot be measured"), None, "its head cannot be measured"),
        (_search(), FASTER, "no alias of the registry is at the profile in use: promote it by hand"),
        (_search(promote=False), FASTER, None),
    ],
)
def test_the_champion_stays_unless_its_alias_and_the_interval_say_otherwise(
    place: SearchPlace, search: RetunedSearch, outcome: ChampionOutcome | None, reason: str | None
) -> None:
    settings = WorkerSettings("", f"sqlite:///{place.database('tracking')}", place.folder)
    found = concluded(search, outcome, "1" * 32, settings, UnsavedSteps())
    assert (found.reason, found.promoted) == (reason, [])
    assert found.over_champion == (None if outcome is None else outcome.over_champion)


def test_a_promotion_that_was_cut_off_is_completed_and_nothing_is_registered_twice(
    place: SearchPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = {"old": ["b"], "new": ["a"]}  # a worker was killed between the two
    promoted: list[str] = []

    promotion = Promotion("", "2", measured().speedup, "1")

    def promote_(run: str, name: str, **_: Any) -> Any:
        promoted.append(name)
        return replace(promotion, address=f"models:/{name}@champion")

    monkeypatch.setattr(retuning, "championships", lambda run, tracking_uri: at[run])
    monkeypatch.setattr(retuning, "promote", promote_)
    search = replace(_search(), champion_run="old")
    found = concluded(search, FASTER, "new", WorkerSettings("", "", place.folder), UnsavedSteps())
    assert found.promoted == ["models:/a@champion", "models:/b@champion"]
    assert promoted == ["b"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--promote"], "give --retune as well"),
        (
            ["--accept-texts", "5"],
            "--accept-texts: texts are kept for searches that are run again: give --retune as well",
        ),
        (["--retune", "--retune-pause", "soon"], "--retune-pause: 'soon' must be a duration"),
    ],
)
def test_wrong_settings_are_said_before_anything_is_opened(flags: list[str], why: str) -> None:
    lists = ["--allow-model", "m", "--allow-dataset", "d", "--database", "sqlite:////absent/service.db"]
    result = CliRunner().invoke(main, ["service", *lists, *flags])
    assert result.exit_code == 2
    assert why in result.output


def test_documents_of_earlier_versions_are_read() -> None:
    old = {"profile": "", "claims_speedup": True, "rows": [], "report": "", "mlflow_run": "run"}
    found = JobResult.model_validate_json(json.dumps(old))
    assert (found.winner, found.contest, found.promised) == (None, None, None)
