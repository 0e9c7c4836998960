"""The published searches for sublayers to skip, one file each, as rivals in the same harness and on the same budget.

To add one, write a file with a `Method` and name its class in `studies.searches.skip_sets.study.METHODS`.
"""

from __future__ import annotations

from studies.searches.skip_sets.study import SkipSets

__all__ = ["SkipSets"]
