"""Algorithm 1: fit, resume, early stopping."""

from bachlib.train.loop import fit
from bachlib.train.run import Run

__all__ = ["Run", "fit"]
