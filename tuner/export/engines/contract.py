"""The contract of an engine: what it can express, what it refuses, and the files that set it up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.export.plan import Plan


class Engine(ABC):
    """One engine. The defaults describe one that takes a draft model and a fixed number of drafted tokens, and nothing else."""

    title: str
    """Name for people."""
    version: str
    """Version whose options are written, and how they were checked."""
    looks_up_alone: bool = False
    """True if it has prompt lookup without a draft model."""
    looks_up_first: bool = False
    """True if it tries prompt lookup before a draft model."""
    has_automaton: bool = False
    """True if its lookup alone may be a suffix automaton, or a trie, which finds matches of any length."""
    stops_below: bool = False
    """True if it ends a draft at an unlikely token."""
    quantises: bool = False
    """True if it quantises the draft's weights itself."""
    reads_layer_lists: bool = False
    """True if it takes each layer's settings from the configuration, for every family; others may derive some from its index."""
    has_ngram_range: bool = True
    """True if its prompt lookup tries n-grams of several lengths; others look for the longest alone."""
    has_schedule: bool = False
    """True if the number of drafted tokens may depend on the number of sequences."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Draft-length rules that it runs as they are."""
        return ("fixed", "top_probability") if self.stops_below else ("fixed",)

    def check(self, plan: Plan, config: Any) -> None:  # noqa: B027 - most engines misread nothing
        """Raise `ExportError` for a plan that the engine would misread; `config` is the target's configuration."""

    def notes(self, plan: Plan) -> list[str]:
        """Return what differs in this engine beyond what its flags say, one sentence each."""
        return []

    def draft_generation(self, plan: Plan) -> dict[str, Any]:
        """Return keys for the draft's `generation_config.json` beyond the model's own."""
        return {}

    @abstractmethod
    def files(self, plan: Plan) -> dict[str, str]:
        """Return the text of each file of settings by its name within the export; scripts end in `.sh`.

        Scripts run in the folder of the export, and `plan.out` is relative then: the folder may be moved.
        """


def script(*commands: str) -> str:
    """Return a shell script of these commands, each of which may have several lines."""
    return "\n".join(["#!/bin/sh", "set -eu", *commands, ""])


def command(*words: str) -> str:
    """Return a command with one flag, and its value, per line."""
    lines: list[str] = []
    for word in words:
        if word.startswith("-") or not lines:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return " \\\n  ".join(lines)
