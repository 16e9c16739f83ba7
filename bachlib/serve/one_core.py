"""One request, one core: the products of a request take one thread each.

torch and numpy bring thread pools of their own. A request that goes from one to the other (towers, then scan) has the
workers of both spinning on the same cores: on two cores a scan of 0.7 ms took 7. Several requests at a time use several
cores; numpy has its threads back when the last of them is done.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np  # noqa: F401  (its BLAS has to be there before the controller looks for it)
import threadpoolctl

_pools = threadpoolctl.ThreadpoolController()
_lock = threading.Lock()
_inside, _limit = 0, None


@contextmanager
def one_core() -> Iterator[None]:
    """numpy's matrix products on one thread, for as long as anybody is inside."""
    global _inside, _limit
    with _lock:
        if _inside == 0:
            _anybody()
            _limit = _pools.limit(limits=1, user_api="blas")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _anybody()
                _limit.restore_original_limits()
                _anybody()


def _anybody() -> None:
    """Whoever comes last gives the threads back: threadpoolctl would only listen to who came first."""
    clear = getattr(getattr(threadpoolctl, "OpenBLASController", None), "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)
