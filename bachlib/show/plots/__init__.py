"""Every figure of the workbook as a pure function that returns a plotly figure; widgets only wrap these.

One colour per head or interest everywhere (`COLOURS`, colour-blind safe). Titles say the finding.
"""

from bachlib.show.plots.data import bars, funnel, long_tail, proportions, sequence_lengths, spectrum, timeline, windows
from bachlib.show.plots.elbo import elbo_waterfall, gamma_on_great_circle, gap_against_kappa, gradient_shares
from bachlib.show.plots.evaluate import (
    calibration_curves,
    gain_by_depth,
    paper_and_ours,
    recall_curves,
    trap_changes,
    wins_and_losses,
)
from bachlib.show.plots.serve import (
    adversary,
    cold_start_curve,
    pareto,
    pi_slopes,
    recall_and_cost,
    rows_looked_at,
    slate_slopes,
)
from bachlib.show.plots.sphere import (
    cosine_of_samples,
    kernels_against_cosine,
    kernels_matched,
    log_normalizers,
    mixture_on_sphere,
    sphere,
)
from bachlib.show.plots.style import COLOURS, colour
from bachlib.show.plots.train import (
    collapse_race,
    elbo_terms,
    gradient_heads,
    head_usage,
    heads_and_interests,
    kappa_trajectories,
    pi_recovered,
)

__all__ = [
    "COLOURS",
    "adversary",
    "bars",
    "calibration_curves",
    "cold_start_curve",
    "collapse_race",
    "colour",
    "cosine_of_samples",
    "elbo_terms",
    "elbo_waterfall",
    "funnel",
    "gain_by_depth",
    "gamma_on_great_circle",
    "gap_against_kappa",
    "gradient_heads",
    "gradient_shares",
    "head_usage",
    "heads_and_interests",
    "kappa_trajectories",
    "kernels_against_cosine",
    "kernels_matched",
    "log_normalizers",
    "long_tail",
    "mixture_on_sphere",
    "paper_and_ours",
    "pareto",
    "pi_recovered",
    "pi_slopes",
    "proportions",
    "recall_and_cost",
    "recall_curves",
    "rows_looked_at",
    "sequence_lengths",
    "slate_slopes",
    "spectrum",
    "sphere",
    "timeline",
    "trap_changes",
    "windows",
    "wins_and_losses",
]
