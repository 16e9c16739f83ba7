"""Figures of heads (where they stand, what they mean, how sharp they are), and of π_u and the slates it brings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from bachlib.show.plots.style import COLOURS, GREY, INK, LIGHT, PALE, PAPER, colour, label, tag, wrapped

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
    most: int = 2000,
) -> go.Figure:
    """Items in the colour of the head that explains them best, heads as stars sized by π and joined to their items.

    `hover`: a text per item; `weight`: π, None where heads have none; `top`: places of each head's first items;
    `regions`: words on the map; `history`: items to mark with a ring; `numbers`: which heads these are, where not
    all are shown. Of more than `most` items some are drawn, at random, and all that are in `top` or `history`.
    """
    figure, numbers = go.Figure(), range(len(names)) if numbers is None else numbers
    items = np.asarray(items, np.float32)  # half the bytes in a notebook
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
    figure.update_xaxes(visible=False).update_yaxes(visible=False, scaleanchor="x", scaleratio=1)
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
    figure.update_yaxes(autorange="reversed", showgrid=False).update_xaxes(tickangle=-40, showgrid=False)
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
    figure.update_xaxes(title="mean cosine of the head and the items it explains").update_yaxes(title="learnt κ")
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
    figure.update_yaxes(autorange="reversed", showgrid=False).update_xaxes(tickangle=-40, showgrid=False, title=what)
    held = float((overlap.max(0) * share).sum() / share.sum())
    one = sum(overlap.max(0) > 0.5)
    text = f"{one} of {len(truth)} {what} have one head for most of their items ({held:.0%} on average)"
    return figure.update_layout(title=text, height=max(380, 190 + 24 * len(used)))


# ------------------------------------------------------------------------------------------ of users and slates


def by_head(
    share: Float[np.ndarray, "n c"], names: Sequence[str], numbers: Sequence[int] | None = None
) -> list[tuple[Float[np.ndarray, " n"], str, str]]:
    """Shares of heads with their colours and tags; what is missing to one is a grey part of the other heads."""
    numbers = range(len(names)) if numbers is None else numbers
    parts = [(share[:, n], colour(r), tag(r, names[n])) for n, r in enumerate(numbers)]
    rest = 1 - share.sum(1)
    return [*parts, (rest, GREY, "other heads")] if rest.max(initial=0) > 1e-5 else parts


def pi_ternary(pi: Float[np.ndarray, "U 3"], names: Sequence[str], hover: Sequence[str] | None = None) -> go.Figure:
    """Users with three heads as points of a triangle, coloured by the head that has most of them."""
    figure, first = go.Figure(), pi.argmax(1)
    for r, name in enumerate(names):
        at = first == r
        figure.add_scatterternary(
            a=pi[at, 0], b=pi[at, 1], c=pi[at, 2], mode="markers", name=f"mostly {label(name)}",
            marker={"size": 6, "opacity": 0.6, "color": colour(r)},
            text=None if hover is None else [hover[u] for u in np.flatnonzero(at)],
            hovertemplate="%{text}" * (hover is not None) + "<br>%{a:.2f} · %{b:.2f} · %{c:.2f}<extra></extra>",
        )  # fmt: skip
    inside = float((pi.max(1) < 0.8).mean())
    for axis, name in zip(("aaxis", "baxis", "caxis"), names, strict=True):
        title = {"text": wrapped(label(name, 26), 14), "font": {"size": 12}}
        figure.update_ternaries({axis: {"title": title, "tickformat": ".0%", "tickfont": {"size": 11}}})
    return figure.update_layout(
        title={"text": f"{inside:.0%} of the users have no head with 80% of their π", "pad": {"b": 44}}, height=540,
        margin={"t": 110, "l": 80, "r": 80}, legend={"orientation": "h", "y": -0.16, "x": 0.5, "xanchor": "center"},
    )  # fmt: skip


def pi_admixture(
    pi: Float[np.ndarray, "U c"],
    cluster: Int[np.ndarray, " U"],
    names: Sequence[str],
    numbers: Sequence[int] | None = None,
    title: str | None = None,
    most: int = 300,
) -> go.Figure:
    """Each user a thin column of their π_u, users of a cluster side by side: the picture of an admixture.

    With more than `most` users every n-th of each cluster is drawn. `numbers`: as in `slate_by_head`.
    """
    order = np.lexsort((-pi[np.arange(len(pi)), pi.argmax(1)], pi.argmax(1), cluster))
    order = order[np.linspace(0, len(order) - 1, min(most, len(order))).astype(int)]
    figure, x = go.Figure(), np.arange(len(order))
    for part, fill, name in by_head(pi[order], names, numbers):
        figure.add_bar(
            x=x, y=part, name=name, marker={"color": fill, "line": {"width": 0}},
            customdata=order, hovertemplate=f"user %{{customdata}}<br>{name} %{{y:.0%}}<extra></extra>",
        )  # fmt: skip
    sizes = [(c, np.flatnonzero(cluster[order] == c)) for c in np.unique(cluster)]
    for c, at in sizes:
        figure.add_annotation(
            x=at.mean(), y=1, yref="paper", text=str(c), showarrow=False, yanchor="bottom", font={"size": 13}
        )
        if at[0]:
            figure.add_vline(x=at[0] - 0.5, line={"color": INK, "width": 1.5})
    figure.update_xaxes(title=f"users, in {len(sizes)} clusters", showticklabels=False, showgrid=False)
    figure.update_yaxes(title="π<sub>u</sub>", tickformat=".0%", range=[0, 1])
    largest = float(pi.max(1).mean())
    return figure.update_layout(
        title={"text": title or f"On average the largest of a user's heads has {largest:.0%} of π", "pad": {"b": 30}},
        barmode="stack", bargap=0, height=max(430, 150 + 20 * len(names)), margin={"t": 84},
        legend={"font": {"size": 12}, "traceorder": "normal"},
    )  # fmt: skip


def history_strip(
    gamma: Float[np.ndarray, "n c"],
    titles: Sequence[str],
    names: Sequence[str],
    held_out: int = 0,
    numbers: Sequence[int] | None = None,
    title: str | None = None,
) -> go.Figure:
    """A user's items in the order of time, each a column split by γ: which head explains it. The last are held out."""
    figure, x = go.Figure(), np.arange(len(gamma))
    for part, fill, name in by_head(gamma, names, numbers):
        if part.max() < 0.01:
            continue  # a head that explains nothing here
        figure.add_bar(
            x=x, y=part, name=name, marker={"color": fill, "line": {"width": 0}},
            text=[label(t) for t in titles], textposition="none",
            hovertemplate=f"%{{text}}<br>γ of {name} %{{y:.0%}}<extra></extra>",
        )  # fmt: skip
    if held_out:
        start = len(gamma) - held_out
        figure.add_vline(x=start - 0.5, line={"color": INK, "width": 2, "dash": "dash"})
        figure.add_annotation(
            x=start - 0.5, y=1, yref="paper", text="held out →", showarrow=False, xanchor="left", yanchor="bottom"
        )
    figure.update_xaxes(title="place in the sequence", showgrid=False)
    figure.update_yaxes(title="γ, the responsibilities", tickformat=".0%", range=[0, 1])
    mean = np.sort(gamma.mean(0))[::-1]
    needed = int(np.searchsorted(np.cumsum(mean), 0.9)) + 1
    text = f"{needed} of {gamma.shape[1]} heads explain nine tenths of this user's {len(gamma)} items"
    return figure.update_layout(
        title={"text": title or text, "pad": {"b": 30}}, barmode="stack", bargap=0.06, margin={"t": 84},
        height=max(340, 150 + 20 * len(names)),
        legend={"font": {"size": 12}, "traceorder": "normal"},
    )  # fmt: skip


def slate_by_head(
    share: Float[np.ndarray, "K k"],
    relative: Float[np.ndarray, " K"],
    titles: Sequence[str],
    names: Sequence[str],
    numbers: Sequence[int] | None = None,
    marks: Sequence[str] | None = None,
    title: str | None = None,
    longest: int = 34,
) -> go.Figure:
    """A slate as stacked bars: an item's bar is as long as its score, m(i | u) over that of the first item, and split
    by the share of each head.

    `numbers`: which heads these are, where not all are shown; the others are one grey part. `marks`: a word behind
    each title. Every head has a trace, also one that brings nothing, so that a widget can refill them.
    """
    figure, y = go.Figure(), list(range(1, len(share) + 1))
    parts = by_head(share, names, numbers)
    for part, fill, name in parts:
        figure.add_bar(
            y=y, x=part * relative, orientation="h", name=name, marker={"color": fill, "line": {"width": 0}},
            customdata=part, text=[label(t) for t in titles], textposition="none",
            hovertemplate=f"%{{text}}<br>{name}: %{{customdata:.0%}}<extra></extra>",
        )  # fmt: skip
    behind = [f" {mark}" if mark else "" for mark in (marks or [""] * len(y))]
    figure.update_yaxes(
        autorange="reversed", tickvals=y, showgrid=False, tickfont={"size": 13},
        ticktext=[f"{label(t, longest)}{mark}  {n}" for n, t, mark in zip(y, titles, behind, strict=True)],
    )  # fmt: skip
    figure.update_xaxes(title="m(i | u), the first item's = 1", range=[0, 1.02])
    title = title or slate_title(np.stack([part for part, _, _ in parts], 1), numbers)
    return figure.update_layout(
        title={"text": title, "xref": "container", "x": 0.01},
        barmode="stack", bargap=0.2,
        height=130 + max(26 * len(share), 20 * len(parts)), margin={"l": 255},
        legend={"font": {"size": 12}, "traceorder": "normal"},
    )  # fmt: skip


def slate_title(share: Float[np.ndarray, "K c"], numbers: Sequence[int] | None = None) -> str:
    """Who brings the slate, in words; a column beyond `numbers` is the other heads."""
    brought = np.bincount(share.argmax(1), minlength=share.shape[1])
    several, most = int((brought > 0).sum()), int(brought.argmax())
    numbers = range(share.shape[1]) if numbers is None else numbers
    who, has, brings = (
        (f"head {numbers[most]}", "has", "brings") if most < len(numbers) else ("other heads", "have", "bring")
    )
    if several == 1:
        return f"{who.capitalize()} {has} the largest part in all of these {len(share)} items"
    return f"{several} heads bring these {len(share)} items; {who} {brings} {brought[most]}"


def pi_before_after(
    before: Float[np.ndarray, " k"], after: Float[np.ndarray, " k"], names: Sequence[str], title: str | None = None
) -> go.Figure:
    """π_u as pale bars and what it was steered to as full ones, a colour per head."""
    y = [tag(r, name) for r, name in enumerate(names)]
    figure = go.Figure()
    colours = [colour(r) for r in range(len(names))]
    hover = "%{y}: %{x:.1%}<extra></extra>"
    figure.add_bar(
        y=y, x=before, orientation="h", name="the model's", hovertemplate=hover, width=0.8,
        marker={"color": LIGHT, "line": {"color": GREY, "width": 1}},
    )  # fmt: skip
    figure.add_bar(
        y=y, x=after, orientation="h", name="now", marker={"color": colours}, hovertemplate=hover, width=0.45
    )
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title="share of π", tickformat=".0%", rangemode="tozero")
    moved = float(np.abs(np.asarray(after) - before).sum() / 2)
    return figure.update_layout(
        title=title or f"{moved:.0%} of π<sub>u</sub> moved", barmode="overlay", showlegend=False,
        height=130 + 30 * len(names),
    )  # fmt: skip
