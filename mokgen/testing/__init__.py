"""The body of every generated test: one layer, compiled or on the CPU executor, held to the oracle and to its contract.

Joins runtime and reference. `check_layer` is what a generated test calls; `open_subject` decides what runs where.
"""

from __future__ import annotations

from mokgen.testing.check import CheckFailed, Report, check_layer
from mokgen.testing.subject import Subject, open_subject, reduced_layer

__all__ = ["CheckFailed", "Report", "Subject", "check_layer", "open_subject", "reduced_layer"]
