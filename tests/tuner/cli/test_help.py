"""Help and cheap checks: complete, grouped, and without the heavy libraries."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from studies.samplers.joint import JointSettings
from tuner.cli.main import COMMANDS, main
from tuner.cli.search import FLAGS
from tuner.config import DistillSettings, SearchConfig

HEAVY = ("torch", "transformers", "optuna", "mlflow", "datasets", "sklearn", "matplotlib")
EXTRAS = ("fastapi", "dbos", "uvicorn", "prometheus_client", "jinja2", "plotly", "scipy", "sqlalchemy")
"""What an installation without extras lacks, beside the heavy ones."""
CHECK = """
import contextlib, io, json, sys
from tuner.cli.main import main
found, known = [], set()
for arguments in json.loads(sys.argv[1]):
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
            main(arguments, prog_name="sdtune")
    except SystemExit as ended:
        status = ended.code
    new = [name for name in {heavy!r} if name in sys.modules and name not in known]
    known.update(new)
    found.append([shown.getvalue(), " ".join(["status", str(status), *new])])
print(json.dumps(found))
"""
HELP = [(), *((name,) for name in COMMANDS)]
CHEAP = [
    ("search", "--trails", "3"),
    ("search", "--dataset", "gsm8k"),
    ("search", "--model", "m", "--dataset", "d", "--study", "conf_layer"),
    ("search", "--model", "m", "--dataset", "d", "--timeout", "10 parsecs"),
    ("search", "--model", "m", "--dataset", "d", "--tuning-prompts", "1"),
    ("distill", "--model", "m", "--dataset", "d", "--exit-layers", "four"),
    ("bench", "p.yaml"),
    ("generate", "p.yaml", "--prompt", "a", "--temperature", "-1"),
    ("show", "none.yaml"),
    ("search", "--model", "/no/such/model", "--dataset", "gsm8k"),
    ("search", "--model", "gpt2", "--dataset", "none.jsonl"),
    ("search", "--model", "gpt2", "--dataset", "gsm8k", "--out", "no/such/folder/p.yaml"),
    ("search", "no/such-model", "--dataset", "gsm8k"),
    ("search", "m", "d", "--set", "finalist=3"),
    ("search", "m", "d", "--dataset", "gsm8k"),
    ("distill", "./none", "--dataset", "gsm8k"),
    ("doctor", "/no/such/model"),
    ("generate", "none.yaml", "--prompt", "a"),
    ("bench", "none.yaml", "--dataset", "gsm8k"),
    ("export", "none.yaml", "--to", "folder", "--out", "exported"),
    ("report", "none"),
]


@pytest.fixture(scope="module")
def ends() -> dict[tuple[str, ...], tuple[str, str]]:
    """Run all command lines in one process, which imports nothing else; give stdout, and the status with new heavy modules."""
    commands = [*((*arguments, "--help") for arguments in HELP), *CHEAP]
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(heavy=(*HEAVY, *EXTRAS)), json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return {command: (shown, ended) for command, (shown, ended) in zip(commands, json.loads(done.stdout), strict=True)}


def test_help_and_cheap_checks_import_nothing_heavy(ends: dict[tuple[str, ...], tuple[str, str]]) -> None:
    for arguments in HELP:
        shown, ended = ends[*arguments, "--help"]
        assert ended == "status 0", arguments
        assert shown.startswith(f"Usage: {' '.join(['sdtune', *arguments])}")
    for arguments in CHEAP:
        assert ends[arguments][1] == "status 2", arguments


def test_a_shell_completes_commands_and_options() -> None:
    complete = ShellComplete(main, {}, "sdtune", "_SDTUNE_COMPLETE").get_completions
    assert [each.value for each in complete([], "se")] == ["search", "serve", "service"]
    assert "--held-out-prompts" in [each.value for each in complete(["search"], "--held")]


def test_every_setting_has_its_description_in_the_long_help() -> None:
    shown = " ".join(CliRunner().invoke(main, ["search", "--help-all"]).stdout.split())
    for document, prefix in ((SearchConfig, ""), (DistillSettings, "distillation."), (JointSettings, "studies.joint.")):
        for name, field in document.model_fields.items():
            assert field.description, name
            if name not in ("model", "dataset", "studies", "distillation"):
                key = f"--{name.replace('_', '-')} " if name in FLAGS and not prefix else f"{prefix}{name} "
                assert key in shown, name
                assert field.description in shown, name


def test_the_short_help_is_short() -> None:
    for command in COMMANDS:
        result = CliRunner().invoke(main, [command, "--help"])
        assert len(re.findall(r"^  -", result.stdout, re.MULTILINE)) <= 25, command
