"""The console script `sdtune`: it checks that the tuner's packages are installed, then runs the command.

Imports the standard library only until then, because an installation for production has none of the tuner's packages.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib.util import find_spec

SERVER_PACKAGES = ("click", "rich", "fastapi", "prometheus_client", "uvicorn")
"""Modules of the packages in the extra `serve`, with which `sdtune serve` runs without the tuner."""
PACKAGES = (
    *("click", "datasets", "jinja2", "matplotlib", "mlflow", "optuna", "plotly", "psutil", "rich", "scipy"),
    *("sklearn", "sqlalchemy"),
)
"""Modules of the packages in the extra `tune`."""


def launch() -> None:
    """Run the command, or exit with status 2 and one line that says what to install."""
    serves = sys.argv[1:2] == ["serve"]
    what, extra = ("server", "serve") if serves else ("tuner", "tune")
    missing = [package for package in (SERVER_PACKAGES if serves else PACKAGES) if find_spec(package) is None]
    if missing:
        print(
            f"sdtune: the {what} is not installed (no {', '.join(missing)}): pip install 'sdtune[{extra}]', or "
            f"pip install -e '.[{extra}]' in a checkout",
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

    threading.Thread(target=stop, daemon=True).start()
    launch()
