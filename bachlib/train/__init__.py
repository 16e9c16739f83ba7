"""Algorithm 1: fit, resume, early stopping."""

from bachlib.train.loop import fit
from bachlib.train.run import Run
from bachlib.train.watch import scalars

__all__ = ["Run", "fit", "scalars"]
