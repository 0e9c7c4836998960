"""Further kinds of prompts for the demo model, on which drafts are accepted more or less often than on its own code.

`prose` is cut from the running interpreter's documentation topics, which the model never saw; `tables` are seeded columns of
numbers; `asserts` are the monotonous checks of a test; `fills` are arrays of one constant. Deterministic: the same
interpreter and seed give the same prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pydoc_data.topics import topics

from decoding.documents.atomic_write import write_atomically
from tuner.evaluation.models.demo_model.recipe import RecipeError
from tuner.evaluation.models.settings import DemoKinds

LENGTH = 600
"""Characters of a prompt of prose."""
NUM_ROWS = 24
"""Rows of a table."""


def prose(num_prompts: int, seed: int) -> list[str]:
    """Return the middles of `num_prompts` documentation topics, from the beginning of a word. ValueError if there are too few."""
    long_enough = sorted(name for name, text in topics.items() if len(text) > 3 * LENGTH)
    if len(long_enough) < num_prompts:
        raise ValueError(f"this interpreter has {len(long_enough)} topics long enough, fewer than {num_prompts}")
    chosen = random.Random(seed).sample(long_enough, num_prompts)
    return [_middle(topics[name]) for name in chosen]


def _middle(text: str) -> str:
    start = text.index(" ", len(text) // 2 - LENGTH // 2) + 1
    return text[start : text.rindex(" ", start, start + LENGTH)]


def tables(num_prompts: int, seed: int) -> list[str]:
    """Return tables of random numbers, each with its own width and number of columns."""
    generator = random.Random(seed)
    prompts = []
    for _ in range(num_prompts):
        width, num_columns = generator.randint(3, 7), generator.randint(2, 4)
        rows = [
            ", ".join(str(generator.randrange(10 ** (width - 1), 10**width)) for _ in range(num_columns))
            for _ in range(NUM_ROWS)
        ]
        prompts.append("\n".join(f"({row})," for row in rows))
    return prompts


def asserts(num_prompts: int, seed: int) -> list[str]:
    """Return checks of a function with a random name that multiplies the numbers from 0."""
    generator = random.Random(seed)
    prompts = []
    for _ in range(num_prompts):
        name = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(1, 8)))
        factor = generator.randint(1, 99)
        prompts.append("\n".join(f"        self.assertEqual({name}({n}), {n * factor})" for n in range(NUM_ROWS // 2)))
    return prompts


def fills(num_prompts: int, seed: int) -> list[str]:
    """Return arrays initialised to one constant, each with its own name, constant and number of columns."""
    generator = random.Random(seed)
    prompts = []
    for _ in range(num_prompts):
        name = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(1, 8)))
        constant = generator.choice(["0", "0.0", "None", "False", "-1", "0x00", "''", str(generator.randrange(100))])
        row = "    " + f"{constant}, " * generator.randint(4, 12)
        prompts.append("\n".join([f"{name} = [", *[row.rstrip()] * (NUM_ROWS // 2)]))
    return prompts


KINDS: dict[str, Callable[[int, int], list[str]]] = {
    "prose": prose,
    "tables": tables,
    "asserts": asserts,
    "fills": fills,
}
"""Prompts by kind, made from their number and a seed."""


def write_kinds(settings: DemoKinds) -> dict[str, int]:
    """Write one file of JSON lines per kind and return the numbers of prompts by file name.

    Raises `RecipeError` if there are too few prompts of a kind, or if a file cannot be written.
    """
    try:
        found = {kind: draw(settings.num_prompts, settings.seed) for kind, draw in KINDS.items()}
    except ValueError as cause:
        raise RecipeError(str(cause)) from None
    for kind, prompts in found.items():
        text = "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
        write_atomically(settings.out / f"{kind}.jsonl", text.encode(), what="the prompts", error=RecipeError)
    return {f"{kind}.jsonl": len(prompts) for kind, prompts in found.items()}
