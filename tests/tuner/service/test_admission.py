"""What a request may hold: every key of a configuration is the client's or the operator's, and values have limits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient

from studies.samplers import SAMPLERS, load_sampler
from tuner.cli.main import main
from tuner.cli.service import OF_THE_WORKER
from tuner.config import DistillSettings, SearchConfig
from tuner.errors import ConfigError
from tuner.service.admission import (
    FILES_IN_STUDIES,
    LIMITS,
    OF_THE_SERVICE,
    Allowed,
    admitted,
    identity,
    limits_of,
    submitted,
)
from tuner.service.contract import SearchRequest, ServiceError


@pytest.fixture
def allowed(tmp_path: Path) -> Allowed:
    (tmp_path / "model").mkdir()
    (tmp_path / "data").mkdir()
    for name in ("prompts", "shots"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "secret.jsonl").write_text('{"prompt": "s"}\n')
    (tmp_path / "data" / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    return Allowed([str(tmp_path / "model"), "org/model"], [str(tmp_path / "data"), "gsm8k"])


def _config(allowed: Allowed, **changes: Any) -> dict[str, Any]:
    return {"model": allowed.models[0], "dataset": f"{allowed.datasets[0]}/prompts.jsonl", **changes}


def _admit(allowed: Allowed, **changes: Any) -> SearchConfig:
    return admitted(SearchRequest(config=_config(allowed, **changes)), allowed)


def _texts(schema: Any) -> Iterator[str]:
    """Yield the keys of a document, and of all documents in it, that hold free text or files, by its JSON Schema."""
    if isinstance(schema, Mapping):
        properties = schema.get("properties")
        for key, node in properties.items() if isinstance(properties, Mapping) else ():
            kinds = (node, *node.get("anyOf", ()), node.get("items", {}))
            if any(each.get("type") == "string" and "enum" not in each and "const" not in each for each in kinds):
                yield key
    for inside in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        yield from _texts(inside)


def test_a_request_holds_no_text_of_an_unknown_kind() -> None:
    """A new key that holds text or a path is not for requests until someone says that it names no file, program or address."""
    assert set(OF_THE_SERVICE) < set(SearchConfig.model_fields)
    assert set(OF_THE_WORKER) < set(OF_THE_SERVICE)
    whole = SearchConfig.model_json_schema()
    own = {key: node for key, node in whole["properties"].items() if key not in OF_THE_SERVICE}
    assert set(_texts({"properties": own})) == {
        *("model", "revision", "dataset", "preset", "prompt_column", "template", "system_prompt", "group_column"),
        *("category_column", "study"),
    }
    assert set(_texts(DistillSettings.model_json_schema())) == {"training_dataset", "training_column"}
    in_studies = {key for each in SAMPLERS for key in _texts(load_sampler(each).Settings.model_json_schema())}
    assert in_studies & FILES_IN_STUDIES == FILES_IN_STUDIES
    assert in_studies - FILES_IN_STUDIES <= {"rules", "skip_attention", "skip_mlp"}, in_studies


def test_no_program_flag_or_file_of_a_head_comes_with_a_request(allowed: Allowed) -> None:
    engine = {"deploy_to": "llama.cpp", "engine_home": "/home/evil", "engine_args": "--log-file /etc/passwd"}
    with pytest.raises(ServiceError, match="deploy_to, engine_args, engine_home: the service and its workers"):
        _admit(allowed, **engine)
    rule = {"rule": "fixed", "max_tokens": 4}
    draft = {"kind": "early_exit", "exit_layer": 2, "head": "exit_head_2.safetensors", "head_sha256": "a" * 64}
    for studies in (
        {"tpe": {"candidates": [{"draft": draft, "draft_length": rule}]}},
        {"draft_length": {"draft": draft}},
    ):
        with pytest.raises(ServiceError, match="studies: head, head_sha256: the service and its workers decide this"):
            _admit(allowed, studies=studies)
    with pytest.raises(ServiceError, match="unknown key 'distillation"):
        _admit(allowed, distillation={"out": "/etc"})
    with pytest.raises(ServiceError, match="revision"):
        _admit(allowed, model="org/model", revision="../../evil")


def test_names_are_resolved_once_so_that_the_worker_means_the_same_file(
    allowed: Allowed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = {"dataset": "data/../data/prompts.jsonl"}
    training = {"training_dataset": "/proc/self/cwd/data/shots.jsonl"}
    given = admitted(
        SearchRequest(config={"model": "model", **wanted, "distillation": training | {"steps": 5}}), allowed
    )
    kept = submitted(given)
    data = tmp_path.resolve() / "data"
    assert (kept["model"], kept["dataset"]) == (str(tmp_path.resolve() / "model"), str(data / "prompts.jsonl"))
    assert kept["distillation"] == {"training_dataset": str(data / "shots.jsonl"), "steps": 5}
    assert SearchConfig.model_validate(kept) == given, "the worker reads what was admitted"
    assert submitted(_admit(allowed, model="org/model", dataset="gsm8k")) == {
        **{"model": "org/model", "dataset": "gsm8k", "timeout": LIMITS["timeout"]}
    }


@pytest.mark.parametrize("key", ["dataset", "distillation"])
@pytest.mark.parametrize("name", ["{}/../secret.jsonl", "{}/link.jsonl", "{}/absent.jsonl", "a\0b", "xsum"])
def test_a_data_set_outside_is_refused_wherever_it_is_named(allowed: Allowed, key: str, name: str) -> None:
    value: Any = name.format(allowed.datasets[0])
    with pytest.raises(ServiceError, match=r"is not on the list|is a control character"):
        _admit(allowed, **{key: {"training_dataset": value} if key == "distillation" else value})


def test_what_decides_the_result_decides_the_id(allowed: Allowed) -> None:
    shots = Path(allowed.datasets[0]) / "shots.jsonl"
    first = _admit(allowed, distillation={"training_dataset": str(shots)})
    known = identity(first, "default")
    assert known == identity(
        _admit(allowed, distillation={"training_dataset": f"{shots.parent}/./shots.jsonl"}), "default"
    )
    assert known != identity(first, "other")
    shots.write_text('{"prompt": "b"}\n')
    assert known != identity(first, "default")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trials": 1001}, "trials: 1001 is above the limit of this service, 1000"),
        ({"timeout": "25h"}, "timeout: 90000.0 is above the limit of this service, 86400"),
        ({"distillation": {"steps": 10**12}}, "distillation.steps: 1000000000000 is above the limit"),
        (
            {"studies": {"joint": {"max_trials": 5000}}},
            "studies.joint: max_trials: 5000 is above the limit of this service, 1000",
        ),
        ({"studies": {"joint": {"survey_tokens": 10**12}}}, "studies.joint: survey_tokens"),
    ],
)
def test_values_have_limits(allowed: Allowed, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ServiceError) as refused:
        _admit(allowed, **changes)
    assert why in str(refused.value)
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


def test_every_number_without_a_bound_of_its_own_has_a_limit() -> None:
    """Also those of keys to come: a setting of cost is limited by its type or by the operator."""
    schemas = {"": SearchConfig.model_json_schema(), "distillation.": DistillSettings.model_json_schema()}
    unbounded = set()
    for prefix, schema in schemas.items():
        for key, node in schema["properties"].items():
            numbers = [each for each in (node, *node.get("anyOf", [])) if each.get("type") in ("integer", "number")]
            has_bound = all("maximum" in each for each in numbers)
            if key not in OF_THE_SERVICE and not has_bound:
                unbounded.add(f"{prefix}{key}")
    # Prompts of a trial are no more than the tuning prompts, and seeds and temperatures cost nothing.
    unbounded -= {"prompts_per_trial", "seed", "distillation.temperature", "exact_width"}
    assert unbounded <= set(LIMITS)


def test_a_search_without_a_limit_on_its_time_gets_the_operators(allowed: Allowed) -> None:
    assert _admit(allowed).timeout == 24 * 3600
    short = Allowed(allowed.models, allowed.datasets, limits_of(["timeout=90s", "distillation.steps=700"]))
    assert _admit(short).timeout == 90
    assert _admit(short, timeout="30s").timeout == 30
    with pytest.raises(ServiceError, match="above the limit of this service, 700"):
        _admit(short, distillation={"steps": 701})


@pytest.mark.parametrize("given", ["timeout", "timeout=inf", "jobs=0", "steps=3", "trials=1.5"])
def test_a_wrong_limit_is_said_before_anything_is_opened(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--limit"):
        limits_of([given])
    result = CliRunner().invoke(main, ["service", "--allow-model", "m", "--allow-dataset", "d", "--limit", given])
    assert result.exit_code == 2
    assert "--limit" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "config",
    [
        {"prompt_column": "\ud800"},
        {"\ud800": 1},
        {"studies": {"joint": {"rules": ["\ud83d"]}}},
        {"timeout": float("inf")},
        {"studies": {"conf_layers": {"skip_ratio": float("nan")}}},
    ],
)
def test_text_that_is_none_and_numbers_that_are_none_are_not_accepted(
    client: TestClient, allowed: Allowed, config: dict[str, Any]
) -> None:
    for body in ({"config": _config(allowed, **config)}, {"config": {}, **config}, {"config": {}, "queue": "\ud800"}):
        answer = client.post("/v1/searches", content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code == 422
        assert "\n" not in answer.json()["detail"]


@pytest.fixture
def client(allowed: Allowed, tmp_path: Path) -> Iterator[TestClient]:
    from tuner.service.app import ServiceSettings, create_service
    from tuner.service.jobs import Jobs

    jobs = Jobs(f"sqlite:///{tmp_path / 'jobs.db'}")
    with TestClient(create_service(jobs, ServiceSettings(allowed, tmp_path / "searches"))) as client:
        yield client
    jobs.close()
