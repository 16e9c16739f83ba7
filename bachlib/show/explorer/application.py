"""The explorer: pick a user or type a history, see heads, π_u and κ, move π_u and watch the slate, ask why.

    Explorer({"p-bach": run, "v-bach": other_run}, dataset)

A JupyterLab application of ipywidgets around `Session`, which does the work, and the figure `plots.slate_by_head`.
`picture()` is the static twin of what is shown. It fits a laptop's screen of 1366 × 768 pixels and follows the theme
of JupyterLab; `plots.use("dark")` makes it dark anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from bachlib.show.explorer.session import Models, Session
from bachlib.show.explorer.widgets import FIXED, TIGHT, Row, Search, Theme, percentages, why_html
from bachlib.show.plots.heads import slate_by_head
from bachlib.show.plots.style import themed
from bachlib.train.run import Run, data_of, find_run


class Explorer(w.VBox):
    """`models`: what can be switched between, BACH models of one data set; `most_heads`: sliders at a time."""

    def __init__(self, models: Models, dataset: Dataset, user: int = 0, K: int = 15, most_heads: int = 8):
        self.session, self.most_heads = Session(models, dataset, K), most_heads
        self.answered_ms, self._still = 0.0, 0
        self._make_controls()
        self.figure = go.FigureWidget(layout=slate_by_head(np.ones((1, 1)), np.ones(1), [""], [""]).layout)
        self.figure.update_layout(width=398, showlegend=False, margin={"l": 20, "r": 8, "t": 34, "b": 40})
        self.figure.update_layout(title={"font": {"size": 14}, "pad": {"b": 8}}, yaxis_tickfont_size=12)
        self.figure.update_xaxes(title_font_size=12, tickfont_size=12)
        who = [self.method, self.search, self.no_user, self.users, self.typed, self.no_item, self.found]
        heads = [*self.rows, self.others, self.back, self.status]
        slate = [self.figure, self.asked, self.because]
        widths = {"292px": [*who, self.history, self.clear], "392px": heads, "400px": slate}
        columns = [w.VBox(children, layout=FIXED | {"width": width}) for width, children in widths.items()]
        super().__init__([w.HBox(columns, layout=FIXED | {"grid_gap": "6px"}), self.theme])
        self._look_for_users()
        self._look_for_items()
        self._be(user)

    @classmethod
    def of_runs(cls, *folders: str | Path, data: str | Path | Dataset | None = None, **how) -> Explorer:
        """Runs that `bach train` has left, all of one data set: paths, or names in outputs/runs or their beginnings."""
        if not folders:
            raise BachError("give at least one run folder, e.g. p-bach-movielens-1m-…")
        folders = [find_run(folder) for folder in folders]
        dataset = data_of(folders[0], data)
        runs = [Run.load(folder, dataset) for folder in folders]
        names = [run.about["identity"]["model"]["method"] for run in runs]
        if len(set(names)) < len(names):
            names = [run.folder.name for run in runs]
        return cls(dict(zip(names, runs, strict=True)), dataset, **how)

    def __repr__(self) -> str:
        told = f"{self.session.dataset.n_users:,} users, {self.session.dataset.n_items:,} items"
        return f"Explorer({', '.join(self.session.retrievers)}; {told})"

    def _make_controls(self) -> None:
        self.theme, wide, methods = Theme(), {"width": "286px"}, list(self.session.retrievers)
        self.method = w.ToggleButtons(options=methods, style={"button_width": "auto"}, layout=FIXED)
        self.search = Search(placeholder="number, genre or title", description="find user", layout=wide)
        self.users = w.Select(rows=8, layout=wide)
        self.typed = Search(placeholder="title; Enter adds it", description="add item", layout=wide)
        self.found = w.Select(rows=5, layout=wide)
        self.no_user, self.no_item, self.others, self.status, self.because = (w.HTML() for _ in range(5))
        scrolls = wide | {"max_height": "160px", "overflow": "auto"}
        self.history = w.TagsInput(allow_duplicates=False, layout=scrolls, placeholder="history")
        self.clear = w.Button(description="clear history", icon="trash")
        self.rows = [Row(lambda _change: self._still or self._steer()) for _ in range(self.most_heads)]
        self.back = w.Button(description="back to π_u", icon="undo")
        self.asked = w.Dropdown(description="why this?", layout={"width": "396px"}, style={"description_width": "64px"})
        for control, do in (
            (self.method, self._choose), (self.search, self._look_for_users), (self.users, self._be),
            (self.typed, self._look_for_items), (self.found, self._add), (self.history, self._read),
            (self.asked, self._why),
        ):  # fmt: skip
            control.observe(lambda _change, do=do: self._still or do(), names="value")
        self.back.on_click(lambda _button: self._show_heads())
        self.clear.on_click(lambda _button: self._take([]))
        self.typed.observe(lambda _change: self._add_typed(), names="entered")
        self.theme.observe(lambda _change: self._steer(), names="dark")

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
        self.no_user.value = "" if found else f"<small>no user fits “{escape(self.search.value)}”</small>"
        if found and self.search.value:
            self.users.value = int(found[0])

    def _be(self, user: int | None = None) -> None:
        user = self.users.value if user is None else user
        if user is not None:
            self.session.be(user)
            with self._quiet():
                self.users.value = None  # so that the same choice can be made again
            self._show_history()

    def _look_for_items(self) -> None:
        typed = self.typed.value.strip()
        with self._quiet():
            self.found.options = [(self.session.title(i), i) for i in self.session.find_items(typed)]
            self.found.value = None
        self.no_item.value = "" if self.found.options else f"<small>no item fits “{escape(typed)}”</small>"

    def _add(self, item: int | None = None) -> None:
        item = self.found.value if item is None else item
        if item is not None:
            with self._quiet():
                self.found.value = None  # as above
            self._take([i for i in self.session.history.tolist() if i != item] + [item])

    def _add_typed(self) -> None:
        """Enter: the item that fits best."""
        typed = self.typed.value.strip()
        if typed and (best := self.session.find_items(typed, 1)):
            self.typed.value = ""
            self._add(best[0])

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
            unknown += [] if found else [tag]
        self._take(numbers)
        if unknown:
            self.status.value = f"<b>no item fits “{escape(unknown[0])}”</b>"

    def _choose(self) -> None:
        self.session.choose(self.method.value)
        self._show_heads()

    def _show_heads(self) -> None:
        """New heads, or back to what the model says of the old ones."""
        try:
            heads, self.before = self.session.heads, self.session.slate()
        except BachError as error:
            self.status.value = f"<b>{escape(str(error))}</b>"
            return
        self.shown = np.sort(np.argsort(-heads.pi, kind="stable")[: self.most_heads])  # the largest, in their own order
        with self._quiet():
            for row, r in zip_longest(self.rows, self.shown):
                row.layout.display = "none" if r is None else None
                if r is not None:
                    row.show(int(r), heads)
        self._steer()

    @property
    def pi(self) -> np.ndarray:
        """π as the sliders have it; a browser rounds them, and one that was not moved stands for the model's number."""
        own, weights = self.session.heads.pi, {}
        for r, row in zip(self.shown, self.rows, strict=False):
            if row.forbid.value or abs(row.slider.value - own[r]) > 0.6 * row.slider.step:
                weights[int(r)] = 0.0 if row.forbid.value else row.slider.value
        return self.session.steered(weights) if weights else own

    def _steer(self) -> None:
        start = perf_counter()
        try:
            pi = self.pi
        except BachError:
            self.status.value = "<b>All heads have weight 0: no slate can be served.</b>"
            for row in self.rows:
                row.say(0)
            return
        self.slate, self.steered = self.session.slate(pi), pi
        self._draw(themed(self.picture(), self.theme.dark))
        *percent, rest = percentages([*pi[self.shown], 1 - pi[self.shown].sum()])
        with self._quiet():
            for row, r, part in zip(self.rows, self.shown, percent, strict=False):
                row.paint(int(r), self.session.heads, part, self.theme.dark)
            chosen, items = self.asked.value, self.slate.items[0].tolist()
            self.asked.options = [(f"{n}. {self.session.title(i)}", i) for n, i in enumerate(items, 1)]
            self.asked.value = chosen if chosen in items else items[0]
        self._why()
        self.answered_ms = 1000 * (perf_counter() - start)
        moved, hidden = np.abs(pi - self.session.heads.pi).sum() / 2, len(pi) - len(self.shown)
        self.others.value = f"<small>{hidden} other heads have {rest}% of π together</small>" if hidden else ""
        proved = "proved: exactly the best of all items" if self.slate.certified[0] else "not proved"
        who = "a typed history" if self.session.user is None else f"user {self.session.user} · ★ liked later"
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
            old, new = self.figure.layout, drawn.layout
            if old.template.layout.paper_bgcolor != new.template.layout.paper_bgcolor:
                old.template = new.template  # light ↔ dark; a template is slow to set
            old.title.text, old.height = new.title.text, 84 + 22 * len(new.yaxis.tickvals)
            old.yaxis.update(tickvals=new.yaxis.tickvals, ticktext=new.yaxis.ticktext)

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
        names, titles = [self.session.heads.names[r] for r in self.shown], [self.session.title(i) for i in items]
        relative = np.exp(slate.scores[0] - slate.scores[0, 0])
        return slate_by_head(slate.head_share[0][:, self.shown], relative, titles, names, self.shown, marks, longest=26)

    def _why(self) -> None:
        self.because.value = why_html(self.session, self.session.why(self.asked.value, self.steered), self.theme.dark)
