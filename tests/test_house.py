"""The house keeps its shape: imports go one way, folders form no circle, third parties live at the edge."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from decoding.drafts import KINDS
from tests.support.paths import ROOT

ALLOWED = {
    "decoding": {"decoding"},
    "studies": {"studies", "decoding"},
    "tuner": {"tuner", "studies", "decoding", "configs"},
    "benchmarks": {"benchmarks", "tuner", "studies", "decoding", "configs"},
}
TRANSFORMERS_INTERNALS = ("decoding/target/", "decoding/cache/")
# What a user runs only on request; `tuner.cli` enters every wing.
WINGS = ("tuner.bench",)
# Fetches profiles from MLflow's model registry, if an address is given. tests/test_packaging.py: production runs without MLflow.
REGISTRY = "decoding.deploy.registry"
TUNING_LIBRARIES = {"optuna", "mlflow", "click", "datasets", "rich", "matplotlib", "sklearn"}


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _name(path: Path) -> str:
    """The dotted name of a module or package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for package in ALLOWED for path in _files(package)}


def _imports(path: Path) -> set[str]:
    """Every module that the file imports, wherever in it; `from package import module` names the module."""
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= names or {node.module}
    return found


def _relative_imports(path: Path) -> list[int]:
    """The lines of relative imports."""
    nodes = ast.walk(_tree(path))
    return [node.lineno for node in nodes if isinstance(node, ast.ImportFrom) and node.level]


IMPORTS = {name: _imports(path) for name, path in MODULES.items()}


def _folder(module: str) -> str:
    """The folder of a module. A module at the top of a package is a folder of its own: it is as easy to find."""
    is_package = MODULES[module].name == "__init__.py"
    folder = module if is_package else module.rpartition(".")[0]
    return module if folder in ALLOWED else folder


def _arrows() -> Iterator[tuple[str, str]]:
    """Imports between folders. A folder and those inside it are one another's own business."""
    for module, imported in IMPORTS.items():
        for other in imported & MODULES.keys():
            start, end = _folder(module), _folder(other)
            if start != end and not f"{end}.".startswith(f"{start}.") and not f"{start}.".startswith(f"{end}."):
                yield start, end


def _is_in(module: str, *folders: str) -> bool:
    return any(f"{module}.".startswith(f"{folder}.") for folder in folders)


def test_imports_go_one_way() -> None:
    for module, imported in IMPORTS.items():
        own = {name.split(".")[0] for name in imported} & {*ALLOWED, "configs", "tests"}
        assert own <= ALLOWED[module.split(".")[0]], module


def test_folders_form_no_circle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for start, end in _arrows():
        graph[start].add(end)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(f"folders import one another in a circle: {' -> '.join(circle.args[1])}")


def test_the_product_does_not_need_bench() -> None:
    for module, imported in IMPORTS.items():
        if not _is_in(module, *WINGS, "tuner.cli", "benchmarks"):
            assert not [other for other in imported if _is_in(other, *WINGS)], module


def test_production_imports_no_tuning_library() -> None:
    for module in MODULES:
        if _is_in(module, "decoding") and module != REGISTRY:
            assert not {name.split(".")[0] for name in IMPORTS[module]} & TUNING_LIBRARIES, module


def test_third_parties_live_at_the_edge() -> None:
    for module, imported in IMPORTS.items():
        path = MODULES[module].relative_to(ROOT).as_posix()
        if any(name.startswith(("transformers.cache_utils", "transformers.models")) for name in imported):
            assert path.startswith(TRANSFORMERS_INTERNALS)
        if any(name.split(".")[0] == "mlflow" for name in imported):
            assert path == "tuner/tracking.py" or MODULES[module] == MODULES[REGISTRY]
        if any(name.split(".")[0] == "click" for name in imported):
            assert path.startswith("tuner/cli/")


def test_tests_share_code_through_the_support_folder_only() -> None:
    """A test that imports another test file or a conftest would move and fail with it."""
    for path in _files("tests"):
        shared = {name for name in _imports(path) if name.split(".")[0] == "tests" or "conftest" in name}
        assert all(_is_in(name, "tests.support") for name in shared), path
        assert not _relative_imports(path), path


def test_every_folder_of_code_says_what_it_holds() -> None:
    for path in MODULES.values():
        init = path.parent / "__init__.py"
        assert init.exists(), path
        assert ast.get_docstring(_tree(init)), init


def _asks_for_a_kind(node: ast.expr | ast.pattern) -> bool:
    """True for `isinstance` with the class of a draft document, and for a comparison of `.kind` with the name of a kind."""
    documents = {kind.document.__name__ for kind in KINDS.values()} | {"DraftDocument"}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        return any(isinstance(name, ast.Name) and name.id in documents for name in ast.walk(node.args[1]))
    if isinstance(node, ast.MatchClass):
        return isinstance(node.cls, ast.Name) and node.cls.id in documents
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        asks = any(isinstance(side, ast.Attribute) and side.attr == "kind" for side in sides)
        return asks and any(isinstance(side, ast.Constant) and side.value in KINDS for side in sides)
    return False


def test_draft_kinds_are_asked_for_nowhere_but_in_their_documents() -> None:
    for package in ALLOWED:
        for path in _files(package):
            if path.is_relative_to(ROOT / "decoding" / "drafts"):
                continue
            nodes = ast.walk(_tree(path))
            lines = [
                node.lineno for node in nodes if isinstance(node, ast.expr | ast.pattern) and _asks_for_a_kind(node)
            ]
            assert not lines, f"{path}, lines {lines}: ask the draft document instead (decoding/drafts/contract.py)"


# Expressions that a technical writer would not use, with the standard term.
COINED = {
    r"\bforet(ell|old)": "predict",
    r"\bdear(er|est)?\b": "expensive",
    r"\b(texts|prompts|decoded|written|passes) in step\b": "in lockstep, or batched",
    r"\bso many (texts|tokens|sequences|prompts|of)\b": "the number's name",
    r"\b(lesson|learnt)": "warm-up, warmed up; training, trained",
    r"\bin front of\b": "before",
    r"\b(stands?|lies) behind\b": "follows, or after",
    r"\bwhat comes of\b": "the result",
    r"\bcomes? to\b": "amounts to, or reaches",
    r"\bwhoever\b|\bsomebody\b": "the caller, the user, the contender",
    r"\bthat are no\b|\bis no such mode\b": "that are not",
}
PROSE = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
    *MODULES.values(),
]


def test_wording_is_standard() -> None:
    pattern = re.compile("|".join(COINED), re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in PROSE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not found, f"say instead: {COINED}"


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for name, path in MODULES.items():
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of a module by the name of what is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield name, node


def test_no_model_brings_code() -> None:
    """Without the flag transformers asks on standard input whether to run a model's code."""
    asking = []
    for module, path in MODULES.items():
        for name, call in _calls(_tree(path)):
            given = {each.arg: ast.unparse(each.value) for each in call.keywords}
            loads = name in ("from_pretrained", "from_config") and given.get("trust_remote_code") != "False"
            reads = name.startswith("load_dataset") and module != "tuner.inputs.data_files"
            asks = ast.unparse(call.func) in ("input", "click.confirm", "click.prompt", "getpass.getpass")
            if loads or reads or asks:
                asking.append(f"{module}:{call.lineno}: {name}")
    assert not asking
