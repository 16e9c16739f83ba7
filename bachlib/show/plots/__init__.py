"""Every figure of the workbook as a pure function that returns a plotly figure; widgets only wrap these.

One colour per head or interest everywhere (`COLOURS`, colour-blind safe). Titles say the finding.
"""

from bachlib.show.plots.data import bars, funnel, long_tail, proportions, sequence_lengths, spectrum, timeline, windows
from bachlib.show.plots.elbo import elbo_waterfall, gamma_on_great_circle, gap_against_kappa, gradient_shares
from bachlib.show.plots.sphere import (
    cosine_of_samples,
    kernels_against_cosine,
    kernels_matched,
    log_normalizers,
    mixture_on_sphere,
    sphere,
)
from bachlib.show.plots.style import COLOURS, colour

__all__ = [
    "COLOURS",
    "bars",
    "colour",
    "cosine_of_samples",
    "elbo_waterfall",
    "funnel",
    "gamma_on_great_circle",
    "gap_against_kappa",
    "gradient_shares",
    "kernels_against_cosine",
    "kernels_matched",
    "log_normalizers",
    "long_tail",
    "mixture_on_sphere",
    "proportions",
    "sequence_lengths",
    "spectrum",
    "sphere",
    "timeline",
    "windows",
]
