"""Training (Algorithm 1, appendix B): Adam on mini-batches of windows with fresh uniform negatives, early stopping.

Everything a step draws comes from (seed, epoch, step). So a training that was stopped anywhere, even by kill −9,
continues from its last resume state to the same weights and history as an uninterrupted one.
"""

import copy
import ctypes
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from bachlib import BachError, NotFinite
from bachlib.data import Dataset, Windows
from bachlib.data.windows import Batch
from bachlib.files import clear_errors, only_one, output_dir
from bachlib.model.twotower import Objective
from bachlib.params import TrainParams, validated
from bachlib.rank.metrics import average_precision_of_ranks
from bachlib.rank.ranks import sample_users, target_ranks
from bachlib.reading import reading
from bachlib.train import checkpoint
from bachlib.train.parallel import Group, chosen_device, group
from bachlib.train.run import Run, name_of_run, other_data
from bachlib.train.watch import Progress, Watch, divergence


def fit(
    model: nn.Module,
    dataset: Dataset,
    params: TrainParams | dict[str, Any] | None = None,
    out: str | Path | None = None,
    *,
    fresh: bool = False,
    quiet: bool = False,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Train a model; return the run, whose model has the weights with the best validation AUPRC.

    A call with the same arguments resumes an unfinished run and returns a finished one unchanged; `epochs` and
    `patience` may differ from the last call. `fresh=True` starts again from the current weights of the model. Ctrl-C
    stops after the current step and keeps everything. A folder holds one training at a time: a second one waits.

    `on_epoch` gets a copy of the history's row at the end of each new epoch, in the first of several processes only.
    The epoch is on the disk before. An error that it raises stops the training and is raised here; the same call goes
    on with the next epoch.
    """
    p = params if isinstance(params, TrainParams) else validated(TrainParams, params or {}, "training")
    dataset.check_same(getattr(model, "built_on", None), "the model was built")
    device = chosen_device(p.device)
    keep_freed_memory()
    folder = Path(out) if out else output_dir("runs", name_of_run(model.config, dataset.identity, p))
    with (
        group(device) as team,
        clear_errors(folder),
        _alone_in(folder, team, quiet),
        torch.random.fork_rng(),
        stopped_by_ctrl_c() as stop,
    ):
        if team.first:
            Run.open(folder, model, dataset, p, fresh or (out is None and other_data(folder, dataset)))
        team.wait()
        run = Run.open(folder, model.to(device), dataset, p, False)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            auprc = validation_auprc(model, dataset, p, team)
            rows = [{"epoch": 0, "step": 0, "valid_auprc": auprc}]
            run.write(rows, status="finished", best={"epoch": 0, "auprc": auprc})
            return run
        return _Training(run, dataset, p, team, quiet or not team.first, on_epoch if team.first else None).go(stop)


@contextmanager
def _alone_in(folder: Path, team: Group, quiet: bool) -> Iterator[None]:
    """Wait until no other training writes into the folder. Processes of torchrun would time out: they are refused."""

    def busy() -> None:
        told = f"another training is writing into {folder}"
        if team.size > 1:
            raise BachError(f"{told}: start again when it has ended, or choose another folder")
        if not quiet:
            print(f"{told}; waiting for its end", flush=True)

    with only_one(folder, busy) if team.first else nullcontext():
        yield


class _Training:
    def __init__(
        self, run: Run, dataset: Dataset, params: TrainParams, team: Group, quiet: bool, on_epoch: Callable | None
    ):
        self.run, self.model, self.dataset, self.p, self.team = run, run.model, dataset, params, team
        self.on_epoch = on_epoch
        following = params.targets == "all" or params.false_negatives == "next"
        self.windows = Windows(dataset, params.batch_size, params.seed, self.model.n_hist, following)
        self.parameters = [q for q in self.model.parameters() if q.requires_grad]
        self.device = self.parameters[0].device
        self.also = {}  # what else every step reads
        if params.log_q:  # how often each item is expected among a row's candidates, see `candidates`
            others, share = min(params.batch_size, len(self.windows)) - 1, self.windows.target_shares()
            expected = torch.from_numpy(others * share + params.n_negatives / dataset.n_items)
            self.also["expected"] = expected.to(self.device)
        self.reads_context = bool(getattr(self.model, "n_context", 0))
        self.optimizer = torch.optim.Adam(self.parameters, lr=params.learning_rate, fused=True)
        self.watch = Watch(self.model.k, self.device)
        self.rows: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.looks = 0  # validations since the best one
        self.progress = Progress(params.epochs, self.windows.steps_per_epoch * params.batch_size, quiet)
        self.state = run.folder / "resume.safetensors"
        if self.state.exists():
            sums, about = checkpoint.load(self.state, self.model, self.optimizer)
            with reading(self.state, checkpoint.AGAIN):
                if team.first:
                    self.watch.load_state_dict(sums)
                self.windows.load_state_dict(about["windows"])
            self.rows, self.best, self.looks = about["rows"], about["best"], about["looks"]
        team.same([*self.model.parameters(), *self.model.buffers()])
        if self.state.exists() and not self.done():
            self.progress.say(f"resuming {run.folder.name} in {self.place()}")

    def place(self) -> str:
        return f"epoch {self.windows.epoch + 1} after {self.windows.step} steps"

    def done(self) -> bool:
        return self.windows.epoch >= self.p.epochs or self.looks >= self.p.patience

    def go(self, stop: threading.Event) -> Run:
        if not self.done():
            self.save()  # a good state exists from the first step on
        self.since, self.seen_windows = time.monotonic(), 0  # for the speed
        try:
            stopped = False
            while not (stopped or self.done()):
                stopped = self.epoch(stop)
            return self.end("stopped" if stopped else "finished")
        except NotFinite:
            if self.team.first:
                self.run.write(self.rows, status="diverged", best=self.best)
            raise
        finally:
            self.progress.close()

    def epoch(self, stop: threading.Event) -> bool:
        """The rest of the epoch; returns True if the training should stop."""
        self.model.train()
        number, steps = self.windows.epoch + 1, self.windows.steps_per_epoch
        for batch in self.windows:
            done = self.windows.step or steps  # of this epoch, this step included
            self.seen_windows += len(batch.positive)
            wants_stop, wants_save = self.step(batch, number, done, stop)
            self.progress.step(number, done * self.p.batch_size, self.p.batch_size, self.watch.row)
            if self.p.log_steps and done % self.p.log_steps == 0 and done < steps:
                self.log(number, done)
            if done == steps:
                self.end_of_epoch(number)
            elif wants_stop or wants_save:
                self.save()
            if wants_stop and not self.done():
                return True
        return False

    def step(self, batch: Batch, epoch: int, step: int, stop: threading.Event) -> tuple[bool, bool]:
        """One gradient step (Algorithm 1); returns (stop?, save?)."""
        draw = np.random.SeedSequence([self.p.seed, epoch, step])
        negatives = np.random.default_rng(draw).integers(self.dataset.n_items, size=self.p.n_negatives)
        own = draw.spawn(self.team.size)[self.team.rank].generate_state(1, np.uint64)[0]
        torch.manual_seed(int(own >> np.uint64(1)))
        mine = self.team.rows(len(batch.positive))
        others = np.delete(batch.positive, mine)  # positives of the other processes are candidates too
        arrays = batch.user[mine], batch.history[mine], batch.positive[mine], np.concatenate([others, negatives])
        user, history, positive, negatives = (torch.from_numpy(x).to(self.device) for x in arrays)
        also = {"context": batch.context} if self.reads_context else {}
        also |= {"targets": batch.following} if self.p.targets == "all" else {}
        also |= {"following": batch.following} if self.p.false_negatives == "next" else {}
        also = {name: torch.from_numpy(x[mine]).to(self.device) for name, x in also.items()} | self.also
        mixed = self.p.precision == "mixed" or (self.p.precision == "auto" and self.device.type == "cuda")
        self.optimizer.zero_grad()
        seen, wrong, loss = None, "", torch.tensor(torch.nan)
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
                seen = self.model.objective(history, positive, negatives, user, **also)
            self.watch.look(seen)
            loss = seen.loss.detach()
            seen.loss.backward()
        except NotFinite as error:  # every process has to know
            wrong = str(error)
        save = self.team.first and time.monotonic() - self.saved >= self.p.checkpoint_seconds
        loss, stops, saves = self.team.average(self.parameters, loss, stop.is_set(), save)
        gradients = [q.grad for q in self.parameters if q.grad is not None]
        if not (np.isfinite(loss) and torch.nn.utils.get_total_norm(gradients).isfinite()):
            self.diverged(f"epoch {epoch}, step {step}", wrong, loss, seen)
        self.optimizer.step()
        return stops > 0, saves > 0

    def diverged(self, place: str, wrong: str, loss: float = math.nan, seen: Objective | None = None) -> NoReturn:
        raise NotFinite(divergence(self.model, seen, wrong, loss, place, self.p.learning_rate, self.state))

    def end_of_epoch(self, number: int) -> None:
        auprc, due = None, number % self.p.valid_every == 0
        if due or number == self.p.epochs:
            try:
                auprc = validation_auprc(self.model, self.dataset, self.p, self.team)
            except NotFinite as error:
                self.diverged(f"the validation of epoch {number}", str(error))
        row = self.log(number, self.windows.steps_per_epoch, auprc)
        better = auprc is not None and (self.best is None or auprc > self.best["auprc"])
        if better:
            self.looks, self.best = 0, {"epoch": number, "auprc": auprc}
            self.write_weights("best")
        elif due:  # an extra validation in the last epoch does not count
            self.looks += 1
        self.write_weights("last")
        self.save()
        self.progress.epoch(row, better, (self.p.epochs - number) * self.progress.windows / row["windows_per_s"])
        if self.on_epoch:
            try:
                self.on_epoch(copy.deepcopy(row))
            except BaseException as error:
                self.run.write(self.rows, status="stopped", best=self.best)
                error.add_note(f"raised by on_epoch after epoch {number}, which is saved: the same call continues")
                raise

    def log(self, epoch: int, step: int, auprc: float | None = None) -> dict[str, Any]:
        """Append a row to the history and start the sums again."""
        self.join_sums()
        now = time.monotonic()
        speed = self.seen_windows / (now - self.since)
        row = {"epoch": epoch, "step": step, "valid_auprc": auprc, "windows_per_s": speed, **self.watch.row()}
        self.rows.append(row)
        self.watch.reset()
        self.since, self.seen_windows = now, 0
        return row

    def join_sums(self) -> None:
        """Add up the sums of all processes."""
        if self.team.size > 1:
            self.watch.sums = {name: self.team.sum(value) for name, value in self.watch.sums.items()}
            self.watch.kappa = self.team.extremes(self.watch.kappa)

    def save(self) -> None:
        self.join_sums()
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters):
            self.diverged(self.place(), "the weights are no longer finite")
        if self.team.first:
            about = {"windows": self.windows.state_dict(), "rows": self.rows, "best": self.best, "looks": self.looks}
            checkpoint.save(self.state, self.model, self.optimizer, self.watch.state_dict(), about)
            self.run.write(self.rows, status="running", best=self.best)
        elif self.watch.sums["steps"] > 0:
            self.watch.reset()
        self.saved = time.monotonic()

    def write_weights(self, name: str) -> None:
        if self.team.first:
            about = {"epoch": self.windows.epoch, "best": self.best, "identity": self.run.about["identity"]}
            checkpoint.write_tensors(self.run.folder / f"{name}.safetensors", self.model.state_dict(), about)

    def end(self, status: str) -> Run:
        """Write the status and put the best weights into the model."""
        if self.team.first:
            self.run.write(self.rows, status=status, best=self.best)
        self.team.wait()
        if self.best and (best := self.run.folder / "best.safetensors").exists():
            checkpoint.load_weights(self.model, best)
        self.model.eval()
        if status == "stopped":
            kept = f"the model has the weights of epoch {self.best['epoch']}" if self.best else "no validation yet"
            self.progress.say(f"stopped in {self.place()}; {kept}. Call fit with the same arguments to resume.")
        return self.run


def validation_auprc(model: nn.Module, dataset: Dataset, p: TrainParams, team: Group) -> float:
    """Mean AP of the validation items over the full ranking; each process ranks for its share of the users."""
    users = sample_users(dataset, p.valid_users, p.seed, split="valid")
    mine = users[team.rank :: team.size]
    found = average_precision_of_ranks(target_ranks(model, dataset, mine, "valid")).sum() if len(mine) else 0.0
    device = next(iter([*model.parameters(), *model.buffers()])).device
    return team.sum(torch.tensor(float(found), dtype=torch.float64, device=device)).item() / len(users)


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next step, instead of giving it back and fetching it again."""
    with suppress(AttributeError, OSError, TypeError):  # only glibc has it
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(option, 1 << 30)


@contextmanager
def stopped_by_ctrl_c() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that the current step is completed; the second one interrupts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_interrupt(*_: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
