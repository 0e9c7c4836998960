"""The search for an engine's settings, on engines whose costs are known: few servers find what an exhaustive grid finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from studies.measurement import BatchTexts, Measurement, PromptSample
from tuner.engines.bench import LoadFigures
from tuner.engines.methods import EarliestMatch, Method
from tuner.errors import EngineError
from tuner.tune.costs import Costs, Setting, best
from tuner.tune.run import flags_of, search, servers
from tuner.tune.task import TuneTask

LOADS = (1, 4)
LENGTHS = (1, 2, 3, 4, 6, 8, 12)


def _flags(num_tokens: int, schedule: Any) -> tuple[str, ...]:
    return (f"--tokens={num_tokens}", *([] if schedule is None else [f"--schedule={list(schedule)}"]))


NGRAMS = [
    Method(
        f"n-grams of {longest} to {shortest}",
        "n-grams",
        LENGTHS,
        _flags,
        EarliestMatch(longest, shortest),
        has_schedule=True,
    )
    for longest in (1, 2, 3, 5)
    for shortest in range(1, longest + 1)
]
DRAFT = Method("draft model", "draft model", LENGTHS, _flags, has_schedule=True, runs_model=True)


def _texts(seed: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Prompts and texts that repeat parts of what came before."""
    random = np.random.default_rng(seed)
    prompts, texts = [], []
    for _ in range(8):
        tokens = [int(each) for each in random.integers(0, 12, 20)]
        while len(tokens) < 60:
            at = int(random.integers(0, len(tokens) - 6))
            tokens += [*tokens[at : at + int(random.integers(2, 7))], int(random.integers(0, 12))]
        prompts.append(tuple(tokens[:20]))
        texts.append(tuple(tokens[20:60]))
    return prompts, texts


class Engine:
    """An engine by a formula: a step costs 10, a drafted token in it `verifying` by load, drafting `drafting` a step or pass."""

    def __init__(self, verifying: Mapping[int, float], drafting: float = 0.5, noise: float = 0.0) -> None:
        """`noise` is the standard deviation of the logarithm of a measured time."""
        self.verifying, self.drafting, self.noise = verifying, drafting, noise
        self.random = np.random.default_rng(0)
        self.prompts, self.texts = _texts(0)
        self.costs = Costs(self.prompts, self.texts)
        self.task = cast(
            TuneTask,
            SimpleNamespace(
                program=SimpleNamespace(title="Engine"),
                sequences=LOADS,
                failed={},
                num_started=1,
                config=SimpleNamespace(further_servers=5),
            ),
        )

    def speedup(self, setting: Setting, sequences: int) -> float:
        return self.measurement(setting, sequences).speedup

    def measurement(self, setting: Setting, sequences: int) -> Measurement:
        plain, drafted = self.costs.work(None, sequences), self._true_work(setting, sequences)
        samples = []
        for group, (without, work) in enumerate(zip(plain, drafted, strict=True)):
            written = 40 * sequences
            rounds = work["sequences"]
            samples.append(
                PromptSample(
                    prompt=group,
                    plain_seconds=10 * without["steps"],
                    plain_tokens=written,
                    draft_seconds=10 * work["steps"]
                    + self.verifying[sequences] * work["verified"]
                    + self.drafting * work["passes"],
                    draft_tokens=written,
                    rounds=round(rounds),
                    drafted=round(work["verified"]),
                    accepted=round(written - sequences - rounds),
                    identical=True,
                    batch=BatchTexts(count=sequences, identical=sequences, ties=0) if sequences > 1 else None,
                )
            )
        return Measurement(samples=tuple(samples))

    def _true_work(self, setting: Setting, sequences: int) -> list[dict[str, float]]:
        if setting.method.lookup is not None:
            found = self.costs.work(setting, sequences)
            return [{**each, "verified": each[f"verified, {sequences}"], "passes": each["steps"]} for each in found]
        accepted = sum(0.7**place for place in range(1, setting.num_tokens + 1))
        rounds = 39 / (1 + accepted)
        verified, passes = rounds * setting.num_tokens * sequences, rounds * setting.num_tokens
        of_group = {"steps": rounds, "sequences": rounds * sequences, "verified": verified, "passes": passes}
        return [of_group] * (len(self.prompts) // sequences)

    def measure(self, name: str, flags: Sequence[str], loads: Mapping[int, Setting]) -> dict[int, LoadFigures] | None:
        self.task.num_started += 1
        return {
            number: LoadFigures(number, self._noisy(self.measurement(each, number))) for number, each in loads.items()
        }

    def _noisy(self, found: Measurement) -> Measurement:
        samples = [
            each.model_copy(
                update={
                    "plain_seconds": each.plain_seconds * np.exp(self.noise * self.random.normal()),
                    "draft_seconds": each.draft_seconds * np.exp(self.noise * self.random.normal()),
                }
            )
            for each in found.samples
        ]
        return Measurement(samples=tuple(samples))

    def run(self, methods: Sequence[Method]) -> dict[int, float]:
        """Return, by load, the true speed-up of what is chosen over that of the best setting of all methods."""
        search(self.task, methods, self.costs, self.measure)
        _, chosen = best(self.costs, methods, LOADS, measured_only=True)
        shares = {}
        for load, setting in chosen.items():
            everything = [self.speedup(Setting(each, n), load) for each in methods for n in each.lengths]
            shares[load] = (1.0 if setting is None else self.speedup(setting, load)) / max(1.0, *everything)
        return shares


@pytest.mark.parametrize("verifying", [{1: 0.1, 4: 0.1}, {1: 2.0, 4: 3.0}, {1: 0.2, 4: 6.0}, {1: 20.0, 4: 20.0}])
def test_a_few_servers_find_what_a_grid_of_lookups_finds(verifying: dict[int, float]) -> None:
    engine = Engine(verifying)
    assert min(engine.run([replace(each, has_schedule=False) for each in NGRAMS]).values()) > 0.98
    assert engine.task.num_started <= 7, "of 77 settings at two loads"


@pytest.mark.parametrize("verifying", [{1: 0.1, 4: 0.1}, {1: 2.0, 4: 3.0}])
def test_noise_of_the_machine_does_not_mislead_by_much(verifying: dict[int, float]) -> None:
    engine = Engine(verifying, noise=0.15)
    assert min(engine.run([replace(each, has_schedule=False) for each in NGRAMS]).values()) > 0.9
    assert engine.task.num_started <= 6


def test_with_a_schedule_one_range_of_n_grams_serves_all_loads() -> None:
    engine = Engine({1: 0.2, 4: 4.0})
    shares = engine.run(NGRAMS)
    assert min(shares.values()) > 0.9, "the best of each load may have another range"
    methods = {each.setting.method for each in engine.costs.measured[-len(LOADS) :]}
    assert len(methods) == 1


def test_the_length_of_a_draft_model_is_found_between_those_that_were_measured() -> None:
    engine = Engine({1: 0.1, 4: 1.0}, drafting=1.0)
    assert min(engine.run([DRAFT]).values()) > 0.98
    assert engine.task.num_started <= 6


def test_drafts_that_end_by_themselves_are_tried_at_their_longest() -> None:
    engine = Engine({1: 0.01, 4: 0.01}, drafting=0.0)
    assert min(engine.run([replace(DRAFT, name="suffixes", kind="suffixes", runs_model=False)]).values()) > 0.99
    assert engine.task.num_started <= 4


def test_nothing_is_chosen_where_plain_decoding_is_faster() -> None:
    engine = Engine({1: 30.0, 4: 30.0}, drafting=20.0)
    search(engine.task, [DRAFT], engine.costs, engine.measure)
    assert best(engine.costs, [DRAFT], LOADS) == (0.0, {1: None, 4: None})


def test_an_engine_that_runs_no_draft_is_an_error() -> None:
    engine = Engine({1: 0.1, 4: 0.1})
    engine.task.failed["n-grams of 1 to 1"] = "it does not start"
    with pytest.raises(EngineError, match="it does not start"):
        search(engine.task, NGRAMS[:1], engine.costs, lambda name, flags, loads: None)


def test_a_server_with_a_schedule_has_all_lengths_and_others_one_each() -> None:
    method = NGRAMS[0]
    chosen = {1: Setting(method, 8), 4: Setting(method, 2), 16: None}
    ((name, flags, loads),) = servers(chosen, lambda setting, number: number == 1)
    assert (name, loads) == ("n-grams of 1 to 1, 2 tokens", {4: Setting(method, 2)})
    assert flags == ("--tokens=8", "--schedule=[(1, 1, 8), (2, 4, 2), (5, 16, 0)]")
    assert flags_of(method, {1: Setting(method, 8)}) == ("--tokens=8",), "a single load needs none"
    single = replace(method, has_schedule=False)
    settings = {load: Setting(single, tokens) for load, tokens in ((1, 8), (4, 2))}
    found = list(servers(settings, lambda setting, number: False))
    assert [(flags, tuple(loads)) for _, flags, loads in found] == [(("--tokens=8",), (1,)), (("--tokens=2",), (4,))]
