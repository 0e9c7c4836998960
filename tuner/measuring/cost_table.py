"""The cost table of a model on this device, from which the cost of any draft is predicted: measured in seconds, and kept.

Passes are timed along the code paths of decoding, as in `decoding.timing` for production: draft steps by the drafter, verifications
by the target and its views. `studies.costs` says which passes, and fits the table. On disk there
is one file per model, device, software and batch size. A table is measured again after any of these has changed. One that was
measured on a disturbed machine serves the process that measured it, and no later one.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

import decoding
import studies.costs
from decoding.decode import Request
from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document
from decoding.draft_length import Controller, Looking
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafts import BitWidth, LayerSkip
from decoding.fingerprint import fingerprint, hash_json
from decoding.lockstep import shared_batch_size
from decoding.target import ResumeView, TappedView, Target
from decoding.text import Ending
from decoding.timing.passes import Prompted, PromptedBatch, between_plain
from studies.costs.fit import fit_costs
from studies.costs.plan import plan_passes
from studies.costs.table import CostTable
from studies.costs.terms import BlockKinds, DraftStep, Pass, Terms, Verification
from tuner.errors import StorageError
from tuner.measuring.machine import MOST_COST_ERROR
from tuner.progress import Progress
from tuner.results import device_name, versions

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 25, 33, 49)
"""Widths to measure: costs bend at the first few tokens and after powers of two, and are linear in between."""
BUDGET_SECONDS = 3.0
FEWEST_SWEEPS, MOST_SWEEPS = 2, 24
"""Limits on the number of sweeps. The first pass of a shape may be slow, so one sweep is too few; passes long enough to spend the
budget in two sweeps are hardly disturbed."""
LONG_PASS = 0.1
"""Seconds of a plain pass from which one sweep is enough."""
GOOD_ERROR = 0.04
"""Median error on held-out passes above which the machine counts as disturbed and is measured for longer."""
BESIDE_PLAIN = 2
"""Number of passes between two plain ones."""
PATIENCE = 2
"""Number of times that the fewest sweeps and the budget may be spent on a disturbed machine."""

Timer = Callable[[Pass], float]
"""Returns the seconds of a pass, timed once."""
DECIDING_PACKAGES = ("sdtune", "torch", "transformers")


@torch.inference_mode()
def measure_cost_table(
    target: Target,
    *,
    max_tokens: int,
    contexts: Sequence[int],
    num_sequences: int = 1,
    bits: Collection[BitWidth] = (),
    budget_seconds: float = BUDGET_SECONDS,
    most_seconds: float = math.inf,
    seed: int = 0,
    timer: Timer | None = None,
) -> CostTable:
    """Time the passes of `studies.costs.plan` for drafts of up to `max_tokens` tokens after `contexts` tokens, and fit the costs.

    Sweeps through all passes are repeated, at least `FEWEST_SWEEPS` times, until `budget_seconds` are spent, and up to `PATIENCE`
    times as long while held-out passes are predicted badly and fewer than `most_seconds` are spent. The seconds of a pass are the
    median of its ratios to the plain passes beside it, times the median plain pass.

    `bits` are the precisions in which quantised drafts are timed too. `seed` draws held-out passes and tokens; `timer` replaces
    running the passes. With `num_sequences` above 1 every pass runs that many sequences in lockstep, each after the same number of
    tokens; the target must be able to share passes.

    Raises ValueError if `max_tokens` or a context is below 1, no context is given, or the model's context has no room for two
    tokens.
    """
    terms = resolve_terms(target, max_tokens=max_tokens, contexts=contexts, bits=bits)
    fitted, held_out = plan_passes(terms, seed)
    passes, plain = [*fitted, *held_out], Verification(1, terms.contexts[0])
    ratios, plain_seconds = defaultdict[Pass, list[float]](list), list[float]()
    start = time.perf_counter()
    own = PassTimer(target, most_tokens=terms.widths[-1], num_sequences=num_sequences, seed=seed)
    with target.runner.temporary_memory(), own:
        timed = timer or own
        for patience in range(1, PATIENCE + 1):
            longest, num_sweeps, fewest = patience * budget_seconds, 0, FEWEST_SWEEPS
            while num_sweeps < fewest or (time.perf_counter() - start < longest and num_sweeps < MOST_SWEEPS):
                sweep = between_plain(
                    partial(timed, plain), [partial(timed, each) for each in passes], at_once=BESIDE_PLAIN
                )
                for each, (seconds, beside) in zip(passes, sweep, strict=True):
                    ratios[each].append(seconds / beside if beside else 1.0)
                    plain_seconds.append(beside)
                num_sweeps += 1
                usual = float(np.median(plain_seconds))
                fewest = 1 if usual >= LONG_PASS else FEWEST_SWEEPS
            found = {each: usual * float(np.median(ratios[each])) for each in passes}
            table = fit_costs(terms, {each: found[each] for each in fitted}, {each: found[each] for each in held_out})
            if table.error.median <= GOOD_ERROR or time.perf_counter() - start >= most_seconds:
                break
    return table


MOST_STEPS = 8
"""Most tokens drafted in a row. As in decoding, a step finds the processor's caches as the previous step left them."""


class PassTimer:
    """Times passes, each from the same state after a prompt of random tokens. A context, which keeps views and prompts meanwhile.

    `most_tokens`, at least 2, are the most positions of a pass. With `num_sequences` above 1 a pass runs that many sequences in
    lockstep, all after the same number of tokens. Call within `torch.inference_mode`.
    """

    def __init__(self, target: Target, *, most_tokens: int, seed: int, num_sequences: int = 1) -> None:
        self._target, self._room, self._seed, self._num_texts = target, most_tokens, seed, num_sequences
        # Plain dictionaries: a cached method would refer to itself, and keep all this until a garbage collection.
        self._drafters: dict[LayerSkip, LayerSkipDrafter] = {}
        self._views: dict[int, ResumeView] = {}
        self._batches: dict[int, PromptedBatch] = {}
        self._states: dict[int, dict[Prompted, Tensor]] = {}
        self._prepared = set[Pass]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for kept in (self._drafters, self._views, self._batches, self._states, self._prepared):
            kept.clear()

    def __call__(self, each: Pass) -> float:
        """Return the seconds of one pass; for a draft step, the mean over about as many steps as last a pass of the whole model.

        Shorter timings are disturbed less often, so only timings of similar length are comparable.
        """
        if self._target.runner.block_call is not None and each not in self._prepared:
            self._prepared.add(each)
            self._time(each)  # the first pass of a fixed shape makes it ready
        return self._time(each)

    def _time(self, each: Pass) -> float:
        context = int(each.context)
        if context not in self._batches:
            self._batches[context] = self._read(context)
        batch = self._batches[context]
        if isinstance(each, DraftStep):
            return self._draft(each, batch)
        if each.boundary and each.width > 1:
            return batch.seconds(self._resumed(each.width, each.boundary, context))
        return batch.seconds(
            lambda sequence: self._target.forward(sequence.ahead(each.width), sequence.cache, sequence.cache.length)
        )

    def _read(self, context: int) -> PromptedBatch:
        stream, shape = torch.Generator().manual_seed(self._seed), (self._num_texts, context + self._room)
        texts = [
            torch.randint(self._target.config.vocab_size, shape[1:], generator=stream).tolist() for _ in range(shape[0])
        ]
        return PromptedBatch(self._target, texts, context, shape[1])

    def _draft(self, each: DraftStep, batch: PromptedBatch) -> float:
        skip, num_sublayers = each.skip, 2 * self._target.num_layers
        drafter = self._drafter(skip)
        run: float = num_sublayers - len(skip.skip_attention) - len(skip.skip_mlp)
        if skip.bits is not None:
            run *= skip.bits / (8 * self._target.dtype.itemsize)
        steps = min(round(num_sublayers / max(run, 1)), MOST_STEPS, self._room - 1)

        request = Request([0], Ending(steps + 1))

        def draft(sequence: Prompted) -> None:
            controller = Looking(steps) if each.looks else Controller(steps)
            drafter.draft(sequence.text, sequence.cache, controller, request, steps)

        return batch.seconds(draft) / steps

    def _drafter(self, skip: LayerSkip) -> LayerSkipDrafter:
        if skip not in self._drafters:
            # Prefix reuse hardly changes a step, and would first check with several passes that a verification may resume.
            self._drafters[skip] = LayerSkipDrafter(self._target, skip, prefix_reuse=False)
        return self._drafters[skip]

    def _resumed(self, width: int, boundary: int, context: int) -> Callable[[Prompted], object]:
        """Return a verification that resumes at block `boundary`."""
        view = self._views.setdefault(boundary, ResumeView(self._target, boundary))
        states = self._states_after(context)

        def verify(sequence: Prompted) -> None:
            known = states[sequence][..., : width - 1, :]
            view.run(sequence.ahead(width), sequence.cache, sequence.cache.length, known)

        return verify

    def _states_after(self, context: int) -> dict[Prompted, Tensor]:
        """Return states at the next positions of each sequence, [.., positions, hidden].

        They are those before block 1, for every boundary: a pass takes the same time whatever the values.
        """
        if context not in self._states:
            view, states = TappedView(self._target, 1), dict[Prompted, Tensor]()

            def keep(sequence: Prompted) -> None:
                found = view.run(sequence.ahead(self._room), sequence.cache, sequence.cache.length).states
                assert found is not None, "the boundary is tapped"
                states[sequence] = found

            self._batches[context].all(keep)
            self._states[context] = states
        return self._states[context]


def resolve_terms(
    target: Target, *, max_tokens: int, contexts: Iterable[int], bits: Collection[BitWidth] = ()
) -> Terms:
    """Return the terms to measure: widths up to `max_tokens` + 1, contexts that leave room for them, and precisions.

    A model without layers to quantise has no `bits`.
    In a short model context, the contexts are reduced before the widths. Raises ValueError as `measure_cost_table` does.
    """
    contexts = sorted(set(contexts))
    if max_tokens < 1 or not contexts or contexts[0] < 1:
        raise ValueError(f"max_tokens and contexts must be at least 1, got {max_tokens} and {contexts}")
    widest, room = max_tokens + 1, target.context_length
    if room is not None:
        if room < 3:
            raise ValueError(f"the model's context of {room} tokens has no room for a draft")
        widest = min(widest, room - 1)
        contexts = sorted({min(context, room - widest) for context in contexts})
    widths = [*(width for width in WIDTHS if width < widest), widest]
    known = tuple(sorted(set(bits))) if target.can_be_quantised else ()
    kinds = BlockKinds.of(target)
    return Terms(kinds, tuple(widths), tuple(contexts), target.lm_heads.num_rows, known)


def cost_key(target: Target, num_sequences: int = 1) -> dict[str, Any]:
    """Return everything that the seconds of a pass depend on, for passes of `num_sequences` sequences in lockstep."""
    model, installed, runner = fingerprint(target.model), versions(), target.runner
    return {
        "config_sha256": model.config_sha256,
        "weights_sha256": model.weights_sha256,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device_name(target.device),
        "threads": torch.get_num_threads(),
        "attention": getattr(target.config, "_attn_implementation", None),
        "runner": runner.name if runner.exact_width is None else f"{runner.name}, bit-exact at {runner.exact_width}",
        "code_sha256": _code_sha256(),
        "num_sequences": num_sequences,
        "versions": {package: installed[package] for package in DECIDING_PACKAGES},
    }


@cache
def _code_sha256() -> str:
    """Return the hash of the code that runs and times the passes: a change of it invalidates a table."""
    folders = (decoding, studies.costs)
    roots = [Path(str(folder.__file__)).parent for folder in folders]
    files = [path for root in roots for kind in ("*.py", "*.cpp", "*.h") for path in root.rglob(kind)]
    return hash_json([hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted([*files, Path(__file__)])])


class StoredCosts(Document):
    """Contents of a file; the table includes its measured error."""

    format: Literal[1] = 1
    key: dict[str, Any]
    created: str
    load: float | None
    """Load average after the measurement; None where the system has none."""
    table: CostTable

    @property
    def is_usable(self) -> bool:
        """False of an earlier process if the table fits badly, or the machine had more to do than it has processors."""
        disturbed = self.table.error.median > MOST_COST_ERROR or (self.load or 0.0) > (os.cpu_count() or 1)
        return not disturbed or datetime.fromisoformat(self.created).timestamp() >= _process_start()


def _process_start() -> float:
    import psutil

    return float(psutil.Process().create_time())


def cost_table(
    target: Target,
    *,
    max_tokens: int,
    contexts: Sequence[int],
    progress: Progress,
    num_sequences: int = 1,
    bits: Collection[BitWidth] = (),
    folder: Path | None = None,
    most_seconds: float = math.inf,
    seed: int = 0,
) -> CostTable:
    """Return the table stored in `folder` if it fits model and device and covers these lengths; else measure and store one.

    With `num_sequences` above 1 the passes run that many sequences in lockstep, or one if the target cannot share
    passes. `bits` are the precisions of quantised drafts that the table must know. An unreadable file or unwritable folder is
    reported to `progress` and costs only the measurement. Raises ValueError as `measure_cost_table` does.
    """
    folder = folder or cache_folder()
    num_sequences = shared_batch_size(target, num_sequences)
    key = cost_key(target, num_sequences)
    path = folder / f"{hash_json(key)[:32]}.json"
    terms = resolve_terms(target, max_tokens=max_tokens, contexts=contexts, bits=bits)
    stored = _read(path, key, progress)
    if (
        stored is not None
        and stored.table.kinds == terms.kinds
        and stored.table.covers(terms.widths, terms.contexts, terms.bits)
    ):
        progress.say(f"costs of {datetime.fromisoformat(stored.created):%d %b %Y %H:%M} UTC, from {path}")
        return stored.table
    table = measure_cost_table(
        target,
        max_tokens=max_tokens,
        contexts=contexts,
        num_sequences=num_sequences,
        bits=bits,
        most_seconds=most_seconds,
        seed=seed,
    )
    created = datetime.now(UTC).isoformat()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    _write(path, StoredCosts(key=key, created=created, load=load, table=table), progress)
    return table


def cache_folder() -> Path:
    """Return the folder of the tables: `sdtune/costs` under XDG_CACHE_HOME, or under ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sdtune" / "costs"


def _read(path: Path, key: dict[str, Any], progress: Progress) -> StoredCosts | None:
    try:
        stored = StoredCosts.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as cause:
        reason = (cause.strerror or str(cause)) if isinstance(cause, OSError) else "damaged, or of another version"
        progress.say(f"the stored costs {path} are measured anew: {reason}")
        return None
    return stored if stored.key == key and stored.is_usable else None


def _write(path: Path, stored: StoredCosts, progress: Progress) -> None:
    content = stored.model_dump_json(indent=1).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, what="the measured costs", error=StorageError)
    except (OSError, StorageError) as cause:
        progress.say(f"{cause}: the measured costs are not kept, and will be measured again next time")
