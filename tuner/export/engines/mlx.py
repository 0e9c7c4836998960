"""mlx-lm: a draft model and a fixed number of tokens."""

from __future__ import annotations

from shlex import quote
from typing import ClassVar

from tuner.export.engines.contract import Engine, command, script
from tuner.export.plan import Plan


class MlxLm(Engine):
    """Flags of `mlx_lm.server`, after the released source; not run."""

    title: ClassVar[str] = "mlx-lm"
    version: ClassVar[str] = "0.32.2, after its source; not run"

    def notes(self, plan: Plan) -> list[str]:
        """Return the limit of its server."""
        return ["With a draft model the server decodes one sequence at a time."]

    def files(self, plan: Plan) -> dict[str, str]:
        """Return `launch.sh`."""
        launch = command(
            f"mlx_lm.server --model {quote(plan.model)}",
            f"--draft-model {quote(str(plan.draft))}",
            f"--num-draft-tokens {plan.length.num_tokens}",
            '"$@"',
        )
        return {"launch.sh": script(launch)}
