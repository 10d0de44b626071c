"""Executing programs without devices: whether they can run, how long they take, what they hold.

``check_deadlock`` runs a program with blocking communication; ``simulate`` runs it as the
engine does, against a cost model, and gives the ``Timeline`` that the engine should measure.
"""

from lightning_spindle.simulate.deadlock import DeadlockError, ProgramError, check_deadlock
from lightning_spindle.simulate.iteration import simulate

__all__ = ["DeadlockError", "ProgramError", "check_deadlock", "simulate"]
