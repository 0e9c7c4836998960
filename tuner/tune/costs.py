"""What a setting would take on known texts: its rounds by replay, or by what was accepted so far, and their cost by regression.

Our formulation. The wall clock of a group of requests is taken to be a sum of what its work consists of, prompt tokens, steps,
sequences in them, drafted tokens verified, and drafting; the coefficients are fitted to every group that was measured, by
non-negative least squares of relative errors. What is left is a factor for each kind of draft and load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import nnls

from tuner.engines.methods import Method, Replay, Rounds

if TYPE_CHECKING:
    from studies.measurement import Measurement

Work = dict[str, float]
"""Amount of each sort of work by name."""


class Setting(NamedTuple):
    method: Method
    num_tokens: int


PlainOr = Setting | None
"""A setting, or None for plain decoding."""


@dataclass(frozen=True)
class Tried:
    """A setting in turns with plain decoding, at one number of requests side by side."""

    setting: Setting
    sequences: int
    measurement: Measurement

    @property
    def num_rounds(self) -> int:
        """Rounds of all sequences: each writes one token beside the accepted ones, of which vLLM counts those after the end too."""
        found = self.measurement
        return max(found.num_spec_steps, self.num_written - found.num_accepted_draft_tokens, 1)

    @property
    def num_written(self) -> int:
        """Tokens after the prefill's."""
        return sum(each.draft_tokens - each.texts.count for each in self.measurement.samples)


class Costs:
    """Fitted to what was measured of some texts, it tells what other settings would take on them."""

    def __init__(self, prompts: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]) -> None:
        """`alone` are the plain texts of the prompts."""
        self._prompts, self._alone = prompts, alone
        self._replays = [Replay(prompt, text) for prompt, text in zip(prompts, alone, strict=True)]
        self._found: dict[tuple[Setting, int], Tried] = {}
        self._coefficients: dict[str, float] = {}
        self._factors: dict[tuple[str | None, int], float] = {}

    @property
    def measured(self) -> list[Tried]:
        """All measurements, in order."""
        return list(self._found.values())

    def add(self, measured: Tried) -> None:
        """Take in a measurement of groups of these prompts, in order."""
        self._found[measured.setting, measured.sequences] = measured

    def fit(self) -> None:
        """Fit the coefficients to all measurements."""
        rows = [row for each in self.measured for row in self._rows(each)]
        names = sorted({name for work, _ in rows for name in work})
        matrix = np.array([[work.get(name, 0.0) / seconds for name in names] for work, seconds in rows])
        scale = matrix.max(axis=0)
        scale[scale == 0] = 1.0
        # Nothing is assumed about costs that one setting cannot tell apart. The smallest ones that fit send the next server where
        # least is known: in simulations with noise of 15 %, 0.995 of the best setting, and 0.97 with a prior.
        found, _ = nnls(matrix / scale, np.ones(len(rows)))
        self._coefficients = dict(zip(names, found / scale, strict=True))
        errors: dict[tuple[str | None, int], list[float]] = defaultdict(list)
        for each in self.measured:
            for kind, setting in ((None, None), (each.setting.method.kind, each.setting)):
                seconds = [s.draft_seconds if setting else s.plain_seconds for s in each.measurement.samples]
                errors[kind, each.sequences].append(log(sum(seconds) / self._unscaled(setting, each.sequences)))
        self._factors = {key: exp(sum(each) / len(each)) for key, each in errors.items()}

    def knows(self, method: Method) -> bool:
        """Return whether drafts of this kind were measured."""
        return any(each.setting.method.kind == method.kind for each in self.measured)

    def speedup(self, setting: Setting, sequences: int) -> float:
        """Return the speed-up over plain decoding as predicted, and where it was measured, the geometric mean of both.

        A few groups of requests are a noisy measurement, and the fit knows all the others.
        """
        predicted, found = self.predicted(setting, sequences), self._found.get((setting, sequences))
        return predicted if found is None else sqrt(predicted * found.measurement.speedup)

    def has(self, setting: Setting, sequences: int) -> bool:
        """Return whether the setting was measured at this load."""
        return (setting, sequences) in self._found

    def predicted(self, setting: Setting, sequences: int) -> float:
        """Return the predicted speed-up over plain decoding."""
        return self._seconds(None, sequences) / self._seconds(setting, sequences)

    def work(self, setting: PlainOr, sequences: int) -> list[Work]:
        """Return the work of each group of `sequences` prompts with a setting."""
        return [self._group(setting, sequences, rows) for rows in self._groups(sequences)]

    def _groups(self, sequences: int) -> Iterator[range]:
        for first in range(0, len(self._prompts) // sequences * sequences, sequences):
            yield range(first, first + sequences)

    def _group(self, setting: PlainOr, sequences: int, rows: Sequence[int]) -> Work:
        rounds = [self._rounds(setting, row) for row in rows]
        steps, read = max(each.count for each in rounds), sum(len(self._prompts[row]) for row in rows)
        work: Work = {"prompt": read, "steps": steps, "sequences": sum(each.count for each in rounds)}
        if setting is None:
            return work
        method = setting.method
        work[f"verified, {sequences}"] = sum(each.drafted for each in rounds)
        work[f"{method.kind}, each step"] = steps
        if method.runs_model:
            work[f"{method.kind}, passes"] = steps * setting.num_tokens
            work[f"{method.kind}, prompt"] = read
        return work

    def _rounds(self, setting: PlainOr, row: int) -> Rounds:
        written = len(self._alone[row]) - 1  # the prefill writes the first token
        if setting is None:
            return Rounds(written, 0)
        if setting.method.lookup is not None:
            return self._replays[row].rounds(setting.method.lookup, setting.num_tokens)
        accepted, drafted = self._per_round(setting)
        count = written / (1 + accepted)
        return Rounds(count, count * drafted)

    def _per_round(self, setting: Setting) -> tuple[float, float]:
        """Return accepted and drafted tokens in a round, between what was measured of the method with other lengths."""
        found: dict[int, list[Tried]] = defaultdict(list)
        for each in self.measured:
            if each.setting.method == setting.method:
                found[each.setting.num_tokens].append(each)
        lengths, values = [0], [(0.0, 0.0)]
        for length in sorted(found):
            rounds = sum(each.num_rounds for each in found[length])
            written = sum(each.num_written for each in found[length])
            drafted = sum(each.measurement.num_draft_tokens for each in found[length])
            lengths.append(length)
            values.append((written / rounds - 1, drafted / rounds))
        accepted, drafted = PchipInterpolator(lengths, np.array(values))(min(setting.num_tokens, lengths[-1]))
        return float(accepted), float(drafted)

    def _rows(self, each: Tried) -> Iterator[tuple[Work, float]]:
        groups = self.work(each.setting, each.sequences), self.work(None, each.sequences)
        for sample in each.measurement.samples:
            yield groups[0][sample.prompt], sample.draft_seconds
            yield groups[1][sample.prompt], sample.plain_seconds

    def _unscaled(self, setting: PlainOr, sequences: int) -> float:
        coefficients = self._coefficients
        return sum(
            amount * coefficients.get(name, 0.0)
            for work in self.work(setting, sequences)
            for name, amount in work.items()
        )

    def _seconds(self, setting: PlainOr, sequences: int) -> float:
        kind = None if setting is None else setting.method.kind
        return self._unscaled(setting, sequences) * self._factors.get((kind, sequences), 1.0)


def best(
    costs: Costs, methods: Sequence[Method], sequences: Sequence[int], *, measured_only: bool = False
) -> tuple[float, dict[int, PlainOr]]:
    """Return the fastest settings, plain decoding where none is faster, and the sum of the logarithms of their speed-ups.

    All loads have one method with a schedule, or each has a setting without one: that is what one server, or one server for each
    load, can run. Kinds of which nothing was measured are left out, with `measured_only` everything else that was not.
    """
    known = [method for method in methods if costs.knows(method)]
    of_methods = [[Setting(method, number) for number in method.lengths] for method in known]
    groups = [each for each in of_methods if each[0].method.has_schedule]
    groups.append([setting for each in of_methods for setting in each if not setting.method.has_schedule])
    found: list[tuple[float, dict[int, PlainOr]]] = [(0.0, dict.fromkeys(sequences))]
    for group in groups:
        score, chosen = 0.0, dict[int, PlainOr]()
        for number in sequences:
            rated = [
                (costs.speedup(each, number), each) for each in group if not measured_only or costs.has(each, number)
            ]
            speed, chosen[number] = max(rated, key=lambda each: each[0], default=(1.0, None))
            if speed <= 1.0:
                chosen[number] = None
            score += log(max(speed, 1.0))
        found.append((score, chosen))
    return max(found, key=lambda each: each[0])
