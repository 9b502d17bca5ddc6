"""Checks the words of source and documentation: `python -m tools.words`, a part of `make lint`.

- Docstrings and comments name their subject: none begins with "Of", "That", "Those", "Who", "By" or "So".
- They name the actor: client, caller, scheduler, engine thread; nobody, somebody and whoever are counted, and
  may stand in at most `MOST_PRONOUNS` lines.
- Words that have a plain equivalent are not used at all.
- Subjects of commits since the last tag are imperative, and have at most 72 characters.

`python -m tools.house --texts 40` prints texts for a person to judge.
"""

import re
import subprocess
import sys
from collections.abc import Iterator

from tools.house import ROOT, SOURCE, texts

OPENINGS = re.compile(r"^(Of|That|Those|Who|Whoever|By|So) (?!far\b|called\b|default\b)[a-z`]")
PRONOUNS = re.compile(r"\b(nobody|somebody|everybody|whoever)\b", re.IGNORECASE)
MOST_PRONOUNS = 29
BANNED = re.compile(
    r"\b(lately|what is said of|what came of|is no valid|are no valid|begin anew|ask again|"
    r"in the place of|as it were|whomever)\b",
    re.IGNORECASE,
)
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md")
LONGEST_SUBJECT = 72
NOT_IMPERATIVE = re.compile(
    r"^([a-z]|(The|A|An|It|This|That|What|Who|There|Of|No|One|Each|All|Where|When|Now)\b"
    r"|\w+(ed|ing)\b(?<!Embed)(?<!Feed)(?<!Seed)(?<!Need)(?<!Speed)(?<!Bring)(?<!String)(?<!Exceed))"
)


def wrong_texts() -> Iterator[str]:
    """Texts of the source and lines of the documentation that are not said plainly."""
    pronouns: list[str] = []
    for text in texts(SOURCE):
        where = f"{text.file.relative_to(ROOT)}:{text.line}"
        if text.kind in ("docstring", "attribute", "comment") and OPENINGS.search(text.text):
            yield f"{where}: begins with {text.text.split()[0]!r}: name the subject first"
        yield from banned(where, text.text)
        pronouns += [f"{where}: {line.strip()}" for line in text.text.splitlines() if PRONOUNS.search(line)]
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
                where = f"{page.relative_to(ROOT)}:{number}"
                yield from banned(where, line)
                pronouns += [f"{where}: {line.strip()}"] if PRONOUNS.search(line) else []
    if len(pronouns) > MOST_PRONOUNS:
        yield f"{len(pronouns)} lines have nobody, somebody, everybody or whoever, {MOST_PRONOUNS} may:"
        yield from pronouns


def banned(where: str, text: str) -> Iterator[str]:
    for match in BANNED.finditer(text):
        yield f"{where}: {match[0]!r} has a plain equivalent"


def wrong_subjects() -> Iterator[str]:
    for subject in subjects():
        if len(subject) > LONGEST_SUBJECT:
            yield f"commit {subject[:40]!r}…: {len(subject)} characters, at most {LONGEST_SUBJECT}"
        if NOT_IMPERATIVE.search(subject):
            yield f"commit {subject!r}: begin with a verb in the imperative, such as Add, Fix or Keep"


def subjects() -> list[str]:
    """Of commits since the last tag; without a tag since this file was added."""
    start = git("describe", "--tags", "--abbrev=0") or git(
        "log", "--diff-filter=A", "--format=%H", "--", "tools/words.py"
    )
    if not start:
        return []
    lines = git("log", "--no-merges", "--format=%s", f"{start.splitlines()[-1]}..HEAD")
    return lines.splitlines()


def git(*arguments: str) -> str:
    """What git prints; nothing where it fails, as in a package without its history."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    wrong = [*wrong_texts(), *wrong_subjects()]
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
