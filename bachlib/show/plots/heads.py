"""Figures of heads: where they stand among the items, what they stand for, how sharp they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from bachlib.show.plots.style import COLOURS, INK, PALE, PAPER, colour, label, tag

PALE_TO_ORANGE = [[0, PALE], [0.5, PAPER], [1, COLOURS[5]]]  # less of a genre is the rule: it should not shout


def map_of_items(
    items: Float[np.ndarray, "n 2"],
    item_head: Int[np.ndarray, " n"],
    hover: Sequence[str],
    heads: Float[np.ndarray, "k 2"],
    names: Sequence[str],
    weight: Float[np.ndarray, " k"] | None,
    top: Sequence[Sequence[int]] = (),
    regions: dict[str, Float[np.ndarray, " 2"]] | None = None,
    history: Sequence[int] = (),
    title: str | None = None,
    numbers: Sequence[int] | None = None,
    most: int = 3000,
) -> go.Figure:
    """Items in the colour of the head that explains them best, heads as stars sized by π and joined to their items.

    `hover`: a text per item; `weight`: π, None where heads have none; `top`: places of each head's first items;
    `regions`: words on the map; `history`: items to mark with a ring; `numbers`: which heads these are, where not
    all are shown. Of more than `most` items some are drawn, at random, and all that are in `top` or `history`.
    """
    figure, numbers = go.Figure(), range(len(names)) if numbers is None else numbers
    shown = np.random.default_rng(0).permutation(len(items))[:most]
    shown = np.unique(np.concatenate([shown, *(np.asarray(p, int) for p in top), np.asarray(history, int)]))
    for n, (r, name) in enumerate(zip(numbers, names, strict=True)):
        at = shown[item_head[shown] == n]
        figure.add_scatter(
            x=items[at, 0], y=items[at, 1], mode="markers", name=f"items of head {r}", legendgroup=str(r),
            showlegend=False, text=[hover[i] for i in at], hovertemplate=f"%{{text}}<extra>{tag(r, name)}</extra>",
            marker={"size": 4, "opacity": 0.45, "color": colour(r)},
        )  # fmt: skip
    for n, places in enumerate(top):
        r, ends = numbers[n], items[np.asarray(places, int)]
        x, y = (np.column_stack([np.full(len(ends), heads[n, a]), ends[:, a], np.full(len(ends), np.nan)]).ravel()
                for a in (0, 1))  # fmt: skip
        figure.add_scatter(
            x=x, y=y, mode="lines", line={"color": colour(r), "width": 1}, opacity=0.6, hoverinfo="skip",
            legendgroup=str(r), showlegend=False,
        )  # fmt: skip
    if len(history):
        ring = items[np.asarray(history, int)]
        figure.add_scatter(
            x=ring[:, 0], y=ring[:, 1], mode="markers", name="history", hoverinfo="skip",
            marker={"symbol": "circle-open", "size": 9, "color": INK, "line": {"width": 1.5}},
        )  # fmt: skip
    for n, (r, name) in enumerate(zip(numbers, names, strict=True)):
        size, told = (20.0, "") if weight is None else (9 + 34 * float(np.sqrt(weight[n])), f": {weight[n]:.1%} of π")
        figure.add_scatter(
            x=[heads[n, 0]], y=[heads[n, 1]], mode="markers", name=tag(r, name, 24), legendgroup=str(r),
            marker={"symbol": "star", "size": size, "color": colour(r), "line": {"color": INK, "width": 1.5}},
            hovertemplate=f"{tag(r, name, 34)}{told}<extra></extra>",
        )  # fmt: skip
    for word, (x, y) in (regions or {}).items():
        figure.add_annotation(
            x=x, y=y, text=f"<b>{label(word)}</b>", showarrow=False, yanchor="bottom", font={"size": 13, "color": INK},
        )  # fmt: skip
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False, scaleanchor="x", scaleratio=1)
    if title is None:
        title = f"Where the {len(names)} heads stand"
        if weight is not None:
            n = int(np.argmax(weight))
            title += f"; the largest, {tag(numbers[n], names[n])}, has {weight[n]:.0%} of π"
    return figure.update_layout(
        title=title, height=620, margin={"l": 10, "r": 10, "b": 10},
        legend={"itemsizing": "constant", "font": {"size": 12},
                "title": {"text": "heads" if weight is None else "heads, sized by π"}},
    )  # fmt: skip


def head_lift(
    lift: Float[np.ndarray, "k g"], names: Sequence[str], genres: Sequence[str], numbers: Sequence[int] | None = None
) -> go.Figure:
    """Head × genre: how many times as often a genre is among a head's items as among all likes; by doublings."""
    numbers = range(len(names)) if numbers is None else numbers
    z = np.clip(np.log2(np.maximum(lift, 1e-9)), -3, 3)
    text = [[f"{v:.1f}" if v >= 1.5 else "" for v in row] for row in lift]
    ticks = [-3, -2, -1, 0, 1, 2, 3]
    figure = go.Figure(
        go.Heatmap(
            z=z, x=[label(g, 18) for g in genres], y=[tag(r, name, 26) for r, name in zip(numbers, names, strict=True)],
            customdata=lift, colorscale=PALE_TO_ORANGE, zmid=0, zmin=-3, zmax=3, xgap=1, ygap=1,
            text=text, texttemplate="%{text}", textfont={"size": 11},
            hovertemplate="%{y}<br>%{x}: × %{customdata:.2f}<extra></extra>",
            colorbar={"title": "lift", "tickvals": ticks, "ticktext": [f"× {2.0**t:g}" for t in ticks]},
        )
    )  # fmt: skip
    r, g = np.unravel_index(np.argmax(lift), lift.shape)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(tickangle=-40, showgrid=False)
    what = f"Head {numbers[r]} has {label(genres[g])} {lift[r, g]:.1f} times as often as people's likes have it"
    return figure.update_layout(title=what, height=max(400, 190 + 24 * len(names)))


def kappa_and_tightness(
    kappa: Float[np.ndarray, " m"],
    tightness: Float[np.ndarray, " m"],
    head: Int[np.ndarray, " m"],
    names: Sequence[str],
    correlation: float,
    numbers: Sequence[int] | None = None,
) -> go.Figure:
    """The learnt κ of heads against the mean cosine of the items they explain; a dot per user and head."""
    figure, numbers = go.Figure(), range(len(names)) if numbers is None else numbers
    for n, (r, name) in enumerate(zip(numbers, names, strict=True)):
        at = head == n
        if at.any():
            figure.add_scatter(
                x=tightness[at], y=kappa[at], mode="markers", name=tag(r, name),
                marker={"size": 5, "opacity": 0.5, "color": colour(r)},
                hovertemplate="mean cosine %{x:.2f}<br>κ %{y:.1f}<extra></extra>",
            )  # fmt: skip
    figure.update_xaxes(title="mean cosine of the head and the items it explains")
    figure.update_yaxes(title="learnt κ")
    said = "grows with" if correlation > 0.2 else "falls with" if correlation < -0.2 else "hardly follows"
    text = f"κ {said} how tight a head's items are: rank correlation {correlation:+.2f}"
    return figure.update_layout(title=text, legend={"itemsizing": "constant", "font": {"size": 12}})


def recovered_interests(
    overlap: Float[np.ndarray, "k m"],
    names: Sequence[str],
    truth: Sequence[str],
    share: Float[np.ndarray, " m"],
    what: str = "planted interests",
) -> go.Figure:
    """True interests against heads: which share of an interest's items a head is responsible for.

    overlap (k, m): columns sum to one over heads; `share`: how much of all likes an interest has.
    """
    best = overlap.argmax(0)
    order = np.lexsort((-overlap.max(0), best))
    used = [r for r in range(len(names)) if overlap[r].max() > 0.05]
    z = overlap[np.ix_(used, order)]
    figure = go.Figure(
        go.Heatmap(
            z=z, x=[f"{label(truth[j], 16)}" for j in order], y=[tag(r, names[r], 26) for r in used],
            colorscale=[[0, PAPER], [1, COLOURS[0]]], zmin=0, zmax=1, xgap=1, ygap=1,
            text=[[f"{v:.0%}" if v > 0.15 else "" for v in row] for row in z], texttemplate="%{text}",
            textfont={"size": 11}, colorbar={"title": "γ", "tickformat": ".0%"},
            hovertemplate="%{x}: %{z:.0%} explained by<br>%{y}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(tickangle=-40, showgrid=False, title=what)
    held = float((overlap.max(0) * share).sum() / share.sum())
    one = sum(overlap.max(0) > 0.5)
    text = f"{one} of {len(truth)} {what} have one head for most of their items ({held:.0%} on average)"
    return figure.update_layout(title=text, height=max(380, 190 + 24 * len(used)))
