"""The contract of an installed engine: how it is found, started and read. `tuner.fields` lists the engines."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Self

from tuner.errors import EngineError
from tuner.fields import PROGRAMS
from tuner.inputs.memory import cache_values
from tuner.measuring.contender import Decoded

if TYPE_CHECKING:
    from tuner.engines.methods import Method
    from tuner.engines.server import Client
    from tuner.export.plan import Plan
    from tuner.inputs.prompts import Prompt

ROOM = 72
"""Positions beyond the longest text: of the longest draft or copy, and a few."""


@dataclass(frozen=True)
class Launch:
    """A command, and the environment variables that it needs beside those of this process."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """A model as an engine is to load it, where no profile is exported; see `Plan`."""

    model: str
    dtype: str
    out: Path
    """Folder of the files that the engine needs beside the model's own."""
    draft_model: str | None = None
    """A draft model of the user's."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings that plain decoding and every draft share."""

    context: int
    """Positions that a sequence may take, prompt included."""
    cache_values: int
    """Numbers in the keys and values of one position of the target."""
    threads: int | None = None
    """CPU threads; None for the engine's own choice."""
    sequences: int = 1
    """Number of sequences decoded at a time."""
    arguments: tuple[str, ...] = ()
    """The user's own flags."""

    @classmethod
    def of(
        cls,
        prompts: Iterable[Prompt],
        max_new_tokens: int,
        config: Any,
        *,
        threads: int | None,
        engine_args: str | None,
        sequences: int = 1,
    ) -> Self:
        """Return settings with room for the prompts, new tokens and drafts within the limit of the model's `config`."""
        limit = getattr(config, "max_position_embeddings", None)
        wanted = max(len(prompt.token_ids) for prompt in prompts) + max_new_tokens + ROOM
        context = wanted if limit is None else min(wanted, limit)
        return cls(context, cache_values(config), threads, sequences, tuple(shlex.split(engine_args or "")))


@dataclass(frozen=True)
class DraftCounts:
    """The engine's own counters of speculative decoding, since it was started or between two readings."""

    rounds: int = 0
    """Verifications of a draft. Rounds without one do not count."""
    drafted: int = 0
    accepted: int = 0

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.rounds - earlier.rounds, self.drafted - earlier.drafted, self.accepted - earlier.accepted
        )


def completed(
    texts: Sequence[tuple[int, ...]], prefill_seconds: float | None, decode_seconds: float, counts: DraftCounts
) -> Decoded:
    """Return the answer of an engine to one request or several, with what was drafted for them.

    Without `prefill_seconds` the decode phase has all seconds and tokens: those of requests side by side cannot be told apart.
    """
    prefill_tokens = 0 if prefill_seconds is None else len(texts)
    return Decoded(
        texts=tuple(texts),
        prefill_seconds=prefill_seconds or 0.0,
        prefill_tokens=prefill_tokens,
        decode_seconds=decode_seconds,
        decode_tokens=sum(map(len, texts)) - prefill_tokens,
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
    )


class EngineProgram(ABC):
    """An engine installed on this machine."""

    title: ClassVar[str]
    """Name for people."""
    home: ClassVar[str]
    """What the folder holds in which it is installed."""
    home_variable: ClassVar[str]
    """Environment variable that names that folder."""
    counters: ClassVar[str]
    """Beginning of the names of its counters of speculative decoding."""
    start_seconds: ClassVar[float] = 120.0
    """Longest time to wait until it answers."""
    usual_start_seconds: ClassVar[float] = 45.0
    """Expected time until it answers, for plans."""
    target_files: ClassVar[tuple[str, ...]] = ()
    """Files of an export that hold the target: exports of one model may share them."""
    starts_at_once: ClassVar[bool] = False
    """True if a server starts in seconds, so that many settings can be tried."""

    @classmethod
    @abstractmethod
    def find(cls, folder: Path, /) -> EngineProgram:
        """Return the engine installed in a folder; raise `EngineError` if it is not there."""

    @abstractmethod
    def version(self) -> str:
        """Return the engine's version; raise `EngineError` if it does not run."""

    def prepare(self, plan: Plan, log: Path) -> tuple[str, ...]:
        """Write the files that the engine loads beside the model's and the draft's folders; return remarks, one sentence each.

        Those of `target_files` that are there already are kept. Raises `EngineError` for a model that it cannot load.
        """
        return ()

    @abstractmethod
    def draft_flags(self, plan: Plan) -> tuple[str, ...]:
        """Return the flags of the export's draft."""

    def runs_profiles(self) -> bool:
        """Return whether this installation drafts with a profile itself, on the target's own weights and keys."""
        return False

    def own_drafts(self, plan: Plan, path: Path) -> dict[str, tuple[str, ...]]:
        """Return, by name, flags of drafts that this installation has beside the export's; `path` is the profile's file."""
        return {}

    @abstractmethod
    def prepare_model(self, served: Served, log: Path) -> tuple[str, ...]:
        """Write what `prepare` writes, for a model and a draft model of the user's."""

    @abstractmethod
    def methods(self, served: Served) -> tuple[Method, ...]:
        """Return the ways of drafting that this installation has for a model, with their settings; the draft model's, if any."""

    @abstractmethod
    def profile_methods(self, plan: Plan, path: Path) -> tuple[Method, ...]:
        """Return the ways in which this installation drafts with a profile, whose file is `path`: its export, or itself."""

    @abstractmethod
    def launch(self, plan: Plan | Served, settings: ServerSettings, port: int, draft_flags: Sequence[str]) -> Launch:
        """Return the command that serves the model at `port` of the loopback interface; without flags it decodes plainly."""

    @abstractmethod
    def complete(self, client: Client, prompt: Sequence[int], num_tokens: int) -> Decoded:
        """Continue the token ids greedily by up to `num_tokens`, by the engine's own clock; raise `EngineError` for a wrong answer.

        Nothing else runs in the engine meanwhile: its counters tell what the request has cost.
        """

    @abstractmethod
    def continuation(self, client: Client, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Continue as `complete` does, untimed and beside other requests, and return the tokens."""

    def counts(self, counters: Mapping[str, float]) -> DraftCounts:
        """Return what the engine's counters say of speculative decoding."""
        names = ("num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total")
        return DraftCounts(*(int(counters.get(f"{self.counters}{name}", 0)) for name in names))

    def counters_after(self, client: Client, before: Mapping[str, float], num_requests: int) -> dict[str, float]:
        """Return the counters once they hold `num_requests` more answered requests than `before`."""
        return client.counters()


def find_engine(name: str, home: Path | None) -> EngineProgram:
    """Return the engine of a name, installed in `home` or where its variable says; raise `EngineError` if it is not found."""
    program: type[EngineProgram] = resolve_name(PROGRAMS[name])
    folder = home or os.environ.get(program.home_variable)
    if not folder:
        raise EngineError(
            f"where {program.title} is installed is not known: name the folder of {program.home} with --engine-home or "
            f"{program.home_variable}"
        )
    return program.find(Path(folder))
