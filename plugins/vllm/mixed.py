"""Mixed requests to two vLLM servers, with the plugin and without: greedy texts must be equal, and no request may stay behind.

    python plugins/vllm/mixed.py PLAIN_ADDRESS DRAFTING_ADDRESS prompts.jsonl [--requests 200]

Requests have prompts and lengths drawn by a seed, 16 at a time; every fifth client goes away after its first bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

GOES_AWAY = 5
"""Every so many requests end with their client."""


def ask(address: str, request: dict[str, Any], *, goes_away: bool) -> list[int] | None:
    """Return the token ids of an answer; None for a client that has gone away."""
    model = json.load(urlopen(f"{address}/v1/models"))["data"][0]["id"]
    body = {**request, "model": model, "temperature": 0, "return_token_ids": True, "stream": goes_away}
    sent = Request(f"{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(sent) as answer:
        if goes_away:
            answer.read(20)
            return None
        return list(json.load(answer)["choices"][0]["token_ids"])


def running(address: str) -> float:
    """Return the requests that a server runs or keeps waiting."""
    lines = urlopen(f"{address}/metrics").read().decode().splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plain")
    parser.add_argument("drafting")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    args = parser.parse_args()
    source, rows = random.Random(0), args.prompts.read_text(encoding="utf-8").splitlines()
    asked = [
        {"prompt": json.loads(source.choice(rows))["prompt"], "max_tokens": source.choice((1, 2, 7, 24, 64))}
        for _ in range(args.requests)
    ]
    away = [number % GOES_AWAY == 0 for number in range(args.requests)]
    texts = []
    for address in (args.plain, args.drafting):
        with ThreadPoolExecutor(16) as pool:
            texts.append(
                list(pool.map(lambda one, a=address: ask(a, one[0], goes_away=one[1]), zip(asked, away, strict=True)))
            )
    time.sleep(5)
    whole = [(one, other) for one, other in zip(*texts, strict=True) if one is not None]
    wrong, left = sum(one != other for one, other in whole), running(args.drafting)
    print(
        f"{len(whole) - wrong} of {len(whole)} texts identical, {sum(away)} clients went away, {left:.0f} requests left behind"
    )
    return 2 if wrong or left else 0


if __name__ == "__main__":
    sys.exit(main())
