"""Serving: exact, two-step and codebook retrieval with certificates; steering, re-ranking, cold start.

`Retriever` comes with torch; `bachlib.serve.lean` serves a saved index without it, and so does `rescore`.
"""

from typing import Any

from bachlib.serve.slate import Slate
from bachlib.serve.steering import Steering

__all__ = ["Retriever", "Slate", "Steering", "rescore"]


def __getattr__(name: str) -> Any:
    if name == "Retriever":
        from bachlib.serve.retriever import Retriever as found
    elif name == "rescore":
        from bachlib.serve.lean import rescore as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
