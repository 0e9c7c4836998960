"""Counts of the rows that were read, and the lines that report them."""

from __future__ import annotations

from collections import Counter

from tuner.inputs.left_out import LeftOut, Reason
from tuner.inputs.reading import LengthLimits, Prompt


class Tally:
    """Counts of the rows that were read: all, those left out by reason, and those cut."""

    def __init__(self) -> None:
        self.num_read = 0
        self.num_cut = 0
        self._left_out: Counter[Reason] = Counter()
        self._refusal = ""

    def add(self, found: Prompt | LeftOut) -> None:
        """Count a row, read as a prompt or left out."""
        self.num_read += 1
        if isinstance(found, Prompt):
            self.num_cut += found.is_cut
            return
        self._left_out[found.reason] += 1
        self._refusal = self._refusal or found.message

    def num(self, reason: Reason) -> int:
        """Return the number of rows left out for a reason."""
        return self._left_out[reason]

    def summary(self, limits: LengthLimits) -> str:
        """Return the counts in one phrase: empty and repeated rows, then every other reason that occurred."""
        phrases = {
            Reason.TOO_LONG: f"too long, as {limits}",
            Reason.NOT_TEXT: "with images or calls of tools",
            Reason.REFUSED: f"refused by the chat template ({self._refusal})",
        }
        listed = [f"{self.num(reason)} {phrase}" for reason, phrase in phrases.items() if self.num(reason)]
        skipped = f"{self.num(Reason.EMPTY)} empty and {self.num(Reason.REPEATED)} repeated rows skipped"
        return "; ".join((skipped, *listed))

    def notes(self, limits: LengthLimits) -> tuple[str, ...]:
        """Return a line for every kind of row that a user should know to be missing or cut."""
        read = self.num_read
        too_long = f"prompts are too long and were left out, as {limits}; {limits.advice}"
        lines = {
            Reason.TOO_LONG: f"{self.num(Reason.TOO_LONG)} of {read} {too_long}",
            Reason.NOT_TEXT: f"{self.num(Reason.NOT_TEXT)} of {read} rows hold images or calls of tools and were left out",
            Reason.REFUSED: f"{self.num(Reason.REFUSED)} of {read} conversations were left out, as the chat template refuses "
            f"them: {self._refusal}",
        }
        cut = f"{self.num_cut} of {read} prompts were cut from the left to {limits.max_prompt_tokens} tokens"
        return (*(line for reason, line in lines.items() if self.num(reason)), *((cut,) if self.num_cut else ()))
