"""Context: numbers of a user or of a request that gate and encoder read, from the data set to the slate."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from serving import SMALL, perturbed
from torch import nn
from torch.nn.functional import normalize

from bachlib import BachError
from bachlib.data import Dataset, Windows, prepare
from bachlib.evaluate import diagnostics, evaluate
from bachlib.experiment.settings import experiment_of
from bachlib.model.methods import build
from bachlib.model.towers import ClsTower
from bachlib.params import N_TEST, N_VALID
from bachlib.serve import Retriever, Steering
from bachlib.serve.newcomers import pi_from_vectors
from bachlib.show.explorer.session import Session
from bachlib.show.portrait import Portrait
from bachlib.show.steering import sliders
from bachlib.train import Run, fit
from bachlib.train.run import data_of

READERS = [("standard", "encoder"), ("all-multihead", "encoder"), ("p-bach", "gate"), ("v-bach", "encoder")]
READERS += [("p-bach", "both"), ("p-bach-global", "gate"), ("p-bach-residual", "both"), ("p-bach-hybrid", "both")]
QUICK = {"batch_size": 256, "n_negatives": 64, "valid_every": 1, "learning_rate": 3e-3, "checkpoint_seconds": 0}


@pytest.fixture(scope="module")
def requests(world) -> Dataset:
    """The small world; the context of a request is the genre of the item that was taken, and noise."""
    genre, rng = world.genres.member[world.sequences], np.random.default_rng(0)
    return world.with_context(genre + 0.1 * rng.normal(size=genre.shape))


def step_of(dataset, size=32):
    """What `loss` takes: history, positive, negatives; and the context."""
    batch = next(iter(Windows(dataset, size)))
    negatives = np.random.default_rng(0).integers(dataset.n_items, size=40)
    parts = batch.history, batch.positive, negatives, getattr(batch, "context", None)
    return [None if x is None else torch.from_numpy(x) for x in parts]


# ------------------------------------------------------------------------------------------------------- the data set


@pytest.mark.parametrize("n_hist", [50, 7])
def test_a_window_reads_the_context_of_its_first_next_item(world, n_hist):
    """Event contexts are the places of the events: that of a window is the place after the last item of the history."""
    numbered = world.with_context(np.arange(len(world.sequences))[:, None])
    for batch in Windows(numbered, 64, n_hist=n_hist):
        for user, history, place in zip(batch.user, batch.history, batch.context[:, 0], strict=True):
            (last,) = np.flatnonzero(world.sequence(user) == history[-1])  # no item comes twice
            assert place == world.offsets[user] + last + 1
    users = np.arange(world.n_users)
    for split, held_out in (("valid", N_VALID + N_TEST), ("test", N_TEST)):
        places = numbered.context_of(users, split)[:, 0].astype(int)
        assert (places == world.offsets[1:] - held_out).all()
        assert (world.sequences[places] == world.targets(users, split)[:, 0]).all()


def test_the_context_of_a_user(world):
    named = world.with_context(np.arange(world.n_users)[:, None] * [1, 10])
    batch = next(iter(Windows(named, 64)))
    assert (batch.context == batch.user[:, None] * [1, 10]).all()
    assert named.context_of([3, 5], "valid").tolist() == named.context_of([3, 5], "test").tolist() == [[3, 30], [5, 50]]


def test_without_a_context_a_batch_is_what_it_was(world, requests):
    for a, b in zip(Windows(world, 64), Windows(requests, 64), strict=True):
        assert a._fields == ("user", "history", "positive") and b._fields == (*a._fields, "context")
        assert all((x == y).all() for x, y in zip(a, b, strict=False))


def test_a_data_set_is_another_with_another_context(world):
    given = np.ones((world.n_users, 2), np.float32)
    one, same, other = world.with_context(given), world.with_context(given.tolist()), world.with_context(given * 2)
    given[:] = 7  # a change from outside does not arrive
    assert one == same and one != other and one != world and (one.context == 1).all() and one.context.dtype == "float32"
    assert one.identity["context"] == {**other.identity["context"], "hash": one.identity["context"]["hash"]}
    assert repr(one).endswith("windows, a context of 2 numbers per user)") and "context" not in repr(world)
    cold = one.strict(0.2)
    assert (cold.context_of(cold.cold, "test") == 1).all() and cold.identity["context"] == one.identity["context"]
    with pytest.raises(BachError, match="once, and before strict"):
        one.with_context(given)
    with pytest.raises(BachError, match="once, and before strict"):
        world.strict(0.2).with_context(given)
    with pytest.raises(BachError, match=r"has no context: use dataset.with_context\(array\)"):
        world.context_of([0], "test")


@pytest.mark.parametrize(
    "wrong, told",
    [
        (lambda w: np.zeros((w.n_users + 1, 2)), r"each of 96 users or of [\d,]+ events, .* got shape \(97, 2\)"),
        (lambda w: np.zeros(w.n_users), r"\(rows, c\).*got shape \(96,\)"),
        (lambda w: np.zeros((w.n_users, 0)), r"c ≥ 1 columns; got shape \(96, 0\)"),
        (lambda w: [["a"]] * w.n_users, "should be an array of numbers"),
        (lambda w: [[1.0], [2.0, 3.0]], "should be an array of numbers"),
        (lambda w: np.where(np.eye(w.n_users) * np.arange(w.n_users) == 9, np.nan, 0), "row 9, column 9 is not"),
        (lambda w: np.full((w.n_users, 1), 1e300), "finite float32 numbers; row 0, column 0 is not"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_wrong_contexts(world, wrong, told):
    with pytest.raises(BachError, match=told):
        world.with_context(wrong(world))


# ---------------------------------------------------------------------------------------------------------- the towers


@pytest.mark.parametrize("name, reads", READERS)
def test_at_the_start_the_model_is_the_papers_to_the_bit(world, requests, name, reads):
    """Scores, loss and gradients, with dropout: the context map is zero and uses no random number."""
    plain = build(name, world, 3, **SMALL)
    model = build(name, requests, 3, context=reads, **SMALL)
    history, positive, negatives, context = step_of(requests)
    assert torch.equal(model.score(history, context=context), plain.score(history))
    assert all(
        torch.equal(a, b) for a, b in zip(model.encode(history, context=context), plain.encode(history), strict=True)
    )
    losses = []
    for one, given in ((plain.train(), None), (model.train(), context)):
        torch.manual_seed(1)
        losses.append(one.loss(history, positive, negatives, context=given))
        losses[-1].backward()
    assert torch.equal(*losses)
    theirs = dict(plain.named_parameters())
    maps = [parameter for part, parameter in model.named_parameters() if part not in theirs]
    assert len(maps) == (2 if reads == "both" else 1)
    for parameter in maps:  # and the gradient reaches the map
        assert not parameter.any() and (parameter.grad.abs().amax(0) > 0).all()
    for part, parameter in model.named_parameters():
        if part in theirs and parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[part].grad, rtol=1e-4, atol=1e-7, msg=part)


def test_a_model_that_reads_none_does_not_see_the_context(world, requests):
    """The default: the same training on a data set with a context as without."""
    on = [
        fit(build("p-bach", data, 3, **SMALL), data, {**QUICK, "epochs": 1}, quiet=True) for data in (world, requests)
    ]
    assert on[0].folder != on[1].folder and on[0].best == on[1].best
    states = [run.model.state_dict() for run in on]
    assert (
        all(torch.equal(x, states[1][name]) for name, x in states[0].items()) and states[0].keys() == states[1].keys()
    )


@pytest.mark.parametrize("width", [16, 24])
def test_the_fast_tower_is_pytorchs_layer(width):
    torch.manual_seed(0)
    tower = ClsTower(3, 16, width, 4, 24, 9, 0.0, 1.0).double().eval()
    tower.read_context(5)
    tower.context.data = torch.randn(width, 5)
    tower.double()
    tokens, history, context = torch.randn(6, 9, 16), torch.randint(0, 9, (6, 9)), torch.randn(6, 5)
    history[2, :4] = -1
    given = tokens.double(), history, context.double()
    torch.testing.assert_close(tower(*given), tower.plain(*given), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(tower(*given[:2], given[2] * 0), tower(*given), atol=0.1)


def test_who_reads_it(requests):
    """`gate` moves π and leaves the heads, `encoder` the other way round."""
    history, *_, context = step_of(requests)
    for reads in ("gate", "encoder", "both"):
        model = perturbed(requests, "p-bach", context=reads)
        a, b = model.encode(history, context=context), model.encode(history, context=context.flip(0))
        assert torch.equal(a.heads, b.heads) == (reads == "gate")
        assert torch.equal(a.log_pi, b.log_pi) == (reads == "encoder")
        one = model.encode(history, context=context[0])  # one for all
        assert all(torch.equal(x[:1], y[:1]) for x, y in zip(one, a, strict=True))


@pytest.mark.parametrize(
    "name, reads, told",
    [
        ("sasrec", "encoder", "the encoder of sasrec is SASRec, which reads no context"),
        ("mind", "encoder", "the encoder of mind is Mind"),
        ("comirec-sa", "both", "the encoder of comirec-sa is ComiRecSA"),
        ("p-bach-global", "both", "the encoder of p-bach-global is Codebook"),
        ("all-multihead", "gate", "the gate of all-multihead does not exist"),
        ("mostpop", "gate", "the gate of mostpop does not exist"),
        ("p-bach", "head", "Input should be 'none', 'gate', 'encoder' or 'both'"),
    ],
)
def test_who_cannot_read_it(requests, name, reads, told):
    with pytest.raises(BachError, match=told):
        build(name, requests, 3, context=reads, **SMALL)


def test_a_context_that_is_not_there(world, requests):
    with pytest.raises(BachError, match=r"context='gate': Dataset.* has no context; build on dataset.with_context"):
        build("p-bach", world, 3, context="gate", **SMALL)
    with pytest.raises(BachError, match="the gate of p-bach is PiTable"):
        build("p-bach", requests, 3, context="gate", pi="table", **SMALL)
    with pytest.raises(BachError, match="context: 'gate' needs a context, which only Python code can give"):
        experiment_of({"context": "gate"}, "here")


def test_an_encoder_of_ones_own(requests):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.map = nn.Linear(16, 3 * 16)

        def read_context(self, width):
            self.more = nn.Linear(width, 3 * 16)

        def forward(self, tokens, history, context):
            return (self.map(tokens.mean(1)) + self.more(context)).view(-1, 3, 16)

    model = build("p-bach", requests, 3, encoder=Own(), context="encoder", **SMALL)
    history, positive, negatives, context = step_of(requests)
    expected = normalize(
        (model.encoder.map(model.items()[history].mean(1)) + model.encoder.more(context)).view(-1, 3, 16), dim=-1
    )
    torch.testing.assert_close(model.encode(history, context=context).heads, expected)
    model.loss(history, positive, negatives, context=context).backward()
    assert model.encoder.more.weight.grad.any()


@pytest.mark.parametrize("name", ["p-bach", "p-bach-global"])
def test_wrong_input(world, requests, name):
    model, plain = build(name, requests, 3, context="gate", **SMALL), build(name, world, 3, **SMALL)
    history, positive, negatives, context = step_of(requests)
    context[7, 2] = torch.nan
    uses = [lambda m, c: m.encode(history, context=c), lambda m, c: m.score(history, context=c)]
    uses += [lambda m, c: m.loss(history, positive, negatives, context=c), lambda m, c: m.log_pi(history, context=c)]
    uses += [lambda m, c: Retriever(m, "exact").retrieve(history, 5, context=c)]
    uses += [lambda m, c: pi_from_vectors(m, np.ones((32, 1, 16)), c)]
    if name == "p-bach-global":
        uses += [lambda m, c: Retriever(m, "codebook").retrieve(history, 5, context=c)]
    for use in uses:
        with pytest.raises(BachError, match=r"reads a context with every request: pass context=, \(B, c\) = \(32, 5\)"):
            use(model, None)
        for wrong in (np.zeros((31, 5)), np.zeros((32, 4)), np.zeros(32), [[0.0] * 5, [1.0]], "genre"):
            with pytest.raises(BachError, match=r"context should be \(B, c\) = \(32, 5\) or \(c,\) = \(5,\) numbers"):
                use(model, wrong)
        with pytest.raises(BachError, match="that of request 7 is not"):
            use(model, context)
        with pytest.raises(BachError, match="this model reads no context"):
            use(plain, np.zeros((32, 5)))


# ------------------------------------------------------------------------------------------------------------ training


@pytest.fixture(scope="module")
def decided(tmp_path_factory) -> Dataset:
    """Sessions of ten events of one interest, drawn uniformly each time: the history cannot tell the next one, and the
    context names it."""
    rng, rows = np.random.default_rng(0), []
    for user in range(120):
        pools = [rng.permutation(60) + 60 * interest for interest in range(4)]
        used = [0] * 4
        while len(rows) < (user + 1) * 100:
            interest = int(rng.choice([j for j in range(4) if used[j] < 60]))
            rows += [(user, item) for item in pools[interest][used[interest] : used[interest] + 10]]
            used[interest] += 10
    log = pd.DataFrame(rows, columns=["user", "item"]).assign(time=range(len(rows)))
    folder = tmp_path_factory.mktemp("decided")
    log.to_csv(folder / "log.csv", index=False)
    columns = {"user": "user", "item": "item", "time": "time"}
    made = prepare("csv", folder / "log.csv", folder / "data", columns=columns, quiet=True)
    interest = made.items["raw_id"].astype(int).to_numpy() // 60
    return made.with_context(np.eye(4)[interest[made.sequences]])


@pytest.mark.parametrize("name, reads", [("p-bach-global", "gate"), ("p-bach", "encoder")])
def test_reading_the_context_pays_where_it_decides(decided, name, reads):
    found = {}
    for by in ("none", reads):
        model = build(name, decided, 4, context=by, **SMALL)
        run = fit(model, decided, {**QUICK, "epochs": 8, "valid_every": 8, "learning_rate": 0.01}, quiet=True)
        found[by] = evaluate(run, decided, quiet=True).means["R@50"]
    assert found[reads] > 1.5 * found["none"], found
    if reads == "gate":  # the same histories ask for another interest when the context does
        history, pi = decided.history(np.arange(50), "test"), []
        for j in range(4):
            pi.append(run.model.encode(history, context=np.eye(4)[j]).log_pi.exp())
            top = run.model.score(history, context=np.eye(4)[j]).topk(10).indices.numpy()
            assert (
                decided.items["raw_id"].astype(int).to_numpy()[top] // 60 == j
            ).mean() > 0.4  # chance: 0.25; half of the next ten are of the next session
        assert min((a - b).abs().sum(1).min() for n, a in enumerate(pi) for b in pi[:n]) > 0.3


def test_a_training_with_a_context_resumes_to_the_bit(requests, tmp_path):
    whole, stopped = (tmp_path / name for name in ("whole", "stopped"))
    params = {**QUICK, "epochs": 2}

    def model():
        return build("p-bach", requests, 3, context="both", **SMALL)

    expected = fit(model(), requests, params, whole, quiet=True)
    killed, steps = model(), 0
    objective = killed.objective

    def fails(*args, **given):
        nonlocal steps
        steps += 1
        if steps == 31:
            raise KeyboardInterrupt
        return objective(*args, **given)

    killed.objective = fails
    with pytest.raises(KeyboardInterrupt):
        fit(killed, requests, params, stopped, quiet=True)
    resumed = fit(model(), requests, params, stopped, quiet=True)
    assert resumed.best == expected.best
    state = resumed.model.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in expected.model.state_dict().items())
    assert state["gate.tower.context"].any() and state["encoder.context"].any()
    loaded = Run.load(stopped, requests)
    assert torch.equal(loaded.model.state_dict()["encoder.context"], state["encoder.context"])
    other = requests.context.copy()
    other[0] += 1
    for dataset in (Dataset.load(requests.folder), Dataset.load(requests.folder).with_context(other)):
        with pytest.raises(
            BachError, match="has no context" if dataset.context is None else "the context or the cold users differ"
        ):
            Run.load(stopped, dataset)
        with pytest.raises(BachError, match="the context or the cold users differ"):
            evaluate(expected, dataset)
    with pytest.raises(BachError, match="trained on data with a context, which is not kept with it"):
        data_of(stopped)
    assert data_of(stopped, requests) is requests


def test_two_processes_read_their_own_rows(requests, tmp_path):
    """The training of one process with the joint batch."""
    np.save(tmp_path / "context.npy", requests.context)
    params = {**QUICK, "epochs": 1, "batch_size": 1024}
    script = f"""
import numpy as np
from bachlib.data import Dataset
from bachlib.model.methods import build
from bachlib.train import fit
requests = Dataset.load({str(requests.folder)!r}).with_context(np.load({str(tmp_path / "context.npy")!r}))
model = build("p-bach", requests, 3, context="both", **{ ({**SMALL, "dropout": 0.0})!r})
fit(model, requests, {params!r}, __import__("sys").argv[1], quiet=True)
"""
    (tmp_path / "train.py").write_text(script)
    start = {"one": [], "two": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]}
    for out, words in start.items():
        command = [sys.executable, *words, str(tmp_path / "train.py"), str(tmp_path / out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (Run.load(tmp_path / out, requests, weights="last") for out in start)
    assert two.history["loss"][0] == pytest.approx(one.history["loss"][0], abs=1e-4)
    assert two.best["auprc"] == pytest.approx(one.best["auprc"], rel=1e-2)
    for part in ("encoder.context", "gate.tower.context"):
        a, b = one.model.state_dict()[part], two.model.state_dict()[part]
        assert a.any() and (a - b).norm() < 0.05 * a.norm()


# ------------------------------------------------------------------------------------------------- serving and looking


@pytest.mark.parametrize("name, strategy, reads", [
    ("p-bach", "exact", "both"), ("p-bach", "two-step", "gate"), ("v-bach-global", "codebook", "gate"),
    ("all-multihead", "exact", "encoder"), ("v-bach-global", "auto", "gate"),
])  # fmt: skip
def test_a_slate_is_that_of_the_models_scores(requests, histories, name, strategy, reads):
    model = perturbed(requests, name, context=reads)
    retriever = Retriever(model, strategy, lists="exact")
    context = requests.context_of(np.arange(30), "test")
    for given in (context, context[4], context.tolist(), torch.from_numpy(context)):
        slate = retriever.retrieve(histories, 20, context=given)
        scores = model.score(histories, context=given).numpy()
        np.put_along_axis(scores, histories, -np.inf, 1)
        np.testing.assert_allclose(slate.scores, -np.sort(-scores)[:, :20], atol=1e-4)
        assert slate.certified.all()
    assert retriever.recall(histories, 20, context=context) == 1
    one = retriever.retrieve(histories[4], 20, context=context[4])
    assert (one.items == retriever.retrieve(histories, 20, context=context).items[4]).all()
    newcomers = retriever.retrieve([[], []], 20, context=context[:2])  # a user of whom only the context is known
    assert (newcomers.scores[0] != newcomers.scores[1]).any()
    if model.kernel:
        steered = retriever.retrieve(histories[4], 20, pi=Steering(forbid=[0]), context=context[4])
        assert not steered.head_share[..., 0].any()


def test_an_index_of_a_model_with_a_context(requests, histories, tmp_path):
    model = perturbed(requests, "p-bach-global", context="gate")
    context = requests.context_of(np.arange(30), "test")
    saved = Retriever(model, "codebook")
    saved.save(tmp_path / "index")
    loaded = Retriever.load(tmp_path / "index", model)
    assert (
        loaded.retrieve(histories, 9, context=context).items == saved.retrieve(histories, 9, context=context).items
    ).all()
    pi = saved.retrieve(histories, 9, context=context).pi
    assert (saved.retrieve(histories, 9, pi=pi).items == saved.retrieve(histories, 9, context=context).items).all()
    vectors = saved.catalogue.vectors[histories]
    np.testing.assert_allclose(pi_from_vectors(model, vectors, context), pi, atol=1e-6)
    with torch.no_grad():
        model.gate.tower.context += 1
    with pytest.raises(BachError, match="index of another model"):
        Retriever.load(tmp_path / "index", model)


def test_evaluation_and_pictures_read_the_users_context(requests):
    model = perturbed(requests, "p-bach", context="both")
    users = np.arange(requests.n_users)
    for split in ("valid", "test"):
        expected = model.encode(requests.history(users, split), context=requests.context_of(users, split))
        for a, b in zip(diagnostics.encode_users(model, requests, users, split), expected, strict=True):
            torch.testing.assert_close(a, b.detach())
    for split, held_out in (("valid", N_VALID + N_TEST), ("test", N_TEST)):
        result = evaluate(model, requests, split, quiet=True)
        scores = model.score(requests.history([8], split), context=requests.context_of([8], split))[0].numpy()
        scores[requests.sequence(8)[:-held_out]] = -np.inf
        assert (1 + (scores > scores[requests.targets([8], split)].T).sum(1) == result.ranks[8]).all()
    session = Session({"mine": model}, requests)
    session.be(8)
    own = Retriever(model, "exact").retrieve(session.had, 15, context=requests.context_of([8], "test"))
    assert (session.slate().items == own.items).all()
    np.testing.assert_allclose(session.heads.pi, own.pi[0])
    session.read(session.history[:5])
    assert session.user is None and session.context.tolist() == requests.context_of([8], "test").tolist()
    shown = sliders(model, requests, users=1).data["users"][0]
    u = int(shown["name"].split()[1].rstrip(":"))
    pi = model.encode(
        np.array(requests.sequence(u)[None, :-N_TEST]), context=requests.context_of([u], "test")
    ).log_pi.exp()
    np.testing.assert_allclose(shown["pi"], pi[0].detach(), atol=1e-5)
    with pytest.raises(BachError, match="mine reads a context: give the data set of the training"):
        Session({"mine": model}, Dataset.load(requests.folder))


def test_a_portrait_needs_the_data_set_with_its_context(requests):
    run = fit(build("p-bach", requests, 3, context="gate", **SMALL), requests, {**QUICK, "epochs": 1}, quiet=True)
    assert "trained with a context, which only your code has" in Portrait(run.folder, requests.folder).missing
    shown = Portrait(run.folder, requests)
    assert not shown.missing
    for part in (shown.numbers, shown.sliders, shown.user):
        assert len(part()) > 1
