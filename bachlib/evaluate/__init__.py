"""How good a model is, and what its heads do."""

from bachlib.evaluate.evaluation import Evaluation, evaluate
from bachlib.rank import metrics

__all__ = ["Evaluation", "evaluate", "metrics"]
