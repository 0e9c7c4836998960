"""From a profile to the plan of its export: lengths, lookups and layers under the rules of an engine. Writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import ExportError
from tuner.export.checkpoint import moved_settings
from tuner.export.plan import Plan, fixed_length, lookup_of
from tuner.export.schedule import check_schedule
from tuner.export.shape import shape_of

if TYPE_CHECKING:
    from decoding.drafts import DraftDocument
    from decoding.profile import DraftProfile
    from tuner.export.engines.contract import Engine
    from tuner.export.schedule import MeasuredSchedule


def plan_for(
    profile: DraftProfile,
    engine: Engine,
    draft: DraftDocument,
    config: Any,
    *,
    model: str,
    dtype: str,
    out: Path,
    asked: int | None = None,
    schedule: MeasuredSchedule | None = None,
) -> Plan:
    """Return the plan of `profile` in `engine`.

    `draft` is its draft as reduced for the engine, `config` the target's configuration, `asked` the user's number of tokens,
    `schedule` one that was measured in the engine.
    Raises `ExportError` for what the engine cannot express or would misread.
    """
    shape = shape_of(draft, profile.target.num_layers) if draft.runs_model else None
    threshold = profile.draft_length.fixed_threshold if engine.stops_below and shape is not None else None
    length = fixed_length(profile, asked, has_threshold=threshold is not None)
    plan = Plan(
        profile=profile,
        model=model,
        dtype=dtype,
        out=out,
        shape=shape,
        length=length,
        threshold=threshold,
        lookup=lookup_of(profile, engine, length),
        bits=draft.parts.bits,
    )
    moved = (
        moved_settings(config.get_text_config(), shape) if shape is not None and not engine.reads_layer_lists else ()
    )
    if schedule is not None:
        check_schedule(schedule, profile, engine)
        plan = plan.with_length(schedule.most_tokens, schedule)
    if moved:
        raise ExportError(
            f"{engine.title} may derive {', '.join(moved)} from the index of a layer, and the draft's layers have others than the "
            "target's first ones: --to hf reads them from the configuration, and --to folder keeps everything"
        )
    engine.check(plan, config)
    return plan
