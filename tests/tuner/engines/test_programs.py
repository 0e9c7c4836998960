"""Command lines, answers and refusals of the engines, without an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from annotated_types import Le

from decoding.draft_length import Fixed, TopProbability
from decoding.drafts import EarlyExit, Lookup
from decoding.profile import DraftProfile, TargetIdentity
from tests.support.engine_stub import write_llama_cpp
from tests.support.tiny import tiny_llama
from tuner.engines import vllm
from tuner.engines.candidates import engine_candidate
from tuner.engines.contract import DraftCounts, Served, ServerSettings, find_engine
from tuner.engines.llama_cpp import LlamaCppServer
from tuner.engines.llama_cpp import read_completion as read_llama_cpp
from tuner.engines.server import Client
from tuner.engines.vllm import VllmServer, read_tokens
from tuner.errors import EngineError
from tuner.export.engines.registry import ENGINES
from tuner.export.plan import FixedLength, NgramSettings, Plan
from tuner.export.shape import DraftShape
from tuner.fields import PROGRAMS
from tuner.inputs.prompts import Prompt

TARGET = TargetIdentity(
    model="m", architecture="A", num_layers=6, dtype="float32", config_sha256="c", weights_sha256="w"
)
PLAN = Plan(
    profile=DraftProfile(name="p", target=TARGET, draft=EarlyExit(exit_layer=2), draft_length=Fixed()),
    model="/models/m",
    dtype="float32",
    out=Path("/exports/one"),
    shape=DraftShape((0, 1), has_head=True, num_target_layers=6),
    length=FixedLength(4, "as asked"),
    threshold=0.25,
    lookup=NgramSettings(3, 3, 8),
)
SETTINGS = ServerSettings(context=100, threads=1, sequences=2, cache_values=48, arguments=("--seed", "7"))


def test_a_server_has_room_for_every_text_and_its_draft_within_the_limit_of_the_model() -> None:
    prompts = [Prompt(row, (1,) * length, "") for row, length in enumerate((10, 30, 20))]
    config, made = tiny_llama().config, list[ServerSettings]()
    for config.max_position_embeddings in (512, 64):
        made.append(ServerSettings.of(prompts, 20, config, threads=2, engine_args="--name 'a b'", sequences=3))
    free, limited = made
    longest_draft = max(field.le for field in Fixed.model_fields["max_tokens"].metadata if isinstance(field, Le))
    assert free.context >= 30 + 20 + longest_draft
    assert limited == replace(free, context=64)
    assert (free.threads, free.sequences, free.arguments) == (2, 3, ("--name", "a b"))


def test_every_measured_engine_has_an_export() -> None:
    assert set(PROGRAMS) <= set(ENGINES)


def test_llama_cpp_is_launched_with_the_flags_of_its_export() -> None:
    program = LlamaCppServer(Path("/src"), Path("/src/llama-server"))
    flags = program.draft_flags(PLAN)
    assert flags[:4] == ("--model-draft", "/exports/one/draft.gguf", "--spec-type", "ngram-simple,draft-simple")
    assert "--model" not in flags
    drafted = program.launch(PLAN, SETTINGS, 8123, flags).command
    plain = program.launch(PLAN, SETTINGS, 8123, ()).command
    assert set(drafted) - set(plain) == set(flags)
    assert plain[:3] == ("/src/llama-server", "--model", "/exports/one/target.gguf")
    words = " ".join(plain)
    assert "--host 127.0.0.1 --port 8123" in words
    assert "--ctx-size 200 --parallel 2 --threads 1 --seed 7" in words


def test_vllm_is_launched_with_the_export_as_speculative_config() -> None:
    program = VllmServer(Path("/env/bin/python"))
    name, value = program.draft_flags(replace(PLAN, lookup=None))
    assert name == "--speculative-config"
    assert json.loads(value)["num_speculative_tokens"] == 4
    launch = program.launch(PLAN, SETTINGS, 8123, ())
    assert launch.command[:3] == ("/env/bin/python", "-m", "vllm.entrypoints.openai.api_server")
    assert "--no-enable-prefix-caching" in launch.command
    assert launch.environment["OMP_NUM_THREADS"] == "1"


def test_vllm_takes_memory_for_its_requests_only() -> None:
    """Servers run beside one another, and beside this process's own model; a draft model has keys and values too."""
    program = VllmServer(Path("/env/bin/python"))
    plain, drafted = (program.launch(PLAN, SETTINGS, 8123, flags).command for flags in ((), program.draft_flags(PLAN)))
    of_requests = 2 * 100 * 48 * 4
    taken = [int(each[each.index("--kv-cache-memory-bytes") + 1]) for each in (plain, drafted)]
    assert of_requests < taken[0] < taken[1] < 20 * of_requests


@pytest.mark.parametrize("installed", ["sdtune-vllm", "arctic-inference", "vllm"])
def test_vllm_also_drafts_by_what_is_installed(installed: str, tmp_path: Path) -> None:
    """Its n-grams need nothing; the profile's own lookup gives their settings, which are comparable then."""
    draft = EarlyExit(exit_layer=2, lookup=Lookup(max_ngram=4, min_ngram=2, max_tokens=7))
    profile = PLAN.profile.model_copy(update={"draft": draft})
    program, plan = _installed(tmp_path, installed), replace(PLAN, profile=profile)
    found = program.own_drafts(plan, Path("profile.yaml"))
    settings = {name: json.loads(flags[1]) for name, flags in found.items()}
    ngrams = {"prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": 7}
    assert settings.pop("vLLM's n-grams") == {"method": "ngram", **ngrams}
    assert {name: each["method"] for name, each in settings.items()} == {
        "sdtune-vllm": {"plugin": "custom_class"},
        "arctic-inference": {"vLLM's suffixes": "suffix"},
        "vllm": {},
    }[installed]
    if "plugin" in found:
        assert json.loads(found["plugin"][3]) == {"sdtune": {"profile": "profile.yaml"}}
    same = replace(plan, shape=None, lookup=NgramSettings(4, 2, 7))
    assert "vLLM's n-grams" not in program.own_drafts(same, Path("profile.yaml")), "that is the export's draft"


def _installed(folder: Path, *names: str) -> VllmServer:
    """Return an environment of vLLM that has these distributions."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\ncase " {" ".join(names)} " in *" $3 "*) echo "$3 1.0" ;; esac\n')
    python.chmod(0o755)
    return VllmServer(python)


def test_vllm_s_own_methods_have_the_flags_of_their_settings(tmp_path: Path) -> None:
    served = Served("/models/m", "float32", tmp_path, draft_model="/drafts/small")
    methods = {each.name: each for each in _installed(tmp_path, "arctic-inference").methods(served)}
    name, value = methods["n-grams of 3 to 2"].flags(8, ((1, 2, 8), (3, 3, 0)))
    assert name == "--speculative-config"
    assert json.loads(value) == {
        "method": "ngram",
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 2,
        "num_speculative_tokens": 8,
        "num_speculative_tokens_per_batch_size": [[1, 2, 8], [3, 3, 0]],
    }
    own = json.loads(methods["draft model"].flags(4, None)[1])
    assert own == {"model": "/drafts/small", "num_speculative_tokens": 4}, "vLLM finds out the method"
    assert json.loads(methods["suffixes"].flags(4, None)[1])["suffix_decoding_max_cached_requests"] == 0
    assert not methods["suffixes"].has_schedule
    names = {each.name for each in _installed(tmp_path).methods(replace(served, draft_model=None))}
    assert not names & {"suffixes", "draft model"}


def test_vllm_runs_a_profile_by_the_plugin_or_as_its_export(tmp_path: Path) -> None:
    plan = replace(PLAN, lookup=None)
    (exported,) = _installed(tmp_path).profile_methods(plan, Path("profile.yaml"))
    assert json.loads(exported.flags(2, ((1, 1, 2), (2, 2, 0)))[1]) == {
        "method": "draft_model",
        "model": "/exports/one/draft",
        "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": [[1, 1, 2], [2, 2, 0]],
    }
    (native,) = _installed(tmp_path, "sdtune-vllm").profile_methods(plan, Path("profile.yaml"))
    flags = native.flags(2, None)
    assert (json.loads(flags[1])["method"], json.loads(flags[1])["num_speculative_tokens"]) == ("custom_class", 2)
    assert json.loads(flags[3]) == {"sdtune": {"profile": "profile.yaml"}}
    assert native.lengths[-1] == plan.profile.longest_draft, "the rule's own limit is the longest"


def test_llama_cpp_s_own_methods_copy_at_least_as_many_tokens_as_the_n_gram_has(tmp_path: Path) -> None:
    program = LlamaCppServer(Path("/src"), Path("/src/llama-server"))
    methods = {each.name: each for each in program.methods(Served("/models/m", "float32", tmp_path, "small.gguf"))}
    assert methods["n-grams of 4"].lengths[0] == 4
    wanted = "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8"
    assert methods["n-grams of 4"].flags(8, None) == tuple(wanted.split())
    assert "--model-draft small.gguf" in " ".join(methods["draft model"].flags(8, None))
    (alone,) = program.profile_methods(replace(PLAN, shape=None), Path("profile.yaml"))
    assert alone.lengths[0] == 3
    assert "--spec-ngram-simple-size-m 6" in " ".join(alone.flags(6, None))


def test_llama_cpp_answers_with_its_own_timings() -> None:
    answer = {"tokens": [5, 6, 7], "timings": {"prompt_ms": 20.0, "predicted_ms": 50.0}}
    done = read_llama_cpp(answer, DraftCounts(1, 2, 1))
    assert (done.texts, done.prefill_seconds, done.decode_seconds, done.decode_tokens) == (((5, 6, 7),), 0.02, 0.05, 2)
    with pytest.raises(EngineError, match="without tokens or timings"):
        read_llama_cpp({"content": "x"}, DraftCounts())


class _Answers(Client):
    """A client that answers from memory; the metrics count the request at the third reading."""

    def counters(self) -> dict[str, float]:
        readings = self.__dict__.setdefault("readings", [0])
        readings[0] += 1
        done = readings[0] >= 3
        values = {vllm.FINISHED: 1.0, vllm.PREFILL: 0.5, vllm.DECODE: 2.0, "vllm:spec_decode_num_drafts_total": 4.0}
        drafted = {"vllm:spec_decode_num_draft_tokens_total": 9.0, "vllm:spec_decode_num_accepted_tokens_total": 6.0}
        return {name: value + done for name, value in (values | drafted).items()}

    def post(self, path: str, document: Any) -> Any:
        assert document["prompt"] == [1, 2]
        return {"choices": [{"token_ids": [3, 4, 5]}]}


def test_vllm_is_timed_by_the_metrics_that_count_the_request() -> None:
    client = _Answers(1, "vLLM")
    done = VllmServer(Path("python")).complete(client, (1, 2), 3)
    assert (done.texts, done.prefill_seconds, done.decode_seconds) == (((3, 4, 5),), 1.0, 1.0)
    assert (done.rounds, done.drafted, done.accepted) == (1, 1, 1)
    with pytest.raises(EngineError, match="without token ids"):
        read_tokens({"choices": []})


def test_an_engine_that_is_not_found_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LLAMA_CPP", "SDTUNE_VLLM", "PATH"):
        monkeypatch.delenv(variable, raising=False)
    for name, words in (("llama.cpp", "--engine-home or LLAMA_CPP"), ("vllm", "--engine-home or SDTUNE_VLLM")):
        with pytest.raises(EngineError, match=words):
            find_engine(name, None)
    with pytest.raises(EngineError, match=r"there is no convert_hf_to_gguf.py"):
        find_engine("llama.cpp", tmp_path)
    with pytest.raises(EngineError, match="no virtual environment"):
        find_engine("vllm", tmp_path)
    home = write_llama_cpp(tmp_path / "llama.cpp")
    monkeypatch.setenv("LLAMA_CPP", str(home))
    assert find_engine("llama.cpp", None).version() == "11434 (abc)"
    (home / "build" / "bin" / "llama-server").unlink()
    with pytest.raises(EngineError, match="llama-server is neither in"):
        find_engine("llama.cpp", None)


def test_a_quantised_draft_is_converted_and_missing_packages_are_named(tmp_path: Path) -> None:
    home = write_llama_cpp(tmp_path / "llama.cpp")
    whole = DraftShape(tuple(range(6)), has_head=False, num_target_layers=6)
    plan = replace(PLAN, out=tmp_path, shape=whole, bits=8)
    program = find_engine("llama.cpp", home)
    remarks = program.prepare(plan, tmp_path / "log")
    assert len(remarks) == 1
    assert {each.name for each in tmp_path.glob("*.gguf")} == {"target.gguf", "draft-Q8_0.gguf"}
    (home / "convert_hf_to_gguf.py").write_text("import not_installed")
    with pytest.raises(EngineError, match=r"No module named 'not_installed'; pip install -e '\.\[engines\]'"):
        program.prepare(plan, tmp_path / "log")


def test_a_draft_is_predicted_by_the_rules_of_the_engine() -> None:
    early = EarlyExit(exit_layer=2).having(lookup=Lookup())
    plan = replace(PLAN, profile=PLAN.profile.model_copy(update={"draft": early}))
    found = engine_candidate(plan)
    assert found.draft.parts.lookup == Lookup(max_ngram=3, min_ngram=3, max_tokens=8)
    assert found.draft_length == TopProbability(max_tokens=4, threshold=0.25)
    fixed = engine_candidate(replace(plan, threshold=None, lookup=None))
    assert fixed.draft.parts.lookup is None
    assert fixed.draft_length == Fixed(max_tokens=4)
