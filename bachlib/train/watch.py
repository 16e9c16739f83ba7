"""What there is to see while a model trains: one row of the history per epoch (or per `log_steps` steps).

loss, reconstruction, prior, entropy    means over the steps (nats per example)
usage, kappa, gradient                  per head: share of γ, mean κ, share of the gradient that reaches the heads
effective_heads                         exp of the entropy of the mean γ: how many heads are in use
head_cosine                             mean cosine between two heads of a user
pi_heads                                exp of the mean entropy of π_u: among how many heads a user's weight is spread
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bachlib.model.twotower import Objective


class Watch:
    """Running sums over steps, kept on the device, so that looking does not slow a GPU down."""

    def __init__(self, k: int, device: torch.device):
        self.k, self.device = k, device
        self.reset()

    def reset(self) -> None:
        scalars = ("steps", "loss", "reconstruction", "prior", "entropy", "head_cosine", "pi_entropy")
        self.sums = {name: torch.zeros((), dtype=torch.float64, device=self.device) for name in scalars}
        self.sums |= {name: torch.zeros(self.k, dtype=torch.float64, device=self.device) for name in PER_HEAD}
        self.kappa = torch.tensor([math.inf, -math.inf], dtype=torch.float64, device=self.device)  # min, max

    @torch.no_grad()
    def look(self, seen: Objective) -> None:
        """Add a step; call it before the backward pass, in which the gradient is looked at."""
        heads, log_pi, kappa = (x.detach() for x in seen.encoded)
        add = {"steps": 1, "loss": seen.loss.detach(), **seen.terms}
        total = heads.sum(1).square().sum(-1)  # |Σ_r u_r|² = k + Σ_{r≠s} ⟨u_r, u_s⟩
        add["head_cosine"] = ((total - self.k) / max(1, self.k * (self.k - 1))).mean()
        add["pi_entropy"] = -(log_pi.exp() * log_pi.clamp(min=-80)).sum(-1).mean()
        add |= {"usage": seen.gamma.mean(0), "kappa": kappa.mean(0)}
        for name, value in add.items():
            self.sums[name] += value
        low, high = kappa.aminmax()
        self.kappa = torch.stack([torch.minimum(self.kappa[0], low), torch.maximum(self.kappa[1], high)])
        if seen.heads.requires_grad:
            seen.heads.register_hook(self._gradient)

    def _gradient(self, gradient: Tensor) -> None:
        norm = gradient.detach().norm(dim=-1).view(-1, self.k).double().sum(0)
        self.sums["gradient"] += norm / norm.sum().clamp(min=1e-300)

    def row(self) -> dict[str, Any]:
        n = self.sums["steps"].item()
        row = {name: (value / n).tolist() for name, value in self.sums.items() if name != "steps"}
        row["pi_heads"] = math.exp(row.pop("pi_entropy"))
        row["kappa_min"], row["kappa_max"] = self.kappa.tolist()
        return row | {"effective_heads": effective_heads(row["usage"])}

    def state_dict(self) -> dict[str, Tensor]:
        return {**self.sums, "kappa_range": self.kappa}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.sums = {name: state[name].to(self.device) for name in self.sums}
        self.kappa = state["kappa_range"].to(self.device)


PER_HEAD = ("usage", "kappa", "gradient")


def effective_heads(usage: list[float]) -> float:
    """exp H of the mean γ: k where all heads explain as much, 1 where one does all."""
    total = sum(usage)
    return math.exp(-sum(u / total * math.log(u / total) for u in usage if u > 0))
