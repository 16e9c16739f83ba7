"""Watching a training: a bar on a terminal, one line that renews itself in a notebook, else a line per epoch."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm


class Progress:
    def __init__(self, epochs: int, windows: int, quiet: bool):
        self.epochs, self.windows, self.quiet = epochs, windows, quiet
        self.bar: tqdm | None = None
        self.terminal = not quiet and sys.stderr.isatty()
        self.notebook = None if quiet or self.terminal else _notebook_display()
        self.lines: list[str] = []
        self.shown = 0.0

    def step(self, epoch: int, done: int, n: int, row: Any) -> None:
        """`done` windows of the epoch are through, the last `n` of them in this step; `row()` tells what is seen."""
        if self.terminal:
            if self.bar is None:
                self.bar = tqdm(
                    total=self.windows, initial=done - n, unit=" windows", unit_scale=True, leave=False,
                    dynamic_ncols=True, desc=f"epoch {epoch}/{self.epochs}",
                )  # fmt: skip
            self.bar.update(n)
        if (self.bar or self.notebook) and time.monotonic() - self.shown > 0.5:
            self.shown = time.monotonic()
            if self.bar:
                self.bar.set_postfix_str(_seen(row()))
            else:
                self._renew(f"epoch {epoch}/{self.epochs} · {done / self.windows:4.0%} · {_seen(row())}")

    def epoch(self, row: dict[str, Any], best: bool, seconds_left: float) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        auprc = "" if row["valid_auprc"] is None else f" · AUPRC {row['valid_auprc']:.4f}{' (best)' if best else ''}"
        left = f", at most {_time(seconds_left)} left" if seconds_left else ""
        speed = f"{row['windows_per_s']:,.0f} windows/s{left}"
        self.say(f"epoch {row['epoch']:>3}/{self.epochs} · {_seen(row)}{auprc} · {speed}")

    def say(self, line: str) -> None:
        if self.quiet:
            return
        if self.notebook:
            self.lines.append(line)
            self._renew()
        elif self.terminal:
            tqdm.write(line, file=sys.stderr)
        else:
            print(line, flush=True)

    def _renew(self, now: str = "") -> None:
        """The first epoch, the last ones, and what happens now."""
        lines = self.lines if len(self.lines) <= 6 else [self.lines[0], "…", *self.lines[-4:]]
        self.notebook.update({"text/plain": "\n".join([*lines, *([now] if now else [])])}, raw=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def _seen(row: dict[str, Any]) -> str:
    text = f"loss {row['loss']:.3f}"
    if row["entropy"] or row["prior"]:  # BACH: the three terms and the concentrations
        text += f" = −({row['reconstruction']:.3f} {row['prior']:+.3f} {row['entropy']:+.3f})"
        text += f" · κ {row['kappa_min']:.1f}–{row['kappa_max']:.1f}"
    return f"{text} · heads {row['effective_heads']:.1f}/{len(row['usage'])}"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _notebook_display():
    """A place in the output of the cell that can be renewed, or None where there is no notebook."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return None
    return display({"text/plain": "training …"}, raw=True, display_id=True)
