"""Real data, offline: each datamodule reads files that an installed wheel ships."""

from datamodules.digits import Digits
from datamodules.motions import Motions
from datamodules.vowels import Vowels

__all__ = ["Digits", "Motions", "Vowels"]
