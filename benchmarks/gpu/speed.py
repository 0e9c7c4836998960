"""Steps on speed: roofline, switch of candidates, a search, its profile against `generate`, and each kind of draft."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

from benchmarks.gpu.roofline import bytes_per_token, time_reads
from benchmarks.gpu.shared import (
    DATASET,
    DEMO,
    GROUP_COLUMN,
    HELD_OUT_PROMPTS,
    NEW_TOKENS,
    TUNING_PROMPTS,
    Shared,
)
from benchmarks.gpu.timing import Interrupted, Make, Turns, own, stock
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import DraftLengthRule, Fixed
from decoding.drafts import BitWidth, Draft, LayerSkip, PromptLookup, SuffixDraft, SuffixLookup
from decoding.errors import UnsupportedModelError, one_line
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding, DraftProfile
from decoding.target import Target
from decoding.text import Ending
from decoding.timing.passes import Stopwatch
from tuner.config import EXACT_WIDTH, SearchConfig
from tuner.errors import ConfigError
from tuner.inputs.models import eos_token_ids, load
from tuner.measuring.contender import PLAIN
from tuner.progress import Progress
from tuner.search.run import InterruptedSearchError, search
from tuner.search.task import prepare

NUM_PROMPTS, NUM_SKIPS = 4, 4
DRAFTED, COPIED = Fixed(max_tokens=4), Fixed(max_tokens=8)
"""Rules: of drafts that run a model or a head, and of copies."""
PRECISIONS: tuple[BitWidth, ...] = (8, 4)
SHARE_OF_SEARCH = 0.85
"""Share of the step's seconds for the whole search, which may overrun its time by a lap of the race."""
WORTHWHILE = 1.02
"""Speed-up from which something deserves to be on by default."""


def _plain(shared: Shared) -> dict[str, Make]:
    return {PLAIN: own(plain_decoder(shared.static), shared.eos_token_ids)}


def _own(shared: Shared, draft: Draft, rule: DraftLengthRule, decoding: Decoding = Decoding()) -> Make:
    return own(Decoder(shared.static, draft, rule, decoding, heads=shared.heads), shared.eos_token_ids)


def rates(shared: Shared, seconds: float) -> dict[str, Any]:
    """Measure plain decoding by both runners and `generate` against the bound by the memory's bandwidth."""
    size, reads = time_reads(shared.device)
    contenders = {
        **_plain(shared),
        "plain-eager": own(plain_decoder(shared.eager), shared.eos_token_ids),
        "hf": stock(shared.wide, shared.eos_token_ids),
    }
    prompts = shared.tuning_prompts(NUM_PROMPTS)
    measured = Turns(shared.static, contenders, prompts, max_new_tokens=NEW_TOKENS)
    bandwidth = size / median([*reads, *time_reads(shared.device)[1]])
    needed = bytes_per_token(shared.eager, [len(prompt) + NEW_TOKENS / 2 for prompt in prompts])
    rows = measured.rows()
    for row in rows:
        row["of the roofline"] = row["tok/s"] * needed / bandwidth
    return {
        "rows": [*rows, {"contender": "roofline", "tok/s": round(bandwidth / needed, 1)}],
        "bytes_per_second": bandwidth,
        "bytes_per_token": needed,
        "plain over hf": f"{measured.ratio(PLAIN, 'hf'):.3f}" if "hf" not in measured.left_out else None,
        "left_out": measured.left_out,
    }


def switching(shared: Shared, seconds: float) -> dict[str, Any]:
    """Time new candidates until their first token can be timed: an exit with its head, one without, random skip sets."""
    stream = random.Random(0)
    num_layers = shared.static.num_layers
    skips = []
    for _ in range(NUM_SKIPS):
        attention, mlp = (tuple(sorted(stream.sample(range(num_layers), num_layers // 3))) for _ in range(2))
        skips.append(LayerSkip(skip_attention=attention, skip_mlp=mlp))
    bare = shared.bare_exit.model_copy(update={"exit_layer": shared.exit_draft.exit_layer + 1})
    rows = [_switch(shared, draft) for draft in (shared.exit_draft, bare, *skips)]
    return {"rows": rows, "median seconds": median(row["switch s"] for row in rows)}


def _switch(shared: Shared, draft: Draft) -> dict[str, Any]:
    """Make a candidate ready as a search does, and decode the same prompt twice: both should take equally long."""
    known = shared.recorder.num_recorded if shared.recorder else 0
    prompts = shared.tuning_prompts(NUM_PROMPTS)
    lengths = [len(prompt) for prompt in prompts]
    request = Request(prompts[0], Ending(NEW_TOKENS, shared.eos_token_ids))
    watch = Stopwatch(shared.device)
    start = watch.now()
    decoder = Decoder(shared.static, draft, Fixed(max_tokens=6), heads=shared.heads)
    decoder.prepare(min(lengths), max(lengths) + NEW_TOKENS)
    ready = watch.now() - start
    first, second = (watch.time(lambda: decoder.generate(request)) for _ in range(2))
    recordings = shared.recorder.num_recorded - known if shared.recorder else 0
    switch = ready + max(first - second, 0.0)
    row = {"draft": draft.describe()[:60], "switch s": switch, "ready s": ready, "first s": first, "second s": second}
    return {**row, "recordings": recordings}


def whole_search(shared: Shared, seconds: float) -> dict[str, Any]:
    """Search with the static runner for a share of the time; the next steps use the profile that it writes."""
    task = prepare(
        search_config(shared, seconds * SHARE_OF_SEARCH), Progress(), loaded=shared.loaded, target=shared.static
    )
    try:
        result = search(task, Progress())
    except InterruptedSearchError as stopped:
        best = stopped.best
        row = {"best so far": best.candidate.draft.describe() if best else None}
        raise Interrupted({"rows": [row]}) from None
    profile, confirmed = result.profile, result.confirmed
    found: dict[str, Any] = {
        "draft": profile.draft.describe(),
        "rule": profile.draft_length.describe(),
        "over plain": f"{confirmed.speedup_interval():.3f}",
        "tok/s": round(confirmed.draft_tokens_per_second, 1),
        "identical": confirmed.num_identical,
        "ties": confirmed.num_ties,
        "texts": confirmed.num_prompts,
        "trials": result.cost.trials,
    }
    return {"rows": [found], "profile": profile.model_dump(mode="json")}


def search_config(shared: Shared, seconds: float) -> SearchConfig:
    """Return the configuration of the search, with `seconds` for all of it."""
    return SearchConfig.model_validate(
        {
            "model": shared.loaded.name,
            "dataset": str(DATASET),
            "group_column": GROUP_COLUMN,
            "tuning_prompts": TUNING_PROMPTS,
            "held_out_prompts": HELD_OUT_PROMPTS,
            "max_new_tokens": NEW_TOKENS,
            "finalists": 2,
            "timeout": f"{max(seconds, 1):.0f}s",
            "device": str(shared.device),
            "runner": "static",
            "heads": shared.heads_folder,
            "distill": "never",
            "stock": False,  # other steps compare with generate
            "storage": f"sqlite:///{shared.out / 'sdtune.db'}",
            "tracking_uri": f"sqlite:///{shared.out / 'mlflow.db'}",
            "out": shared.profile,
            "studies": {"joint": {"exit_layers": list(shared.exit_layers)}},
        }
    )


def profile_bench(shared: Shared, seconds: float, *, batch_size: int, against: str, num_prompts: int) -> dict[str, Any]:
    """Measure the search's profile on held-out prompts against plain decoding and `generate`.

    Raises `ConfigError` if no search has written one; the best one of an interrupted search will do.
    """
    candidates = (shared.profile, shared.profile.with_suffix(".unconfirmed.yaml"))
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        raise ConfigError("there is no profile to measure: the search wrote none")
    profile, prompts = DraftProfile.load(path), shared.held_out(num_prompts)
    longest = max(map(len, prompts)) + NEW_TOKENS
    options: dict[str, dict[str, Any]] = {
        "hf": {},
        "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10},
        # One size for all prompts: transformers would otherwise compile again for each prompt longer than the ones before.
        "hf-static": {"cache_implementation": "static", "max_cache_len": longest},
    }
    contenders = {**_plain(shared), "profile": _own(shared, profile.draft, profile.draft_length, profile.decoding)}
    contenders |= {name: stock(shared.wide, shared.eos_token_ids, **options[name]) for name in against.split()}
    measured = Turns(shared.static, contenders, prompts, max_new_tokens=NEW_TOKENS, batch_size=batch_size)
    return {"rows": measured.rows(), "left_out": measured.left_out}


def demo_losslessness(shared: Shared, seconds: float, *, dtype: str) -> dict[str, Any]:
    """Compare the demo model's committed profile and plain decoding by every runner, in one precision."""
    folder = DEMO / "result"
    profile = DraftProfile.load(folder / "profile.yaml")
    model = load(str(DEMO / "model"), dtype=dtype, device=str(shared.device)).model
    eos, contenders = eos_token_ids(model), dict[str, Make]()
    targets = {
        "static": Target(model, "static"),
        "eager": Target(model),
        "bitwise": Target(model, "static", exact_width=EXACT_WIDTH),
    }
    for mode, target in targets.items():
        changes = {"runner": target.runner.name, "exact_width": target.runner.exact_width}
        decoding = Decoding.model_validate({**profile.decoding.model_dump(), **changes})
        contenders[PLAIN if mode == "static" else f"plain-{mode}"] = own(plain_decoder(target), eos)
        heads = HeadFolder(target, folder)
        decoder = Decoder(target, profile.draft, profile.draft_length, decoding, heads=heads)
        contenders[f"profile-{mode}"] = own(decoder, eos)
    prompts = shared.tuning_prompts(NUM_PROMPTS)
    measured = Turns(targets["static"], contenders, prompts, max_new_tokens=32)
    return {"rows": measured.rows(), "left_out": measured.left_out}


def kinds(shared: Shared, seconds: float, *, batch_size: int, num_prompts: int) -> dict[str, Any]:
    """Measure every kind of draft in turns with plain decoding."""
    quarter = shared.static.num_layers // 4
    drafts: dict[str, Draft] = {
        "prompt lookup": PromptLookup(),
        "suffix automaton": SuffixDraft(),
        "exit with head": shared.exit_draft,
        "suffix automaton, then exit": shared.exit_draft.having(lookup=SuffixLookup(max_tokens=COPIED.max_tokens)),
        # Every other block of the middle half: what a search finds depends on the time that it has.
        "skip set": LayerSkip.blocks(tuple(range(quarter, 3 * quarter, 2))),
        **{f"int{bits}": LayerSkip(bits=bits) for bits in PRECISIONS},
    }
    contenders, refused = _plain(shared), dict[str, str]()
    for name, draft in drafts.items():
        try:
            contenders[name] = _own(shared, draft, DRAFTED if draft.runs_model else COPIED)
        except UnsupportedModelError as cause:  # a precision without a kernel on this device
            refused[name] = one_line(cause)
    prompts = shared.tuning_prompts(num_prompts)
    measured = Turns(shared.static, contenders, prompts, max_new_tokens=NEW_TOKENS, batch_size=batch_size)
    return {"rows": measured.rows(), "left_out": {**refused, **measured.left_out}}


def prefix_reuse(shared: Shared, seconds: float) -> dict[str, Any]:
    """Measure one draft with and without prefix reuse: verification from the first changed block, or from the start."""
    contenders = _plain(shared)
    for name, reuses in (("on", True), ("off", False)):
        decoding = Decoding(runner="static", prefix_reuse=reuses)
        contenders[name] = _own(shared, shared.exit_draft, DRAFTED, decoding)
    return _on_over_off(shared, contenders, "off")


def _on_over_off(shared: Shared, contenders: dict[str, Make], off: str) -> dict[str, Any]:
    """Return the gain of `on`, and whether it deserves to be a default: worthwhile, certain, and without a wrong token."""
    prompts = shared.tuning_prompts(NUM_PROMPTS)
    measured = Turns(shared.static, contenders, prompts, max_new_tokens=NEW_TOKENS, repeats=2)
    if measured.left_out:
        return {"rows": [{"refused": reason} for reason in measured.left_out.values()]}
    gain = measured.ratio("on", off)
    pays = gain.value >= WORTHWHILE and gain.ci95[0] > 1 and not measured.losslessness("on")["wrong"]
    return {"rows": measured.rows(), "on over off": f"{gain:.3f}", "pays": pays}
