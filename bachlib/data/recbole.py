"""Write a prepared data set as RecBole's atomic files, so that a peer can train on the same sequences.

    <folder>/<name>.inter    user_id:token  item_id:token  timestamp:float    every event of every user, in its order
    <folder>/<name>.item     item_id:token  title:token_seq  genres:token_seq  every item of the catalogue

A prepared data set knows the order of events, not their times, so the timestamp is the place in the sequence: 0, 1, …
The source `recbole` of `prepare` reads these files and RecBole's own. RecBole splits in its own way (`eval_args`): its
test items are not ours. Items that no kept user likes are in the table of items only.
"""

import io
import re
from pathlib import Path

import pandas as pd

from bachlib import BachError
from bachlib.data.dataset import Dataset
from bachlib.files import whole_folder

EVENTS = "user_id:token\titem_id:token\ttimestamp:float\n"
ITEMS = "item_id:token\ttitle:token_seq\tgenres:token_seq\n"


def write_recbole(dataset: Dataset, folder: str | Path) -> Path:
    """Write the atomic files into a new folder; its name is the name of the data set in RecBole."""
    folder = Path(folder).expanduser().resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BachError(f"{folder} exists and is not empty: choose another folder, or remove it")
    users, items = _ids(dataset.users["raw_id"], "user"), _ids(dataset.items["raw_id"], "item")
    with whole_folder(folder) as new:
        with (new / f"{folder.name}.inter").open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(EVENTS)
            for user, raw in enumerate(users):
                places = enumerate(dataset.sequence(user))
                stream.writelines(f"{raw}\t{items[item]}\t{place}\n" for place, item in places)
        with (new / f"{folder.name}.item").open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(ITEMS)
            for raw, title, genres in zip(items, dataset.items["title"], dataset.items["genres"], strict=True):
                words = " ".join(_plain(genre).replace(" ", "\xa0") for genre in genres)  # a space would end a word
                stream.write(f"{raw}\t{_plain(title)}\t{words}\n")
    return folder


def _plain(text: str) -> str:
    """A title or genre without tabs, line ends and quotes, which RecBole cannot read."""
    return re.sub(r'[\s"]+', " ", str(text)).strip()


def _ids(raw: pd.Series, what: str) -> list[str]:
    """The ids as text, if RecBole will read them as they are: it reads with pandas, which has quotes and takes NA, null
    and the like for missing."""
    ids = raw.astype(str)
    wrong = ids.str.contains(r'[\t\r\n"]')
    if not wrong.any():
        read = pd.read_csv(io.StringIO("\n".join(["id", *ids])), sep="\t", dtype=str, skip_blank_lines=False)["id"]
        wrong = (read != ids.reset_index(drop=True)).to_numpy()
    if wrong.any():
        named = "RecBole's files cannot hold a tab, a line end, a quote, or a word for a missing value such as NA"
        raise BachError(f"{what} {ids[wrong].iloc[0]!r} cannot be written: {named}")
    return ids.tolist()
