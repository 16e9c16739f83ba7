"""Figures of logs, sequences and windows, and of named numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from bachlib.params import N_TEST, N_VALID
from bachlib.show.plots.style import ABOVE, COLOURS, INK, colour, label


def funnel(steps: list[dict[str, Any]]) -> go.Figure:
    """What each step of the pipeline left of the log: `dataset.meta["steps"]`."""
    rows = np.array([step["rows"] for step in steps])
    figure = go.Figure().add_bar(
        y=[step["step"] for step in steps], x=rows, orientation="h", marker_color=COLOURS[0],
        text=[f"{s['rows']:,} rows · {s['users']:,} users · {s['items']:,} items" for s in steps],
        textposition=["inside" if row > 0.5 * rows[0] else "outside" for row in rows], insidetextanchor="end",
        hovertemplate="%{y}: %{text}<extra></extra>",
    )  # fmt: skip
    return figure.update_layout(
        title=f"Of {rows[0]:,} events {rows[-1]:,} ({rows[-1] / rows[0]:.0%}) reach the model",
        xaxis={"title": "rows (events) left", "range": [0, rows[0] * 1.02]}, yaxis_autorange="reversed",
        height=110 + 42 * len(steps),
    )  # fmt: skip


def long_tail(n_users: np.ndarray) -> go.Figure:
    """Popularity of items by rank, both axes logarithmic, with the share of the most popular tenth."""
    counts, head = np.sort(np.asarray(n_users))[::-1], max(1, len(n_users) // 10)
    rank = np.unique(np.geomspace(1, max(1, (counts > 0).sum()), 400).astype(int))  # the axis has no zero
    figure = go.Figure(go.Scatter(x=rank, y=counts[rank - 1], mode="lines", line_color=COLOURS[0], line_width=3))
    figure.add_vrect(x0=1, x1=head, fillcolor=COLOURS[1], opacity=0.15, line_width=0)
    figure.add_annotation(x=np.log10(head) / 2, y=0.06, yref="paper", text="top 10% of items", showarrow=False)
    figure.update_xaxes(type="log", title="rank of the item by popularity")
    figure.update_yaxes(type="log", title="users who like it")
    share = counts[:head].sum() / counts.sum()
    return figure.update_layout(title=f"The most popular tenth of the items gets {share:.0%} of the likes")


def sequence_lengths(lengths: np.ndarray, min_items: int) -> go.Figure:
    """How long the sequences are, with the threshold of the k-core."""
    figure = go.Figure(go.Histogram(x=lengths, nbinsx=60, marker_color=COLOURS[0]))
    median, least = float(np.median(lengths)), f"min_items = {min_items}"
    figure.add_vline(x=min_items, line_color=COLOURS[5], annotation_text=least, annotation_yshift=18)
    figure.add_vline(x=median, line_dash="dot", line_color=INK, annotation_text=f"median {median:.0f}")
    figure.update_xaxes(title="liked items of a user, L").update_yaxes(title="users")
    text = f"A user gives {np.maximum(lengths - 79, 1).mean():.0f} training windows on average"
    return figure.update_layout(title={"text": text, "pad": {"b": 34}}, margin_t=88, bargap=0.02)


def timeline(u: int, sequence: np.ndarray, titles: np.ndarray, labels: np.ndarray, names: list[str]) -> go.Figure:
    """One user's sequence: a dot per liked item in its row (genre or interest), the held-out items at the right.

    titles, labels: of each item of the catalogue its title and the row it belongs to; names: what the rows are called.
    """
    row = np.asarray(labels)[sequence]
    used = [r for r in np.argsort(-np.bincount(row, minlength=len(names))) if (row == r).any()]
    figure = go.Figure()
    for r in used:
        at = np.flatnonzero(row == r)
        figure.add_scatter(
            x=at, y=[used.index(r)] * len(at), mode="markers", marker={"color": colour(r), "size": 8}, showlegend=False,
            text=[label(title) for title in np.asarray(titles)[sequence[at]]],
            hovertemplate="%{text}<extra>item %{x}</extra>",
        )  # fmt: skip
    border = len(sequence) - N_TEST - 0.5  # the two words meet there, on both sides
    valid, test = (border - N_VALID, "valid ", COLOURS[1], "right"), (border + N_TEST, " test", COLOURS[5], "left")
    for x, name, fill, side in (valid, test):
        figure.add_vrect(x0=x, x1=border, fillcolor=fill, opacity=0.18, line_width=0)
        figure.add_annotation(x=border, xanchor=side, text=name, **ABOVE)
    rows = {"tickvals": list(range(len(used))), "ticktext": [label(names[r]) for r in used]}
    figure.update_yaxes(range=[len(used) - 0.5, -0.5], **rows)
    title = f"User {u}: {len(sequence)} liked items in {len(used)} kinds; the next item stays with its kind"
    return figure.update_layout(
        title={"text": f"{title} {(row[1:] == row[:-1]).mean():.0%} of the time", "pad": {"b": 24}},
        xaxis_title="place in the sequence", margin_t=70, height=150 + 26 * len(used),
    )  # fmt: skip


def windows(length: int, n_hist: int, n_next: int) -> go.Figure:
    """First, second and last training window of a user over a sequence of so many items."""
    prefix = length - N_VALID - N_TEST
    n_hist = min(n_hist, prefix - n_next)  # a short sequence gives one window, padded on the left
    last = prefix - n_hist - n_next
    figure, starts = go.Figure(), np.array(sorted({0, min(1, last), last}))
    for name, base, n, fill, opacity in (
        (f"history, {n_hist}", starts, n_hist, COLOURS[0], 1),
        (f"one of the next {n_next} is the target", starts + n_hist, n_next, COLOURS[2], 1),
        ("validation", np.full(len(starts), prefix), N_VALID, COLOURS[1], 0.5),
        ("test", np.full(len(starts), prefix + N_VALID), N_TEST, COLOURS[5], 0.5),
    ):
        y, how = [f"window {start + 1}" for start in starts], {"marker_color": fill, "opacity": opacity}
        figure.add_bar(y=y, base=base, x=[n] * len(starts), orientation="h", name=name, **how)
    return figure.update_layout(
        title=f"{length} liked items give {last + 1} training windows; none touches the held-out 20",
        xaxis_title="place in the sequence", yaxis_autorange="reversed", barmode="overlay",
        legend={"orientation": "h", "y": -0.45}, height=360,
    )  # fmt: skip


def spectrum(singular_values: np.ndarray, density: float) -> go.Figure:
    """Singular values of the user–item matrix."""
    sigma = np.asarray(singular_values)
    figure = go.Figure(go.Scatter(x=np.arange(1, len(sigma) + 1), y=sigma, mode="lines+markers", line_color=COLOURS[0]))
    figure.update_xaxes(title="factor").update_yaxes(title="singular value σ", rangemode="tozero")
    title = f"The first factor is popularity (σ₁ = {sigma[0] / sigma[1]:.1f} σ₂); {density:.1%} of the matrix is filled"
    return figure.update_layout(title=title)


def bars(values: dict[str, float], title: str, axis: str) -> go.Figure:
    """Named numbers side by side, the best one highlighted."""
    names, x = [label(name, 60) for name in values], list(values.values())
    fills = [COLOURS[2] if value == max(x) else COLOURS[4] for value in x]
    figure = go.Figure(go.Bar(y=names, x=x, orientation="h", text=[f"{v:.3f}" for v in x], marker_color=fills))
    figure.update_yaxes(autorange="reversed").update_xaxes(title=axis, range=[0, max(x) * 1.15])
    return figure.update_layout(title=title, height=120 + 42 * len(values))


def proportions(pi: np.ndarray, names: list[str], title: str, users: list[int] | None = None) -> go.Figure:
    """π of some users (n, k), the first ones if nothing is said, as stacked bars, one colour per head or interest."""
    users = [f"user {u}" for u in (range(len(pi)) if users is None else users)]
    figure = go.Figure()
    for r, name in enumerate(names):
        hover, how = f"{label(name)} %{{x:.0%}}<extra></extra>", {"orientation": "h", "marker_color": colour(r)}
        figure.add_bar(y=users, x=pi[:, r], name=label(name), hovertemplate=hover, **how)
    figure.update_yaxes(autorange="reversed").update_xaxes(title="π<sub>u</sub>", tickformat=".0%", range=[0, 1])
    legend, height = {"font_size": 12, "traceorder": "normal"}, 140 + max(40 + 34 * len(users), 20 * len(names))
    return figure.update_layout(barmode="stack", title=title, height=height, legend=legend)
