"""What is installed: production needs `decoding` and its few packages, the tuner is an extra."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from tests.support.paths import ROOT
from tuner.cli.launch import EXTRAS, launch

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
MODULES = {
    "nvidia-ml-py": "pynvml",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
    "scikit-learn": "sklearn",
}
"""Names that are imported, by the names for pip where they differ."""
WITHOUT_TUNER = """
import sys
from importlib.machinery import PathFinder

blocked = set(sys.argv[1].split())

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in blocked else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
import decoding.deploy
print(*sorted({name.split(".")[0] for name in sys.modules} & {"studies", "tuner", *blocked}))
sys.argv = ["sdtune", "show", "profile.yaml"]
from tuner.cli.launch import launch
launch()
"""


def _modules(packages: list[str]) -> set[str]:
    """Return the modules that requirements such as `scikit-learn>=1.9` stand for."""
    names = (re.split(r"[<>=\[]", package)[0] for package in packages)
    return {MODULES.get(name, name) for name in names}


def _imported(package: str) -> set[str]:
    """Return the top-level modules that a package imports, anywhere in its files."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"decoding", "studies", "tuner", "configs"}


def test_production_runs_without_the_packages_of_the_tuner() -> None:
    """They are hidden from Python; the command says in one line what to install."""
    blocked = _modules(PROJECT["optional-dependencies"]["tune"])
    assert {"optuna", "mlflow", "datasets", "click", "scipy", "rich"} <= blocked
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TUNER, " ".join(sorted(blocked))],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
    )
    assert ran.stdout.strip() == "", ran.stderr
    (line,) = ran.stderr.strip().splitlines()
    assert line.startswith("sdtune: the tuner is not installed")
    assert "pip install -e '.[tune]' in sdtune's checkout" in line
    assert ran.returncode == 2


def test_dependencies_are_what_decoding_imports() -> None:
    """numpy is used through torch, pydantic brings pydantic_core, and MLflow is imported only for a registered profile.

    The server is an extra; fastapi brings starlette, and torch jinja2.
    """
    served = _modules(PROJECT["optional-dependencies"]["serve"]) | {"starlette", "jinja2"}
    others = {"pydantic_core", "mlflow", *served}
    assert _modules(PROJECT["dependencies"]) == _imported("decoding") - others | {"numpy"}
    assert served - {"click", "rich"} <= _imported("decoding/serving")


def test_the_extras_hold_whatever_else_the_tuner_imports() -> None:
    brought = {"annotated_types", "filelock", "huggingface_hub", "pydantic_core", "tokenizers"}  # by the dependencies
    brought |= {"anyio", "starlette", "markupsafe"}  # by fastapi and jinja2
    needed = _imported("studies") | _imported("tuner")
    extras = PROJECT["optional-dependencies"]
    known = _modules([*PROJECT["dependencies"], *extras["tune"], *extras["service"], *extras["serve"], *extras["ray"]])
    # `benchmarks.serving` needs the client. `conversion` lies in the sources of llama.cpp.
    assert needed - known - brought - {"openai", "conversion"} == set()


def test_search_needs_nothing_of_the_service() -> None:
    assert set(EXTRAS["service"]) - {"uvicorn"} <= _imported("tuner/service")
    modules = {path for path in (ROOT / "tuner").rglob("*.py") if "service" not in path.parts}
    imports = re.compile(r"^\s*(import|from) dbos\b", re.MULTILINE)
    assert not [path for path in modules if imports.search(path.read_text(encoding="utf-8"))]


def test_the_wheel_holds_no_benchmark() -> None:
    found = PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert found == ["decoding*", "studies*", "tuner*", "configs*"]


def test_the_wheel_holds_every_data_file_of_the_packages() -> None:
    for package, patterns in PYPROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT.joinpath(*package.split("."))
        files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        data = [
            path for path in files if package in ("decoding", "studies", "tuner") and "__pycache__" not in path.parts
        ]
        assert not [path for path in data if path.suffix != ".py" and not any(path.match(each) for each in patterns)]
        assert all(list(folder.glob(each)) for each in patterns)


def test_command_is_the_launcher() -> None:
    assert PROJECT["scripts"] == {"sdtune": "tuner.cli.launch:launch"}


def test_help_needs_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """That help imports nothing of one is checked in `tests/tuner/cli/test_help.py`."""
    installed = ("click", "rich")
    monkeypatch.setattr("tuner.cli.launch.find_spec", lambda package: package if package in installed else None)
    monkeypatch.setattr(sys, "argv", ["sdtune", "serve", "--help"])
    with pytest.raises(SystemExit) as ended:
        launch()
    assert ended.value.code == 0


def test_launcher_knows_the_packages_of_the_extras() -> None:
    for name, modules in EXTRAS.items():
        assert set(modules) == _modules(PROJECT["optional-dependencies"][name])
