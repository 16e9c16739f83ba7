"""How good a model is, and what its heads do."""

from bachlib.evaluate import metrics
from bachlib.evaluate.ranking import Evaluation, evaluate

__all__ = ["Evaluation", "evaluate", "metrics"]
