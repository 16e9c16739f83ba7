"""The planted world: a synthetic data set with known interests, written as a raw log like any other.

Interests are directions on the sphere. Items lie around their interest with a power-spherical density (the kernel of
eq. 18) and have Zipf popularity. A user has proportions π_u ~ Dirichlet over the interests and a taste, one point
inside each interest. Sessions stay on an interest for a while; inside it the user picks items near the taste, none
twice. Some events are dislikes of random items and some repeat an earlier item, which the pipeline has to remove.
The truth lies beside the log in `truth.npz`, to measure how well a model recovers it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bachlib import BachError
from bachlib.data.dataset import Truth
from bachlib.files import only_one, output_dir, read_json, short_hash, whole_folder, write_json
from bachlib.params import WorldParams, validated
from bachlib.reading import read_arrays, reading

START = 1_704_067_200  # 2024-01-01 UTC
MINUTE, DAY = 60, 86_400

# genre of each interest → the nouns of its titles
GENRES = {
    "Heist": "Vault Getaway Safe Alibi Diamond Forger Blueprint Crew Lookout Ransom Tunnel Decoy",
    "Space Opera": "Nebula Starship Comet Orbit Admiral Moon Wormhole Colony Signal Drone Supernova Airlock",
    "Baking": "Croissant Sourdough Oven Meringue Rye Pastry Tart Bagel Yeast Macaron Brioche Crumb",
    "Noir": "Shadow Detective Alley Cigarette Dame Raincoat Informer Bourbon Streetlamp Motive Blackmail Saxophone",
    "Romance": "Letter Kiss Wedding Summer Heart Promise Balcony Waltz Rose Proposal Ferry Reunion",
    "Western": "Canyon Sheriff Saddle Saloon Rifle Mustang Prairie Bandit Spur Stagecoach Ranch Showdown",
    "Nature": "Glacier Falcon Reef Savanna Wolf Forest Whale Monsoon Tundra Orchid River Migration",
    "Horror": "Cellar Doll Asylum Curse Mirror Grave Scream Attic Fog Ritual Scarecrow Whisper",
    "Sports": "Striker Final Marathon Coach Penalty Arena Underdog Sprint Trophy Racket Summit Relay",
    "History": "Emperor Siege Crown Treaty Legion Plague Castle Revolution Pharaoh Voyage Scribe Cathedral",
    "Jazz": "Trumpet Quartet Solo Midnight Swing Ballad Vinyl Blues Drummer Club Encore Rhythm",
    "Robots": "Android Circuit Cyborg Algorithm Assembly Servant Uprising Laboratory Chip Prototype Gear Memory",
    "Courtroom": "Verdict Witness Jury Appeal Judge Oath Evidence Attorney Confession Trial Perjury Objection",
    "Fairy Tale": "Dragon Princess Spell Goblin Mirror Unicorn Tower Giant Wand Mermaid Fox Lantern",
    "Ocean": "Harbour Submarine Pearl Storm Anchor Lighthouse Shark Island Tide Captain Wreck Trench",
    "Comedy": "Neighbour Vacation Twin Mix-up Roommate Parrot Birthday Impostor Diet Babysitter Prank Traffic",
}
ADJECTIVES = """
    Silent Golden Last Broken Crimson Hidden Lonely Electric Frozen Secret Burning Crooked Distant Gentle Hollow Lucky
    Restless Velvet Wild Borrowed Perfect Strange Second Paper Northern Reluctant Infinite Stolen Forgotten Sunday
""".split()


def write_world(folder: str | Path | None = None, **params: Any) -> Path:
    """Write log, items and truth of a planted world unless it exists; the default is `outputs/logs/planted-<hash>`."""
    chosen = validated(WorldParams, params, "planted world")
    folder = Path(folder) if folder is not None else output_dir("logs", f"planted-{short_hash(chosen.model_dump())}")
    if read_json(folder / "world.json") == chosen.model_dump():
        return folder
    with only_one(folder):
        if read_json(folder / "world.json") != chosen.model_dump():  # nobody has written it meanwhile
            _write(folder, chosen)
    return folder


def _write(folder: Path, params: WorldParams) -> None:
    rng = np.random.default_rng(params.seed)
    with whole_folder(folder) as new:
        world = _plant(params, rng)
        log = _live(params, world, rng)
        log.drop(columns="interest").to_csv(new / "log.csv", index=False, lineterminator="\n")
        _items(world).to_csv(new / "items.csv", index=False, lineterminator="\n")
        np.savez(new / "truth.npz", event_interest=log["interest"].to_numpy(np.int16), **world)
        write_json(new / "world.json", params.model_dump())


def _plant(params: WorldParams, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Directions, items and users: everything that is fixed before the first event."""
    m, d = params.n_interests, params.d
    directions = unit(rng.normal(size=(m, d)))
    item_interest = rng.permutation(np.arange(params.n_items) % m)
    items = power_spherical(directions[item_interest], params.width, rng)
    popularity = np.empty(params.n_items)
    for r in range(m):
        members = np.flatnonzero(item_interest == r)
        popularity[members] = (1.0 + rng.permutation(len(members))) ** -params.zipf
    pi = rng.dirichlet(np.full(m, params.interests_per_user / m), size=params.n_users)
    tastes = power_spherical(np.broadcast_to(directions, (params.n_users, m, d)), params.width, rng)
    names = np.array([list(GENRES)[r] if r < len(GENRES) else f"Genre {r + 1}" for r in range(m)])
    world = {"directions": directions, "items": items, "popularity": popularity, "pi": pi, "tastes": tastes}
    world = {name: value.astype(np.float32) for name, value in world.items()}
    return world | {"genres": names, "item_interest": item_interest.astype(np.int16)}


def _live(params: WorldParams, world: dict[str, np.ndarray], rng: np.random.Generator) -> pd.DataFrame:
    """The raw log, user after user in the order of time: user, item, rating, time, interest (−1: a dislike)."""
    members = [np.flatnonzero(world["item_interest"] == r) for r in range(params.n_interests)]
    spread = 0.5
    n_liked = rng.lognormal(np.log(params.mean_events) - spread**2 / 2, spread, params.n_users).astype(int) + 1
    frames = []
    for u in range(params.n_users):
        interest = sessions(world["pi"][u], params.stickiness, n_liked[u], rng)
        item = np.full(len(interest), -1)
        for r in np.unique(interest):
            visits = np.flatnonzero(interest == r)
            taste = members[r][_favourites(params, world, u, r, members[r], rng)]
            item[visits[: len(taste)]] = taste[: len(visits)]
        kept = item >= 0  # an interest can run out of items
        interest, item = interest[kept], item[kept]
        begins = np.concatenate([[True], interest[1:] != interest[:-1]])
        gap = np.where(begins, rng.exponential(2 * DAY, len(item)), rng.exponential(1.5 * MINUTE, len(item)))
        time = START + rng.uniform(0, 60 * DAY) + np.cumsum(gap)
        rating = rng.choice([4.0, 4.5, 5.0], len(item))

        n_disliked = rng.poisson(len(item) * params.disliked / (1 - params.disliked))
        again = np.sort(rng.choice(len(item), rng.binomial(len(item), params.repeated), replace=False))
        parts = {  # liked, disliked, repeated
            "user": [np.full(len(item) + n_disliked + len(again), u)],
            "item": [item, rng.integers(params.n_items, size=n_disliked), item[again]],
            "rating": [rating, rng.choice([1.0, 2.0, 3.0, 3.5], n_disliked), rating[again]],
            "time": [time, rng.uniform(time[0], time[-1], n_disliked), rng.uniform(time[again], time[-1] + DAY)],
            "interest": [interest, np.full(n_disliked, -1), interest[again]],
        }
        frames.append(parts)
    log = pd.DataFrame({name: np.concatenate([part for f in frames for part in f[name]]) for name in frames[0]})
    log["time"] = (log["time"] // MINUTE * MINUTE).astype(np.int64)  # whole minutes: real logs have ties too
    log = log.sort_values(["user", "time"], kind="stable", ignore_index=True)
    return log.assign(user=_names("u", log["user"]), item=_names("i", log["item"]))


def sessions(pi: np.ndarray, stickiness: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """The interest of each of n events: stay with probability `stickiness`, else draw from π_u again."""
    drawn = rng.choice(len(pi), size=n, p=pi / pi.sum(dtype=np.float64))
    moves = rng.random(n) >= stickiness
    moves[0] = True
    return drawn[np.maximum.accumulate(np.where(moves, np.arange(n), 0))]


def _favourites(params: WorldParams, world, u: int, r: int, members: np.ndarray, rng) -> np.ndarray:
    """The interest's items in the order in which this user meets them: drawn without replacement (Gumbel's trick),
    each with probability ∝ popularity · ((1 + cos) / 2)^κ around the user's taste."""
    kappa = np.log(0.5) / np.log((1 + np.cos(params.taste)) / 2)
    cosine = world["items"][members] @ world["tastes"][u, r]
    weight = np.log(world["popularity"][members]) + kappa * np.log(np.clip((1 + cosine) / 2, 1e-30, None))
    return np.argsort(-(weight + rng.gumbel(size=len(members))), kind="stable")


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def power_spherical(mean: np.ndarray, angle: float, rng: np.random.Generator) -> np.ndarray:
    """One draw around each mean direction (…, d) whose expected cosine is cos(angle).

    Under the power-spherical density the cosine is 2·Beta((d−1)/2 + κ, (d−1)/2) − 1, with mean κ / (κ + d − 1).
    """
    d = mean.shape[-1]
    kappa = (d - 1) * np.cos(angle) / (1 - np.cos(angle))
    t = 2 * rng.beta((d - 1) / 2 + kappa, (d - 1) / 2, size=mean.shape[:-1])[..., None] - 1
    tangent = rng.normal(size=mean.shape)
    tangent = unit(tangent - (tangent * mean).sum(-1, keepdims=True) * mean)
    return t * mean + np.sqrt(1 - t**2) * tangent


def _names(letter: str, index: pd.Series) -> pd.Series:
    return letter + index.astype(str).str.zfill(7)


def index_of(names: pd.Series) -> np.ndarray:
    return names.str[1:].astype(int).to_numpy()


def _items(world: dict[str, np.ndarray]) -> pd.DataFrame:
    genre = pd.Series(world["genres"][world["item_interest"]])
    titles = [_title(name, n) for name, n in zip(genre, genre.groupby(genre).cumcount(), strict=True)]
    return pd.DataFrame({"item": _names("i", pd.Series(range(len(genre)))), "title": titles, "genre": genre})


def _title(genre: str, n: int) -> str:
    nouns = GENRES.get(genre, genre.replace(" ", "-")).split()
    sequel, n = divmod(n, len(nouns) * len(ADJECTIVES))
    row, column = divmod(n, len(nouns))
    adjective = ADJECTIVES[(row + 7 * column) % len(ADJECTIVES)]  # every pair once, neighbours unalike
    return f"{adjective} {nouns[column]}" + (f" {sequel + 1}" if sequel else "")


def align_truth(world: Path, prepared: Path) -> None:
    """Write the truth into a prepared folder, in the contiguous ids of the data set."""
    if not (world / "truth.npz").exists():
        raise BachError(f"{world} is not a planted world (it has no truth.npz); write one with planted.write_world()")
    truth = read_arrays(world / "truth.npz", Truth._fields)
    with reading(world / "truth.npz", "or the log beside it is not of this world"):
        user = index_of(pd.read_parquet(prepared / "users.parquet")["raw_id"])
        item = index_of(pd.read_parquet(prepared / "items.parquet")["raw_id"])
        rows = {"items": item, "item_interest": item, "popularity": item, "pi": user, "tastes": user}
        kept = {name: array[rows.get(name, ...)] for name, array in truth.items()}
    np.savez(prepared / "truth.npz", **kept)
