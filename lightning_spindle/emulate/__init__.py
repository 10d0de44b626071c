"""The real engine on devices that are not there: what a simulated iteration is held against.

Every rank is a thread with an engine of its own, which sends real (small) tensors over gloo. Operators
are stubs that advance their rank's virtual clock by what they cost, and messages take the time that a
modelled network gives them. Costs and sizes come from the same ``Costs`` as the simulator's; how an
iteration unfolds comes from the engine, and how transfers share links is written anew here, so that a
mistake of the simulator shows.
"""

from lightning_spindle.emulate.run import emulate

__all__ = ["emulate"]
