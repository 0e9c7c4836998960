"""Help and cheap checks: complete, grouped, and without the heavy libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tuner.cli.main import COMMANDS, main
from tuner.config import DistillSettings, SearchConfig
from tuner.evaluation.registry import EVALUATIONS, resolve

HEAVY = ("torch", "transformers", "optuna", "mlflow", "datasets", "sklearn", "matplotlib")
CHECK = """
import sys
from tuner.cli.main import main
try:
    main(sys.argv[1:], prog_name="sdtune")
except SystemExit as ended:
    status = ended.code
print("status", status, *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


def run_lightly(*arguments: str) -> tuple[str, str]:
    """Run `sdtune` in a process of its own; return stdout and the last line of stderr: status and heavy modules."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(heavy=HEAVY), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.stdout, done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [(), *((name,) for name in COMMANDS), *(("evaluate", name) for name in EVALUATIONS)], ids=" ".join
)
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    shown, ended = run_lightly(*arguments, "--help")
    assert ended == "status 0"
    assert shown.startswith(f"Usage: {' '.join(['sdtune', *arguments])}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("search", "--trails", "3"),
        ("search", "--dataset", "gsm8k"),
        ("search", "--model", "m", "--dataset", "d", "--study", "conf_layer"),
        ("search", "--model", "m", "--dataset", "d", "--timeout", "10 parsecs"),
        ("search", "--model", "m", "--dataset", "d", "--tuning-prompts", "1"),
        ("distill", "--model", "m", "--dataset", "d", "--exit-layers", "four"),
        ("bench", "--profile", "p.yaml"),
        ("generate", "--profile", "p.yaml", "--prompt", "a", "--temperature", "-1"),
        ("show", "none.yaml"),
        ("evaluate", "rules", "--profile", "p.yaml"),
        ("evaluate", "searches", "--model", "m", "--dataset", "d", "--budget", "soon"),
    ],
    ids=" ".join,
)
def test_cheap_checks_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    _, ended = run_lightly(*arguments)
    assert ended == "status 2"


def test_every_setting_is_a_flag_with_its_description(tmp_path: Path) -> None:
    for command, document, nested in (
        ("search", SearchConfig, {"studies", "distillation"}),
        ("distill", DistillSettings, set()),
    ):
        shown = " ".join(CliRunner().invoke(main, [command, "--help"]).stdout.split())
        for name, field in document.model_fields.items():
            assert field.description, name
            if name not in nested:
                assert f"--{name.replace('_', '-')} " in shown, name
                assert field.description in shown, name


def test_every_evaluation_describes_its_settings() -> None:
    for name in EVALUATIONS:
        evaluation = resolve(name)
        assert evaluation.__doc__, name
        assert all(field.description for key, field in evaluation.model_fields.items() if key != "config"), name
