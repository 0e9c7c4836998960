"""Documents and data sets with random damage: they are read, or refused by the error of their kind, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from decoding.errors import ProfileError, SdtuneError, one_line
from decoding.profile import DraftProfile
from tuner.config import DistillSettings, SearchConfig, load_config
from tuner.errors import ConfigError, DatasetError
from tuner.evaluation.hardening.outcomes import CheckOutcome
from tuner.inputs.datasets import open_table
from tuner.progress import Progress

PIECES = (
    *(
        "null",
        "true",
        "-1",
        "0",
        "1e400",
        ".nan",
        "''",
        "[]",
        "{}",
        "!!python/object:os.system",
        "&a",
        "*a",
        "<<: *a",
        "\x00",
        "\t",
    ),
    *(
        "\n",
        ": ",
        "- ",
        "2026-13-01",
        "0x",
        "99999999999999999999",
        "\u2028",
        "\ufeff",
        "'",
        '"',
        "[",
        "{",
        "}",
        "#",
        "%",
        "@",
        "`",
    ),
)
"""Text that readers stumble over."""
MOST_CHANGES = 4


def damaged(text: str, stream: random.Random) -> str:
    """Return the text with one to `MOST_CHANGES` random changes: pieces put in, stretches cut, doubled or moved."""
    for _ in range(stream.randint(1, MOST_CHANGES)):
        start = stream.randint(0, len(text))
        end = min(len(text), start + stream.randint(0, 12))
        replacement = stream.choice(("", stream.choice(PIECES), text[start:end] * 2, text[: end - start]))
        text = text[:start] + replacement + text[end:]
    return text


def read_damaged(
    name: str, texts: Sequence[str], read: Callable[[Path], object], refusal: type[SdtuneError], path: Path, *, num_cases: int,
    seed: int, progress: Progress,
) -> CheckOutcome:  # fmt: skip
    """Read damaged `texts`, written to `path` one after another; any error but `refusal`, or one of several lines, is a failure."""
    tally, stream = CheckOutcome(name), random.Random(seed)
    progress.stage(name, num_cases)
    for number in range(num_cases):
        text = damaged(texts[number % len(texts)], stream)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        tally.count(_failure(read, path, refusal, text))
        progress.advance()
    path.unlink(missing_ok=True)
    return tally


def _failure(read: Callable[[Path], object], path: Path, refusal: type[SdtuneError], text: str) -> str | None:
    try:
        read(path)
    except refusal as error:
        return f"{len(str(error).splitlines())} lines: {text[:200]!r}" if "\n" in str(error).strip() else None
    except Exception as error:  # the failure that is looked for
        return f"{type(error).__name__}: {one_line(error)[:120]}: {text[:200]!r}"
    return None


def damaged_profiles(
    profiles: Sequence[Path], folder: Path, num_cases: int, seed: int, progress: Progress
) -> CheckOutcome:
    """Read damaged copies of these profiles."""
    texts = [path.read_text(encoding="utf-8") for path in profiles]
    return read_damaged(
        "damaged profiles", texts, DraftProfile.load, ProfileError, folder / "profile.yaml", num_cases=num_cases, seed=seed,
        progress=progress,
    )  # fmt: skip


def damaged_configurations(
    texts: Sequence[str], folder: Path, num_cases: int, seed: int, progress: Progress
) -> CheckOutcome:
    """Read damaged copies of these configurations."""
    return read_damaged(
        "damaged configurations", texts, _read_configuration, ConfigError, folder / "search.yaml", num_cases=num_cases, seed=seed,
        progress=progress,
    )  # fmt: skip


def damaged_data(texts: Sequence[str], folder: Path, num_cases: int, seed: int, progress: Progress) -> CheckOutcome:
    """Read damaged copies of these .jsonl data sets."""
    return read_damaged(
        "damaged data sets", texts, _read_data, DatasetError, folder / "data.jsonl", num_cases=num_cases, seed=seed,
        progress=progress,
    )  # fmt: skip


def _read_configuration(path: Path) -> tuple[SearchConfig, DistillSettings]:
    config = load_config(path, {})
    return config, config.distillation


def _read_data(path: Path) -> object:
    return open_table(str(path))
