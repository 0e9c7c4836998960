"""What a check of many cases found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CheckOutcome:
    """Cases of one check: their number, and a line for each that went wrong."""

    name: str
    num_cases: int = 0
    failures: list[str] = field(default_factory=list)

    def count(self, failure: str | None = None) -> None:
        """Count a case, with what went wrong in it, if anything."""
        self.num_cases += 1
        if failure is not None:
            self.failures.append(failure)


def prefixed(what: str, problem: str | None) -> str | None:
    """Return a problem with the case in which it came up, or None."""
    return None if problem is None else f"{what}: {problem}"
