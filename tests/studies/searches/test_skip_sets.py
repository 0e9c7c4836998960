"""The rival searches for skip sets: what they may propose, their schedules and stops, and that they go on where they stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.draft_length import AdaptiveExit, Fixed, TopProbability
from decoding.drafts import LayerSkip
from decoding.target import DraftView, Target
from decoding.text import Ending
from studies.contract import Problem, Study, TrialRecord, TrialState
from studies.searches.registry import create_study
from studies.searches.skip_sets import draft_verify, swift
from studies.searches.skip_sets.bayes import suggest_point
from studies.searches.skip_sets.methods import METHODS
from studies.searches.skip_sets.settings import SkipSetsSettings
from studies.searches.skip_sets.study import SkipSets
from studies.searches.skip_sets.swift import Swift
from studies.switches import Switches, odd_blocks
from tests.support.records import measurement
from tests.support.tiny import tiny_target

NUM_LAYERS = 8
ODD = LayerSkip.blocks((1, 3, 5))
NUM_SKIPPED = 5  # int(2 * (8 - 2) * 0.45)
Speedup = Callable[[LayerSkip], float | None]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(NUM_LAYERS)


@pytest.fixture(scope="module")
def problem(target: Target) -> Problem:
    prompts = ((5, 9, 14, 3, 7, 21), (8, 40, 2, 33), (11, 12, 50))
    plain = plain_decoder(target)
    texts = [plain.generate(Request(prompt=prompt, ending=Ending(max_new_tokens=20))).tokens for prompt in prompts]
    return Problem(target, prompts=prompts, continuations=tuple(texts), earlier={}, seed=3)


@pytest.fixture
def fake_matchness(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deeper what is skipped, the better the draft; nothing is run."""
    monkeypatch.setattr(Swift, "matchness", lambda self, draft: worth(draft))
    monkeypatch.setattr(swift, "suggest_point", lambda points, *args, size, **rest: np.linspace(0.0, 1.0, size))


def worth(draft: LayerSkip) -> float:
    """Between 0 and 0.9, another for nearly every set."""
    return sum(0.01 * block for block in draft.skip_attention) + sum(0.0103 * block for block in draft.skip_mlp)


def planted(draft: LayerSkip) -> float:
    """A speed-up with a known optimum: skipping attention from block 4 on is free, any other skip lowers acceptance."""
    free = sum(block >= 4 for block in draft.skip_attention)
    harmful = sum(block < 4 for block in draft.skip_attention) + len(draft.skip_mlp)
    return 1.0 + 0.1 * free - 0.05 * harmful


class Run:
    """A study with its trials in memory; `speedup` measures each, and None is a failure."""

    def __init__(self, problem: Problem, speedup: Speedup = planted, **settings: Any) -> None:
        self.study = create_study("skip_sets", problem, SkipSetsSettings(**settings))
        self._speedup = speedup
        self._stored = optuna.create_study(direction="maximize", sampler=self.study.setup().sampler)
        for start in self.study.setup().starts:
            self._stored.enqueue_trial(dict(start))
        self.records: list[TrialRecord] = []

    def go(self, count: int) -> Run:
        for _ in range(count):
            if self.study.finished():
                break
            self._step()
        return self

    def resumed(self, study: Study) -> Run:
        """The same storage in another process, with a new sampler that observes the records again."""
        for record in self.records:
            study.observe(TrialRecord.model_validate_json(record.model_dump_json()))
        self.study, self._stored.sampler = study, study.setup().sampler
        return self

    @property
    def drafts(self) -> list[LayerSkip]:
        drafts = [record.candidate.draft for record in self.records]
        return [draft for draft in drafts if isinstance(draft, LayerSkip)]

    @property
    def told(self) -> list[dict[str, Any]]:
        return [record.model_dump() for record in self.records]

    @property
    def best(self) -> float:
        return max(record.speedup or 0.0 for record in self.records)

    def _step(self) -> None:
        trial = self._stored.ask()
        candidate, notes = self.study.propose(trial)
        assert isinstance(candidate.draft, LayerSkip)
        value = self._speedup(candidate.draft)
        record = TrialRecord(
            study="skip_sets",
            number=trial.number,
            state=TrialState.FAIL if value is None else TrialState.COMPLETE,
            candidate=candidate,
            measurement=None if value is None else measurement([value, value]),
            notes=notes,
        )
        self._stored.tell(trial, value, state=optuna.trial.TrialState.FAIL if value is None else None)
        self.study.observe(record)
        self.records.append(record)


def num_sublayers(draft: LayerSkip) -> int:
    return len(draft.skip_attention) + len(draft.skip_mlp)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_has_a_rule_and_the_settings_may_name_another(problem: Problem, method: str) -> None:
    adaptive = AdaptiveExit(max_tokens=8, initial_threshold=0.8)
    usual = TopProbability(max_tokens=12, threshold=0.6)
    for named, expected in {
        None: adaptive if method == "draft_verify" else usual,
        Fixed(max_tokens=2): Fixed(max_tokens=2),
    }.items():
        (record,) = Run(problem, method=method, draft_length=named).go(1).records
        assert record.candidate.draft_length == expected


def test_odd_layers_are_measured_once(problem: Problem) -> None:
    run = Run(problem, method="odd_layers").go(5)
    assert run.drafts == [ODD]
    assert run.study.finished() == "the odd blocks are measured"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("fake_matchness")
def test_only_legal_sets_are_proposed(problem: Problem, method: str) -> None:
    run = Run(problem, method=method).go(14)
    allowed = range(NUM_LAYERS) if method == "draft_verify" else range(1, NUM_LAYERS - 1)
    for draft in run.drafts:
        assert {*draft.skip_attention, *draft.skip_mlp} <= set(allowed)
    if method != "odd_layers":
        assert len(set(run.drafts)) > 8
    if method != "random":
        assert run.drafts[0] == ODD
    if method in ("random", "swift"):
        searched = run.drafts[method == "swift" :]
        assert {num_sublayers(draft) for draft in searched} == {NUM_SKIPPED}
        assert any(draft.skip_attention != draft.skip_mlp for draft in searched), "attention and MLPs apart"


def test_draft_and_verify_leaves_out_the_first_and_the_last_block_too(problem: Problem) -> None:
    skipped = {block for draft in Run(problem, method="draft_verify").go(6).drafts for block in draft.skip_attention}
    assert {0, NUM_LAYERS - 1} <= skipped


@pytest.mark.parametrize("method", ["random", "swift", "draft_verify", "tpe"])
@pytest.mark.usefixtures("fake_matchness")
def test_resumed_search_goes_on_as_if_it_had_not_stopped(problem: Problem, method: str) -> None:
    settings: dict[str, Any] = {"method": method, "swift": {"bayes_interval": 4}}
    whole = Run(problem, **settings).go(16)
    stopped = Run(problem, **settings).go(12)
    stopped.resumed(SkipSets(problem, SkipSetsSettings(**settings))).go(4)
    assert stopped.told == whole.told


@pytest.mark.parametrize("method", ["random", "swift", "draft_verify", "tpe"])
@pytest.mark.usefixtures("fake_matchness")
def test_another_seed_is_another_search(problem: Problem, method: str) -> None:
    other = Problem(problem.target, problem.prompts, problem.continuations, earlier={}, seed=4)
    assert Run(problem, method=method).go(6).drafts != Run(other, method=method).go(6).drafts


def test_random_sets_are_all_alike_in_chance() -> None:
    switches = Switches.of_middle_blocks(4)
    drawn = [switches.random(np.random.default_rng([0, index]), 2) for index in range(600)]
    counts = np.sum(drawn, axis=0)
    assert set(np.sum(drawn, axis=1)) == {2.0}
    assert counts == pytest.approx(np.full(4, 300), abs=60)  # 5 deviations of a half chance


@pytest.mark.usefixtures("fake_matchness")
def test_swift_measures_each_better_match_as_soon_as_it_is_found(problem: Problem) -> None:
    run = Run(problem, method="swift").go(40)
    best, seen = 0.0, set[LayerSkip]()
    for record, draft in zip(run.records[1:], run.drafts[1:], strict=True):
        *before, last = record.notes["scores"]
        assert max(before, default=0.0) <= best, "a round ends at the first better match"
        assert draft not in seen
        if last > best:
            assert record.notes["matchness"] == last == worth(draft)
        else:
            assert len(record.notes["scores"]) == 25
            assert record.notes["matchness"] < best, "a runner-up"
        best = max(best, last)
        seen.add(draft)


@pytest.mark.usefixtures("fake_matchness")
def test_swift_may_score_whole_rounds_before_it_measures(problem: Problem) -> None:
    settings = {"until_better": False, "round_length": 40}
    records = Run(problem, method="swift", swift=settings).go(4).records
    assert [len(record.notes["scores"]) for record in records] == [0, 40, 40, 40]
    assert records[1].notes["matchness"] == max(records[1].notes["scores"])


def test_swift_asks_the_process_for_every_25th_candidate(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def suggest(points: Sequence[Any], values: Sequence[float], *, size: int, kappa: float, rng: Any) -> Any:
        assert (size, kappa) == (12, 2.5)
        assert [worth(Switches.of_middle_blocks(NUM_LAYERS).largest(p, NUM_SKIPPED)) for p in points] == values
        asked.append(len(points))
        return suggest_point(points, values, size=size, kappa=kappa, rng=rng)

    monkeypatch.setattr(Swift, "matchness", lambda self, draft: worth(draft))
    monkeypatch.setattr(swift, "suggest_point", suggest)
    records = Run(problem, method="swift").go(9).records
    assert asked
    assert asked == list(range(24, records[-1].notes["num_scored"], 25))
    assert sum(len(record.notes["bayes_points"]) for record in records) == len(asked)


@pytest.mark.parametrize(
    ("scores", "settings", "reason", "num_scored"),
    [
        ([0.2, 0.5, 0.96], {}, "a matchness of 0.960 is reached", 3),
        ([0.2, 0.95, 0.1], {"max_candidates": 7}, "7 candidates scored", 7),
        ([0.2, 0.5, 0.1], {"tolerance": 30}, "no better matchness in 30 candidates", 32),
        ([0.2, 0.5, 0.1], {}, "no better matchness in 300 candidates", 302),
        ([0.001 * index for index in range(900)], {"max_matchness": 1.0}, "1000 candidates scored", 1000),
    ],
)
@pytest.mark.usefixtures("fake_matchness")
def test_swift_stops_as_its_code_does(
    problem: Problem,
    monkeypatch: pytest.MonkeyPatch,
    scores: Sequence[float],
    settings: dict[str, Any],
    reason: str,
    num_scored: int,
) -> None:
    run = Run(problem, method="swift", swift=settings, max_trials=2000)
    index = iter(range(2000))
    monkeypatch.setattr(Swift, "matchness", lambda self, draft: scores[min(next(index), len(scores) - 1)])
    run.go(1500)
    assert run.study.finished() == reason
    assert run.records[-1].notes["num_scored"] == num_scored


def test_swift_scores_the_share_of_tokens_that_a_parallel_pass_predicts(problem: Problem, target: Target) -> None:
    window, draft = 12, LayerSkip(skip_attention=(2, 5), skip_mlp=(1, 4, 6))
    shares = []
    for prompt, text in zip(problem.prompts[:2], problem.continuations, strict=False):
        cache = target.new_cache(len(prompt) + window)
        target.forward(_ids(prompt), cache, 0)
        view = DraftView(target, draft.skip_attention, draft.skip_mlp, keep_boundary=False)
        # Token by token through one cache: each reads the draft's own keys and values of those before.
        predicted = [int(view.forward(_ids([text[i]]), cache, len(prompt) + i).argmax()) for i in range(window)]
        shares.append(np.mean(np.array(predicted) == text[1 : window + 1]))
    settings = SkipSetsSettings(method="swift", swift={"window": window, "num_texts": 2})
    assert Swift(problem, settings).matchness(draft) == pytest.approx(np.mean(shares))
    assert 0.0 < np.mean(shares) < 1.0


def _ids(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(tokens)])


def test_draft_and_verify_finds_more_than_random_in_as_many_trials(problem: Problem) -> None:
    found = [Run(problem, method=method).go(30).best for method in ("draft_verify", "random")]
    assert found[0] > found[1] + 0.05


def test_draft_and_verify_counts_a_failure_as_the_slowest_known(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[float]] = []

    def suggest(points: Sequence[Any], values: Sequence[float], *, size: int, kappa: float, rng: Any) -> Any:
        assert (size, kappa, len(points)) == (16, 2.576, len(values))
        told.append(list(values))
        return rng.random(size)

    monkeypatch.setattr(draft_verify, "suggest_point", suggest)
    speedups = iter([None, 1.2, None, 1.1, 1.3])
    Run(problem, lambda draft: next(speedups), method="draft_verify").go(5)
    assert told == [[], [1.2, 1.2], [1.2, 1.2, 1.2], [1.1, 1.2, 1.1, 1.1]]


def test_tpe_goes_through_optuna_and_learns(problem: Problem) -> None:
    run = Run(problem, method="tpe").go(40)
    trials = run._stored.get_trials()
    assert all(set(trial.params) == set(Switches.of_middle_blocks(NUM_LAYERS).names) for trial in trials)
    for trial, draft in zip(trials, run.drafts, strict=True):
        assert {name for name, off in trial.params.items() if off} == {
            *(f"attention.{block}" for block in draft.skip_attention),
            *(f"mlp.{block}" for block in draft.skip_mlp),
        }
    speedups = [record.speedup or 0.0 for record in run.records]
    assert np.mean(speedups[-10:]) > np.mean(speedups[1:11]) + 0.05


def test_a_process_is_highest_where_its_values_are() -> None:
    corners = [np.array([float(a), float(b)]) for a in (0, 1) for b in (0, 1)]
    point = suggest_point(corners, [0.0, 0.0, 1.0, 0.0], size=2, kappa=0.0, rng=np.random.default_rng(0))
    assert point == pytest.approx([1.0, 0.0], abs=0.3)
    assert suggest_point([], [], size=5, kappa=1.0, rng=np.random.default_rng(0)).shape == (5,)


def test_switches_and_drafts_are_each_others_inverse() -> None:
    switches = Switches.of_all_blocks(4)
    draft = LayerSkip(skip_attention=(0, 2), skip_mlp=(3,))
    assert switches.point(draft).tolist() == [1, 0, 1, 0, 0, 0, 0, 1]
    assert switches.draft(switches.point(draft)) == draft
    assert switches.largest(np.array([0.1, 0.9, 0.2, 0.9, 0.9, 0, 0, 0]), 2) == LayerSkip(skip_attention=(1, 3))
    with pytest.raises(ValueError, match="switches for blocks 1 to 2"):
        Switches.of_middle_blocks(4).point(draft)
    assert odd_blocks(3) == LayerSkip.blocks((1,))


def test_trials_and_patience_end_it(problem: Problem) -> None:
    assert Run(problem, method="random", max_trials=3).go(9).study.finished() == "3 trials done"
    run = Run(problem, lambda draft: 1.1, method="random", patience=4).go(9)
    assert run.study.finished() == "no better candidate in 4 trials"
    assert len(run.records) == 5


def test_space_is_the_search_and_not_how_long_it_goes_on(problem: Problem) -> None:
    spaces = [
        SkipSets(problem, SkipSetsSettings(**settings)).setup().space
        for settings in ({}, {"max_trials": 3, "patience": 2, "swift": {"tolerance": 9}}, {"swift": {"window": 9}})
    ]
    assert spaces[0] == spaces[1] != spaces[2]
    assert SkipSets(problem, SkipSetsSettings(method="random")).setup().space != spaces[0]


@pytest.mark.parametrize(
    ("num_layers", "settings", "message"),
    [
        (2, {"method": "tpe"}, "2 layers has no block between"),
        (4, {"method": "swift", "skip_ratio": 0.2}, r"0.2 of the 4 sublayers .* is none of them; give at least 0.25"),
        (8, {"method": "random", "skip_ratio": 0.05}, "give at least 0.084"),
    ],
)
def test_settings_that_leave_nothing_out_are_refused(num_layers: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SkipSetsSettings(**settings).check(tiny_target(num_layers))


def test_a_model_without_separate_mlps_has_the_odd_layers_alone() -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=4, num_attention_heads=2, word_embed_proj_dim=16
    )
    target = Target(OPTForCausalLM(config))
    SkipSetsSettings(method="odd_layers").check(target)
    for method in ("random", "swift", "draft_verify", "tpe"):
        with pytest.raises(ValueError, match="leaves out single sublayers"):
            SkipSetsSettings(method=method).check(target)
