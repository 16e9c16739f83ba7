"""Every figure of the workbook as a pure function that returns a plotly figure; widgets only wrap these.

One colour per head or interest everywhere (`COLOURS`, colour-blind safe). Titles say the finding. `use("dark")` shows
all of them for a dark page.
"""

# ruff: noqa: F401, I001 (an import here is a public name; a line per name would be a page)
# fmt: off
from bachlib.show.plots.answers import (
    calibration_controls, diversity_and_recall, genre_coverage, gradient_noise, posterior_gap, shuffle_test,
)
from bachlib.show.plots.claims import effects, gains, learning, mixture_map, plane_of_worlds, verdicts
from bachlib.show.plots.data import bars, funnel, long_tail, proportions, sequence_lengths, spectrum, timeline, windows
from bachlib.show.plots.evaluate import (
    calibration_curves, gain_by_depth, paper_and_ours, recall_curves, trap_changes, wins_and_losses,
)
from bachlib.show.plots.heads import (
    head_lift, history_strip, kappa_and_tightness, map_of_items, pi_admixture, pi_before_after, pi_ternary,
    recovered_interests, slate_by_head,
)
from bachlib.show.plots.serve import (
    adversary, cold_start_curve, dials, pareto, pi_slopes, recall_and_cost, recall_by_budget, rows_looked_at,
    slate_slopes,
)
from bachlib.show.plots.speed import amounts, goal_bars, growth_curves, parts_of_a_step, peer_bars
from bachlib.show.plots.sphere import (
    cosine_of_samples, kernels_against_cosine, kernels_matched, log_normalizers, mixture_on_sphere, sphere,
)
from bachlib.show.plots.style import COLOURS, colour, dark, noted, use
from bachlib.show.plots.sweep import by_axis, kappa_bounds, parallel_coordinates
from bachlib.show.plots.train import (
    collapse_race, elbo_terms, elbo_waterfall, gamma_on_great_circle, gap_against_kappa, gradient_heads,
    gradient_shares, head_usage, heads_and_interests, kappa_trajectories, pi_recovered,
)
