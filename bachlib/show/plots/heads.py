"""Figures of heads (where they stand, what they mean, how sharp they are), and of π_u and the slates it brings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from bachlib.show.plots.style import ABOVE, COLOURS, GREY, INK, LIGHT, PALE, PAPER, colour, label, tag, wrapped

PALE_TO_ORANGE = [[0, PALE], [0.5, PAPER], [1, COLOURS[5]]]  # less of a genre is the rule: it should not shout
STACKED = {"barmode": "stack", "legend": {"font": {"size": 12}, "traceorder": "normal"}}
Names, Numbers = Sequence[str], Sequence[int] | None  # numbers: which heads these are, where not all are shown


def numbered(names: Names, numbers: Numbers) -> list[tuple[int, str]]:
    """Heads with their names."""
    return list(zip(range(len(names)) if numbers is None else numbers, names, strict=True))


def map_of_items(
    items: Float[np.ndarray, "n 2"], item_head: Int[np.ndarray, " n"], hover: Names, heads: Float[np.ndarray, "k 2"],
    names: Names, weight: Float[np.ndarray, " k"] | None, top: Sequence[Sequence[int]] = (),
    regions: dict[str, Float[np.ndarray, " 2"]] | None = None, history: Sequence[int] = (), title: str | None = None,
    numbers: Numbers = None, most: int = 2000,
) -> go.Figure:  # fmt: skip
    """Items in the colour of the head that explains them best, heads as stars sized by π and joined to their items.

    `hover`: a text per item, where <br> begins a line; `weight`: π, None where heads have none; `top`: places of each
    head's first items; `regions`: words on the map; `history`: items to mark with a ring. Of more than `most` items
    some are drawn, at random, and all that are in `top` or `history`.
    """
    figure, named = go.Figure(), numbered(names, numbers)
    told = ["<br>".join(map(label, text.split("<br>"))) for text in hover]
    items = np.asarray(items, np.float32)  # half the bytes in a notebook
    shown = np.random.default_rng(0).permutation(len(items))[:most]
    shown = np.unique(np.concatenate([shown, *(np.asarray(p, int) for p in top), np.asarray(history, int)]))
    for n, (r, name) in enumerate(named):
        at = shown[item_head[shown] == n]
        figure.add_scatter(
            x=items[at, 0], y=items[at, 1], mode="markers", name=f"items of head {r}", legendgroup=str(r),
            showlegend=False, text=[told[i] for i in at], hovertemplate=f"%{{text}}<extra>{tag(r, name)}</extra>",
            marker={"size": 4, "opacity": 0.45, "color": colour(r)},
        )  # fmt: skip
    for n, places in enumerate(top):
        r, ends = named[n][0], items[np.asarray(places, int)]
        star, gap = np.broadcast_to(heads[n], ends.shape), np.full(ends.shape, np.nan)
        x, y = np.stack([star, ends, gap], 1).reshape(-1, 2).T
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
    for n, (r, name) in enumerate(named):
        size, told = (20.0, "") if weight is None else (9 + 34 * float(np.sqrt(weight[n])), f": {weight[n]:.1%} of π")
        figure.add_scatter(
            x=[heads[n, 0]], y=[heads[n, 1]], mode="markers", name=tag(r, name, 24), legendgroup=str(r),
            marker={"symbol": "star", "size": size, "color": colour(r), "line": {"color": INK, "width": 1.5}},
            hovertemplate=f"{tag(r, name, 34)}{told}<extra></extra>",
        )  # fmt: skip
    for word, (x, y) in (regions or {}).items():
        font, text = {"size": 13, "color": INK}, f"<b>{label(word)}</b>"
        figure.add_annotation(x=x, y=y, text=text, showarrow=False, yanchor="bottom", font=font)
    figure.update_xaxes(visible=False).update_yaxes(visible=False, scaleanchor="x", scaleratio=1)
    said = f"Where the {len(names)} heads stand"
    if weight is not None:
        said += f"; the largest, {tag(*named[np.argmax(weight)])}, has {np.max(weight):.0%} of π"
    legend = {"itemsizing": "constant", "font_size": 12, "title_text": "heads" + ", sized by π" * (weight is not None)}
    return figure.update_layout(title=title or said, height=620, margin={"l": 10, "r": 10, "b": 10}, legend=legend)


def head_lift(lift: Float[np.ndarray, "k g"], names: Names, genres: Names, numbers: Numbers = None) -> go.Figure:
    """Head × genre: how many times as often a genre is among a head's items as among all likes; by doublings."""
    named, ticks = numbered(names, numbers), [-3, -2, -1, 0, 1, 2, 3]
    figure = go.Figure().add_heatmap(
        z=np.clip(np.log2(np.maximum(lift, 1e-9)), -3, 3), x=[label(g, 18) for g in genres],
        y=[tag(r, name, 26) for r, name in named], customdata=lift, colorscale=PALE_TO_ORANGE, zmid=0, zmin=-3, zmax=3,
        text=[[f"{v:.1f}" if v >= 1.5 else "" for v in row] for row in lift], texttemplate="%{text}",
        textfont={"size": 11}, xgap=1, ygap=1, hovertemplate="%{y}<br>%{x}: × %{customdata:.2f}<extra></extra>",
        colorbar={"title": "lift", "tickvals": ticks, "ticktext": [f"× {2.0**t:g}" for t in ticks]},
    )  # fmt: skip
    r, g = np.unravel_index(np.argmax(lift), lift.shape)
    figure.update_yaxes(autorange="reversed", showgrid=False).update_xaxes(tickangle=-40, showgrid=False)
    what = f"Head {named[r][0]} has {label(genres[g])} {lift[r, g]:.1f} times as often as people's likes have it"
    return figure.update_layout(title=what, height=max(400, 190 + 24 * len(names)))


def kappa_and_tightness(
    kappa: Float[np.ndarray, " m"], tightness: Float[np.ndarray, " m"], head: Int[np.ndarray, " m"], names: Names,
    correlation: float, numbers: Numbers = None,
) -> go.Figure:  # fmt: skip
    """The learnt κ of heads against the mean cosine of the items they explain; a dot per user and head."""
    figure, hover = go.Figure(), "mean cosine %{x:.2f}<br>κ %{y:.1f}<extra></extra>"
    for n, (r, name) in enumerate(numbered(names, numbers)):
        x, y, marker = tightness[head == n], kappa[head == n], {"size": 5, "opacity": 0.5, "color": colour(r)}
        if len(x):
            figure.add_scatter(x=x, y=y, mode="markers", name=tag(r, name), marker=marker, hovertemplate=hover)
    figure.update_xaxes(title="mean cosine of the head and the items it explains").update_yaxes(title="learnt κ")
    said = "grows with" if correlation > 0.2 else "falls with" if correlation < -0.2 else "hardly follows"
    text = f"κ {said} how tight a head's items are: rank correlation {correlation:+.2f}"
    return figure.update_layout(title=text, legend={"itemsizing": "constant", "font": {"size": 12}})


def recovered_interests(
    overlap: Float[np.ndarray, "k m"], names: Names, truth: Names, share: Float[np.ndarray, " m"],
    what: str = "planted interests",
) -> go.Figure:  # fmt: skip
    """True interests against heads: which share of an interest's items a head is responsible for (columns sum to one);
    `share`: how much of all likes an interest has."""
    order = np.lexsort((-overlap.max(0), overlap.argmax(0)))
    used = [r for r in range(len(names)) if overlap[r].max() > 0.05]
    z = overlap[np.ix_(used, order)]
    figure = go.Figure().add_heatmap(
        z=z, x=[label(truth[j], 16) for j in order], y=[tag(r, names[r], 26) for r in used], xgap=1, ygap=1,
        colorscale=[[0, PAPER], [1, COLOURS[0]]], zmin=0, zmax=1, colorbar={"title": "γ", "tickformat": ".0%"},
        text=[[f"{v:.0%}" if v > 0.15 else "" for v in row] for row in z], texttemplate="%{text}",
        textfont={"size": 11}, hovertemplate="%{x}: %{z:.0%} explained by<br>%{y}<extra></extra>",
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", showgrid=False).update_xaxes(tickangle=-40, showgrid=False, title=what)
    one, held = sum(overlap.max(0) > 0.5), np.average(overlap.max(0), weights=share)
    text = f"{one} of {len(truth)} {what} have one head for most of their items ({held:.0%} on average)"
    return figure.update_layout(title=text, height=max(380, 190 + 24 * len(used)))


def by_head(
    share: Float[np.ndarray, "n c"], names: Names, numbers: Numbers = None
) -> list[tuple[Float[np.ndarray, " n"], str, str]]:
    """Shares of heads with their colours and tags; what is missing to one is a grey part of the other heads."""
    parts = [(share[:, n], colour(r), tag(r, name)) for n, (r, name) in enumerate(numbered(names, numbers))]
    rest = 1 - share.sum(1)
    return [*parts, (rest, GREY, "other heads")] if rest.max(initial=0) > 1e-5 else parts


def pi_ternary(pi: Float[np.ndarray, "U 3"], names: Names, hover: Names) -> go.Figure:
    """Users with three heads as points of a triangle, coloured by the head that has most of them."""
    figure, first = go.Figure(), pi.argmax(1)
    for r, name in enumerate(names):
        at = first == r
        figure.add_scatterternary(
            a=pi[at, 0], b=pi[at, 1], c=pi[at, 2], mode="markers", name=f"mostly {label(name)}",
            marker={"size": 6, "opacity": 0.6, "color": colour(r)}, text=[hover[u] for u in np.flatnonzero(at)],
            hovertemplate="%{text}<br>%{a:.2f} · %{b:.2f} · %{c:.2f}<extra></extra>",
        )  # fmt: skip
    inside = float((pi.max(1) < 0.8).mean())
    for axis, name in zip(("aaxis", "baxis", "caxis"), names, strict=True):
        title = {"text": wrapped(label(name, 26), 14), "font": {"size": 12}}
        figure.update_ternaries({axis: {"title": title, "tickformat": ".0%", "tickfont": {"size": 11}}})
    return figure.update_layout(
        title={"text": f"For {inside:.0%} of the users no head has 80% of π", "pad": {"b": 44}}, height=540,
        margin={"t": 110, "l": 80, "r": 80}, legend={"orientation": "h", "y": -0.16, "x": 0.5, "xanchor": "center"},
    )  # fmt: skip


def pi_admixture(
    pi: Float[np.ndarray, "U c"], cluster: Int[np.ndarray, " U"], names: Names, numbers: Numbers = None, title: str = ""
) -> go.Figure:
    """Each user (of more than 300 every n-th) a thin column of their π_u, a cluster side by side: an admixture."""
    order = np.lexsort((-pi[np.arange(len(pi)), pi.argmax(1)], pi.argmax(1), cluster))
    order = order[np.linspace(0, len(order) - 1, min(300, len(order))).astype(int)]
    figure, x = go.Figure(), np.arange(len(order))
    for part, fill, name in by_head(pi[order], names, numbers):
        marker, hover = {"color": fill, "line_width": 0}, f"user %{{customdata}}<br>{name} %{{y:.0%}}<extra></extra>"
        figure.add_bar(x=x, y=part, name=name, marker=marker, customdata=order, hovertemplate=hover)
    clusters = np.unique(cluster)
    for c in clusters:
        at = np.flatnonzero(cluster[order] == c)
        figure.add_annotation(x=at.mean(), text=str(c), font_size=13, **ABOVE)
        if at[0]:
            figure.add_vline(x=at[0] - 0.5, line={"color": INK, "width": 1.5})
    figure.update_xaxes(title=f"users, in {len(clusters)} clusters", showticklabels=False, showgrid=False)
    figure.update_yaxes(title="π<sub>u</sub>", tickformat=".0%", range=[0, 1])
    text = title or f"On average the largest of a user's heads has {pi.max(1).mean():.0%} of π"
    height = max(430, 150 + 20 * len(names))
    return figure.update_layout(title={"text": text, "pad": {"b": 30}}, bargap=0, height=height, margin_t=84, **STACKED)


def history_strip(
    gamma: Float[np.ndarray, "n c"], titles: Names, names: Names, held_out: int = 0, numbers: Numbers = None,
    title: str = "",
) -> go.Figure:  # fmt: skip
    """A user's items in the order of time, each a column split by γ: which head explains it. The last are held out."""
    figure, x = go.Figure(), np.arange(len(gamma))
    shown = [head for head in by_head(gamma, names, numbers) if head[0].max() >= 0.01]  # those that explain something
    for part, fill, name in shown:
        figure.add_bar(
            x=x, y=part, name=name, marker={"color": fill, "line_width": 0}, text=[label(t) for t in titles],
            textposition="none", hovertemplate=f"%{{text}}<br>γ of {name} %{{y:.0%}}<extra></extra>",
        )  # fmt: skip
    if held_out:
        start = len(gamma) - held_out - 0.5
        figure.add_vline(x=start, line={"color": INK, "width": 2, "dash": "dash"})
        figure.add_annotation(x=start, text="held out →", xanchor="left", **ABOVE)
    figure.update_xaxes(title="place in the sequence", showgrid=False)
    figure.update_yaxes(title="γ, the responsibilities", tickformat=".0%", range=[0, 1])
    needed = np.searchsorted(np.cumsum(np.sort(gamma.mean(0))[::-1]), 0.9) + 1
    text = f"{needed} of {gamma.shape[1]} heads explain nine tenths of this user's {len(gamma)} items"
    title, height = {"text": title or text, "pad": {"b": 30}}, max(340, 150 + 20 * len(names))
    return figure.update_layout(title=title, bargap=0.06, margin_t=84, height=height, **STACKED)


def slate_by_head(
    share: Float[np.ndarray, "K k"], relative: Float[np.ndarray, " K"], titles: Names, names: Names,
    numbers: Numbers = None, marks: Names | None = None, title: str = "", longest: int = 34,
) -> go.Figure:  # fmt: skip
    """A slate as stacked bars: an item's bar is as long as its score, m(i | u) over that of the first item, and split
    by the share of each head. `marks`: a word behind each title. Every head has a trace, also one that brings nothing,
    so that a widget can refill them."""
    figure, y, parts = go.Figure(), list(range(1, len(share) + 1)), by_head(share, names, numbers)
    for part, fill, name in parts:
        figure.add_bar(
            y=y, x=part * relative, orientation="h", name=name, marker={"color": fill, "line_width": 0},
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
    title, height = {"text": title, "xref": "container", "x": 0.01}, 130 + max(26 * len(share), 20 * len(parts))
    return figure.update_layout(title=title, bargap=0.2, height=height, margin_l=255, **STACKED)


def slate_title(share: Float[np.ndarray, "K c"], numbers: Numbers) -> str:
    """Who brings the slate, in words; a column beyond `numbers` is the other heads."""
    brought = np.bincount(share.argmax(1), minlength=share.shape[1])
    several, most = int((brought > 0).sum()), int(brought.argmax())
    numbers = range(share.shape[1]) if numbers is None else numbers
    who, has, s = (f"head {numbers[most]}", "has", "s") if most < len(numbers) else ("other heads", "have", "")
    if several == 1:
        return f"{who.capitalize()} {has} the largest part in all of these {len(share)} items"
    return f"{several} heads bring these {len(share)} items; {who} bring{s} {brought[most]}"


def pi_before_after(before: Float[np.ndarray, " k"], after: Float[np.ndarray, " k"], names: Names) -> go.Figure:
    """π_u as pale bars and what it was steered to as full ones, a colour per head."""
    figure, colours = go.Figure(), [colour(r) for r in range(len(names))]
    pale = {"color": LIGHT, "line": {"color": GREY, "width": 1}}
    for x, name, width, marker in ((before, "the model's", 0.8, pale), (after, "now", 0.45, {"color": colours})):
        figure.add_bar(
            y=[tag(r, name) for r, name in enumerate(names)], x=x, orientation="h", name=name, width=width,
            marker=marker, hovertemplate="%{y}: %{x:.1%}<extra></extra>",
        )  # fmt: skip
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(title="share of π", tickformat=".0%", rangemode="tozero")
    title = f"{np.abs(after - before).sum() / 2:.0%} of π<sub>u</sub> moved"
    return figure.update_layout(title=title, barmode="overlay", showlegend=False, height=130 + 30 * len(names))
