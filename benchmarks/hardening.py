"""Does anything break? A number of 0 leaves a check out; exit status 1 if any case fails.

Bad input: garbage for every option of every command, each in a process of its own, must end with status 2 and one line, and write
nothing. Damaged profiles, configurations and data sets must be read, or refused in one line. Sequences of random models, drafts
and rules must be those of transformers' `generate`; threads that share a decoder must write the same ones.

When a disk is full, a folder cannot be written or a database is locked, a search with planted costs must end with one line or wait,
and the same command must resume it: no finished trial lost or doubled, and the undisturbed winner. Full disks need root, to mount a
small one. `benchmarks.killed` does the same with kills.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from benchmarks import faults
from benchmarks.random_texts import compare_with_generate, sequences_in_threads
from benchmarks.results import show, write
from benchmarks.small_search import REFUSED, STORES, CheckOutcome, SearchPlace, status_of
from benchmarks.task import arguments
from decoding.documents.strict_yaml import dump
from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, LayerSkip, Lookup
from decoding.errors import ProfileError, SdtuneError, one_line
from decoding.profile import DraftProfile, TargetIdentity
from tuner.cli.main import COMMANDS
from tuner.cli.main import main as sdtune
from tuner.config import SearchConfig, load_config
from tuner.errors import ConfigError, DatasetError
from tuner.inputs.datasets import open_table

GARBAGE = "@none\x1b[of]these"
"""A value that no number, choice or file has; with brackets and an escape sequence, which must not be interpreted."""
COMMAND_SECONDS = 120
SEMANTIC = """
serch
search
search no/such-model --dataset data.jsonl
search model --dataset missing.jsonl
search model --dataset data.jsonl --out data.jsonl
search model --dataset data.jsonl --out .
search model --dataset data.jsonl --out no/folder/p.yaml
search --config data.jsonl
search --config missing.yaml
search model --dataset data.jsonl --storage sqlite:///data.jsonl
search model --dataset data.jsonl --storage nodatabase://me:secret@host/db
search model --dataset null.json
show missing.yaml
show data.jsonl
show empty
generate missing.yaml --prompt x
generate data.jsonl
export missing.yaml --to folder --out x
doctor
doctor missing
doctor empty
bench missing.yaml --dataset data.jsonl
distill missing --dataset data.jsonl
"""
"""Commands whose arguments do not fit together or name what is not there. Run in the folder of `refuse_all`."""
PIECES = (
    *("null", "true", "-1", "0", "1e400", ".nan", "''", "[]", "{}", "!!python/object:os.system", "&a", "*a", "<<: *a"),
    *("\x00", "\t", "\n", ": ", "- ", "2026-13-01", "0x", "9" * 20, "\u2028", "\ufeff", "'", '"', "[", "{", "}", "#"),
    *("%", "@", "`"),
)
"""Text that readers stumble over."""
MOST_CHANGES = 4
DATA = (
    '{"prompt": "def f(x):", "file": "a.py"}\n{"prompt": "import os", "file": "b.py"}\n',
    '{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}\n',
)
STRIKES_AFTER = 2
"""Trials that are finished before a fault."""
DISK_BYTES = 8 * 2**20


def command_lines() -> list[list[str]]:
    """Return the command lines: an unknown option and garbage for each option that takes no free text, and the semantic ones."""
    lines = [line.split() for line in SEMANTIC.strip().splitlines()]
    for name in COMMANDS:
        command = sdtune.get_command(None, name)  # type: ignore[arg-type]  # it does not look at the context
        assert command is not None
        subcommands = getattr(command, "commands", {"": command})
        for sub, each in subcommands.items():
            prefix = [name, *([sub] if sub else [])]
            lines.append([*prefix, "--no-such-option"])
            for option in each.params:
                takes_text = option.type.name in ("text", "path", "filename", "file", "directory")
                if option.param_type_name == "option" and not getattr(option, "is_flag", False) and not takes_text:
                    lines.append([*prefix, option.opts[0], GARBAGE])
    return lines


def refuse_all(folder: Path, lines: Sequence[Sequence[str]]) -> CheckOutcome:
    """Run the command lines in `folder`, which holds a broken model and data sets; return what went wrong."""
    for name in ("empty", "model"):
        (folder / name).mkdir(parents=True)
    (folder / "model" / "config.json").write_text("[]", encoding="utf-8")
    (folder / "data.jsonl").write_text('{"prompt": "x"}\n', encoding="utf-8")
    (folder / "null.json").write_text("null", encoding="utf-8")
    outcome, before = CheckOutcome("bad input"), _contents(folder)
    for line in lines:
        problem = _unlike_a_refusal(*_said(folder, line))
        if problem is None and _contents(folder) != before:
            problem = "files were written or changed"
        outcome.count(problem, of=repr(" ".join(line)))
    return outcome


def _said(folder: Path, line: Sequence[str]) -> tuple[int | None, str]:
    """Return status and stderr of a command, or None for the status if it does not end."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tuner.cli.main", *line]
    try:
        found = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return found.returncode, found.stderr


def _unlike_a_refusal(status: int | None, said: str) -> str | None:
    """Return how the end of a command differs from status 2 with one line for the user, or None."""
    lines = [line for line in said.splitlines() if line.startswith("sdtune: ")]
    if status != REFUSED or len(lines) != 1 or "Traceback" in said:
        return f"status {status}: {' '.join(said.split())[-200:]}"
    return "the password is shown" if "secret" in said else None


def _contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def damaged(text: str, stream: random.Random) -> str:
    """Return the text with one to `MOST_CHANGES` random changes: pieces put in, stretches cut, doubled or moved."""
    for _ in range(stream.randint(1, MOST_CHANGES)):
        start = stream.randint(0, len(text))
        end = min(len(text), start + stream.randint(0, 12))
        replacement = stream.choice(("", stream.choice(PIECES), text[start:end] * 2, text[: end - start]))
        text = text[:start] + replacement + text[end:]
    return text


def read_damaged(
    name: str,
    texts: Sequence[str],
    read: Callable[[Path], object],
    refusal: type[SdtuneError],
    path: Path,
    num_cases: int,
    seed: int,
) -> CheckOutcome:
    """Read damaged `texts`, written to `path` one after another; any error but `refusal`, or one of several lines, is a failure."""
    outcome, stream = CheckOutcome(name), random.Random(seed)
    for number in range(num_cases):
        text = damaged(texts[number % len(texts)], stream)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        problem = None
        try:
            read(path)
        except refusal as error:
            problem = f"{len(str(error).splitlines())} lines: {text[:200]!r}" if "\n" in str(error).strip() else None
        except Exception as error:  # the failure that is looked for
            problem = f"{type(error).__name__}: {one_line(error)[:120]}: {text[:200]!r}"
        outcome.count(problem)
    return outcome


def damaged_documents(folder: Path, documents: int, data_sets: int, seed: int) -> list[CheckOutcome]:
    """Read damaged profiles, configurations and data sets."""
    target = TargetIdentity(
        model="m", architecture="LlamaForCausalLM", num_layers=6, dtype="float32", config_sha256="a", weights_sha256="b"
    )
    drafts = (LayerSkip.blocks((2, 3)), EarlyExit(exit_layer=3), LayerSkip(skip_mlp=(1,), bits=8, lookup=Lookup()))
    rule = Fixed(max_tokens=4)
    profiles = [dump(DraftProfile(name="p", target=target, draft=each, draft_length=rule)) for each in drafts]
    configurations = [dump(SearchConfig(model="m", dataset="d.jsonl")), "model: m\ndataset: d\nstudies: {joint: {}}\n"]
    read_config = partial(load_config, given={})
    checks: list[tuple[str, Sequence[str], Callable[[Path], object], type[SdtuneError], str, int]] = [
        ("damaged profiles", profiles, DraftProfile.load, ProfileError, "p.yaml", documents),
        ("damaged configurations", configurations, read_config, ConfigError, "c.yaml", documents),
        ("damaged data sets", DATA, lambda path: open_table(str(path)), DatasetError, "d.jsonl", data_sets),
    ]
    return [
        read_damaged(name, texts, read, refusal, folder / file, count, seed)
        for name, texts, read, refusal, file, count in checks
        if count
    ]


class Case(NamedTuple):
    """A fault of one of the three folders in which a search writes."""

    name: str
    store: str
    strike: Callable[[SearchPlace], faults.Fault]
    """Returns the fault, which begins in the process of the search."""
    repair: Callable[[Path], object] = lambda folder: None
    disk: Callable[[Path], AbstractContextManager[object]] = nullcontext
    """What the folder lies on."""
    waits: bool = False
    """Whether the search is to wait for the end of the fault."""


def cases(locked_seconds: float) -> list[Case]:
    """Return all cases; full disks only for root, who can mount a small one."""

    def of_folder(fault: Callable[[Path], object], store: str) -> Callable[[SearchPlace], faults.Fault]:
        return lambda place: partial(fault, place.stores[store])

    def lock(store: str) -> Callable[[SearchPlace], faults.Fault]:
        return lambda place: partial(faults.lock, place.database(store), locked_seconds)

    full = [
        Case(f"full disk, {each}", each, of_folder(faults.fill, each), faults.make_room, _small_disk) for each in STORES
    ]
    closed = [
        Case(f"read-only folder, {each}", each, of_folder(faults.forbid_writing, each), faults.allow_writing)
        for each in STORES
    ]
    locked = [Case(f"locked database, {each}", each, lock(each), waits=True) for each in STORES[:2]]
    return [*(full if os.geteuid() == 0 else []), *closed, *locked]


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Let `folder` be a disk of its own, of a few megabytes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def searches_with_faults(folder: Path, most: int, locked_seconds: float) -> tuple[CheckOutcome, dict[str, str]]:
    """Run a search under each of at most `most` faults; return what went wrong, and what each search said."""
    outcome, said = CheckOutcome("searches with failing stores"), dict[str, str]()
    model = SearchPlace.made(folder)
    if (problem := model.finish("undisturbed")) is not None:
        outcome.count(problem, of="undisturbed")
        return outcome, said
    for case in cases(locked_seconds)[:most]:
        own = folder / case.name.replace(" ", "-").replace(",", "")
        with ExitStack() as stack:
            stores = {store: own / store for store in STORES}
            for store, path in stores.items():
                path.mkdir(parents=True)
                if store == case.store:
                    stack.enter_context(case.disk(path))
            shutil.copy(model.database("tracking"), stores["tracking"])  # making its tables takes seconds
            # The undisturbed search is compared with: its trials and profile lie beside.
            shutil.copy(model.database("trials"), stores["trials"])
            shutil.copy(model.profile("undisturbed"), stores["profile"])
            place = SearchPlace(folder, stores)
            outcome.count(_problem(case, place, said), of=case.name)
    return outcome, said


def _problem(case: Case, place: SearchPlace, said: dict[str, str]) -> str | None:
    """Run the search, repair what failed and run it again; return what went wrong."""
    status = status_of(place.start("faulty", after=STRIKES_AFTER, fault=case.strike(place)))
    said[case.name] = place.said("faulty").strip()
    case.repair(place.stores[case.store])
    problem = place.failure("faulty", status) if case.waits else _unlike_a_refusal(status, said[case.name])
    known = place.records("faulty")
    if problem is None and len(known) < STRIKES_AFTER:
        problem = f"{len(known)} trials are on disk, of {STRIKES_AFTER} before the fault"
    return problem or place.finish("faulty") or place.difference("faulty", known, "undisturbed")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--command-lines", type=int, default=1000, help="most command lines with bad input")
    parser.add_argument("--documents", type=int, default=2000, help="damaged profiles, and as many configurations")
    parser.add_argument("--data-sets", type=int, default=2000, help="damaged ones")
    parser.add_argument("--sequences", type=int, default=300, help="random ones, compared with generate")
    parser.add_argument("--threaded-sequences", type=int, default=500, help="of threads on one decoder")
    parser.add_argument("--decoding-threads", type=int, default=8)
    parser.add_argument("--faults", type=int, default=8, help="most faults that a search meets")
    parser.add_argument("--locked-seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    found, facts = list[CheckOutcome](), dict[str, Any]()
    with TemporaryDirectory(prefix="sdtune-hardening-") as name:
        folder = Path(name)
        for part in ("commands", "faults"):
            (folder / part).mkdir()
        if args.command_lines:
            found.append(refuse_all(folder / "commands", command_lines()[: args.command_lines]))
        found += damaged_documents(folder, args.documents, args.data_sets, args.seed)
        if args.sequences:
            outcome, facts["ties"] = compare_with_generate(args.sequences, args.seed)
            found.append(outcome)
        if args.threaded_sequences:
            found.append(sequences_in_threads(args.threaded_sequences, args.decoding_threads, args.seed))
        if args.faults:
            outcome, facts["faults"] = searches_with_faults(folder / "faults", args.faults, args.locked_seconds)
            found.append(outcome)
    rows = [each.row for each in found]
    show("Cases and failures", rows)
    for each in found:
        for failure in each.failures:
            print(f"{each.name}: {failure}")
    write(args.json, {**facts, "failures": {each.name: each.failures for each in found}}, rows)
    return int(any(each.failures for each in found))


if __name__ == "__main__":
    sys.exit(main())
