"""The trainer of this process: shows its progress, and keeps a checkpoint from which a stopped training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from decoding.target import Target
from tuner.heads.checkpoint import OtherCheckpointError, load_checkpoint, save_checkpoint
from tuner.heads.group import GroupData, TrainedGroup
from tuner.heads.training import Losses, Run
from tuner.progress import Progress

OnLosses = Callable[[int, Sequence[Losses]], None]
"""Callback for finished steps: the number of steps reported before, and the losses of each new step."""


@dataclass(frozen=True)
class TrainerHere:
    target: Target
    data: GroupData
    checkpoint: Path
    identity: Mapping[str, Any]
    """Of the distillation: what a checkpoint must have been made with."""
    progress: Progress
    on_losses: OnLosses
    overwrite: bool
    """Train anew if the checkpoint belongs to another distillation; it is refused otherwise."""

    def train(self, exits: Sequence[int], most_seconds: float | None) -> TrainedGroup:
        """Train the heads of these exits, for `most_seconds` at most; go on from the checkpoint if there is one.

        Raises `DistillationError` if a loss is not finite.
        """
        settings, progress = self.data.settings, self.progress
        run = self.data.new_run(self.target, exits, most_seconds)
        heads = "head" if len(exits) == 1 else "heads"
        progress.stage(f"training {len(exits)} {heads}", settings.steps)
        if self.checkpoint.exists():
            self._resume(run)
        num_reported = run.step

        def keep() -> None:
            nonlocal num_reported
            progress.advance()
            progress.show(f"loss {fmean(run.losses[-1].values()):.3f}")
            if run.step % settings.checkpoint_every == 0 or run.progress(settings) >= 1:
                self.on_losses(num_reported, run.losses[num_reported:])
                save_checkpoint(run, self.identity, self.checkpoint)
                mean = fmean(loss for losses in run.losses[num_reported:] for loss in losses.values())
                progress.say(f"step {run.step}: loss {mean:.3f} nats per token, mean of {len(exits)} {heads}")
                num_reported = run.step

        self.data.train(run, self.target, keep)
        progress.stage("evaluating the trained heads", len(self.data.unseen))
        return self.data.finished(run, self.target, progress.advance)

    def _resume(self, run: Run) -> None:
        """Restore the checkpoint; refuse one of another distillation unless `overwrite` is set."""
        try:
            load_checkpoint(run, self.identity, self.checkpoint)
        except OtherCheckpointError:
            if not self.overwrite:
                raise
            return
        self.progress.say(f"resuming a stopped distillation after step {run.step}")
        self.progress.advance(run.step)
