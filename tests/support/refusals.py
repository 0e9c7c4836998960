"""The contract for wrong input: one line on stderr, exit status 2."""

from __future__ import annotations

from click.testing import Result


def refused(result: Result, *words: str) -> None:
    """Assert that a command ended with status 2 and a single `sdtune: ` line, the last on stderr, that contains `words`."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("sdtune: ")]
    assert len(lines) == 1, result.stderr
    assert result.stderr.rstrip().endswith(lines[0])
    for word in words:
        assert word in lines[0], lines[0]
