"""`bach sweep` while it runs: a table that renews itself in a terminal, a line per event elsewhere."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bachlib.experiment import cluster as pool
from bachlib.experiment import estimate
from bachlib.experiment.cluster import LOG, Outcome
from bachlib.experiment.stages import data_name, prepared
from bachlib.experiment.sweep import Point, Sweep, keep, state

SHOWN = 12  # rows of a long sweep: what runs, what failed, and the last that were done


def run_sweep(
    sweep: Sweep, *, workers: int | None = None, threads: int | None = None, dask: str | None = None
) -> dict[str, Outcome]:
    """Run what is missing of a sweep; returns the outcome of every point."""
    folder = keep(sweep)
    known = {point.name: Outcome("done", state(point).seconds or 0.0) for point in sweep.points if _done(point)}
    missing = [point for point in sweep.points if point.name not in known]
    if not missing:
        return known
    if dask:
        where, threads = pool.on_dask(dask), threads or 1  # each of a cluster's threads takes a run
    else:
        workers, threads = pool.local_workers(len(missing), workers, threads)
        where = pool.here(workers)
    with where as (executor, limit), Progress(sweep, known, limit) as progress:
        progress.say(f"{folder.name}: {len(known)} done, {len(missing)} to run, {limit} at a time → {folder}")
        if dask:  # once and here: machines that share a disk do not see each other's locks
            for p in {data_name(point.p): point.p for point in missing}.values():
                prepared(p)
        return known | pool.through(executor, missing, threads, progress.tell, limit)


def _done(point: Point) -> bool:
    return state(point).status == "done"


class Progress:
    def __init__(self, sweep: Sweep, known: dict[str, Outcome], limit: int):
        self.points, self.limit = sweep.points, limit
        self.ended, self.running = dict(known), {}
        self.before = len(known)
        self.points_of = {point.name: point for point in sweep.points}
        self.hopes: dict[str, float] = {}
        self.console = Console(highlight=False)
        self.live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def tell(self, point: Point | None, outcome: Outcome | None) -> None:
        """A point has begun or ended; None: time has passed."""
        if point and outcome:
            self.running.pop(point.name, None)
            self.ended[point.name] = outcome
            if not self.live:
                why = f": {outcome.error.splitlines()[0]}" if outcome.error else ""
                counts = f"[{len(self.ended)}/{len(self.points)}]"
                self.say(f"{counts} {point.name} {outcome.status} in {outcome.seconds:.0f} s{why}; {self.left()}")
        elif point:
            self.running[point.name] = time.monotonic()
        if self.live:
            self.live.update(self.table(), refresh=True)

    def left(self) -> str:
        """Time left: what was expected of the rest, corrected by how the finished ones went."""
        new = [(name, outcome) for name, outcome in list(self.ended.items())[self.before :] if outcome.status == "done"]
        took, hoped = sum(outcome.seconds for _, outcome in new), sum(self.expected(name) for name, _ in new)
        factor = took / hoped if hoped > 0 else 1.0
        waiting = [point.name for point in self.points if point.name not in self.ended]
        rest = [factor * self.expected(name) - self._since(name) for name in waiting]
        if any(math.isnan(seconds) for seconds in rest):
            return "nobody knows how much is left"
        return f"about {spoken(sum(max(1.0, s) for s in rest) / self.limit)} left" if rest else "nothing left"

    def expected(self, name: str) -> float:
        """Asked again as long as nobody knows: after the first run the data is prepared."""
        if math.isnan(self.hopes.get(name, math.nan)):
            self.hopes[name] = estimate.seconds(self.points_of[name].p)
        return self.hopes[name]

    def _since(self, name: str) -> float:
        return time.monotonic() - self.running[name] if name in self.running else 0.0

    def table(self) -> Group:
        counts = Counter(outcome.status for outcome in self.ended.values())
        waiting = len(self.points) - len(self.ended) - len(self.running)
        head = f"{counts['done']} done · {len(self.running)} running · {counts['failed']} failed · {waiting} waiting"
        running, failed, done, waits = ([] for _ in range(4))
        kinds = {"running": running, "failed": failed, "done": done, "waiting": waits}
        for name in [*self.ended, *(point.name for point in self.points if point.name not in self.ended)]:
            status, said = self._row(name)
            kinds[status].append((name, status, said))
        rows = [*running, *failed[-SHOWN // 2 :], *reversed(done), *waits][:SHOWN]
        table = Table(box=None, pad_edge=False)
        for column in ("run", "status", "time"):
            table.add_column(column)
        for row in rows:
            table.add_row(*row)
        return Group(Text(f"{head} · {self.left()}"), table)

    def _row(self, name: str) -> tuple[str, str]:
        if name in self.running:
            return "running", spoken(self._since(name))
        if name in self.ended:
            outcome = self.ended[name]
            return outcome.status, outcome.error.splitlines()[0] if outcome.error else spoken(outcome.seconds)
        return "waiting", f"about {spoken(self.expected(name))}"


def spoken(seconds: float) -> str:
    """95 → "1 min 35 s"."""
    if math.isnan(seconds):
        return "unknown time, until the data is prepared"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def plan(sweep: Sweep, workers: int | None, threads: int | None) -> str:
    """What `bach sweep` would do: each point with its state and a rough time."""
    lines, rest = [], 0.0
    for point in sweep.points:
        now, about = state(point).status, estimate.seconds(point.p)
        rest += 0 if now == "done" else about
        told = "done" if now == "done" else f"{now}, about {spoken(about)}"
        lines.append(f"  {point.name:<52} {told}")
    missing = sum(state(point).status != "done" for point in sweep.points)
    workers, threads = pool.local_workers(max(1, missing), workers, threads)
    total = f"{len(sweep.points)} runs, {missing} to do; about {spoken(rest / workers)} with {workers} at a time"
    return "\n".join([f"{sweep.file.name}: {sweep.file.about}", *lines, f"{total} ({threads} threads each). Rough."])


def failures(points: Sequence[Point], outcomes: dict[str, Outcome]) -> list[str]:
    """Why runs have failed, with where to read more."""
    return [
        f"{point.name}: {outcome.error}\n  log: {point.folder / LOG}"
        for point in points
        if (outcome := outcomes.get(point.name)) and outcome.status == "failed"
    ]
