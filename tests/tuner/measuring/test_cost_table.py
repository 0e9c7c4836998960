"""Measuring a cost table on a clock that the passes move, on every family, and keeping it on disk."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.drafts import EarlyExit, LayerSkip
from decoding.fingerprint import hash_json
from decoding.kernels import compiled
from decoding.runners.contract import Inputs, Outputs, Part
from decoding.target import Target
from decoding.target.parts import ModelPart
from decoding.timing.round_costs import LEAST_COST
from studies.contract import TrialRecord
from studies.costs.table import CostTable
from studies.costs.terms import DraftStep, Pass, Verification
from tests.support.costs import assert_monotone
from tests.support.families import NUM_LAYERS, target_of
from tests.support.shared_passes import watch_shared_passes
from tests.support.tiny import tiny_llama, tiny_target
from tuner.measuring import cost_table as cost
from tuner.measuring.cost_table import (
    FEWEST_SWEEPS,
    MOST_STEPS,
    MOST_SWEEPS,
    PATIENCE,
    WIDTHS,
    PassTimer,
    cost_key,
    cost_table,
    measure_cost_table,
    resolve_terms,
)


class Clock:
    """Stands still but for what the passes take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def read(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all that is measured."""
    planted = Clock()
    monkeypatch.setattr(time, "perf_counter", planted.read)
    return planted


class Listener:
    """Remembers the lines said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def stage(self, name: str, total: int | None = None) -> None: ...

    def advance(self, steps: int = 1) -> None: ...

    def trial(self, record: TrialRecord, best: TrialRecord | None) -> None: ...

    def show(self, text: str) -> None: ...

    def say(self, line: str) -> None:
        self.lines.append(line)


PLAIN = Verification(1, 16)
"""The pass that is timed beside all others."""


def known_seconds(each: Pass) -> float:
    """A device of known costs for models of 6 blocks: an attention 2 s, an MLP 3 s, the rest of a pass 4 s, a look 0.5 s."""
    if isinstance(each, DraftStep):
        look = 0.5 if each.looks else 0.0
        return 4.0 + look + 2.0 * (6 - len(each.skip.skip_attention)) + 3.0 * (6 - len(each.skip.skip_mlp))
    return 34.0 + (each.width - 1) * (1.0 + 0.5 * (6 - each.boundary))


def measure(timer: Callable[[Pass], float] = known_seconds, **settings: Any) -> CostTable:
    settings = {"max_tokens": 4, "contexts": (16, 32), **settings}
    return measure_cost_table(tiny_target(), timer=timer, **settings)


@pytest.mark.usefixtures("clock")
def test_known_costs_are_found_again() -> None:
    table = measure(max_tokens=8)
    assert table.widths == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert table.error.worst < 1e-6
    draft = LayerSkip(skip_attention=(2, 4), skip_mlp=(3,))
    costs = table.round_costs(draft, 8, context=20, prefix_reuse=True)
    assert costs.draft_step == pytest.approx((4 + 2 * 4 + 3 * 5) / 34, rel=1e-6)
    assert costs.look == pytest.approx(0.5 / 34, rel=1e-6)
    assert costs.verify == pytest.approx([1.0, *(1 + n * 3.0 / 34 for n in range(1, 9))], rel=1e-6)
    assert table.saved_seconds(LayerSkip(skip_attention=(5,)), context=20) == pytest.approx(2.0, rel=1e-6)


def test_disturbed_passes_do_not_count(clock: Clock) -> None:
    calls = dict[Pass, int]()

    def timer(each: Pass) -> float:
        calls[each] = calls.get(each, 0) + 1
        # One sweep in three, another for each pass; the plain pass beside each is timed too often to be disturbed in most.
        disturbed = each != PLAIN and (calls[each] + len(calls)) % 3 == 0
        return known_seconds(each) + (100.0 if disturbed else 0.0)

    def counted(each: Pass) -> float:
        clock.seconds += 1.0
        return timer(each)

    assert measure(counted, budget_seconds=400.0).error.worst < 1e-6
    assert set(calls.values()) - {calls[PLAIN]} == {calls[next(iter(calls.keys() - {PLAIN}))]}


def test_machine_that_is_slower_for_a_while_slows_all_alike(clock: Clock) -> None:
    def slower_every(seconds: int) -> CostTable:
        clock.seconds = 0.0

        def timer(each: Pass) -> float:
            clock.seconds += 1.0
            slower = 1.5 if int(clock.seconds / seconds) % 2 else 1.0
            return slower * known_seconds(each)

        return measure(timer, budget_seconds=0.0)

    tables = [slower_every(seconds) for seconds in range(25, 80, 3)]
    errors = sorted(table.error.median for table in tables)
    assert errors[len(errors) // 2] < 0.001, "but for the few passes at which it changes"
    assert errors[-1] < 0.05
    draft = LayerSkip(skip_mlp=(3,))
    steps = [table.round_costs(draft, 4, context=20, prefix_reuse=False).draft_step for table in tables]
    assert statistics.median(steps) == pytest.approx(31 / 34, rel=0.01)


def test_sweeps_are_repeated_until_the_time_is_spent(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = dict[Pass, int]()

    def timer(each: Pass) -> float:
        calls[each] = calls.get(each, 0) + 1
        clock.seconds += 1.0
        return known_seconds(each)

    def num_sweeps() -> int:
        (found,) = {count for each, count in calls.items() if each != PLAIN}
        return found

    measure(timer, budget_seconds=0.0)
    assert num_sweeps() == 1, "these passes are long"
    one_sweep = clock.seconds
    monkeypatch.setattr(cost, "LONG_PASS", known_seconds(PLAIN) + 1)
    calls.clear()
    measure(timer, budget_seconds=0.0)
    assert num_sweeps() == FEWEST_SWEEPS
    for sweeps in (5, MOST_SWEEPS + 9):
        calls.clear()
        measure(timer, budget_seconds=sweeps * one_sweep - 0.5)
        assert num_sweeps() == min(sweeps, MOST_SWEEPS)


@pytest.mark.usefixtures("clock")
def test_machine_that_is_disturbed_is_measured_for_longer_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "LONG_PASS", 2 * known_seconds(PLAIN) + 1)
    stream = torch.Generator().manual_seed(0)
    calls, wrong = dict[Pass, int](), dict[Pass, float]()

    def timer(each: Pass) -> float:
        calls[each] = calls.get(each, 0) + 1
        # The same pass is always as wrong: no repetition helps.
        return known_seconds(each) * wrong.setdefault(each, 1 + float(torch.rand(1, generator=stream)))

    assert measure(timer, budget_seconds=0.0).error.median > cost.GOOD_ERROR
    assert {count for each, count in calls.items() if each != PLAIN} == {PATIENCE * FEWEST_SWEEPS}


@pytest.mark.parametrize(
    ("context_length", "max_tokens", "contexts", "widths", "resolved"),
    [
        (10_000, 2, (256, 64, 64), (1, 2, 3), (64, 256)),
        (100, 4, (64, 256), (1, 2, 3, 4, 5), (64, 95)),
        (100, 4, (200, 256), (1, 2, 3, 4, 5), (95,)),
        (4, 16, (64,), (1, 2, 3), (1,)),
        (10_000, 60, (64,), (*WIDTHS, 61), (64,)),
    ],
)
def test_contexts_give_way_to_the_widths_and_these_to_the_models_context(
    context_length: int,
    max_tokens: int,
    contexts: tuple[int, ...],
    widths: tuple[int, ...],
    resolved: tuple[int, ...],
) -> None:
    target = tiny_target()
    target.config.max_position_embeddings = context_length
    terms = resolve_terms(target, max_tokens=max_tokens, contexts=contexts)
    assert (terms.widths, terms.contexts) == (widths, resolved)


class TimedTarget(Target):
    """The real model, whose whole passes take 2 s, and 0.5 s for each token after the first."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(tiny_llama())
        self._clock = clock

    def forward(self, token_ids: Tensor, cache: KVCache, start: int, *, last_only: bool = False) -> Tensor:
        self._clock.seconds += 1.5 + 0.5 * token_ids.shape[1]
        return super().forward(token_ids, cache, start, last_only=last_only)


@torch.inference_mode()
def test_passes_are_timed_after_the_untimed_pass_of_the_prompt(clock: Clock) -> None:
    target = TimedTarget(clock)
    timer = PassTimer(target, most_tokens=5, seed=0)
    assert [timer(Verification(width, 20)) for width in (1, 3, 5)] == [2.0, 3.0, 4.0]
    assert timer(Verification(5, 20, boundary=2)) == 0.0  # the views themselves stand outside of this clock
    assert timer(DraftStep(LayerSkip.blocks((2,)), 20)) == 0.0


@torch.inference_mode()
@pytest.mark.parametrize(
    ("skip", "steps"),
    [
        (LayerSkip(), 1),
        (LayerSkip(bits=8), 4),  # of the bytes of float32
        (LayerSkip.blocks((1, 2, 3, 4)), 3),
        (LayerSkip.blocks(tuple(range(6))), MOST_STEPS),
    ],
)
def test_draft_steps_are_averaged_over_the_length_of_a_whole_pass(
    skip: LayerSkip, steps: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = list[int]()
    compute = ModelPart.compute

    def timed(self: ModelPart, inputs: Inputs) -> Outputs:
        clock.seconds += 3.0
        drafted.append(int(inputs.positions[0, 0]))
        return compute(self, inputs)

    timer = PassTimer(tiny_target(), most_tokens=9, seed=0)
    timer(DraftStep(skip, 20))
    monkeypatch.setattr(ModelPart, "compute", timed)
    for looks in (False, True):
        assert timer(DraftStep(skip, 20, looks=looks)) == 3.0
        assert drafted == list(range(20, 20 + steps))
        drafted.clear()


@torch.inference_mode()
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("runner", "runs"), [("eager", [1, 1]), ("static", [2, 1])])
def test_the_first_pass_of_a_fixed_shape_is_not_timed(
    runner: str, runs: list[int], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, count = Target(tiny_llama(), runner), 0
    compute = ModelPart.compute

    def timed(self: ModelPart, inputs: Inputs) -> Outputs:
        nonlocal count
        count += 1
        clock.seconds += 100.0 if count == 1 and runner == "static" else 3.0  # the first is made ready
        return compute(self, inputs)

    timer = PassTimer(target, most_tokens=5, seed=0)
    timer(Verification(2, 20))  # reads the prompt
    monkeypatch.setattr(ModelPart, "compute", timed)
    counts = []
    for _ in runs:
        count = 0 if not counts else 1
        before = count
        assert timer(Verification(4, 20)) == 3.0
        counts.append(count - before)
    assert counts == runs


@torch.inference_mode()
@pytest.mark.parametrize(
    "each",
    [
        Verification(1, 20),
        Verification(4, 20),
        Verification(4, 20, boundary=2),
        DraftStep(LayerSkip.blocks((1, 2, 3, 4)), 20),
    ],
)
def test_passes_of_several_texts_are_shared_by_all(each: Pass, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    assert target.unbatchable_reason is None
    shared: list[tuple[tuple[int, ...], set[int]]] = []

    def note(part: Part, spans: dict[int, tuple[int, int]]) -> None:
        clock.seconds += 3.0
        shared.append((tuple(spans), {start for start, _ in spans.values()}))

    watch_shared_passes(target, monkeypatch, note)
    timer = PassTimer(target, most_tokens=5, num_sequences=3, seed=0)
    timer(each)  # it may look at the sub-layers before a block
    shared.clear()
    assert timer(each) == 3.0
    steps = 3 if isinstance(each, DraftStep) else 1
    assert shared == [((0, 1, 2), {20 + step}) for step in range(steps)]


@pytest.fixture
def one_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each pass once, for tests that look at no seconds."""
    monkeypatch.setattr(cost, "FEWEST_SWEEPS", 1)
    monkeypatch.setattr(cost, "PATIENCE", 1)


@pytest.mark.usefixtures("one_sweep")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox_parallel"])
def test_table_of_a_family_predicts_positive_and_monotone_costs(family: str) -> None:
    """Run each kind of pass: full attention, windows and norms, and parallel blocks, which have no separate sublayers."""
    target = target_of(family)
    table = measure_cost_table(target, max_tokens=2, contexts=(8, 24), budget_seconds=0.0)
    assert_monotone(table, max_tokens=2)
    assert table.error.num_passes > 8
    for draft in (EarlyExit(exit_layer=2), LayerSkip.blocks(tuple(range(NUM_LAYERS)))):
        costs = table.round_costs(draft, 2, context=16.5, prefix_reuse=True)
        assert costs.draft_step >= LEAST_COST
        assert len(costs.verify) == 3


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of each measurement; none takes time."""
    calls: list[dict[str, Any]] = []

    def measure_quickly(target: Target, **settings: Any) -> CostTable:
        calls.append(settings)
        return measure_cost_table(target, timer=known_seconds, budget_seconds=0.0, **settings)

    monkeypatch.setattr(cost, "measure_cost_table", measure_quickly)
    return calls


def ask(folder: Path, *, target: Target | None = None, listener: Listener | None = None, **settings: Any) -> CostTable:
    settings = {"max_tokens": 4, "contexts": (16, 32), **settings}
    return cost_table(target or tiny_target(), folder=folder, progress=listener or Listener(), **settings)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_table_is_measured_once(tmp_path: Path, measured: list[dict[str, Any]]) -> None:
    folder, listener = tmp_path / "deep" / "costs", Listener()
    first = ask(folder, listener=listener)
    assert ask(folder, listener=listener) == first
    assert ask(folder, max_tokens=2, contexts=(20,)) == first
    assert len(measured) == 1
    (line,) = listener.lines
    assert re.fullmatch(rf"costs of \d\d \w+ \d{{4}} \d\d:\d\d UTC, from {only_file(folder)}", line)
    stored = json.loads(only_file(folder).read_text())
    assert stored["table"]["error"]["num_passes"] == first.error.num_passes
    assert stored["created"].startswith("20")
    assert stored["key"]["runner"] == "eager"


def test_every_source_of_the_kernels_decides_about_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, read_bytes = set[Path](), Path.read_bytes

    def noted(path: Path) -> bytes:
        hashed.add(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    cost._code_sha256.__wrapped__()
    kernels = Path(compiled.__file__).parent
    assert {each for each in kernels.iterdir() if each.is_file()} <= hashed


@pytest.mark.parametrize(
    ("error", "load", "times"), [(0.24, 0.0, 2), (0.01, 1000.0, 2), (0.01, 0.0, 1), (0.24, None, 2)]
)
def test_table_of_a_disturbed_machine_serves_the_process_that_measured_it_only(
    tmp_path: Path,
    measured: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    error: float,
    load: float | None,
    times: int,
) -> None:
    ask(tmp_path)
    path = only_file(tmp_path)
    stored = json.loads(path.read_text())
    stored["table"]["error"]["median"], stored["load"] = error, load
    path.write_text(json.dumps(stored))
    ask(tmp_path)
    assert len(measured) == 1, "all studies of a search have one table"
    monkeypatch.setattr(cost, "_process_start", lambda: time.time() + 1)  # another process, later
    ask(tmp_path)
    assert len(measured) == times


@pytest.mark.parametrize(
    "more", [{"max_tokens": 6}, {"contexts": (16, 64)}, {"contexts": (8, 32)}], ids=["wider", "longer", "shorter"]
)
def test_table_that_does_not_cover_what_is_asked_is_measured_anew(
    tmp_path: Path, measured: list[dict[str, Any]], more: dict[str, Any]
) -> None:
    ask(tmp_path)
    assert ask(tmp_path, **more) == ask(tmp_path, **more)
    assert len(measured) == 2
    only_file(tmp_path)


def test_each_number_of_sequences_in_lockstep_has_its_own_file(
    tmp_path: Path, measured: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    for num_sequences in (1, 4, 4):
        ask(tmp_path, target=target, num_sequences=num_sequences)
    assert [settings["num_sequences"] for settings in measured] == [1, 4]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{hash_json(cost_key(target, count))[:32]}.json" for count in (1, 4)
    }
    monkeypatch.setattr(target, "unbatchable_reason", "for the sake of the test")
    ask(tmp_path, target=target, num_sequences=8)
    assert len(measured) == 2, "sequences that take turns have the table of one"
    ask(tmp_path, target=tiny_target(seed=1))
    assert len(measured) == 3, "another model has a file of its own"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"format": 1', '"format": 0'),
    ],
    ids=["cut", "older"],
)
def test_damaged_file_is_measured_anew_and_said(
    tmp_path: Path, measured: list[dict[str, Any]], damage: Callable[[str], str]
) -> None:
    first = ask(tmp_path)
    path = only_file(tmp_path)
    whole = path.read_text()
    path.write_text(damage(whole))
    assert path.read_text() != whole
    listener = Listener()
    assert ask(tmp_path, listener=listener) == first
    assert len(measured) == 2
    (line,) = listener.lines
    assert str(path) in line
    assert "measured anew" in line
    assert ask(tmp_path, listener=listener) == first
    assert len(measured) == 2


def test_folder_that_cannot_be_written_costs_only_the_measurement(
    tmp_path: Path, measured: list[dict[str, Any]]
) -> None:
    (tmp_path / "file").write_text("in the way")
    listener = Listener()
    assert ask(tmp_path / "file" / "costs", listener=listener).error.worst < 1e-6
    assert len(measured) == 1
    assert any("will be measured again" in line for line in listener.lines)
