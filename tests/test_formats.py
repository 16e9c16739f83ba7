"""Logs of the field as their authors publish them, tar.gz archives, and RecBole's files in both directions."""

import gzip
import io
import tarfile

import pandas as pd
import pytest
from commands import bach_here
from logs import (
    as_raw,
    plain_pipeline,
    random_events,
    tar_gz,
    write_amazon,
    write_atomic,
    write_kuairand,
    write_lastfm,
)

from bachlib import BachError
from bachlib.data import planted, prepare, raw
from bachlib.data.download import locate
from bachlib.data.recbole import write_recbole
from bachlib.experiment.settings import experiment_of, read_experiment

EVENTS = random_events(31, ties=False)
SETTING = {"min_items": 40, "quiet": True}
LASTFM = "userid-timestamp-artid-artname-traid-traname.tsv"


def refused(said, *asked, **params):
    with pytest.raises(BachError, match=said) as caught:
        prepare(*asked, **SETTING | params)
    return str(caught.value)


def expected(user="{}", item="{}", **options):
    """The plain pipeline, with ids as a format writes them."""
    found = plain_pipeline(EVENTS, min_items=40, **options)
    return {user.format(u): [item.format(i) for i in items] for u, items in found.items()}


# ------------------------------------------------------------------------------------------------ as they are published


@pytest.mark.parametrize("packed", [False, True])
def test_amazon_2023(tmp_path, packed):
    path = write_amazon(tmp_path / "Video_Games.csv", EVENTS)
    if packed:
        path = path.with_name("Video_Games.csv.gz")
        path.write_bytes(gzip.compress((tmp_path / "Video_Games.csv").read_bytes()))
    data = prepare("amazon-2023", path, tmp_path / "o", **SETTING)
    assert as_raw(data) == expected("A{:04d}", "B{:05d}")


@pytest.mark.parametrize(("min_rating", "liked"), [(4.0, 4), (5.0, 5), (1.0, 1)])
def test_kuairand_is_liked_by_a_click_or_the_button(tmp_path, min_rating, liked):
    """All log files of the archive; one hated video of a click is not liked."""
    half, other = EVENTS[::2], EVENTS[1::2]
    logs = {}
    for name, events in (("standard_4_08_to_4_21_pure", half), ("random_4_22_to_5_08_pure", other)):
        logs[f"K/data/log_{name}.csv"] = write_kuairand(tmp_path / f"log_{name}.csv", events)
    (tmp_path / "features.csv").write_text("video_id,author\n1,2\n")
    path = tar_gz(tmp_path / "K.tar.gz", logs | {"K/data/video_features_basic_pure.csv": tmp_path / "features.csv"})
    data = prepare("kuairand", path, tmp_path / "o", min_rating=min_rating, **SETTING)
    rated = [(u, i, {1: 0, 4: 4, 5: 5}.get(r, 1), t) for u, i, r, t in EVENTS]
    wanted = plain_pipeline(rated, min_items=40, min_rating=liked)
    assert as_raw(data) == wanted and wanted


@pytest.mark.parametrize("packed", [False, True])
def test_lastfm_1k_by_artist(tmp_path, packed):
    plain = write_lastfm(tmp_path / LASTFM, EVENTS)
    (tmp_path / "profile").write_text("#id\tgender\n")
    members = {"lastfm-dataset-1K/userid-profile.tsv": tmp_path / "profile", f"lastfm-dataset-1K/{LASTFM}": plain}
    path = tar_gz(tmp_path / "lastfm-dataset-1K.tar.gz", members) if packed else plain
    data = prepare("lastfm-1k", path, tmp_path / "o", **SETTING)
    assert as_raw(data) == expected("user_{:06d}", 'The "{}" Été, & Co', rated=False)
    assert (data.items["title"] == data.items["raw_id"]).all()


def test_yambda(tmp_path):
    table = pd.DataFrame(EVENTS, columns=["uid", "item_id", "is_organic", "timestamp"])
    table = table.assign(timestamp=table["timestamp"] // 5 * 5 - 10**9, is_organic=table["is_organic"] % 2)
    table[["uid", "timestamp", "item_id", "is_organic"]].astype("uint32").to_parquet(tmp_path / "likes.parquet")
    data = prepare("yambda", tmp_path, tmp_path / "o", **SETTING)
    steps = [(u, i, 5, t // 5) for u, i, _, t in EVENTS]
    assert as_raw(data) == {str(u): list(map(str, x)) for u, x in plain_pipeline(steps, min_items=40).items()}
    table.rename(columns={"uid": "user"}).to_parquet(tmp_path / "likes.parquet")
    refused(r"has no column 'uid' \(user\); .* not the authors' file", "yambda", tmp_path, tmp_path / "p")
    listed = table.groupby("uid").agg(list).reset_index()  # the authors' other layout
    listed.to_parquet(tmp_path / "likes.parquet")
    refused("'timestamp' should hold a number, a date or text and is", "yambda", tmp_path, tmp_path / "p")


def test_rows_that_cannot_be_read_and_lines_that_were_cut_off(tmp_path):
    amazon = write_amazon(tmp_path / "a.csv", EVENTS)
    whole = amazon.read_bytes()
    amazon.write_bytes(whole[:-5])
    refused(f"a.csv, line {len(EVENTS) + 1}: the last line is cut off", "amazon-2023", amazon, tmp_path / "o")
    amazon.write_bytes(whole + b"A1,,5.0,1000\n")
    refused(f"a.csv, line {len(EVENTS) + 2}: item is missing", "amazon-2023", amazon, tmp_path / "o")
    kuairand = write_kuairand(tmp_path / "log_a.csv", EVENTS)
    text = kuairand.read_text()
    fields = text.splitlines()[1].split(",")
    kuairand.write_text(text + ",".join([*fields[:5], "yes", *fields[6:]]) + "\n")
    said = f"log_a.csv, line {len(EVENTS) + 2}: click is not a whole number"
    refused(said, "kuairand", kuairand, tmp_path / "o")
    kuairand.write_text(text.replace("is_click", "is_klick", 1))
    refused(
        "log_a.csv is not a kuairand log: its first line should name .*is_click", "kuairand", kuairand, tmp_path / "o"
    )
    lastfm = write_lastfm(tmp_path / LASTFM, [*EVENTS])
    lastfm.write_text(lastfm.read_text() + "user_1\tyesterday\t\tA\t\tB\nuser_1\t2009-01-01T00:00:00Z\t\t\t\tB\n")
    told = refused(f"line {len(EVENTS) + 1}: time is not a time", "lastfm-1k", lastfm, tmp_path / "o")
    data = prepare("lastfm-1k", lastfm, tmp_path / "skipped", on_bad_rows="skip", **SETTING)
    assert data.meta["bad_rows"]["count"] == 2, told


def test_where_they_come_from_and_their_experiments(tmp_path, monkeypatch):
    monkeypatch.setenv("BACH_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path / "outputs"))
    for source, said in (("yambda", "likes.parquet.*Apache-2.0"), ("lastfm-1k", "lastfm-dataset-1K.tar.gz.*non-comm"),
                         ("kuairand", "zenodo.*CC BY-SA"), ("amazon-2023", "--path.*no licence"),
                         ("recbole", "your own log: give its path")):  # fmt: skip
        with pytest.raises(BachError, match=f"(?s){said}"):
            locate(source)
    for source in ("amazon-2023", "recbole"):
        with pytest.raises(BachError, match=f"path: source {source!r} needs the path of your log"):
            experiment_of({"source": source}, "here")
    assert [read_experiment(name).source for name in ("yambda", "lastfm-1k")] == ["yambda", "lastfm-1k"]


# ---------------------------------------------------------------------------------------------------- tar.gz archives


def packed(path, *members):
    """A tar.gz of (name, content, changes of its header)."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content, changes in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            for key, value in changes.items():
                setattr(about, key, value)
            archive.addfile(about, io.BytesIO(content))
    return path


def test_a_member_is_only_a_name(tmp_path):
    """Members that lead elsewhere are read as streams; links are no files."""
    log = write_lastfm(tmp_path / "log", EVENTS).read_bytes()
    secret = tmp_path / "secret.tsv"
    secret.write_bytes(log)
    link = {"type": tarfile.SYMTYPE, "linkname": str(secret)}
    path = packed(tmp_path / "a.tar.gz", (LASTFM, b"", link), (LASTFM, b"", link | {"type": tarfile.LNKTYPE}))
    refused(f"the tar.gz .*a.tar.gz has no file {LASTFM}; it has no files", "lastfm-1k", path, tmp_path / "o")
    path = packed(tmp_path / "b.tar.gz", (f"../../{LASTFM}", log, {}))
    before = sorted(p.name for p in tmp_path.parent.iterdir())
    assert prepare("lastfm-1k", path, tmp_path / "o", **SETTING).n_users
    assert sorted(p.name for p in tmp_path.parent.iterdir()) == before


def test_damaged_tars(tmp_path):
    log = write_lastfm(tmp_path / "log", EVENTS).read_bytes()
    whole = packed(tmp_path / "a.tar.gz", ("x/README", b"hello", {}), (LASTFM, log, {})).read_bytes()
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 255]) + whole[half + 1 :]
    wrong_sum = whole[:-6] + bytes([whole[-6] ^ 255]) + whole[-5:]
    for content in (whole[:half], whole[:-2], flipped, wrong_sum, b"", b"no tar at all", gzip.compress(b"no tar")):
        (tmp_path / "a.tar.gz").write_bytes(content)
        refused(r"a\.tar\.gz is a damaged tar\.gz", "lastfm-1k", tmp_path / "a.tar.gz", tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_tars_that_would_fill_the_disk_or_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "CHUNK", 1 << 16)
    zeros = bytes(1 << 22)
    bomb = packed(tmp_path / "a.tar.gz", ("x", zeros * 4, {}), (LASTFM, b"hello", {}))
    refused("a.tar.gz unpacks to more than 200 times its size: no log does", "lastfm-1k", bomb, tmp_path / "o")
    long_name = packed(tmp_path / "b.tar.gz", ("././@LongLink", zeros * 8, {"type": tarfile.GNUTYPE_LONGNAME}))
    monkeypatch.setattr(raw, "AT_ONCE", 1 << 16)
    refused("b.tar.gz", "lastfm-1k", long_name, tmp_path / "o")
    monkeypatch.setattr(raw, "MEMBERS", 3)
    many = packed(tmp_path / "c.tar.gz", *((f"x{n}", b"", {}) for n in range(5)))
    refused("c.tar.gz has more than 3 members", "lastfm-1k", many, tmp_path / "o")


# ------------------------------------------------------------------------------------------------------------ RecBole


ITEM = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"


def test_atomic_files_as_recbole_has_them(tmp_path):
    (folder := tmp_path / "ml").mkdir()
    write_atomic(folder / "ml.inter", EVENTS)
    rows = [f'{i}\t"Film" {i}, The\t199{i % 10}\tAction Sci-Fi\n' for i in range(1, 140)]
    (folder / "ml.item").write_text(ITEM + "".join(rows))
    data = prepare("recbole", folder, tmp_path / "o", **SETTING)
    assert as_raw(data) == expected()
    row = data.items.set_index("raw_id").loc["7"]
    assert (row["title"], list(row["genres"])) == ('"Film" 7, The', ["Action", "Sci-Fi"])
    (folder / "ml.item").write_text(ITEM + "1\ttoo short\n")
    refused("ml.item is not in the format", "recbole", folder, tmp_path / "p")
    (folder / "ml.inter").write_text("user_id:token\tartist_id:token\tweight:float\n1\t2\t3\n")
    said = "ml.inter is not a recbole log: its first line should name user_id:token, item_id:token, timestamp:float"
    refused(said, "recbole", folder, tmp_path / "p")
    path = write_atomic(tmp_path / "x.inter", EVENTS)
    path.write_text(path.read_text().replace("timestamp:float", "timestamp:float\tuser_id:token"))
    refused("once each", "recbole", path, tmp_path / "p")
    path = write_atomic(tmp_path / "x.inter", [*EVENTS, (1, 1, 5, 12)])
    path.write_bytes(path.read_bytes()[:-1])
    refused("the last line is cut off", "recbole", path, tmp_path / "p")


def test_there_and_back(world, tmp_path):
    """The planted world, written and prepared again: the same sequences in the same order, titles and genres."""
    folder = write_recbole(world, tmp_path / "mine")
    assert sorted(path.name for path in folder.iterdir()) == ["mine.inter", "mine.item"]
    again = prepare("recbole", folder, tmp_path / "again", quiet=True)
    assert as_raw(again) == as_raw(world)
    there, here = (data.items.set_index("raw_id") for data in (world, again))
    assert len(here) > 300 and set(here.index) == set(world.items["raw_id"][sorted(set(world.sequences.tolist()))])
    assert (there.loc[here.index, "title"] == here["title"]).all()
    assert there.loc[here.index, "genres"].map(list).equals(here["genres"].map(list))
    as_recbole = pd.read_csv(folder / "mine.inter", sep="\t")  # so it reads
    assert as_recbole.dtypes.astype(str).tolist()[2] == "int64" and len(as_recbole) == len(world.sequences)


def made(tmp_path, user="u1", item="i", title="t", genre="Film Noir|Sci-Fi"):
    rows = [(user, f"{item}{n:02d}", n, f"{title} {n}", genre) for n in range(40)]
    table = pd.DataFrame(rows, columns=["user", "item", "time", "title", "genre"])
    table.to_csv(tmp_path / "log.csv", index=False)
    return prepare("csv", tmp_path / "log.csv", tmp_path / "data", min_items=31, quiet=True)


def test_titles_that_recbole_cannot_hold_are_made_plain(tmp_path):
    data = made(tmp_path, title='A\t"B"\nC')
    folder = write_recbole(data, tmp_path / "mine")
    again = prepare("recbole", folder, tmp_path / "again", min_items=31, quiet=True)
    assert as_raw(again) == as_raw(data) and again.items["title"][3] == "A B C 3"
    assert list(again.items["genres"][3]) == ["Film Noir", "Sci-Fi"]
    assert pd.read_csv(folder / "mine.item", sep="\t")["genres:token_seq"][0].split(" ") == ["Film\xa0Noir", "Sci-Fi"]


@pytest.mark.parametrize(("user", "item"), [("a\tb", "i"), ("u1", 'x"'), ("NA", "i"), ("null", "i")])
def test_ids_that_recbole_cannot_hold_are_refused(tmp_path, user, item):
    data = made(tmp_path, user, item)
    with pytest.raises(BachError, match=r"^(user|item) '.*' cannot be written: RecBole's files cannot hold"):
        write_recbole(data, tmp_path / "mine")
    assert not (tmp_path / "mine").exists() and not list(tmp_path.glob(".mine*"))


def test_a_folder_that_exists_is_not_overwritten(world, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(BachError, match="exists and is not empty: choose another folder"):
        write_recbole(world, tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"


def test_bach_prepare_writes_them(tmp_path):
    log = planted.write_world(tmp_path / "w", n_users=20, n_items=200, n_interests=3, mean_events=120) / "log.csv"
    words = ["prepare", "--source", "csv", "--path", log, "--out", tmp_path / "data", "--min-items", 40]
    done = bach_here(*words, "--recbole", tmp_path / "mine")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"→ {tmp_path / 'mine'}", done.stderr
    assert (tmp_path / "mine" / "mine.inter").stat().st_size
