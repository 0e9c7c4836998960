"""Further kinds of prompts for the demo model, on which the same draft is right more or less often than on its own code.

`prose` is cut from the running interpreter's documentation topics, which the model never saw; `tables` are seeded columns of
numbers; `asserts` are the monotonous checks of a test; `fills` are arrays of one constant. Run as `python -m
tuner.evaluation.models.demo_kinds`;
a draft-length rule that adapts can be compared on a mixture of them with `sdtune evaluate rules`. Deterministic: the same
interpreter and seed give the same prompts.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from pydoc_data.topics import topics

import click
from rich.console import Console

from decoding.documents.atomic_write import write_atomically
from decoding.errors import SdtuneError

LENGTH = 600
"""Characters of a prompt of prose."""
NUM_ROWS = 24
"""Rows of a table."""


def prose(num_prompts: int, seed: int) -> list[str]:
    """The middle of that many documentation topics, from the beginning of a word on. ValueError if there are too few."""
    long_enough = sorted(name for name, text in topics.items() if len(text) > 3 * LENGTH)
    if len(long_enough) < num_prompts:
        raise ValueError(f"this interpreter has {len(long_enough)} topics long enough, fewer than {num_prompts}")
    chosen = random.Random(seed).sample(long_enough, num_prompts)
    return [_middle(topics[name]) for name in chosen]


def _middle(text: str) -> str:
    start = text.index(" ", len(text) // 2 - LENGTH // 2) + 1
    return text[start : text.rindex(" ", start, start + LENGTH)]


def tables(num_prompts: int, seed: int) -> list[str]:
    """Rows of random numbers, each table with a width and a number of columns of its own."""
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
    """Checks of a function with a random name on the numbers from 0 on, which it multiplies."""
    generator = random.Random(seed)
    prompts = []
    for _ in range(num_prompts):
        name = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(1, 8)))
        factor = generator.randint(1, 99)
        prompts.append("\n".join(f"        self.assertEqual({name}({n}), {n * factor})" for n in range(NUM_ROWS // 2)))
    return prompts


def fills(num_prompts: int, seed: int) -> list[str]:
    """Arrays initialised to one constant, each with a name, a constant and a number of columns of its own."""
    generator = random.Random(seed)
    prompts = []
    for _ in range(num_prompts):
        name = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(1, 8)))
        constant = generator.choice(["0", "0.0", "None", "False", "-1", "0x00", "''", str(generator.randrange(100))])
        row = "    " + f"{constant}, " * generator.randint(4, 12)
        prompts.append("\n".join([f"{name} = [", *[row.rstrip()] * (NUM_ROWS // 2)]))
    return prompts


@click.command(context_settings={"show_default": True})
@click.option("--out", type=click.Path(path_type=Path), default=Path("configs/demo"), help="Folder to write into.")
@click.option("--num-prompts", type=click.IntRange(1), default=32, help="Of each kind.")
@click.option("--seed", type=int, default=0)
def main(out: Path, num_prompts: int, seed: int) -> None:
    """Write prose.jsonl, tables.jsonl, asserts.jsonl and fills.jsonl."""
    try:
        kinds = {
            "prose": prose(num_prompts, seed),
            "tables": tables(num_prompts, seed),
            "asserts": asserts(num_prompts, seed),
            "fills": fills(num_prompts, seed),
        }
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    for kind, prompts in kinds.items():
        text = "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
        write_atomically(out / f"{kind}.jsonl", text.encode(), what="the prompts", error=SdtuneError)
        Console().print(f"{len(prompts)} prompts in {out / kind}.jsonl")


if __name__ == "__main__":
    main()
