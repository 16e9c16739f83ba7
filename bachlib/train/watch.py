"""What a training reports: a row of the history per epoch (or per `log_steps` steps), progress, and divergence.

loss, reconstruction, prior, entropy    means over the steps (nats per example)
usage, kappa, gradient                  per head: share of γ, mean κ, share of the gradient that reaches the heads
effective_heads                         exp of the entropy of the mean γ: the number of heads in use
head_cosine                             mean cosine between two heads of a user
pi_heads                                exp of the mean entropy of π_u: the number of heads a user's weight covers
"""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from bachlib import needs
from bachlib.model.twotower import Objective

SCALARS = ("steps", "loss", "reconstruction", "prior", "entropy", "head_cosine", "pi_entropy")
PER_HEAD = ("usage", "kappa", "gradient")


class Watch:
    """Running sums over steps, kept on the device, so that reading them does not slow down a GPU."""

    def __init__(self, k: int, device: torch.device):
        self.k, self.device = k, device
        self.reset()

    def reset(self) -> None:
        self.sums = {name: torch.zeros((), dtype=torch.float64, device=self.device) for name in SCALARS}
        self.sums |= {name: torch.zeros(self.k, dtype=torch.float64, device=self.device) for name in PER_HEAD}
        self.kappa = torch.tensor([math.inf, -math.inf], dtype=torch.float64, device=self.device)  # min, max

    @torch.no_grad()
    def look(self, seen: Objective) -> None:
        """Add a step. Call it before the backward pass, which adds the gradient."""
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
        kinds = (seen.heads,) if isinstance(seen.heads, Tensor) else tuple(seen.heads)
        if all(heads.requires_grad for heads in kinds):
            torch.autograd.graph.register_multi_grad_hook(kinds, self._gradient)

    def _gradient(self, gradients: tuple[Tensor, ...]) -> None:
        norms = [of.detach().norm(dim=-1).view(-1, of.shape[-2]).double().sum(0) for of in gradients]
        norm = torch.cat(norms)
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


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row for a tracker: of head 2 as "usage/2", and without a validation that was not due."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        found |= {f"{name}/{r}": x for r, x in enumerate(value)} if isinstance(value, list) else {name: value}
    return {name: x for name, x in found.items() if x is not None}


def to_tensorboard(folder: Path) -> Callable[[dict[str, Any]], None]:
    """A callback for `fit` that writes the rows into a folder for TensorBoard."""
    needs("TensorBoard's writer", "trackers", "tensorboard")
    board: list[Any] = []

    def write(row: dict[str, Any]) -> None:
        if not board:  # now: only one of several processes is called
            from torch.utils.tensorboard import SummaryWriter

            board.append(SummaryWriter(folder))
        for name, value in scalars(row).items():
            board[0].add_scalar(name, value, row["epoch"])
        board[0].flush()

    return write


def effective_heads(usage: list[float]) -> float:
    """exp of the entropy of the mean γ: k if all heads explain equally much, 1 if one head explains everything."""
    total = sum(usage)
    return math.exp(-sum(u / total * math.log(u / total) for u in usage if u > 0))


class Progress:
    """Progress on the screen: a bar in a terminal, one updated output in a notebook, else a line per epoch."""

    def __init__(self, epochs: int, windows: int, quiet: bool):
        self.epochs, self.windows, self.quiet = epochs, windows, quiet
        self.terminal = not quiet and sys.stderr.isatty()
        self.notebook = None if quiet or self.terminal else _notebook_display()
        self.bar, self.lines, self.shown = None, [], 0.0

    def step(self, epoch: int, done: int, n: int, row: Callable[[], dict[str, Any]]) -> None:
        """`done` windows of the epoch are done, the last `n` of them in this step; `row()` is the row so far."""
        if self.terminal:
            if self.bar is None:
                shown = {"desc": f"epoch {epoch}/{self.epochs}", "unit": " windows", "unit_scale": True}
                self.bar = tqdm(total=self.windows, initial=done - n, leave=False, dynamic_ncols=True, **shown)
            self.bar.update(n)
        if (self.bar or self.notebook) and time.monotonic() - self.shown > 0.5:
            self.shown = time.monotonic()
            if self.bar:
                self.bar.set_postfix_str(_in_short(row()))
            else:
                self._update(f"epoch {epoch}/{self.epochs} · {done / self.windows:4.0%} · {_in_short(row())}")

    def epoch(self, row: dict[str, Any], best: bool, seconds_left: float) -> None:
        self.close()
        auprc = "" if row["valid_auprc"] is None else f" · AUPRC {row['valid_auprc']:.4f}{' (best)' if best else ''}"
        left = f", at most {tqdm.format_interval(seconds_left)} left" if seconds_left else ""
        speed = f"{row['windows_per_s']:,.0f} windows/s{left}"
        self.say(f"epoch {row['epoch']:>3}/{self.epochs} · {_in_short(row)}{auprc} · {speed}")

    def say(self, line: str) -> None:
        if self.quiet:
            return
        if self.notebook:
            self.lines.append(line)
            self._update()
        elif self.terminal:
            tqdm.write(line, file=sys.stderr)
        else:
            print(line, flush=True)

    def _update(self, now: str = "") -> None:
        """Show the first epoch, the last ones and the current step."""
        lines = self.lines if len(self.lines) <= 6 else [self.lines[0], "…", *self.lines[-4:]]
        self.notebook.update({"text/plain": "\n".join([*lines, *([now] if now else [])])}, raw=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _in_short(row: dict[str, Any]) -> str:
    text = f"loss {row['loss']:.3f}"
    if row["entropy"] or row["prior"]:  # BACH: the three terms and the range of κ
        text += f" = −({row['reconstruction']:.3f} {row['prior']:+.3f} {row['entropy']:+.3f})"
        text += f" · κ {row['kappa_min']:.1f}–{row['kappa_max']:.1f}"
    return f"{text} · heads {row['effective_heads']:.1f}/{len(row['usage'])}"


def _notebook_display():
    """An output of the current cell that can be updated, or None outside of a notebook."""
    ipython = sys.modules.get("IPython")
    if ipython and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell":
        return ipython.display.display({"text/plain": "training …"}, raw=True, display_id=True)
    return None


def divergence(
    model: nn.Module, seen: Objective | None, wrong: str, loss: float, place: str, learning_rate: float, state: Path
) -> str:
    """The message about what is not finite: a step's loss or gradient, or `wrong`, the error that was raised."""
    terms = {name: value.item() for name, value in seen.terms.items()} if seen else {}
    bad_terms = [f"{name} = {value}" for name, value in terms.items() if not math.isfinite(value)]
    parameters = dict(model.named_parameters())
    bad = [name for name, q in parameters.items() if q.grad is not None and not q.grad.isfinite().all()]
    largest = sorted(parameters, key=lambda name: -parameters[name].detach().abs().nan_to_num(torch.inf).max())[:3]
    kappa = "κ from {:.4g} to {:.4g}, ".format(*seen.encoded.kappa.detach().aminmax()) if seen else ""
    if not wrong:
        told = ", ".join(bad_terms) or f"all finite, { ({name: round(value, 4) for name, value in terms.items()}) }"
        of_gradient = "none, but its length is more than float32 holds" if math.isfinite(loss) else "none"
        of_gradient = f"{', '.join(bad[:6]) or of_gradient}{' …' if len(bad) > 6 else ''}"
        wrong = f"loss = {loss}\n  terms: {told}\n  gradient not finite in: {of_gradient}"
    return (
        f"training diverged in {place}: {wrong}"
        f"\n  {kappa}learning rate {learning_rate:g}, largest parameters: "
        + ", ".join(f"{name} (|max| {parameters[name].detach().abs().max():.4g})" for name in largest)
        + f"\n  the last good state is kept in {state}; a smaller learning rate or a larger tau usually helps"
    )
