"""Run drafts in vLLM by the plugin, in turns with plain decoding: every text must be equal. Run by `.ci/engines vllm`.

    python plugins/vllm/check.py --profile configs/demo/result/profile.yaml --dataset configs/demo/prompts.jsonl [--json FILE]

All engines live in one process and continue the same prompts in turns, so that their seconds can be compared: CPU seconds, or
wall-clock seconds on a GPU. Beside the profile itself run parts of it, and drafts of every kind; one that skips nothing has to be
accepted whole.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)


from decoding.draft_length import Fixed  # noqa: E402 - after the environment
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PromptLookup, SuffixDraft  # noqa: E402
from decoding.profile import DraftProfile  # noqa: E402

LEAST_COUNT = 10
LEAST_P = 0.001
"""p-value below which sampled texts are taken for those of another distribution."""
ON_GPU = Path("/proc/driver/nvidia").is_dir()
clock = time.perf_counter if ON_GPU else time.process_time
PLAIN, PROFILE, NOTHING_SKIPPED, COPY = "plain", "profile", "nothing skipped", "exported copy"


def variants(profile: DraftProfile) -> Iterator[tuple[str, DraftProfile]]:
    """Yield the profile, and drafts of every kind for its model."""
    num_layers = profile.target.num_layers
    half, third = tuple(range(1, num_layers - 1, 2)), tuple(range(1, num_layers - 1, 3))
    drafts = {
        NOTHING_SKIPPED: LayerSkip(),
        "blocks skipped": LayerSkip.blocks(half),
        "sublayers skipped": LayerSkip(skip_attention=half, skip_mlp=third),
        "exit, lookup first": EarlyExit(exit_layer=max(1, num_layers // 4), lookup=Lookup(max_ngram=3, min_ngram=2)),
        "prompt lookup": PromptLookup(max_ngram=2),
        "suffix automaton": SuffixDraft(),
    }
    yield PROFILE, profile
    if profile.draft.trained_head is not None:
        yield (
            "head alone, fixed length",
            profile.model_copy(
                update={"draft": profile.draft.having(lookup=None), "draft_length": Fixed(max_tokens=6)}
            ),
        )
    for name, draft in drafts.items():
        yield name, profile.model_copy(update={"draft": draft, "draft_length": Fixed(max_tokens=4)})


class Engine:
    """One engine, its texts, and what its scheduler counted."""

    def __init__(self, served: str, args: argparse.Namespace, profile: Path | None = None, **drafting: Any) -> None:
        """Start plain decoding, or with the settings of `speculative_config` in `drafting`; with a profile, by the plugin."""
        from vllm import LLM

        settings: dict[str, Any] = {"speculative_config": drafting} if drafting else {}
        if profile is not None:
            drafting |= {"method": "custom_class", "model": "sdtune_vllm.proposer.SelfDraft"}
            settings = {"speculative_config": drafting, "additional_config": {"sdtune": {"profile": str(profile)}}}
        self.llm = LLM(
            model=served,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=max(2, *args.batch),
            kv_cache_memory_bytes=args.cache_mib * 2**20,
            disable_log_stats=False,
            **({"seed": 0, "enforce_eager": not ON_GPU} | settings | json.loads(args.engine)),
        )
        self.texts: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.seconds: list[float] = []
        self.counts = {"rounds": 0, "drafted": 0, "accepted": 0, "preempted": 0}
        self.lengths: set[int] = set()
        self.p_value: float | None = None
        """Of the sampled texts having plain decoding's distribution."""
        self._count()

    def _count(self) -> None:
        """Count in the scheduler: the engines of one process share their metrics."""
        scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        own, preempt = scheduler.make_spec_decoding_stats, scheduler._preempt_request

        def counting(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *rest: Any, **more: Any) -> Any:
            if num_draft_tokens:
                self.counts["rounds"] += 1
                self.counts["drafted"] += num_draft_tokens
                self.counts["accepted"] += num_accepted_tokens
                self.lengths.add(num_draft_tokens)
            return own(stats, num_draft_tokens, num_accepted_tokens, *rest, **more)

        def preempting(*given: Any, **more: Any) -> Any:
            self.counts["preempted"] += 1
            return preempt(*given, **more)

        scheduler.make_spec_decoding_stats, scheduler._preempt_request = counting, preempting

    @property
    def cache_layers(self) -> list[int]:
        """Layers with keys and values in each group of the cache, those of a draft included."""
        return [len(group.layer_names) for group in self.runner.kv_cache_config.kv_cache_groups]

    def forget(self) -> None:
        """Begin to count and to keep texts anew, without keys and values of earlier prompts."""
        self.texts.clear(), self.prompts.clear(), self.seconds.clear(), self.lengths.clear()
        self.counts.update(dict.fromkeys(self.counts, 0))
        self.llm.reset_prefix_cache()

    def generate(self, prompts: Sequence[str], params: Any) -> list[Any]:
        return self.llm.generate(list(prompts), params, use_tqdm=False)

    def write(self, prompts: Sequence[str], params: Any) -> None:
        began = clock()
        answers = self.generate(prompts, params)
        self.seconds.append(clock() - began)
        self.texts += [list(answer.outputs[0].token_ids) for answer in answers]
        self.prompts += [list(answer.prompt_token_ids) for answer in answers]

    @property
    def runner(self) -> Any:
        core: Any = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        return core.model_executor.driver_worker.worker.model_runner

    def gap(self, number: int, other: Sequence[int]) -> float:
        """Return how much less likely the first differing token of another text is than this engine's own, in log-probability."""
        from vllm import SamplingParams

        own = self.texts[number]
        at = next((at for at, (one, two) in enumerate(zip(own, other, strict=False)) if one != two), None)
        if at is None:  # one text ends before the other
            return math.inf
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
        [answer] = self.llm.generate([{"prompt_token_ids": self.prompts[number] + own[:at]}], params, use_tqdm=False)
        known = answer.outputs[0].logprobs[0]
        return known[own[at]].logprob - known[other[at]].logprob if {own[at], other[at]} <= known.keys() else math.inf


class Unpadded(Engine):
    """The same engine with drafts as they come; what it writes and counts is kept apart."""

    def __init__(self, padded: Engine) -> None:
        self.llm, self._padded = padded.llm, padded
        self.texts, self.prompts, self.seconds, self.p_value = [], [], [], None
        self.counts, self.lengths = dict.fromkeys(padded.counts, 0), set()

    def generate(self, prompts: Sequence[str], params: Any) -> list[Any]:
        drafter, padded = self.runner.drafter, self._padded
        kept = padded.counts, padded.lengths
        padded.counts, padded.lengths = self.counts, self.lengths
        drafter._prefers_uniform = lambda num_requests: False
        try:
            return super().generate(prompts, params)
        finally:
            del drafter._prefers_uniform
            padded.counts, padded.lengths = kept


def run_as_on_a_gpu() -> None:
    """Give draft passes rows without a request, as CUDA graphs have them, and a batch drafts of one length."""
    from sdtune_vllm.proposer import SelfDraft

    own: Any = SelfDraft._new_passes
    changed: Any = SelfDraft
    changed._new_passes = lambda self, runner, size: own(self, runner, size + 2)
    changed._prefers_uniform = lambda self, num_requests: True


def draft_in_every_step() -> None:
    """Have no steps for the metrics of a server: a draft's counts are those of other ways to run it."""
    from sdtune_vllm import proposer

    proposer.PLAIN_EVERY = sys.maxsize


def speed_up(plain: Sequence[float], own: Sequence[float]) -> tuple[float, float, float]:
    """Return plain seconds over own ones, with a 95 % bootstrap interval over groups of prompts."""
    source, size = random.Random(0), len(plain)
    drawn = [[source.randrange(size) for _ in range(size)] for _ in range(2000)]
    found = sorted(sum(plain[i] for i in each) / sum(own[i] for i in each) for each in drawn)
    return sum(plain) / sum(own), found[50], found[1949]


def sampled(engine: Engine, prompt: str, count: int) -> list[tuple[int, ...]]:
    """Return sampled continuations of three tokens, at a temperature at which a few are frequent."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.5, max_tokens=3)
    counts, lengths = dict(engine.counts), set(engine.lengths)  # of the texts that are compared
    answers = engine.generate([prompt] * count, params)
    engine.counts.update(counts), engine.lengths.intersection_update(lengths)
    return [tuple(answer.outputs[0].token_ids) for answer in answers]


def same_distribution(one: Sequence[tuple[int, ...]], other: Sequence[tuple[int, ...]]) -> float:
    """Return the p-value of the chi-square statistic of two samples, by 2,000 permutations; rare texts count as one."""
    import numpy as np

    counts = Counter([*one, *other])
    names = [(), *(text for text, count in counts.items() if count >= LEAST_COUNT)]
    both = np.array([names.index(text) if text in names else 0 for text in (*one, *other)])
    size = len(one)
    total = np.maximum(np.bincount(both, minlength=len(names)), 1e-9)

    def statistic(of_one: Any) -> float:
        expected = total * size / len(both)
        return float(((of_one - expected) ** 2 / expected).sum())

    seen, source = statistic(np.bincount(both[:size], minlength=len(names))), np.random.default_rng(0)
    drawn = [statistic(np.bincount(source.permutation(both)[:size], minlength=len(names))) for _ in range(2000)]
    return sum(each >= seen for each in drawn) / len(drawn)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument(
        "--beside", type=Path, action="append", default=[], help="further profile without a head, by name"
    )
    parser.add_argument("--dataset", type=Path, required=True, help="JSON lines with `prompt`")
    parser.add_argument("--model", help="default: the profile's")
    parser.add_argument(
        "--launched", action="store_true", help="also run the profile with passes that are not recorded"
    )
    parser.add_argument("--copy", type=Path, help="draft folder of `sdtune export --to vllm`, to compare with")
    parser.add_argument("--copy-tokens", type=int, default=4)
    parser.add_argument("--only", action="append", metavar="NAME", help="run this draft only; may be repeated")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--rows", help="rows of the dataset from 0, such as 3,10,37: those that no search has tuned on")
    parser.add_argument("--ngram", help="also run vLLM's own n-grams, as LONGEST,SHORTEST,TOKENS")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1], help="requests side by side; may be several numbers"
    )
    parser.add_argument("--passes", type=int, default=1, help="the second finds the prefix cache")
    parser.add_argument(
        "--as-on-a-gpu",
        action="store_true",
        help="rows without a request in draft passes, drafts of one length in a batch",
    )
    parser.add_argument(
        "--unpadded", action="store_true", help="also run each draft without padding a batch to one length, as on a CPU"
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--cache-mib", type=int, default=256)
    parser.add_argument("--engine", default="{}", help="further settings of vLLM's LLM, as JSON")
    parser.add_argument(
        "--sampled", type=int, default=0, help="texts to sample with each engine; their distributions are compared"
    )
    parser.add_argument(
        "--tie",
        type=float,
        default=0.0,
        help="difference of log-probabilities up to which two tokens tie; 0 in float32",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import torch
    import vllm
    from vllm import SamplingParams

    if args.as_on_a_gpu:
        run_as_on_a_gpu()
    draft_in_every_step()
    profile = DraftProfile.load(args.profile)
    model = args.model or profile.target.model
    rows = [json.loads(line)["prompt"] for line in args.dataset.read_text(encoding="utf-8").splitlines()]
    prompts = [rows[int(each)] for each in args.rows.split(",")] if args.rows else rows[: args.prompts]
    engines = {PLAIN: Engine(model, args)}
    with tempfile.TemporaryDirectory() as folder:
        if profile.draft.trained_head is not None:
            file = profile.draft.trained_head.file
            (Path(folder) / file).symlink_to((args.profile.parent / file).absolute())
        others = [(path.stem, DraftProfile.load(path)) for path in args.beside]
        for name, variant in (*variants(profile), *others):
            if args.only and name not in args.only and (name, variant) not in others:
                continue
            path = Path(folder) / f"{name.replace(' ', '_')}.yaml"
            variant.save(path)
            engines[name] = Engine(model, args, path, num_speculative_tokens=variant.longest_draft)
        if args.unpadded:
            engines |= {f"{name}, not padded": Unpadded(engine) for name, engine in engines.items() if name != PLAIN}
        if args.launched:
            path, most = Path(folder) / f"{PROFILE}.yaml", profile.longest_draft
            profile.save(path)
            engines["launched one by one"] = Engine(model, args, path, num_speculative_tokens=most, enforce_eager=True)
        if args.copy:
            copy = {"method": "draft_model", "model": str(args.copy), "num_speculative_tokens": args.copy_tokens}
            engines[COPY] = Engine(model, args, **copy)
        if args.ngram:  # last: engines that start after it in one process fail
            longest, shortest, most = map(int, args.ngram.split(","))
            ngrams = {"prompt_lookup_max": longest, "prompt_lookup_min": shortest, "num_speculative_tokens": most}
            engines["vLLM's n-grams"] = Engine(model, args, method="ngram", **ngrams)
        params = SamplingParams(temperature=0, max_tokens=args.tokens)
        found, wrong = dict[str, Any](), 0
        for size in args.batch:
            for engine in engines.values():  # what a first pass compiles is not timed
                engine.write(prompts[:size], SamplingParams(temperature=0, max_tokens=4))
                engine.forget()
            groups = [prompts[start : start + size] for start in range(0, len(prompts), size)] * args.passes
            for turn, group in enumerate(groups):
                order = list(engines)
                for name in order[turn % len(order) :] + order[: turn % len(order)]:
                    engines[name].write(group, params)
            if args.sampled:
                texts = {name: sampled(engine, prompts[0], args.sampled) for name, engine in engines.items()}
                for name, engine in engines.items():
                    engine.p_value = same_distribution(texts[PLAIN], texts[name])
            print(f"{size} side by side")
            found[str(size)], different = report(engines, args.tie)
            wrong += different
    if args.json:
        facts = {"vllm": vllm.__version__, "torch": torch.__version__, "device": device()}
        facts |= {"command": " ".join(sys.argv[1:]), "side_by_side": found}
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 2 if wrong else 0


def device() -> str:
    import platform

    import torch

    return torch.cuda.get_device_name() if ON_GPU else platform.processor() or platform.machine()


def report(engines: dict[str, Engine], tie: float) -> tuple[dict[str, Any], int]:
    """Print and return what each engine has done, and how many texts and distributions are wrong."""
    plain, found, wrong = engines[PLAIN], {}, 0
    for name, engine in engines.items():
        differing = [number for number, text in enumerate(engine.texts) if text != plain.texts[number]]
        gaps = [plain.gap(number, engine.texts[number]) for number in differing]
        identical = len(engine.texts) - len(gaps)
        value, low, high = speed_up(plain.seconds, engine.seconds)
        wrong += sum(gap > tie for gap in gaps) + (engine.p_value is not None and engine.p_value < LEAST_P)
        found[name] = {
            "identical": identical,
            "texts": len(engine.texts),
            "gaps": gaps,
            "speedup": value,
            "ci95": [low, high],
            "seconds": [round(each, 4) for each in engine.seconds],
            "cache_layers": engine.cache_layers,
            "lengths": sorted(engine.lengths),
            "sampled_p_value": engine.p_value,
            **engine.counts,
        }
        if PROFILE in engines and name not in (PROFILE, PLAIN):
            over = speed_up(engine.seconds, engines[PROFILE].seconds)
            found[name]["profile_over_it"] = over
            print(f"{PROFILE:10} over {name:26} {over[0]:.2f} [{over[1]:.2f}, {over[2]:.2f}]")
        rate = engine.counts["accepted"] / engine.counts["drafted"] if engine.counts["drafted"] else math.nan
        print(
            f"{name:26} identical {identical}/{len(engine.texts)}  {value:.2f} [{low:.2f}, {high:.2f}]  accepted {rate:.0%}"
            f"  {engine.counts}  layers {'+'.join(map(str, engine.cache_layers))}  lengths {sorted(engine.lengths)}"
            + (f"  gaps {', '.join(f'{gap:.3f}' for gap in gaps)}" if gaps else "")
            + ("" if engine.p_value is None else f"  sampled p {engine.p_value:.3f}")
        )
    return found, wrong


if __name__ == "__main__":
    sys.exit(main())
