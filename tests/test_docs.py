"""The documentation agrees with the code: length, links, modules, names and commands."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click
import pytest

from decoding.drafts import SuffixDraft
from tests.support.profiles import save_profile
from tuner.cli.main import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "benchmarks").rglob("README.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("decoding", "studies", "tuner", "benchmarks")


def _blocks(page: Path, language: str) -> list[str]:
    """Return the fenced code blocks of a page in one language; an empty string selects blocks without a language."""
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _prose(page: Path) -> str:
    """Return a page without its fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `sdtune` command in the shell blocks and in the prose of a page."""
    for block in [*_blocks(page, "sh"), *_blocks(page, "")]:
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.removeprefix("$ ").split("&&"):
                words = shlex.split(command, comments=True)
                if words[:1] == ["sdtune"]:
                    yield words[1:]
    for command in re.findall(r"`sdtune ([^`]+)`", _prose(page)):
        yield shlex.split(command)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs form them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_readme_is_short_and_the_pages_are_few() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    assert len(list((ROOT / "docs").rglob("*.md"))) <= 12


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert page.parent != ROOT / "docs" or target.is_relative_to(page.parent), f"{link} leaves the site"
        assert not anchor or anchor in _anchors(target), link


@pytest.fixture
def demo_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder: it holds the demo model and a profile for it."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    save_profile(Path("profile.yaml"), "configs/demo/model", SuffixDraft())
    return tmp_path


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "production.md"], ids=_id)
def test_production_examples_run(page: Path, demo_folder: Path) -> None:
    names: dict[str, Any] = {}
    for block in _blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
    assert (demo_folder / "profile.yaml").exists()
    assert names["output"].shape[1] == names["inputs"]["input_ids"].shape[1] + 64


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_commands_exist_with_their_options(page: Path) -> None:
    for words in _commands(page):
        command: click.Command = main
        context = click.Context(main, info_name="sdtune")
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(context, words[0])
            assert found is not None, f"sdtune {' '.join(words)}"
            command, words = found, words[1:]
            context = click.Context(command, info_name=command.name, parent=context)
        command.make_parser(context).parse_args(list(words))  # raises for an unknown option


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_names_of_code_exist(page: Path) -> None:
    prose = _prose(page)
    for name in re.findall(r"`((?:decoding|studies|tuner|benchmarks)(?:\.\w+)+)`", prose):
        resolve_name(name)
    for path in re.findall(r"`((?:decoding|studies|tuner|benchmarks|tests|configs|docs)/[\w/.-]+)`", prose):
        assert (ROOT / path).exists(), path


def test_packages_to_carry_cover_the_dependencies() -> None:
    """Each dependency is carried to a machine without a registry or is there already; carried versions are the tested ones."""
    page = ROOT / "docs" / "runners.md"
    carried = dict(word.split("==") for block in _blocks(page, "") for word in block.split() if "==" in word)
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", constraints, re.MULTILINE))
    assert {name: version for name, version in carried.items() if tested.get(name, version) != version} == {}
    present = re.search(r"^It goes with (.*?), and with what these need\.", _prose(page), re.MULTILINE | re.DOTALL)
    assert present is not None
    available = {*carried, *re.findall(r"[\w-]+", present[1]), *(["mlflow"] if "mlflow-skinny" in carried else [])}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["tune"]]
    assert {re.split(r"[<>=\[]", each)[0] for each in needed} - available == set()


def test_structure_has_the_first_sentence_of_every_folder() -> None:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\* `([\w/]+)`: (.+)$", page, re.MULTILINE))
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("__init__.py"))
    documented = {
        path.parent.relative_to(ROOT).as_posix(): ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for path in paths
    }
    assert listed == {folder: " ".join(text.split("\n\n")[0].split()) for folder, text in documented.items()}
