"""Check the prose of documents and docstrings against the standard in CONTRIBUTING.md.

    python docs/check_prose.py [FILE ...]

Print a line for each long sentence, and for each docstring that begins with a clause.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MOST_WORDS = 20
# Clauses in the place of a name: a docstring names the thing, or says what is done to it.
OPENINGS = re.compile(r"(What|Whether|How|Where|Which|Who|When|Those|That|Likewise|The same)\b")
SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+(?=[A-Z`*(\[\"]|weft\b)|\n\s*\n")
# Code, formulas and links count as one word each.
ONE_WORD = re.compile(r"``?[^`]+``?|\[[^\]]*\]\([^)]*\)|\$[^$]+\$|\([^()]*\d{4}\.\d{4,5}[^()]*\)")


class Finding(NamedTuple):
    path: Path
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.problem}"


def words(sentence: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in ONE_WORD.sub("x", sentence).split())


def long_sentences(path: Path, first_line: int, text: str) -> Iterator[Finding]:
    begin = 0
    for part in [*SENTENCE_END.finditer(text), None]:
        end = part.start() if part is not None else len(text)
        sentence = text[begin:end]
        if words(sentence) > MOST_WORDS:
            line = first_line + text.count("\n", 0, begin + len(sentence) - len(sentence.lstrip()))
            yield Finding(path, line, f"{words(sentence)} words: {' '.join(sentence.split())[:60]} ...")
        begin = part.end() if part is not None else end


def document(path: Path) -> Iterator[Finding]:
    """Find long sentences in paragraphs and list items; code, tables, headings and comments are left out."""
    block: list[str] = []
    start, fenced = 1, False
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        text = line.strip()
        fence = text.startswith(("```", "~~~"))
        skipped = (
            fenced
            or fence
            or not text
            or text.startswith(("|", "#", "<", "!", "==="))
            or line.startswith("    ")
        )
        if skipped or re.match(r"([-*+]|\d+\.) ", text):
            yield from long_sentences(path, start, "\n".join(block))
            block, start = [], number
        fenced ^= fence
        if not skipped:
            block.append(re.sub(r"^\s*([-*+]|\d+\.) ", "", line))


def module(path: Path) -> Iterator[Finding]:
    """Find docstrings that begin with a clause, and long sentences in them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None:
            continue
        line = node.body[0].lineno
        if OPENINGS.match(docstring):
            yield Finding(path, line, f"begins with a clause: {docstring.splitlines()[0][:60]}")
        prose, _, parameters = docstring.partition("\n\nParameters\n----------\n")
        prose = re.split(r"\n\s*\n(?:Args|Attributes|Raises|Returns|Yields):|\n\n {4}", prose)[0]
        yield from long_sentences(path, line, prose)
        # Help texts of commands: each begins below its parameter's name.
        for text in re.split(r"^\w+\n", parameters, flags=re.MULTILINE):
            yield from long_sentences(path, line, text)


def main() -> int:
    asked = [Path(name).resolve() for name in sys.argv[1:]] or [
        ROOT / name
        for name in subprocess.run(
            ["git", "ls-files", "README.md", "CONTRIBUTING.md", "docs/*.md", "src/weft/*.py"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split()
    ]  # fmt: skip
    findings = [one for path in asked for one in (module(path) if path.suffix == ".py" else document(path))]
    for one in findings:
        print(one)
    print(f"{len(findings)} findings in {len(asked)} files", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
