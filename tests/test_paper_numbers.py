"""The equations, sections, tables and figures of the paper that the project cites exist and say what is claimed."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = yaml.safe_load((ROOT / "tests" / "paper_numbers.yaml").read_text())
KNOWN = {kind: {str(number): of for number, of in table.items()} for kind, table in NUMBERS.items()}
ONE = r"(?:\d+(?:\.\d)?|[A-Z]\b)"
CITED = re.compile(
    r"(?<![\w.`-])((?i:eqs?\.|equations?|sections?|appendix|appendices|tables?|figures?|fig\.|algorithms?|remarks?))"
    rf"(?:[ ~]|\n# | \n)+({ONE}(?:(?:, | and |, and | to | ?[–-] ?){ONE})*)(?![\w(])"
)
SHORT = {"eq": "equation", "appendice": "appendix", "fig": "figure"}
PAGES = ["README.md", "bachlib/README.md", "notebooks/README.md", "CONTRIBUTING.md"]
WHERE = ["bachlib/**/*.py", "bachlib/**/*.yaml", "notebooks/*.py", "params/**/*.yaml", "tests/*.py", *PAGES]
FILES = sorted(path for pattern in WHERE for path in ROOT.glob(pattern) if path != Path(__file__).resolve())


def numbers(text: str) -> list[str]:
    """["12", "13", "14"] of "12–14"."""
    found: list[str] = []
    for first, last in re.findall(rf"({ONE})(?:(?: to | ?[–-] ?)({ONE}))?", text):
        between = (
            range(int(first), int(last) + 1) if last.isdigit() and first.isdigit() else [first, *[last][: bool(last)]]
        )
        found += map(str, between)
    return found


def citations(text: str) -> Iterator[tuple[int, str, list[str], str]]:
    """(line, kind, numbers, the line with its neighbours) of every citation."""
    lines = text.splitlines()
    for match in CITED.finditer(text):
        kind = match[1].lower().rstrip("s.")
        at = text.count("\n", 0, match.start())
        yield at + 1, SHORT.get(kind, kind), numbers(match[2]), "\n".join(lines[max(0, at - 1) : at + 3])


def wrong(text: str, own_sections: bool = False) -> list[str]:
    """What is wrong with the citations of a text. `own_sections`: a section is one of the text, not of the paper."""
    own, found = set(re.findall(r"^# ## (\d+) ·", text, re.M)), []
    for line, kind, cited, near in citations(text):
        if kind == "section" and own_sections and not re.search(r"sections? [\d., –and]+ of the paper", near):
            missing, fits = [n for n in cited if own and n not in own], True
        else:
            missing = [n for n in cited if n not in KNOWN[kind]]
            fits = any(re.search(KNOWN[kind][n]["words"], near, re.I) for n in cited if n not in missing)
        if missing:
            found.append(f"line {line}: there is no {kind} {', '.join(missing)}")
        elif not fits:
            told = "; ".join(f"{kind} {n} is about {KNOWN[kind][n]['says']}" for n in cited)
            found.append(f"line {line}: {told}. The text says: {near.strip()}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_cited_is_there(path):
    assert not wrong(path.read_text(), own_sections=path.parent.name == "notebooks")


def test_citations_are_found():
    """Enough of them: a pattern that finds nothing would pass every file."""
    kinds = [kind for path in FILES for _, kind, _, _ in citations(path.read_text())]
    assert {kind: kinds.count(kind) > least for kind, least in (("equation", 60), ("section", 30), ("table", 15))} == {
        "equation": True, "section": True, "table": True,
    }  # fmt: skip
    assert {"figure", "algorithm", "remark", "appendix"} <= set(kinds)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("π_u is right if head r explains this share (the fixed point of the M-step, eq. 22)", "equation 22 is about"),
        ("the responsibilities (eq. 24)", "no equation 24"),
        ("κ stays bounded (section 5.5)", "no section 5.5"),
        ("Evaluation over the full catalogue (section 5)", "section 5 is about related work"),
        ("Item tower, gating tower (figure 3, appendix B)", "figure 3 is about from personal"),
        ("Table 3: every method on Netflix", "table 3 is about"),
        ("Table 9: every method", "no table 9"),
        ("eqs. 12–24 are the mixture", "no equation 24"),
        ("the data (appendix C)", "no appendix C"),
    ],
)
def test_known_mistakes_are_caught(text, said):
    assert len(found := wrong(text)) == 1 and said in found[0]


def test_what_is_right_passes():
    for text in (
        "The reconstruction loss (eq. 22), the ELBO (eq. 21) and the gap (eq. 20)",
        "Evaluation (section 6); κ without a prior (section 6.5)",
        "the mixture (eqs. 12–14, 19)",
        "towers (figure 4, appendix B)",
        "slate.table(0, items); table 2x2; a section",
    ):
        assert not wrong(text), text
    assert wrong("# ## 1 · A\nsee section 2", own_sections=True) and not wrong("# ## 1 · A\nsee section 1", True)


def test_the_numbers_are_those_of_the_papers_source():
    """Counted once more from the LaTeX, environment by environment."""
    if not (source := os.environ.get("BACH_PAPER")):
        pytest.skip("BACH_PAPER is not set: the source of the paper is not part of the project")
    text = re.sub(r"(?<!\\)%.*", "", Path(source).read_text())
    count: dict[str, int] = dict.fromkeys(KNOWN, 0) | {"subsection": 0}
    labels, total = {}, {kind: 0 for kind in KNOWN}
    parts = re.compile(
        r"\\(section|subsection|appendix)\b|\\begin\{(equation|align|figure|table|algorithm|remark)\}.*?\\end\{\2\}",
        re.S,
    )
    after = False
    for match in parts.finditer(text):
        kind, inside = match[1] or match[2], match[0]
        if kind == "appendix":
            after = True
            continue
        if match[1]:
            inside = text[match.end() : match.end() + 200].split("\\section")[0].split("\\subsection")[0]
        name = {"align": "equation", "section": "appendix" if after else "section"}.get(kind, kind)
        rows = inside.count("\\\\") + 1 - inside.count("\\nonumber") if kind == "align" else 1
        count[name] += rows
        if kind == "section":
            count["subsection"] = 0
        number = f"{count['section']}.{count['subsection']}" if kind == "subsection" else str(count[name])
        number = chr(64 + count[name]) if name == "appendix" else number
        total["section" if kind == "subsection" else name] += rows
        for label in re.findall(r"\\label\{(.*?)\}", inside)[:1]:
            labels[label] = ("section" if kind == "subsection" else name, number)
    ours = {
        of["label"]: (kind, number) for kind, table in KNOWN.items() for number, of in table.items() if "label" in of
    }
    assert labels == ours and total == {kind: len(table) for kind, table in KNOWN.items()}
