"""`sdtune search --deploy-to`, with a stand-in for llama.cpp: what is tried, where it is raced, and what the profile says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoModelForCausalLM

from decoding.draft_length import RULES, Fixed, TopProbability
from decoding.drafts import (
    EarlyExit,
    LayerSkip,
    Lookup,
    PlainDecoding,
    PromptLookup,
    SuffixDraft,
    SuffixLookup,
)
from decoding.profile import DraftProfile, TargetIdentity
from studies.contract import Candidate
from tests.support.commands import SearchCommand
from tests.support.engine_stub import write_llama_cpp
from tests.support.refusals import refused
from tests.support.stored_trials import stored_records
from tuner.engines.bench import EngineServers
from tuner.engines.candidates import CandidateExports, EngineRules
from tuner.errors import ExportError
from tuner.search.budget import Seconds
from tuner.search.engine import EngineArena

SMALL = "studies: {joint: {num_surveyed: 30, max_tokens: 4, num_drafts: 2, num_lookups: 1, kinds: [skip_set, lookup]}}"


@pytest.fixture
def deploy(run_search: SearchCommand, workplace: Path) -> SearchCommand:
    """The search of the small configuration, deployed to the stand-in."""
    config = workplace.parent / "small.yaml"
    text = config.read_text().replace("study: [conf_layers, exit_layer, draft_length]\n", "")
    config.write_text(text + SMALL + "\n")
    home = write_llama_cpp(workplace.parent / "llama.cpp")

    def run(*flags: str, **named: Any) -> Any:
        return run_search("--deploy-to", "llama.cpp", *flags, **{"engine_home": str(home), **named})

    return run


def _shown(output: str) -> str:
    return " ".join(output.split())


@pytest.mark.usefixtures("quick_costs")
def test_only_what_the_engine_runs_is_tried_and_the_engine_decides(deploy: SearchCommand) -> None:
    done = deploy()
    assert done.exit_code == 0, done.output
    records = stored_records(Path("sdtune.db"))
    assert records
    assert not [record.reason for record in records if record.reason and "ExportError" in record.reason]
    assert {record.candidate.draft_length.rule for record in records} <= {"fixed", "top_probability"}
    profile = DraftProfile.load(Path("profile.yaml"))
    assert isinstance(profile.draft, PromptLookup), "the stand-in's lookup is its fastest draft"
    assert profile.measured is not None
    assert profile.measured.speedup.value == pytest.approx(2.5)
    assert not profile.decoding.prefix_reuse
    assert profile.provenance is not None
    engine = profile.provenance.engine
    assert engine is not None
    assert (engine.name, engine.version) == ("llama.cpp", "11434 (abc)")
    assert "--spec-type ngram-simple" in engine.command
    assert "tmp" not in engine.command
    assert "in llama.cpp 11434 (abc)" in _shown(done.stdout)


@pytest.mark.usefixtures("quick_costs")
def test_time_that_was_kept_for_the_heat_is_not_kept_after_it(
    deploy: SearchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the time is expected for the heat, which takes it: enough is left to confirm on all prompts."""
    monkeypatch.setattr("tuner.search.run.heat_seconds", lambda program, pair_seconds: 300.0)
    monkeypatch.setattr("tuner.search.run._seconds", lambda *_: Seconds(4.0, 4.0, 4.0))
    genuine = EngineArena.shortlist

    def heated(arena: EngineArena, *given: Any) -> Any:
        arena.task.budget.spent_before += 300.0
        return genuine(arena, *given)

    monkeypatch.setattr(EngineArena, "shortlist", heated)
    done = deploy("--timeout", "10m", "--held-out-prompts", "12")
    assert done.exit_code == 0, done.output
    assert "to keep within --timeout" not in _shown(done.stdout)


@pytest.mark.usefixtures("quick_costs")
def test_an_engine_that_is_slower_with_every_draft_decodes_plainly(deploy: SearchCommand) -> None:
    done = deploy("--set", "engine_args=--slow", trials=1)
    assert done.exit_code == 0, done.output
    profile = DraftProfile.load(Path("profile.yaml"))
    assert isinstance(profile.draft, PlainDecoding)
    assert profile.provenance is not None
    assert profile.provenance.engine is not None
    assert "--spec-type" not in profile.provenance.engine.command
    assert "verdict Do not ship: decode plainly" in _shown(done.stdout)


@pytest.mark.usefixtures("quick_costs")
def test_wrong_texts_win_nothing(deploy: SearchCommand) -> None:
    done = deploy("--set", "engine_args=--wrong", trials=1)
    assert done.exit_code == 0, done.output
    assert isinstance(DraftProfile.load(Path("profile.yaml")).draft, PlainDecoding)


@pytest.mark.usefixtures("quick_costs")
def test_an_engine_that_does_not_start_is_started_once(deploy: SearchCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each draft, as if it refused those: vLLM takes a minute on a GPU."""
    started, genuine = list[str](), EngineServers._started

    def counting(servers: EngineServers, *given: Any) -> Any:
        started.append(servers.program.title)
        return genuine(servers, *given)

    monkeypatch.setattr(EngineServers, "_started", counting)
    refused(deploy("--set", "engine_args=--broken", trials=1), "llama.cpp ended with status 1", "--broken")
    assert started == ["llama.cpp"]


def test_wrong_settings_are_refused_before_anything_runs(deploy: SearchCommand, run_search: SearchCommand) -> None:
    refused(deploy(temperature="1"), "deploy_to", "temperature")
    refused(deploy(engine_home="nowhere"), "nowhere does not hold llama.cpp's sources")
    refused(run_search(engine_home="nowhere"), "engine_home", "deploy_to")


@pytest.fixture(scope="module")
def rules(checkpoint: Path) -> dict[str, EngineRules]:
    """The rules of each engine for the tiny model."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    identity = TargetIdentity(
        model="tiny", architecture="A", num_layers=6, dtype="float32", config_sha256="c", weights_sha256="w"
    )
    return {name: EngineRules(name, identity, model.config, model="tiny") for name in ("llama.cpp", "vllm")}


@pytest.mark.parametrize(
    ("draft", "rule", "runs"),
    [
        (LayerSkip(skip_attention=(1,), lookup=SuffixLookup()), "ada_edl", True),
        (EarlyExit(exit_layer=2, lookup=Lookup(max_ngram=3, min_ngram=1)), "top_probability", True),
        (SuffixDraft(), "fixed", True),
        (EarlyExit(exit_layer=2), "beta_thompson", False),
        (LayerSkip(bits=8), "fixed", False),
    ],
)
def test_a_plugin_runs_profiles_as_they_are(rules: dict[str, EngineRules], draft: Any, rule: str, runs: bool) -> None:
    known = rules["vllm"]
    native = EngineRules("vllm", known._target, known._config, model="tiny", runs_profiles=True)
    candidate = Candidate(draft=draft, draft_length=RULES[rule]())
    if runs:
        assert native.as_run(candidate) == candidate
        native.check(candidate)
    else:
        with pytest.raises(ExportError, match="vLLM does not run"):
            native.check(candidate)
    with pytest.raises(ExportError):
        known.check(candidate)


def test_a_plugin_is_handed_the_profile_with_its_head(rules: dict[str, EngineRules], tmp_path: Path) -> None:
    known, heads, out = rules["vllm"], tmp_path / "heads", tmp_path / "out"
    heads.mkdir()
    out.mkdir()
    (heads / "exit_head_2.safetensors").write_bytes(b"head")
    native = EngineRules("vllm", known._target, known._config, model="tiny", runs_profiles=True)
    program: Any = SimpleNamespace(target_files=(), prepare=lambda plan, log: (), draft_flags=lambda plan: ("--copy",))
    exports = CandidateExports(program, native, cast(Any, None), heads, out)
    draft = EarlyExit(
        exit_layer=2, head="exit_head_2.safetensors", head_sha256="0" * 64, lookup=SuffixLookup(max_tokens=9)
    )
    candidate = Candidate(draft=draft, draft_length=RULES["ada_edl"]())
    plan, flags = exports.write(candidate)
    assert plan is exports.plain, "no draft model is written"
    assert json.loads(flags[1])["num_speculative_tokens"] == max(9, candidate.draft_length.max_tokens)
    path = Path(json.loads(flags[3])["sdtune"]["profile"])
    profile = DraftProfile.load(path)
    assert (profile.draft, profile.draft_length) == (candidate.draft, candidate.draft_length)
    assert (path.parent / "exit_head_2.safetensors").read_bytes() == b"head"
    assert exports.write(candidate)[1] == flags, "written once: the same server"


EXIT = EarlyExit(exit_layer=2)
SINGLE = Lookup(max_ngram=3, min_ngram=3)


@pytest.mark.parametrize(
    ("draft", "engines"),
    [
        (EXIT, {"llama.cpp", "vllm"}),
        (LayerSkip.blocks((1, 3)), {"llama.cpp", "vllm"}),
        (LayerSkip(skip_attention=(1,)), set()),
        (LayerSkip(bits=8), {"llama.cpp"}),
        (EXIT.having(lookup=SINGLE), {"llama.cpp"}),
        (EXIT.having(lookup=Lookup(max_ngram=3, min_ngram=1)), set()),
        (EXIT.having(lookup=SuffixLookup()), set()),
        (PromptLookup(max_ngram=3, min_ngram=3), {"llama.cpp", "vllm"}),
        (PromptLookup(max_ngram=3, min_ngram=1), {"vllm"}),
        (PlainDecoding(), {"llama.cpp", "vllm"}),
    ],
)
def test_an_engine_accepts_the_drafts_that_it_runs_as_they_are(
    rules: dict[str, EngineRules], draft: Any, engines: set[str]
) -> None:
    assert {name for name, each in rules.items() if each.accepts(draft)} == engines


def test_rules_that_an_engine_lacks_are_named(rules: dict[str, EngineRules]) -> None:
    rules["llama.cpp"].check(Candidate(draft=EXIT, draft_length=TopProbability()))
    with pytest.raises(ExportError, match="vLLM drafts by 8 tokens a round"):
        rules["vllm"].check(Candidate(draft=EXIT, draft_length=TopProbability()))
    with pytest.raises(ExportError, match=r"in place of AdaEDL"):
        rules["llama.cpp"].check(Candidate(draft=EXIT, draft_length=RULES["ada_edl"](rule="ada_edl")))
    rules["vllm"].check(Candidate(draft=PromptLookup(), draft_length=Fixed(max_tokens=5)))
