"""Arms whose choice a test makes by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from decoding.arms.arm import Arm
from decoding.arms.chooser import ArmChooser
from decoding.arms.decoder import ArmedDecoder
from decoding.arms.windows import TimedWindow
from decoding.decoder import Decoder


class HandChooser(ArmChooser):
    """Keeps the arm that the test has set."""

    def __init__(self, arm: int, num_arms: int = 1) -> None:
        super().__init__([None] * num_arms)
        self.arm = arm

    def begin(self, num_running: int) -> int:
        """Return the arm of the test."""
        return self.arm

    def learn(self, window: TimedWindow) -> int:
        """Return the arm of the test."""
        return self.arm


def armed(decoders: Sequence[Decoder], chooser: ArmChooser, with_head: Collection[int] = (1,)) -> ArmedDecoder:
    """Return arms of these decoders; `with_head` are those with a trained head."""
    arms = [
        Arm(f"arm {number}", decoder, has_head=number in with_head and hasattr(decoder.drafter, "prefill_target"))
        for number, decoder in enumerate(decoders, 1)
    ]
    return ArmedDecoder(arms, chooser=chooser)
