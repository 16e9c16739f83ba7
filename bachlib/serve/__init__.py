"""Serving: exact, two-step and codebook retrieval with certificates; steering, re-ranking, cold start.

`Retriever` comes with torch; a saved codebook is served without it by `bachlib.serve.lean`.
"""

from typing import Any

from bachlib.serve.slate import Slate
from bachlib.serve.steering import Steering

__all__ = ["Retriever", "Slate", "Steering"]


def __getattr__(name: str) -> Any:
    if name != "Retriever":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bachlib.serve.retriever import Retriever

    return Retriever
