"""The towers as programs for other runtimes: torch.export, which needs only torch, and ONNX, which needs no torch.

    user_side    history (B, n) item numbers, −1 pads on the left → heads (B, k, d), log π_u (B, k), κ (B, k)
    item_tower   rows (m, d) like those of PureSVD → vectors (m, d), for new items

B, m and n are free; n is 1 … n_hist, so a caller passes the last n_hist items. An empty history is a row of −1. MIND's
routing starts, as in evaluation, from a fixed function of the history. Each program is run and compared with the model.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.functional import normalize

from bachlib import BachError, needs
from bachlib.model import products, towers
from bachlib.model.towers import PiTable
from bachlib.model.twotower import TwoTower

OPSETS = range(18, 24)  # of ONNX
CLOSE = 1e-5  # the largest difference between a program and its model, relative where a number is above 1
LARGE = 1 << 30  # bytes of weights; an ONNX file holds at most 2 GB, so larger ones lie in a file beside it


class Unchecked(TwoTower):
    """A model without the checks of its input, which a program cannot hold."""

    def _history(self, history: Tensor, n: int | None = None) -> Tensor:
        return history


class UserSide(nn.Module):
    def __init__(self, model: TwoTower):
        super().__init__()
        if model.n_context:
            raise BachError("this model reads a context with every request; an export is of models without one")
        if isinstance(model.gate, PiTable):
            raise BachError("pi='table' has a π_u for each user of the data set and none for a history: use pi='gate'")
        with torch.no_grad():
            self.register_buffer("rows", model.token_rows().cpu().clone())
        self.model = deepcopy(model).cpu().eval()
        self.model.__class__, self.model.item_tower = Unchecked, None  # the rows are all it needs of the tower

    def forward(self, history: Int[Tensor, "B n"]) -> tuple[Tensor, ...]:
        return tuple(self.model.encode(history, rows=self.rows))


class ItemTower(nn.Module):
    def __init__(self, model: TwoTower):
        super().__init__()
        self.tower = deepcopy(model.item_tower).cpu().eval()

    def forward(self, rows: Float[Tensor, "m d"]) -> tuple[Tensor]:
        return (normalize(self.tower.embed(rows), dim=-1),)


class Part(NamedTuple):
    """A part of a model that becomes a program."""

    name: str
    module: nn.Module
    examples: list[Tensor]
    given: dict[str, dict[int, Any]]  # the input's name and its free dimensions
    returned: list[str]


def user_side(model: TwoTower) -> Part:
    shapes = (4, model.n_hist), (1, 1), (3, (model.n_hist + 1) // 2)
    n = {1: Dim("n", max=model.n_hist)} if model.n_hist > 1 else {}
    examples = [_histories(len(model.token_rows()), *shape) for shape in shapes]
    return Part("user_side", UserSide(model), examples, {"history": {0: Dim("B"), **n}}, ["heads", "log_pi", "kappa"])


def item_tower(model: TwoTower) -> Part | None:
    """None for a tower of your own without `embed(rows)`."""
    if not hasattr(model.item_tower, "embed"):
        return None
    examples = [torch.randn(m, model.d, generator=torch.Generator().manual_seed(m)) for m in (5, 1, 20)]
    return Part("item_tower", ItemTower(model), examples, {"rows": {0: Dim("m")}}, ["vectors"])


def _histories(n_items: int, B: int, n: int) -> Int[Tensor, "B n"]:
    """Random histories of all lengths; the last of several is empty."""
    history = torch.randint(n_items, (B, n), generator=torch.Generator().manual_seed(B))
    length = torch.linspace(n, 0 if B > 1 else n, B).ceil()
    return history.where(torch.arange(n, 0, -1) <= length[:, None], -1)


def check_opset(opset: int) -> None:
    if opset not in OPSETS:
        known = f"torch {torch.__version__} writes {OPSETS[0]} … {OPSETS[-1]}"
        raise BachError(f"opset {opset} is too {'old' if opset < OPSETS[0] else 'new'}: {known}")


def write(part: Part, folder: Path, opset: int = OPSETS[0]) -> float:
    """Write `name`.pt2 and `name`.onnx; returns the largest difference between the programs and the model."""
    check_opset(opset)
    needs("an export to ONNX", "export", "onnx", "onnxscript", "onnxruntime")
    files = [folder / f"{part.name}{ending}" for ending in (".pt2", ".onnx")]
    with _quiet(), torch.no_grad():
        try:
            made = to_onnx(program := exported(part), part, opset)
        except Exception as error:  # of any kind, if the module is the user's own
            if isinstance(error, BachError):
                raise
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise BachError(f"the {part.name} of this model cannot be exported ({why:.200})") from error
        torch.export.save(program, files[0])
        made.save(files[1], external_data=sum(x.nbytes for x in program.state_dict.values()) > LARGE)
        return max(difference(part, run) for run in runs(part, *files))


def exported(part: Part) -> ExportedProgram:
    """By torch.export, without the names of source files."""
    free = tuple(part.given.values())
    with _whole_products():
        program = torch.export.export(part.module, (part.examples[0],), dynamic_shapes=free, strict=True)
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in chain.from_iterable(graph.nodes for graph in graphs):
        for told in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node"):
            node.meta.pop(told, None)
    return program


def to_onnx(program: ExportedProgram, part: Part, opset: int) -> torch.onnx.ONNXProgram:
    """torch's own optimiser is not used: it takes the 1e-9 of `squash` for 0, and an empty history becomes NaN."""
    from onnxscript import ir, optimizer

    if any(node.target in IN_OTHER_WORDS for node in program.graph.nodes):
        program = program.run_decompositions(IN_OTHER_WORDS)
    names = {name: {at: dim.__name__ for at, dim in free.items()} for name, free in part.given.items()}
    made = torch.onnx.export(
        program, input_names=[*names], output_names=part.returned, dynamic_shapes=names, opset_version=opset,
        optimize=False, verbose=False,
    )  # fmt: skip
    optimizer.inline(made.model)
    for _ in range(2):
        optimizer.fold_constants(made.model)
    optimizer.remove_unused_nodes(made.model)
    ir.passes.common.ClearMetadataAndDocStringPass()(made.model)
    if (found := made.model.opset_imports[""]) != opset:
        raise BachError(f"opset {opset} was asked for, but torch wrote {found}: use --opset {found}")
    return made


def _erfinv(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """erf⁻¹ for |x| < 0.996, to 4e-7 (Giles 2010, "Approximating the erfinv function", the central polynomial)."""
    w, made = -torch.log((1 - x) * (1 + x)) - 2.5, torch.full_like(x, 2.81022636e-08)
    for factor in (3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
                   0.246640727, 1.50140941):  # fmt: skip
        made = made * w + factor
    return made * x


def _sum(x: Tensor, dim: list[int], keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """A sum of whole numbers wraps around, as torch's does; onnxruntime's ends at −2^63."""
    if x.dtype != torch.int64:
        return NotImplemented
    high, low = (half.double().sum(dim, keepdim).long() for half in (x >> 32, x & 0xFFFFFFFF))
    return (high << 32) + low


IN_OTHER_WORDS = {torch.ops.aten.erfinv.default: _erfinv, torch.ops.aten.sum.dim_IntList: _sum}  # what ONNX lacks


def runs(part: Part, pt2: Path, onnx: Path) -> Iterator[Any]:
    """The two written programs as functions of the input."""
    import onnxruntime

    (name,) = part.given
    session = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    yield torch.export.load(pt2).module()
    yield lambda given: [torch.from_numpy(x) for x in session.run(None, {name: given.numpy()})]


def difference(part: Part, run: Any) -> float:
    """The largest difference from the model over the examples; raises an error above `CLOSE`."""
    worst = 0.0
    for given in part.examples:
        for name, wanted, found in zip(part.returned, part.module(given), run(given), strict=True):
            same = found.shape == wanted.shape
            off = ((found - wanted).abs() / wanted.abs().clamp(min=1)).max().item() if same else torch.inf
            if not off <= CLOSE:  # also if it is not a number
                told = f"{name} by {off:.1g} for an input of shape {tuple(given.shape)}"
                raise BachError(f"the {part.name} as a program differs from the model in {told} (at most {CLOSE:g})")
            worst = max(worst, off)
    return worst


@contextmanager
def _whole_products() -> Iterator[None]:
    """Products by torch's own operator and in one piece: other runtimes have no oneDNN, and B decides on the parts."""
    before = products.ONEDNN, towers.in_parts
    products.ONEDNN, towers.in_parts = None, lambda net, rows: net(rows)
    try:
        yield
    finally:
        products.ONEDNN, towers.in_parts = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters say about packages they do not find and constants they do not fold."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
