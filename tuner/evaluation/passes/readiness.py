"""How long a new candidate takes to be ready by the static runner: its first text against its second.

Run as `python -m tuner.evaluation.passes.readiness`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.target import Target
from decoding.text import Ending
from decoding.timing.stopwatch import Stopwatch
from tuner.inputs.environment import device_name, versions
from tuner.inputs.models import load

NUM_CANDIDATES = 6
DRAFTED = 4
PROMPT_TOKENS, NEW_TOKENS = 64, 32


def measure_readiness(target: Target, *, num_candidates: int = NUM_CANDIDATES, seed: int = 0) -> list[dict[str, Any]]:
    """Seconds of the first and of the second text of random skip sets, one after another; the first candidate compiles for all.

    What the first takes more than the second is what the switch to the candidate costs.
    """
    stream = random.Random(seed)
    prompt = [stream.randrange(target.config.vocab_size) for _ in range(PROMPT_TOKENS)]
    watch, measured = Stopwatch(target.device), []
    for _ in range(num_candidates):
        attention, mlp = (sorted(stream.sample(range(target.num_layers), target.num_layers // 3)) for _ in range(2))
        skip = LayerSkip(skip_attention=tuple(attention), skip_mlp=tuple(mlp))
        start = watch.now()
        decoder = Decoder(target, skip, Fixed(max_tokens=DRAFTED))
        seconds = []
        for _ in range(2):
            decoder.generate(Request(prompt, Ending(NEW_TOKENS)))
            seconds.append(watch.now() - start)
            start = watch.now()
        measured.append(
            {
                "draft": skip.describe(),
                "first_seconds": seconds[0],
                "second_seconds": seconds[1],
                "switch_seconds": seconds[0] - seconds[1],
            }
        )
    return measured


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    loaded = load(arguments.model, dtype=arguments.dtype, device=arguments.device)
    target = Target(loaded.model, "static")
    document = {
        "device": device_name(target.device),
        "dtype": arguments.dtype,
        "versions": versions(),
        "candidates": measure_readiness(target),
    }
    arguments.out.write_text(json.dumps(document, indent=1))
    print("a candidate is ready after", ", ".join(f"{each['switch_seconds']:.2f} s" for each in document["candidates"]))


if __name__ == "__main__":
    main()
