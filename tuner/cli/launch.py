"""The console script `sdtune`: it checks that the tuner's packages are installed, then runs the command.

Imports nothing beyond the standard library until then, because an installation for production has none of the tuner's packages.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib.util import find_spec

from decoding.errors import how_to_install

TUNE = (
    *("click", "datasets", "jinja2", "mlflow", "optuna", "plotly", "psutil", "rich", "scipy"),
    *("sklearn", "sqlalchemy"),
)
EXTRAS = {
    "tune": TUNE,
    "serve": ("click", "rich", "fastapi", "prometheus_client", "uvicorn"),
    "service": ("dbos", "fastapi", "httpx2", "jinja2", "prometheus_client", "uvicorn"),
}
"""Modules of the packages in each extra. `sdtune serve` runs without the tuner, the tuning service with it."""


def launch() -> None:
    """Run the command, or exit with status 2 and one line that says what to install."""
    named = (sys.argv[1:2] or [""])[0]
    extras = {"serve": ("serve",), **dict.fromkeys(("service", "worker", "jobs"), ("tune", "service"))}
    wants_help = not {"-h", "--help", "--version"}.isdisjoint(sys.argv)
    for extra in extras.get(named, ("tune",)):
        needed = ("click", "rich") if wants_help else EXTRAS[extra]
        if missing := [package for package in needed if find_spec(package) is None]:
            what = {"tune": "tuner", "serve": "server", "service": "tuning service"}[extra]
            print(
                f"sdtune: the {what} is not installed (no {', '.join(missing)}): {how_to_install(extra)}",
                file=sys.stderr,
            )
            sys.exit(2)

    from tuner.cli.main import main

    main()


def work() -> None:
    """Run the command of a worker until the process that started it closes stdin, by its end of whatever kind."""

    def stop() -> None:
        os.read(sys.stdin.fileno(), 1)
        os.kill(os.getpid(), signal.SIGINT)

    # A shell's background jobs ignore SIGINT, and so would this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=stop, daemon=True).start()
    launch()
