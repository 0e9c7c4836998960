"""Write the demo model's prompts. The same interpreter (CPython 3.11.7), tokenizer and seed give the same prompts.

`held-out` are beginnings of functions, classes and files, cut from source files the model never saw; `training` are cut from files
it was trained on, to train exit heads. On the other kinds drafts are accepted more or less often than on code: `prose` is cut from
the interpreter's documentation topics, `tables` are columns of numbers, `asserts` checks that repeat, `fills` arrays of a constant.

    python -m benchmarks.demo_model.prompts held-out --out prompts.jsonl
"""

from __future__ import annotations

import json
import random
import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from transformers import PreTrainedTokenizerFast

from benchmarks.demo_model.corpus import LIBRARY, library_corpus, read_source

DEFINITION = re.compile(r"^ *(?:async def|def|class) ", re.MULTILINE)
LINE_END = re.compile(r"(?<=[^\n])\n")  # not of an empty line
NEARLY_SEEN = "distutils/msvccompiler.py"
"""A first training stage saw `msvc9compiler.py`, which repeats most of it: its prompts would be remembered, not continued."""
CONTINUATION, MOST_PER_FILE = 160, 8
"""Tokens of real text that must follow a prompt, and most prompts of one file."""
PROSE_LENGTH, NUM_ROWS = 600, 24


def main() -> None:
    """Write one file of prompts."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("held-out", "training", *KINDS))
    parser.add_argument("--num", type=int, help="prompts; default: 120 of code, 32 of another kind")
    parser.add_argument("--model", type=Path, default=Path("configs/demo/model"))
    parser.add_argument("--held-out", type=Path, default=Path("configs/demo/held_out_files.json"))
    parser.add_argument("--shortest", type=int, default=64, help="fewest tokens")
    parser.add_argument("--longest", type=int, default=512, help="most tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.kind in KINDS:
        rows = [{"prompt": prompt} for prompt in KINDS[args.kind](args.num or 32, args.seed)]
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model, trust_remote_code=False)
        unseen = json.loads(args.held_out.read_text(encoding="utf-8"))
        num = args.num or 120
        files = [name for name in unseen if name != NEARLY_SEEN]
        if args.kind == "training":
            files = _seen_files(unseen, num)
        cut = {
            name: cut_file(
                text, f"{args.seed}/{name}", args.shortest, args.longest, lambda t: len(tokenizer(t).input_ids)
            )
            for name in files
            if (text := read_source(LIBRARY / name))
        }
        rows = choose(cut, num, args.seed)
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} prompts in {args.out}")


def _seen_files(unseen: Sequence[str], num_prompts: int) -> list[str]:
    names = [path.relative_to(LIBRARY).as_posix() for path in library_corpus(with_tests=False).training_files]
    seen = sorted(set(names) - set(unseen))
    return random.Random(0).sample(seen, min(len(seen), max(1, num_prompts // 4)))


def cut_file(text: str, seed: str, shortest: int, longest: int, count: Callable[[str], int]) -> list[str]:
    """Return prompts of one file, in order, evenly spread and without overlap.

    Each begins with the file or with a definition, aims at a length drawn log-uniformly, and ends before a line break: the
    model's tokens join the break with the indentation after it, so a prompt ending in one would split a token.
    """
    generator = random.Random(seed)
    found: list[str] = []
    free = 0
    for begin in sorted({0, *(match.start() for match in DEFINITION.finditer(text))}):
        if begin < free:
            continue
        aim = round(shortest * (longest / shortest) ** generator.random())
        end = None
        for match in LINE_END.finditer(text, begin):
            num_tokens = count(text[begin : match.start()])
            if num_tokens > aim:
                break
            if num_tokens >= shortest:
                end = match.start()
        # Sixteen characters a token are plenty; counting to the end of every file would take most of the time.
        if end is not None and count(text[end : end + 16 * CONTINUATION]) >= CONTINUATION:
            found.append(text[begin:end])
            free = end
    if len(found) <= MOST_PER_FILE:
        return found
    return [found[index * (len(found) - 1) // (MOST_PER_FILE - 1)] for index in range(MOST_PER_FILE)]


def choose(by_file: dict[str, list[str]], num_prompts: int, seed: int) -> list[dict[str, str]]:
    """Take prompts from the files in turns until there are enough, then shuffle, so that any first few are of many files."""
    generator = random.Random(seed)
    queues = {name: generator.sample(prompts, len(prompts)) for name, prompts in sorted(by_file.items())}
    chosen: list[dict[str, str]] = []
    while len(chosen) < num_prompts and any(queues.values()):
        turn = [{"prompt": queue.pop(), "file": name} for name, queue in queues.items() if queue]
        chosen += turn[: num_prompts - len(chosen)]
    if len(chosen) < num_prompts:
        raise ValueError(f"the files give {len(chosen)} prompts, fewer than the {num_prompts} asked for")
    generator.shuffle(chosen)
    return chosen


def prose(num_prompts: int, seed: int) -> Iterator[str]:
    """Yield the middles of documentation topics, from the beginning of a word."""
    long_enough = sorted(name for name, text in topics.items() if len(text) > 3 * PROSE_LENGTH)
    for name in random.Random(seed).sample(long_enough, num_prompts):
        text = topics[name]
        start = text.index(" ", len(text) // 2 - PROSE_LENGTH // 2) + 1
        yield text[start : text.rindex(" ", start, start + PROSE_LENGTH)]


def tables(num_prompts: int, seed: int) -> Iterator[str]:
    """Yield tables of random numbers, each with its own width and number of columns."""
    generator = random.Random(seed)
    for _ in range(num_prompts):
        width, num_columns = generator.randint(3, 7), generator.randint(2, 4)
        rows = [
            ", ".join(str(generator.randrange(10 ** (width - 1), 10**width)) for _ in range(num_columns))
            for _ in range(NUM_ROWS)
        ]
        yield "\n".join(f"({row})," for row in rows)


def _name(generator: random.Random) -> str:
    return "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(1, 8)))


def asserts(num_prompts: int, seed: int) -> Iterator[str]:
    """Yield checks of a function with a random name that multiplies the numbers from 0."""
    generator = random.Random(seed)
    for _ in range(num_prompts):
        name, factor = _name(generator), generator.randint(1, 99)
        yield "\n".join(f"        self.assertEqual({name}({n}), {n * factor})" for n in range(NUM_ROWS // 2))


def fills(num_prompts: int, seed: int) -> Iterator[str]:
    """Yield arrays initialised to one constant, each with its own name, constant and number of columns."""
    generator = random.Random(seed)
    for _ in range(num_prompts):
        name = _name(generator)
        constant = generator.choice(["0", "0.0", "None", "False", "-1", "0x00", "''", str(generator.randrange(100))])
        row = "    " + f"{constant}, " * generator.randint(4, 12)
        yield "\n".join([f"{name} = [", *[row.rstrip()] * (NUM_ROWS // 2)])


KINDS: dict[str, Callable[[int, int], Iterator[str]]] = {
    "prose": prose,
    "tables": tables,
    "asserts": asserts,
    "fills": fills,
}

if __name__ == "__main__":
    main()
