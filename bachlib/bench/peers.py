"""Public libraries beside ours: training, evaluation and serving of the same sequences, in one process and in turns.

`make bench-peers` runs this file in an environment of its own, which has RePlay, RecBole and Torch-RecHub. RecBole
switches autograd's anomaly mode on when it is imported; it is switched off here. Nothing is like for like: each row
says what differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import nn

from bachlib.bench import serve
from bachlib.bench.measure import both_clocks, judged, save, told, world
from bachlib.data import Dataset, Windows
from bachlib.evaluate import evaluate
from bachlib.model.methods import build
from bachlib.rank.ranks import sample_users
from bachlib.serve import exact
from bachlib.serve.twostep import Neighbours, two_step

Work = Callable[[], Any]
WORLD = {"n_users": 12_000, "n_items": 20_050}  # after preparation more than 10,000 users and 20,000 items
D, N_HIST, BATCH, NEGATIVES, K, DROPOUT = 64, 50, 512, 2048, 100, 0.2
LEARNT = "learns a table of item vectors, where ours is a tower on PureSVD rows"
TOP = f"metrics of the first {K} only, where ours are of the full ranking"
OURS = {"p-bach, k = 8": ("p-bach", 8), "p-bach, k = 32": ("p-bach", 32), "all-multihead, k = 8": ("all-multihead", 8),
        "standard, one vector": ("standard", 1)}  # fmt: skip


class Peer(nn.Module):
    """A public model: `loss(history, positive, negatives)`, `score(history)`, and what is not like for like.

    Its items count from `first`; histories are padded on the left with `first` − 1, as ours are with −1.
    """

    first = 1

    def __init__(self, model: nn.Module, unlike: str, trained: str = "", vectors: int = 1):
        super().__init__()
        self.model, self.vectors = model, vectors
        self.unlike = {"train": f"{unlike}; {trained}", "evaluate": f"{unlike}; {TOP}"}


class Replay(Peer):
    first = 0

    def __init__(self, n_items: int, every: bool = False):
        from replay.data import FeatureHint, FeatureSource, FeatureType
        from replay.data.nn import TensorFeatureInfo, TensorFeatureSource, TensorSchema
        from replay.nn.loss import CESampled
        from replay.nn.sequential import SasRec

        source = TensorFeatureSource(FeatureSource.INTERACTIONS, "item_id")
        about = {"is_seq": True, "embedding_dim": D, "cardinality": n_items, "padding_value": n_items}
        hint = {"feature_type": FeatureType.CATEGORICAL, "feature_hint": FeatureHint.ITEM_ID}
        schema = TensorSchema([TensorFeatureInfo("item_id", feature_sources=[source], **hint, **about)])
        model = SasRec.from_params(schema, D, num_heads=1, max_sequence_length=N_HIST, dropout=DROPOUT)
        model.loss = CESampled()
        model.loss.logits_callback = model.get_logits
        often = "each of the 50 positions, each with its next item" if every else "the last position only"
        super().__init__(model, f"two causal blocks, feed-forward of {D}; {LEARNT}", f"a loss at {often}")
        self.every, self.pad = every, n_items

    def loss(self, history: torch.Tensor, positive: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        there, targets = history >= 0, torch.cat((history[:, 1:], positive[:, None]), 1)
        wanted = there if self.every else torch.arange(N_HIST).expand_as(history) == N_HIST - 1
        shared = torch.cat((positive, negatives))
        labels = {"positive_labels": targets[..., None], "negative_labels": shared}
        ids = {"item_id": history.masked_fill(~there, self.pad)}
        return self.model.forward_train(ids, there, **labels, target_padding_mask=wanted[..., None])["loss"]

    def score(self, history: torch.Tensor) -> torch.Tensor:
        there = history >= 0
        return self.model.forward_inference({"item_id": history.masked_fill(~there, self.pad)}, there)["logits"]


class RecBole(Peer):
    def __init__(self, n_items: int, loss: str):
        from recbole.model.sequential_recommender.sasrec import SASRec

        config = {
            "USER_ID_FIELD": "user", "ITEM_ID_FIELD": "item", "LIST_SUFFIX": "_list", "NEG_PREFIX": "neg_",
            "ITEM_LIST_LENGTH_FIELD": "length", "MAX_ITEM_LIST_LENGTH": N_HIST, "device": torch.device("cpu"),
            "n_layers": 2, "n_heads": 1, "hidden_size": D, "inner_size": 4 * D, "hidden_dropout_prob": DROPOUT,
            "attn_dropout_prob": DROPOUT, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "initializer_range": 0.02,
            "loss_type": loss,
        }  # fmt: skip
        sizes = type("Sizes", (), {"num": lambda self, field: n_items + 1})()
        kind = "softmax over the full catalogue" if loss == "CE" else "one negative per window (BPR)"
        super().__init__(SASRec(config, sizes), f"two causal blocks, feed-forward of {4 * D}; {LEARNT}", kind)

    def _batch(self, history: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
        length = (history > 0).sum(1)
        left = torch.arange(N_HIST) + N_HIST - length[:, None]  # RecBole pads on the right
        moved = history.gather(1, left.clamp(max=N_HIST - 1)) * (left < N_HIST)
        return {"item_list": moved, "length": length, **more}

    def loss(self, history: torch.Tensor, positive: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        batch = self._batch(history, item=positive, neg_item=negatives[: len(positive)])
        return self.model.calculate_loss(batch)

    def score(self, history: torch.Tensor) -> torch.Tensor:
        return self.model.full_sort_predict(self._batch(history))


class RecHub(Peer):
    def __init__(self, n_items: int, name: str, k: int = 8):
        from torch_rechub.basic.features import SequenceFeature, SparseFeature
        from torch_rechub.models import matching

        item = SparseFeature("item", n_items + 1, D, padding_idx=0)
        like = {"vocab_size": n_items + 1, "embed_dim": D, "pooling": "concat", "shared_with": "item", "padding_idx": 0}
        history, negatives = (SequenceFeature(part, **like) for part in ("history", "negatives"))
        more = {"max_length": N_HIST} if name == "MIND" else {}
        features = ([SparseFeature("user", 1, D)], [history], [item], [negatives])
        model = getattr(matching, name)(*features, interest_num=k, **more)
        unlike = f"no attention between positions; the largest cosine counts; {LEARNT}"
        trained = f"{NEGATIVES + BATCH} negatives of each window's own, as it has no shared ones"
        super().__init__(model, unlike, trained, k)

    def loss(self, history: torch.Tensor, positive: torch.Tensor, negatives: torch.Tensor) -> torch.Tensor:
        own = torch.randint(1, int(negatives.max()) + 1, (len(history), NEGATIVES + BATCH))
        batch = {"user": torch.zeros(len(history)), "history": history, "item": positive, "negatives": own}
        return nn.functional.cross_entropy(self.model(batch), torch.zeros(len(history), dtype=torch.long))

    def score(self, history: torch.Tensor) -> torch.Tensor:
        heads = self.model.user_tower({"user": torch.zeros(len(history)), "history": history})
        items = nn.functional.normalize(self.model.embedding.embed_dict["item"].weight, dim=-1)
        return (heads @ items.T).amax(1)


def peers(n_items: int) -> dict[str, Peer]:
    made = {
        "RePlay SasRec": Replay(n_items),
        "RePlay SasRec, every position": Replay(n_items, every=True),
        "RecBole SASRec": RecBole(n_items, "CE"),
        "RecBole SASRec, BPR": RecBole(n_items, "BPR"),
        "Torch-RecHub ComiRec-SA, k = 8": RecHub(n_items, "ComirecSA"),
        "Torch-RecHub MIND, k = 8": RecHub(n_items, "MIND"),
    }
    torch.autograd.set_detect_anomaly(False)  # recbole's sine.py switches it on when imported
    return made


# --------------------------------------------------------------------------------------------------------- training


def training(dataset: Dataset, of_peers: dict[str, Peer], rounds: int) -> list[dict[str, Any]]:
    """Windows per core-second: one step of 512 windows and 2,048 + 512 candidates, with Adam."""
    batches = [tuple(map(torch.from_numpy, batch[1:])) for batch in islice(Windows(dataset, BATCH), 8)]

    def step_of(model: nn.Module, first: int) -> Work:
        optimizer, turn = torch.optim.Adam(model.train().parameters(), 1e-3, fused=True), cycle(batches)

        def step() -> None:
            history, positive = (part + first for part in next(turn))
            optimizer.zero_grad()
            model.loss(history, positive, torch.randint(first, dataset.n_items + first, (NEGATIVES,))).backward()
            optimizer.step()

        return step

    steps = {name: step_of(build(method, dataset, k), 0) for name, (method, k) in OURS.items()}
    steps |= {name: step_of(peer, peer.first) for name, peer in of_peers.items()}
    return _rows("train", "windows", BATCH, both_clocks(steps, rounds), of_peers)


# ------------------------------------------------------------------------------------------------------- evaluation


def evaluation(dataset: Dataset, of_peers: dict[str, Peer], rounds: int, users: int = 2_000) -> list[dict[str, Any]]:
    """Users per core-second: the full catalogue is ranked without the items that a user has seen; then metrics."""
    models = {name: build(method, dataset, k) for name, (method, k) in OURS.items() if k < 32}
    works = {name: partial(evaluate, model, dataset, max_users=users, quiet=True) for name, model in models.items()}
    chosen = sample_users(dataset, users, 0)
    seen = [torch.from_numpy(dataset.sequence(u)[:-10].astype(np.int64)) for u in chosen]
    told = *(torch.from_numpy(part(chosen, "test")) for part in (dataset.history, dataset.targets)), seen
    ways = {"RePlay": _replay_metrics, "RecBole": _recbole_metrics, "Torch-RecHub": _rechub_metrics}
    for name, peer in of_peers.items():
        if name.endswith(("every position", "BPR", "MIND, k = 8")):
            continue  # they score as the row above them does
        works[name] = partial(_evaluated, peer.eval(), *told, ways[name.split()[0]])
    return _rows("evaluate", "users", len(chosen), both_clocks(works, rounds), of_peers)


@torch.no_grad()
def _evaluated(peer: Peer, histories: torch.Tensor, targets: torch.Tensor, seen: list[torch.Tensor], way: Any) -> Any:
    add, result = way()
    for at in range(0, len(histories), BATCH):
        part, rows = slice(at, at + BATCH), seen[at : at + BATCH]
        scores, of = peer.score(histories[part] + peer.first), torch.tensor(list(map(len, rows)))
        scores[torch.arange(len(rows)).repeat_interleave(of), torch.cat(rows) + peer.first] = -torch.inf
        scores[:, : peer.first] = -torch.inf
        add(scores, targets[part] + peer.first)
    return result()


def _replay_metrics() -> tuple[Callable, Work]:
    from replay.metrics.torch_metrics_builder import TorchMetricsBuilder

    builder = TorchMetricsBuilder(["recall", "ndcg", "map"], [10, 50, K])
    return lambda scores, targets: builder.add_prediction(scores.topk(K).indices, targets), builder.get_metrics


def _recbole_metrics() -> tuple[Callable, Work]:
    from recbole.evaluator import Collector, Evaluator

    config = {"metrics": ["Recall", "NDCG", "MAP"], "topk": [10, 50, K], "metric_decimal_place": 4}
    config |= {"eval_args": {"mode": "full"}, "device": torch.device("cpu")}
    np.float = float  # a name that numpy has removed and RecBole 1.2.1 uses
    collector, evaluator = Collector(config), Evaluator(config)

    def add(scores: torch.Tensor, targets: torch.Tensor) -> None:
        rows = torch.arange(len(targets)).repeat_interleave(targets.shape[1])
        collector.eval_batch_collect(scores, None, rows, targets.flatten())

    return add, lambda: evaluator.evaluate(collector.get_data_struct())


def _rechub_metrics() -> tuple[Callable, Work]:
    from torch_rechub.basic.metric import topk_metrics

    wanted, found = [], []

    def add(scores: torch.Tensor, targets: torch.Tensor) -> None:
        found.extend(scores.topk(K).indices.tolist())
        wanted.extend(targets.tolist())

    return add, lambda: topk_metrics(dict(enumerate(wanted)), dict(enumerate(found)), [10, 50, K])


# ---------------------------------------------------------------------------------------------------------- serving


def serving(rounds: int, n: int = 200_000, k: int = 8) -> list[dict[str, Any]]:
    """Requests per core-second: the best 100 of n items for given heads, one request at a time."""
    import faiss

    rng = np.random.default_rng(0)
    directions, items = serve.catalogue(n, rng)
    query = serve.requests(directions, k, "power-spherical", rng)
    graph, flat, table = Neighbours(items, "hnsw"), faiss.IndexFlatIP(D), torch.from_numpy(items)
    flat.add(items)
    usual = faiss.clone_index(graph.on_cpu)
    usual.hnsw.efSearch = 16  # faiss's default, with which Torch-RecHub uses it
    heads = torch.from_numpy(query.heads)

    def largest(search: Callable[[np.ndarray], tuple[Any, Any]], u: int) -> np.ndarray:
        """The union of the heads' lists, each item by its largest cosine."""
        t, found = map(np.asarray, search(query.heads[u]))
        order = np.argsort(-t, axis=None)
        kept, first = np.unique(found.flat[order], return_index=True)
        return kept[np.argsort(first)[:K]]

    each: dict[str, tuple[int, str, Callable[[int], Any]]] = {
        "ours, exact scan, k = 8": (k, "", lambda u: exact.top_k(query[u : u + 1], items, K, serve.NOTHING)),
        "ours, two-step, k = 8": (k, "", lambda u: two_step(query[u : u + 1], items, K, serve.NOTHING, graph)),
        "faiss flat, one vector": (1, "one inner product, no mixture", lambda u: flat.search(query.heads[u, :1], K)),
        "faiss flat, k = 8": (k, "the largest cosine, no mixture", lambda u: largest(lambda q: flat.search(q, K), u)),
        "faiss HNSW, k = 8": (
            k, "the largest cosine, no mixture; faiss's default effort: it finds less",
            lambda u: largest(lambda q: usual.search(q, K), u),
        ),
        "torch matmul and topk, one vector": (
            1, "one inner product, no mixture: RePlay's and RecBole's way", lambda u: (heads[u, :1] @ table.T).topk(K),
        ),
    }  # fmt: skip
    works = {name: lambda one=one: [one(u) for u in range(serve.REQUESTS)] for name, (_, _, one) in each.items()}
    took = both_clocks(works, rounds)
    about = {name: (vectors, unlike) for name, (vectors, unlike, _) in each.items()}
    return _rows("serve", "requests", serve.REQUESTS, took, about)


def _rows(what: str, unit: str, count: int, took: dict[str, dict[str, float]], about: dict[str, Any]) -> list[dict]:
    """A row per contender. `about`: a peer, or (vectors, what is not like for like)."""
    rows = []
    for name, seconds in took.items():
        row = {"name": name, "what": what, "unit": unit, "ours": name in OURS or name.startswith("ours")}
        told = about.get(name, (OURS[name][1] if name in OURS else 1, ""))
        vectors, unlike = (told.vectors, told.unlike[what]) if isinstance(told, Peer) else told
        rates = {"per_core_second": count / seconds["cpu_s"], "per_wall_second": count / seconds["wall_s"]}
        rows.append(row | {"vectors": vectors, "unlike": unlike} | rates)
    return rows


def against_the_fastest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The goals: windows per core-second of p-BACH against the fastest peer with one vector and a loss per window."""
    rates = {row["name"]: row["per_core_second"] for row in rows if row["what"] == "train"}
    of_one = [row for row in rows if row["what"] == "train" and row["vectors"] == 1 and not row["ours"]]
    fastest = max(of_one, key=lambda row: row["per_core_second"])["name"]
    return [
        judged(f"{name} against {fastest}", {"times": rates[name] / rates[fastest]}, {}, {"times": goal})
        for name, goal in (("p-bach, k = 8", 3.0), ("p-bach, k = 32", 1.5))
    ]


def main(rounds: int = 5) -> None:
    dataset = world(**WORLD)
    of_peers = peers(dataset.n_items)
    parts = (lambda: training(dataset, of_peers, rounds), lambda: evaluation(dataset, of_peers, rounds),
             lambda: serving(rounds))  # fmt: skip
    results = []
    for part in parts:
        for row in part():
            rates = f"{row['per_core_second']:>9,.0f} {row['unit']}/core-second {row['per_wall_second']:>9,.0f} /second"
            print(f"{row['what']:<9} {row['name']:<34}{rates}  {row['unlike']}", flush=True)
            results.append(row | {"bench": row["what"]})
    for goal in against_the_fastest(results):
        print(f"{goal['name']}: {told(goal)}")
        results.append(goal | {"bench": "goals"})
    print(f"→ {save('peers', results)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
