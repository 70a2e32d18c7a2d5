"""The CPU executor: runs the tasks of a stored plan with torch, in ticket order or in a seeded interleaving.

It honours the plan's waits and signals and nothing else, and refuses a read of what is not yet written.
"""

from mokgen.execute.run import route, run
from mokgen.execute.state import DeadlockError, UnwrittenReadError
from mokgen.plan.model import LayerPlan

__all__ = ["DeadlockError", "LayerPlan", "UnwrittenReadError", "route", "run"]
