"""What may end a training early: somebody's Ctrl-C, which never cuts a step in half, and numbers that are none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bachlib.model.twotower import Objective
from bachlib.params import TrainParams


def diverged(
    model: nn.Module,
    seen: Objective | None,
    wrong: str,
    loss: float,
    epoch: int,
    step: int,
    p: TrainParams,
    state: Path,
) -> str:
    """What went wrong in a step whose loss or gradient is not a finite number."""
    terms = {name: value.item() for name, value in seen.terms.items()} if seen else {}
    bad_terms = [wrong] if wrong else [f"{name} = {value}" for name, value in terms.items() if not np.isfinite(value)]
    parameters = dict(model.named_parameters())
    bad = [name for name, q in parameters.items() if q.grad is not None and not q.grad.isfinite().all()]
    largest = sorted(parameters, key=lambda name: -parameters[name].detach().abs().nan_to_num(torch.inf).max())[:3]
    kappa = "κ from {:.4g} to {:.4g}, ".format(*seen.encoded.kappa.detach().aminmax()) if seen else ""
    return (
        f"training diverged in epoch {epoch}, step {step}: loss = {loss}"
        f"\n  terms: {', '.join(bad_terms) or 'all finite, ' + str({n: round(v, 4) for n, v in terms.items()})}"
        f"\n  gradient not finite in: {', '.join(bad[:6]) or 'none'}{' …' if len(bad) > 6 else ''}"
        f"\n  {kappa}learning rate {p.learning_rate:g}, largest parameters: "
        + ", ".join(f"{name} (|max| {parameters[name].detach().abs().max():.4g})" for name in largest)
        + f"\n  the last good state is kept in {state}; a smaller learning rate or a larger tau is what usually helps"
    )


@contextmanager
def stopped_by_ctrl_c() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that a step is never cut in half; the second one interrupts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def on_interrupt(*_: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
