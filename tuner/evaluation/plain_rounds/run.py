"""Plain rounds of a server with a profile, in turns with a server without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group

from decoding.arms.arm import Arm
from decoding.arms.belief import PLAIN
from decoding.arms.decoder import ArmedDecoder
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.deploy import load_decoder
from decoding.serving.batch import RowDecoder
from studies.ratios import Work, speed_ratio
from tuner.errors import ConfigError
from tuner.evaluation.continuous import Always, decode_side_by_side, greedy_requests, read_prompts
from tuner.evaluation.contract import Report
from tuner.evaluation.plain_rounds.settings import PlainRoundsEvaluation
from tuner.evaluation.tables import ratio_cell
from tuner.inputs.models import load
from tuner.progress import Progress
from tuner.results import stamped, write_json
from tuner.tables import figures_table

WITHOUT, WITH = "no profile", "plain rounds"


def run_and_write(settings: PlainRoundsEvaluation, progress: Progress) -> Report:
    """Decode in turns; write the file of results if there is one. Raises `SdtuneError` for errors of the user."""
    loaded_profile = load_decoder(settings.profile)
    identity = loaded_profile.profile.target
    prompts = read_prompts(settings.dataset)
    loaded = load(settings.model or identity.model, revision=identity.revision, dtype=identity.dtype, device="cpu")
    requests = greedy_requests(prompts, loaded.tokenizer, settings.max_new_tokens)[: settings.prompts]
    decoder = loaded_profile.decoder_for(loaded.model)
    if decoder.drafter is None:
        raise ConfigError("the profile decodes plainly")
    progress.stage("plain rounds", len(settings.levels) * (settings.rounds + 1) * 2)
    arm = Arm.of(loaded_profile.profile, decoder)
    rows = [compare(arm, requests, level, settings.rounds, progress) for level in settings.levels]
    succeeded = not any(row["num_different"] for row in rows)
    document = {"rows": rows, "succeeded": succeeded}
    if settings.out is not None:
        write_json(settings.out.parent, settings.out.stem, stamped(document, loaded.model.device))
    return Report(_table(rows), succeeded=succeeded)


def compare(arm: Arm, requests: Sequence[Request], level: int, num_rounds: int, progress: Progress) -> dict[str, Any]:
    """Decode all requests `num_rounds` times each way, in turns and in alternating order; the first round warms up."""
    plain: Decoder = plain_decoder(arm.decoder.target)
    ways: dict[str, RowDecoder] = {WITHOUT: plain, WITH: ArmedDecoder([arm], chooser=Always(PLAIN, 1))}
    units: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    num_different = 0
    for number in range(num_rounds + 1):
        texts = {}
        for name in ways if number % 2 else reversed(ways):
            seconds, texts[name] = decode_side_by_side(ways[name], requests, level)
            if number:
                units[name].append((seconds, sum(map(len, texts[name]))))
            progress.advance()
        num_different += sum(a != b for a, b in zip(texts[WITHOUT], texts[WITH], strict=True))
    works = {name: Work.of(found) for name, found in units.items()}
    return {
        "sequences": level,
        "tokens_per_second": {name: work.tokens_per_second for name, work in works.items()},
        "speed_with_over_without": speed_ratio(works[WITHOUT], works[WITH]).model_dump(mode="json"),
        "seconds": {name: [seconds for seconds, _ in found] for name, found in units.items()},
        "num_different": num_different,
    }


def _table(rows: Sequence[dict[str, Any]]) -> Group:
    table = figures_table("tokens per second", "sequences", WITHOUT, WITH, "speed, with over without")
    for row in rows:
        rates = [f"{row['tokens_per_second'][name]:.1f}" for name in (WITHOUT, WITH)]
        table.add_row(str(row["sequences"]), *rates, ratio_cell(row["speed_with_over_without"]))
    return Group(table, f"texts that differ: {sum(row['num_different'] for row in rows)}")
