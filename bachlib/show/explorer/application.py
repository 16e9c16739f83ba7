"""The explorer: pick a user or type a history, see heads, π_u and κ, move π_u and watch the slate, ask why.

    Explorer({"p-bach": run, "v-bach": other_run}, dataset)

A JupyterLab application of ipywidgets around `serve.session.Session`, which does the work, and the figure
`plots.slate_by_head`. `picture()` is the static twin of what is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from itertools import zip_longest
from pathlib import Path
from time import perf_counter

import ipywidgets as w
import numpy as np
import plotly.graph_objects as go

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.model.twotower import TwoTower
from bachlib.serve import Retriever
from bachlib.show.explorer.controls import TIGHT, Row, why_html
from bachlib.show.explorer.session import Session
from bachlib.show.plots.profiles import slate_by_head
from bachlib.show.plots.style import themed
from bachlib.train.run import Run, data_of


class Explorer(w.VBox):
    """`models`: what can be switched between, BACH models of one data set; `most_heads`: sliders at a time."""

    def __init__(
        self,
        models: Mapping[str, Run | TwoTower | Retriever],
        dataset: Dataset,
        user: int = 0,
        K: int = 15,
        most_heads: int = 8,
    ):
        self.session, self.most_heads = Session(models, dataset, K), most_heads
        self.answered_ms, self._still = 0.0, 0
        self._make_controls()
        self.figure = go.FigureWidget(layout=themed(slate_by_head(np.ones((1, 1)), np.ones(1), [""], [""])).layout)
        self.figure.update_layout(width=610, showlegend=False)  # the heads are listed beside it
        rows = w.VBox([row.box for row in self.rows])
        left = w.VBox([rows, self.others, self.back, self.status, self.asked, self.because], layout={"width": "475px"})
        people, catalogue = w.VBox([self.search, self.users]), w.VBox([self.typed, self.found])
        super().__init__(
            [w.HBox([self.method, people, catalogue]), self.history, w.HBox([left, self.figure])],
        )
        self._look_for_users()
        self._be(user)

    @classmethod
    def of_runs(cls, *folders: str | Path, data: str | Path | None = None, **how) -> Explorer:
        """The runs of some folders, as `bach train` leaves them; all of one data set."""
        if not folders:
            raise BachError("give at least one run folder, e.g. outputs/runs/p-bach-movielens-1m-…")
        dataset = data_of(Path(folders[0]), Path(data) if data else None)
        runs = [Run.load(folder, dataset) for folder in folders]
        names = [run.about["identity"]["model"]["method"] for run in runs]
        twice = len(set(names)) < len(names)
        return cls(
            {run.folder.name if twice else name: run for name, run in zip(names, runs, strict=True)}, dataset, **how
        )

    def __repr__(self) -> str:
        told = f"{self.session.dataset.n_users:,} users, {self.session.dataset.n_items:,} items"
        return f"Explorer({', '.join(self.session.retrievers)}; {told})"

    # ------------------------------------------------------------------------------------------------------- controls

    def _make_controls(self) -> None:
        column, word = {"width": "440px"}, {"description_width": "70px"}
        self.method = w.ToggleButtons(options=list(self.session.retrievers), layout={"width": "170px"})
        self.search = w.Text(placeholder="a number, or what they like", description="find user", style=word)
        self.users = w.Select(rows=3, layout=column)
        self.typed = w.Text(placeholder="a word of a title", description="add item", style=word)
        self.found = w.Select(rows=3, layout=column)
        self.history = w.TagsInput(
            allow_duplicates=False,
            layout={"width": "98%", "max_height": "66px", "overflow": "auto"},
            placeholder="history",
        )
        self.rows = [Row.make(lambda _change: self._still or self._steer()) for _ in range(self.most_heads)]
        self.others = w.HTML()
        self.back = w.Button(description="back to π_u", icon="undo")
        self.status = w.HTML()
        self.asked = w.Dropdown(description="why this?", layout=column, style=word)
        self.because = w.HTML()
        for control, do in (
            (self.method, self._choose), (self.search, self._look_for_users), (self.users, self._be),
            (self.typed, self._look_for_items), (self.found, self._add), (self.history, self._read),
            (self.asked, self._why),
        ):  # fmt: skip
            control.observe(lambda _change, do=do: self._still or do(), names="value")
        self.back.on_click(lambda _button: self._show_heads())

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """While controls are set by the program, nothing happens by itself."""
        self._still += 1
        try:
            yield
        finally:
            self._still -= 1

    def _look_for_users(self) -> None:
        found = self.session.find_users(self.search.value)
        with self._quiet():
            self.users.options = [(self.session.about_user(int(u)), int(u)) for u in found]
            self.users.value = None
        if found and self.search.value:
            self.users.value = int(found[0])

    def _be(self, user: int | None = None) -> None:
        user = self.users.value if user is None else user
        if user is not None:
            self.session.be(user)
            self._forget(self.users)
            self._show_history()

    def _look_for_items(self) -> None:
        with self._quiet():
            self.found.options = [(self.session.title(i), i) for i in self.session.find_items(self.typed.value)]
            self.found.value = None

    def _add(self) -> None:
        if (item := self.found.value) is not None:
            self._forget(self.found)
            self._take([i for i in self.session.history.tolist() if i != item] + [item])

    def _forget(self, chosen: w.Select) -> None:
        """So that the same choice can be made again."""
        with self._quiet():
            chosen.value = None

    def _take(self, history: list[int]) -> None:
        try:
            self.session.read(history)
        except BachError as error:
            self.status.value = f"<b>{escape(str(error))}</b>"
        else:
            self._show_history()

    def _show_history(self) -> None:
        with self._quiet():
            self.history.value = [self._tag(i) for i in self.session.history[-self.session.retriever.model.n_hist :]]
        self._show_heads()

    def _tag(self, item: int) -> str:
        return f"{self.session.title(item)} · {item}"

    def _read(self) -> None:
        """Tags were removed, moved or typed; what was typed becomes the item that fits best."""
        numbers, unknown = [], []
        for tag in self.history.value:
            number = tag.rpartition(" · ")[2]
            known = number.isdecimal() and int(number) < self.session.dataset.n_items and self._tag(int(number)) == tag
            found = [int(number)] if known else self.session.find_items(tag, 1)
            numbers += [i for i in found if i not in numbers]
            unknown += [tag] if not found else []
        self._take(numbers)
        if unknown:
            self.status.value = f"<b>There is no item like “{escape(unknown[0])}”.</b>"

    def _choose(self) -> None:
        self.session.choose(self.method.value)
        self._show_heads()

    # ------------------------------------------------------------------------------------------------ heads and slate

    def _show_heads(self) -> None:
        """New heads, or back to what the model says of the old ones."""
        try:
            heads, self.before = self.session.heads, self.session.slate()
        except BachError as error:
            self.status.value = f"<b>{escape(str(error))}</b>"
            return
        self.shown = heads.largest(self.most_heads)
        with self._quiet():
            for row, r in zip_longest(self.rows, self.shown):
                row.box.layout.display = "none" if r is None else None
                if r is not None:
                    row.show(int(r), heads)
        self._steer()

    @property
    def pi(self) -> np.ndarray:
        """π as the sliders have it; a browser rounds them, and one that was not moved stands for the model's number."""
        own, weights = self.session.heads.pi, {}
        for r, row in zip(self.shown, self.rows, strict=False):
            moved = abs(row.slider.value - own[r]) > 0.6 * row.slider.step
            weights[int(r)] = 0.0 if row.forbid.value else row.slider.value if moved else own[r]
        return self.session.steered(weights)

    def _steer(self) -> None:
        start = perf_counter()
        try:
            pi = self.pi
        except BachError:
            self.status.value = "<b>No head has any weight: there is nothing to serve by.</b>"
            return
        self.slate, self.steered = self.session.slate(pi), pi
        self._draw(themed(self.picture()))
        with self._quiet():
            chosen, items = self.asked.value, self.slate.items[0].tolist()
            self.asked.options = [(f"{n}. {self.session.title(i)}", i) for n, i in enumerate(items, 1)]
            self.asked.value = chosen if chosen in items else items[0]
        self._why()
        self.answered_ms = 1000 * (perf_counter() - start)
        moved = np.abs(pi - self.session.heads.pi).sum() / 2
        hidden = len(pi) - len(self.shown)
        kept = f"{hidden} other heads have {1 - pi[self.shown].sum():.0%} of π together"
        self.others.value = f"<small>{kept}</small>" if hidden else ""
        proved = "proved: exactly the best of all items" if self.slate.certified[0] else "not proved"
        who = "a history of your own" if self.session.user is None else f"user {self.session.user} · ★ liked later"
        self.status.value = (
            f'<div style="{TIGHT}"><small>{who}<br>{moved:.0%} of π<sub>u</sub> moved · {proved}<br>'
            f"answered in {self.answered_ms:.0f} ms</small></div>"
        )

    def _draw(self, drawn: go.Figure) -> None:
        """Refill the figure that is there: much less has to travel to the browser than with a new one."""
        with self.figure.batch_update():
            if len(drawn.data) != len(self.figure.data):
                self.figure.data = []
                self.figure.add_traces(drawn.data)
                for trace in self.figure.data:
                    trace.on_click(self._clicked)
            else:
                for old, new in zip(self.figure.data, drawn.data, strict=True):
                    kept = {key: new[key] for key in ("x", "y", "customdata", "text", "name", "hovertemplate")}
                    old.update(kept, marker_color=new.marker.color)
            self.figure.layout.title.text, self.figure.layout.height = drawn.layout.title.text, drawn.layout.height
            self.figure.layout.yaxis.update(tickvals=drawn.layout.yaxis.tickvals, ticktext=drawn.layout.yaxis.ticktext)

    def _clicked(self, _trace, points, _state) -> None:
        if points.point_inds:
            self.asked.value = int(self.slate.items[0][points.point_inds[0]])

    def picture(self) -> go.Figure:
        """What is shown now, as a figure."""
        slate, was = self.slate, {item: n for n, item in enumerate(self.before.items[0].tolist())}
        items, marks = slate.items[0].tolist(), []
        for n, item in enumerate(items):
            up = was.get(item, n) - n
            moved = "new" if item not in was else f"↑{up}" if up > 0 else f"↓{-up}" if up < 0 else ""
            marks.append(f"{'★ ' * (item in self.session.later)}{moved}".strip())
        names = [self.session.heads.names[r] for r in self.shown]
        relative = np.exp(slate.scores[0] - slate.scores[0, 0])
        titles = [self.session.title(i) for i in items]
        return slate_by_head(slate.head_share[0][:, self.shown], relative, titles, names, self.shown, marks)

    # ------------------------------------------------------------------------------------------------------------ why

    def _why(self) -> None:
        self.because.value = why_html(self.session, self.session.why(self.asked.value, self.steered))
