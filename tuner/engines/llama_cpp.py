"""llama.cpp: `llama-server`, and its converter to GGUF."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from decoding.errors import how_to_install
from tuner.engines.contract import DraftCounts, EngineProgram, Launch, Served, ServerSettings, completed
from tuner.engines.methods import EXPORTED, Entry, Flags, LatestMatch, Method
from tuner.engines.server import HOST, output_of, reason_in
from tuner.errors import EngineError
from tuner.export.engines import gguf_converter
from tuner.export.engines.llama_cpp import CONVERT, DRAFT, GGUF, TARGET, LlamaCpp, conversion

if TYPE_CHECKING:
    from tuner.engines.server import Client
    from tuner.export.plan import Plan
    from tuner.measuring.contender import Decoded

CONVERTER = "convert_hf_to_gguf.py"
SERVER = "llama-server"
BUILT = Path("build") / "bin"
SIZES, COPIED = (1, 2, 3, 4, 5, 6, 8, 12), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48)
"""Lengths of n-grams, and numbers of copied tokens to choose from."""
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Numbers of tokens of a draft model to choose from."""


@dataclass(frozen=True)
class LlamaCppServer(EngineProgram):
    """llama.cpp's sources, which hold the converter, and the programs built from them."""

    title: ClassVar[str] = "llama.cpp"
    counters: ClassVar[str] = "llamacpp:spec_decode_"
    home: ClassVar[str] = f"its sources, which hold {CONVERTER}"
    home_variable: ClassVar[str] = "LLAMA_CPP"
    target_files: ClassVar[tuple[str, ...]] = (TARGET,)
    starts_at_once: ClassVar[bool] = True
    usual_start_seconds: ClassVar[float] = 2.0

    sources: Path
    server: Path

    @classmethod
    def find(cls, sources: Path, /) -> LlamaCppServer:
        """Return the engine whose sources are in this folder; the server is in its `build/bin` or on the PATH."""
        if not (sources / CONVERTER).is_file():
            raise EngineError(f"{sources} does not hold llama.cpp's sources: there is no {CONVERTER}")
        built = sources / BUILT / SERVER
        server = str(built) if built.is_file() else shutil.which(SERVER)
        if server is None:
            raise EngineError(
                f"llama.cpp has no server: {SERVER} is neither in {sources / BUILT} nor on the PATH; build it with cmake "
                f"--build build --target {SERVER}"
            )
        return cls(sources.absolute(), Path(server).absolute())

    def version(self) -> str:
        """Return the number of the build."""
        text = output_of([str(self.server), "--version"], self.title)
        found = re.search(r"version: (.+)", text)
        return found[1] if found else text.strip().splitlines()[0]

    def prepare(self, plan: Plan, log: Path) -> tuple[str, ...]:
        """Convert the target and the draft to GGUF, as the export's `convert.sh` does."""
        out, model = plan.out.absolute(), str(Path(plan.model).absolute())
        return self._convert(LlamaCpp().files(replace(plan, out=out, model=model))[CONVERT], plan.model, log)

    def prepare_model(self, served: Served, log: Path) -> tuple[str, ...]:
        """Convert the model to GGUF, and the draft model unless it is a file of that format."""
        commands = [conversion(str(Path(served.model).absolute()), served.dtype, str(served.out.absolute() / TARGET))]
        if served.draft_model is not None and not served.draft_model.endswith(GGUF):
            draft = str(served.out.absolute() / DRAFT)
            commands.append(conversion(str(Path(served.draft_model).absolute()), served.dtype, draft))
        return self._convert("set -eu\n" + "\n".join(commands), served.model, log)

    def _convert(self, commands: str, model: str, log: Path) -> tuple[str, ...]:
        programs = (str(Path(sys.executable).parent), str(self.server.parent), os.environ.get("PATH", os.defpath))
        environment = os.environ | {"LLAMA_CPP": str(self.sources), "PATH": os.pathsep.join(programs)}
        with log.open("wb") as output:
            done = subprocess.run(
                ["sh", "-c", commands],
                cwd=Path(gguf_converter.__file__).parent,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        text = log.read_text(encoding="utf-8", errors="replace")
        if missing := re.search(r"^ModuleNotFoundError: .*", text, re.MULTILINE):
            raise EngineError(f"llama.cpp's converter: {missing[0]}; {how_to_install('engines')}")
        if done.returncode:
            raise EngineError(f"llama.cpp's converter cannot convert {model}: {reason_in(log)}")
        return (gguf_converter.NOTE,) if gguf_converter.NOTE in text else ()

    def draft_flags(self, plan: Plan) -> tuple[str, ...]:
        """Return the flags of the export's `launch.sh`, the model apart."""
        settings = LlamaCpp().settings(plan)
        return tuple(word for name, value in settings.items() if name != "model" for word in (f"--{name}", value))

    def methods(self, served: Served) -> tuple[Method, ...]:
        """Return its simple n-grams, each length with copies at least as long, and the draft model."""
        found = [
            Method(
                f"n-grams of {size}",
                "n-grams",
                tuple(each for each in COPIED if each >= size),
                _ngrams(size),
                LatestMatch(size),
            )
            for size in SIZES
        ]
        if served.draft_model is not None:
            own = served.draft_model if served.draft_model.endswith(GGUF) else str(served.out / DRAFT)

            def flags(num_tokens: int, schedule: Sequence[Entry] | None) -> tuple[str, ...]:
                return ("--spec-type", "draft-simple", "--model-draft", own, "--spec-draft-n-max", str(num_tokens))

            found.append(Method("draft model", "draft model", LENGTHS, flags, runs_model=True))
        return tuple(found)

    def profile_methods(self, plan: Plan, path: Path) -> tuple[Method, ...]:
        """Return the export of the profile, its lookup with copies that are not shorter than the n-gram."""
        shortest = plan.lookup.longest if plan.shape is None and plan.lookup is not None else 1
        lengths = tuple(each for each in LENGTHS if each >= shortest)

        def flags(num_tokens: int, schedule: Sequence[Entry] | None) -> tuple[str, ...]:
            return self.draft_flags(plan.with_length(num_tokens))

        return (Method(EXPORTED, "profile", lengths, flags, runs_model=plan.shape is not None),)

    def launch(self, plan: Plan | Served, settings: ServerSettings, port: int, draft_flags: Sequence[str]) -> Launch:
        """Return the command of `llama-server`, with room for the sequences and without its web page."""
        threads = () if settings.threads is None else ("--threads", str(settings.threads))
        shared = ("--ctx-size", str(settings.context * settings.sequences), "--parallel", str(settings.sequences))
        return Launch(
            (
                str(self.server),
                *("--model", str(plan.out / TARGET)),
                *("--host", HOST, "--port", str(port), "--metrics", "--no-webui"),
                *shared,
                *threads,
                *draft_flags,
                *settings.arguments,
            )
        )

    def complete(self, client: Client, prompt: Sequence[int], num_tokens: int) -> Decoded:
        """Continue token ids by `/completion`, without a cache of earlier prompts; the timings are the server's."""
        before = self.counts(client.counters())
        answer = client.post("/completion", _request(prompt, num_tokens))
        return read_completion(answer, self.counts(client.counters()) - before)

    def continuation(self, client: Client, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Continue token ids by `/completion`."""
        return read_completion(client.post("/completion", _request(prompt, num_tokens)), DraftCounts()).texts[0]


def _ngrams(size: int) -> Flags:
    def flags(num_tokens: int, schedule: Sequence[Entry] | None) -> tuple[str, ...]:
        settings = {"type": "ngram-simple", "ngram-simple-size-n": size, "ngram-simple-size-m": num_tokens}
        return tuple(word for name, value in settings.items() for word in (f"--spec-{name}", str(value)))

    return flags


def _request(prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
    return {
        "prompt": list(prompt),
        "n_predict": num_tokens,
        "temperature": 0,
        "return_tokens": True,
        "cache_prompt": False,
    }


def read_completion(answer: dict[str, object], counts: DraftCounts) -> Decoded:
    """Return a completion from the JSON of `/completion`; raise `EngineError` for one without tokens or timings."""
    tokens, timings = answer.get("tokens"), answer.get("timings")
    if not isinstance(tokens, list) or not isinstance(timings, dict) or not tokens:
        raise EngineError(f"llama.cpp answered without tokens or timings: {str(answer)[:200]}")
    prefill, decode = timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000
    return completed((tuple(tokens),), prefill, decode, counts)
