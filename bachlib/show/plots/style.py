"""How the figures look: one colour per head or interest everywhere, colour-blind safe."""

from __future__ import annotations

import plotly.graph_objects as go
import plotly.io as pio

# Okabe–Ito, then Tol's muted scheme
COLOURS = """
    #0072B2 #E69F00 #009E73 #CC79A7 #56B4E9 #D55E00 #F0E442 #882255
    #44AA99 #332288 #DDCC77 #117733 #AA4499 #999933 #88CCEE #661100
""".split()
INK, GREY, LIGHT = "#222222", "#767676", "#E5E5E5"

pio.templates["bach"] = go.layout.Template(
    layout={
        "font": {"family": "system-ui, sans-serif", "size": 14, "color": INK},
        "title": {
            "font": {"size": 17},
            "x": 0,
            "xref": "paper",
            "yanchor": "bottom",
            "y": 1,
            "yref": "paper",
            "pad": {"b": 14},
        },
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "xaxis": {"gridcolor": LIGHT, "zeroline": False, "automargin": True},
        "yaxis": {"gridcolor": LIGHT, "zeroline": False, "automargin": True},
        "colorway": COLOURS,
        "margin": {"l": 60, "r": 20, "t": 60, "b": 50},
        "width": 860,
        "height": 400,
    }
)
pio.templates.default = "bach"
pio.renderers.default = "plotly_mimetype"  # data only: the other renderers store megabytes of script in the notebook


def colour(r: int) -> str:
    return COLOURS[r % len(COLOURS)]
