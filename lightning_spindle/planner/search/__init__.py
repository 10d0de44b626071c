"""The planner that searches: no stage barriers, simulated annealing from a linear program's optimum.

1. Start: the LP across levels (``bounds.across_levels``) for several capacities γN, rounded to
   whole layers; the best of these orders (``start``). γ below 1 leaves room for what rounding loses.
2. Annealing over orders of slices ⟨n, l⟩ (``anneal``, ``moves``), each decoded to a schedule
   (``decode``).
3. Finalists are placed on devices (section 3.5, ``placement``) and compared as they will run, with
   the plans of all other planners: the result is never worse than theirs.
"""

from __future__ import annotations

from lightning_spindle.planner.search.plan import Score, plan_search

__all__ = ["Score", "plan_search"]
