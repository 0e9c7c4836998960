"""The house keeps its shape: imports go one way, and third parties live at the edge."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "decoding": {"decoding"},
    "studies": {"studies", "decoding"},
    "tuner": {"tuner", "studies", "decoding", "configs"},
}
TRANSFORMERS_INTERNALS = {"decoding/target/anatomy.py", "decoding/cache/kv_cache.py", "decoding/cache/rounds_cache.py"}


def _imports(path: Path) -> set[str]:
    """Every module that the file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    for path in _files(package):
        own = {name.split(".")[0] for name in _imports(path)} & {*ALLOWED, "configs", "tests"}
        assert own <= ALLOWED[package], path


def test_what_production_imports_knows_nothing_of_tuning() -> None:
    for path in _files("decoding"):
        assert not {name.split(".")[0] for name in _imports(path)} & {
            "optuna",
            "mlflow",
            "click",
            "datasets",
            "rich",
        }, path


def test_transformers_internals_and_mlflow_each_have_their_place() -> None:
    for package in ALLOWED:
        for path in _files(package):
            imported = _imports(path)
            place = path.relative_to(ROOT).as_posix()
            if any(name.startswith(("transformers.cache_utils", "transformers.models")) for name in imported):
                assert place in TRANSFORMERS_INTERNALS
            if any(name.split(".")[0] == "mlflow" for name in imported):
                assert place == "tuner/tracking.py"


def test_every_folder_of_code_is_a_package_that_says_what_it_holds() -> None:
    for package in ALLOWED:
        for path in _files(package):
            init = path.parent / "__init__.py"
            assert init.exists(), path
            assert ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))), init
