"""`sdtune bench --engine --sequences`: rounds in turns, what is chosen from them, and the command with a stand-in for llama.cpp."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from decoding.drafts import LayerSkip
from decoding.profile import Interval
from decoding.text import Ending
from studies.measurement import BatchTexts, Measurement, PromptSample
from tests.support.engine_stub import write_llama_cpp
from tests.support.profiles import save_profile
from tests.support.refusals import refused
from tests.support.tiny import write_tiny_prompts
from tuner.bench.loads import DraftLoads, ScheduleResult, best_length, check_groups, schedule_table
from tuner.cli.main import main
from tuner.engines.bench import EngineDecoding, LoadFigures, engine_judge
from tuner.engines.contract import DraftCounts, EngineProgram
from tuner.engines.server import Client
from tuner.errors import ConfigError
from tuner.export.schedule import MeasuredSchedule, ScheduledLoad
from tuner.measuring.baseline import Baseline


def _figures(*plain_seconds: float, identical: bool = True) -> LoadFigures:
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
    return LoadFigures(2, Measurement(samples=samples))


def test_the_fastest_length_whose_interval_lies_above_1_is_chosen() -> None:
    noisy, sure, surer = _figures(0.8, 4.0, 1.2), _figures(1.3, 1.31, 1.32), _figures(1.2, 1.2, 1.2)
    assert best_length({1: surer, 4: sure, 8: noisy})[0] == 4
    number, interval = best_length({1: surer, 8: noisy})
    assert number == 1
    assert interval is not None
    assert interval.value == pytest.approx(1.2)
    assert best_length({8: noisy, 2: _figures(0.9, 0.9, 0.9)}) == (0, None)


def test_a_length_whose_texts_differ_is_not_chosen() -> None:
    wrong = _figures(2.0, 2.0, identical=False)
    assert wrong.measurement.num_different == 4
    assert best_length({4: wrong, 2: _figures(1.1, 1.1)})[0] == 2


def test_two_rounds_are_needed() -> None:
    check_groups((1, 3), 7)
    with pytest.raises(ConfigError, match=r"--sequences 4 needs at least 8 prompts, 2 rounds, and there are 7"):
        check_groups((4, 1), 7)


class _Answers(Client):
    """A client of which only the counters are asked: they count three rounds per reading."""

    def counters(self) -> dict[str, float]:
        readings = self.__dict__.setdefault("readings", [0])
        readings[0] += 1
        return {"rounds": 3.0 * readings[0]}


def test_requests_side_by_side_are_timed_from_the_first_request_to_the_last_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Engine:
        def continuation(self, client: Client, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
            return (*prompt, num_tokens)

        def counters_after(self, client: Client, before: dict[str, float], num_requests: int) -> dict[str, float]:
            assert num_requests == 2
            return client.counters()

        def counts(self, counters: dict[str, float]) -> DraftCounts:
            return DraftCounts(int(counters["rounds"]), 2 * int(counters["rounds"]), int(counters["rounds"]))

    seconds = iter((10.0, 12.5))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))
    server = EngineDecoding("draft", cast(EngineProgram, Engine()), _Answers(1, "engine"), by_load=True)
    done = server.decode([(1, 2), (3, 4)], 9)
    assert done.texts == ((1, 2, 9), (3, 4, 9))
    assert (done.decode_seconds, done.decode_tokens, done.prefill_tokens) == (2.5, 6, 0)
    assert (done.rounds, done.drafted, done.accepted) == (3, 6, 3)


def test_what_plain_decoding_does_at_the_same_load_is_no_fault_of_the_draft() -> None:
    target: Any = SimpleNamespace(runner=SimpleNamespace(exact_width=8), dtype=torch.float32)
    baseline = Baseline(((1,),), ((10, 11),), (0,), Ending(2, frozenset()))
    judge = engine_judge(lambda: target, baseline)
    assert judge("draft", 0, {"plain": (10, 12), "draft": (10, 12)}).identical
    assert judge("draft", 0, {"plain": (10, 12), "draft": (10, 11)}).identical
    assert not judge("draft", 0, {"plain": (10, 12), "draft": (10, 13)}).identical
    assert not judge("plain", 0, {"plain": (10, 12)}).identical, "plain decoding itself is compared with that of one"
    alone = engine_judge(lambda: target, replace(baseline, continuations=()))
    assert not alone("draft", 0, {"plain": (10, 12), "draft": (10, 11)}).identical, "of one request each"


Bench = Callable[..., Result]


@pytest.fixture
def bench(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Run the command in a folder with a profile, prompts and the stand-in."""
    monkeypatch.chdir(tmp_path)
    write_tiny_prompts(Path("prompts.jsonl"))
    write_llama_cpp(Path("llama.cpp"))
    save_profile(Path("profile.yaml"), checkpoint, LayerSkip.blocks((2, 3)))

    def run(*flags: str) -> Result:
        numbers = ("--tuning-prompts", "4", "--held-out-prompts", "4", "--max-new-tokens", "12")
        command = ["bench", "profile.yaml", "--dataset", "prompts.jsonl", *numbers]
        return CliRunner().invoke(main, [*command, "--engine", "llama.cpp", "--engine-home", "llama.cpp", *flags])

    return run


def _document() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(Path("bench/schedule.json").read_text()))


def test_each_length_is_measured_at_each_number_of_sequences(bench: Bench) -> None:
    done = bench("--sequences", "2", "--sequences", "1", "--draft-tokens", "2", "--draft-tokens", "40")
    assert done.exit_code == 0, done.output
    document = _document()
    assert "--parallel 2" in document["plain_command"]
    assert "too many tokens to draft" in document["failed"]["40 tokens"]
    (draft,) = document["drafts"].values()
    assert "--spec-draft-n-max 2" in draft["flags"]
    assert [(each["sequences"], len(each["samples"]), each["texts"], each["identical"]) for each in draft["loads"]] == [
        (1, 4, 4, 4),
        (2, 2, 4, 4),
    ]
    assert [each["num_draft_tokens"] for each in draft["loads"]] == [24, 24]
    schedule = document["schedule"]
    assert schedule["entries"][0][0] == 1
    assert [load["sequences"] for load in schedule["loads"]] == [1, 2]
    table = Path("bench/schedule.txt").read_text()
    assert "requests side by side" in table
    assert "too many tokens to draft" in table


def test_a_different_text_is_an_error_and_never_scheduled(bench: Bench) -> None:
    done = bench("--sequences", "2", "--draft-tokens", "2", "--engine-args", "--wrong")
    refused(done, "4 texts differ", "llama.cpp's own plain decoding")
    assert _document()["schedule"]["entries"] == [[1, 2, 0]]
    assert "decode plainly in llama.cpp" in " ".join(Path("bench/schedule.txt").read_text().split())


def test_an_engine_that_runs_no_length_is_an_error(bench: Bench) -> None:
    refused(bench("--sequences", "2", "--draft-tokens", "40"), "too many tokens to draft")


def test_settings_that_do_not_go_together_are_refused(bench: Bench) -> None:
    refused(bench("--sequences", "3"), "--sequences 3 needs at least 6 prompts")
    refused(bench("--draft-tokens", "2"), "--draft-tokens needs --sequences")
    refused(bench("--sequences", "1", "--set", "engine_settings=f"), "engine_settings", "--sequences")
    command = ["bench", "profile.yaml", "--dataset", "prompts.jsonl", "--sequences", "2"]
    refused(CliRunner().invoke(main, command), "--sequences", "give --engine")


def test_a_dry_run_checks_the_rounds_and_starts_nothing(bench: Bench) -> None:
    refused(bench("--sequences", "3", "--dry-run"), "--sequences 3 needs at least 6 prompts")
    done = bench("--sequences", "2", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "llama.cpp's own plain decoding" in done.stdout
    assert not Path("bench").exists()


def test_a_schedule_that_costs_more_than_it_gains_is_named() -> None:
    slower = Interval(value=0.69, ci95=(0.51, 0.92))
    loads = (
        ScheduledLoad(sequences=1, num_tokens=3, speedup=Interval(value=1.2, ci95=(1.1, 1.3)), scheduled=slower),
        ScheduledLoad(sequences=8, num_tokens=0, scheduled=Interval(value=0.9, ci95=(0.8, 1.1))),
    )
    schedule = MeasuredSchedule(
        engine="vLLM",
        engine_version="0",
        date="2026-11-24",
        target_weights_sha256="w",
        draft={},
        entries=((1, 1, 3), (2, 8, 0)),
        loads=loads,
    )
    at_loads = tuple(replace(_figures(1.0, 1.0), sequences=number) for number in (1, 8))
    draft = DraftLoads("3 tokens", 3, (), at_loads, 1.0)
    console = Console(width=200, file=io.StringIO())
    console.print(schedule_table(ScheduleResult("vllm", "vLLM", "0", (draft,), {}, schedule, {})))
    text = cast(io.StringIO, console.file).getvalue()
    assert (
        "1 side by side, a server with the whole schedule is slower than one without a draft, 0.69 [0.51, 0.92]" in text
    )
    assert text.count("slower than one without") == 1
    assert "[[1, 1, 3], [2, 8, 0]]: 1 sequence: 3 tokens; from 2: plain decoding" in text
    assert "sdtune export PROFILE --to vllm --schedule schedule.json" in text
