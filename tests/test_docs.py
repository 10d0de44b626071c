"""The documentation runs: every ```python block of README.md and docs/, each file's blocks in one process.

A block with ``<!-- no-run -->`` on the line before its fence is compiled only. A file's blocks become one
script in which they stand on the lines they have in the document, so that a traceback points there.
"""

import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.scripts import run_script

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*filter(Path.exists, [ROOT / "README.md"]), *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    line: int  # of the first line of code, from 1
    code: str
    run: bool


def python_blocks(text: str) -> list[Block]:
    """The ```python blocks of a Markdown text, dedented."""
    blocks, lines = [], text.splitlines()
    number = 0
    while number < len(lines):
        opening = lines[number].strip()
        if opening.startswith("```") and opening != "```":
            end = next((n for n in range(number + 1, len(lines)) if lines[n].strip() == "```"), None)
            assert end is not None, f"the block opened on line {number + 1} is not closed"
            if opening == "```python":
                before = lines[number - 1].strip() if number else ""
                code = textwrap.dedent("\n".join(lines[number + 1 : end]))
                blocks.append(Block(number + 2, code, before != "<!-- no-run -->"))
            number = end
        number += 1
    return blocks


def as_script(blocks: list[Block]) -> str:
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


@pytest.mark.scripts
@pytest.mark.timeout(320)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks(document: Path, tmp_path: Path) -> None:
    blocks = python_blocks(document.read_text())
    for block in blocks:
        compile(as_script([block]), str(document), "exec")
    runnable = [block for block in blocks if block.run]
    if not runnable:
        return
    script = tmp_path / f"{document.stem}_md.py"
    script.write_text(as_script(runnable))
    run_script(script, timeout_s=300.0, cwd=tmp_path, env={"MPLBACKEND": "Agg"}).check()


def test_blocks_are_found_where_they_stand() -> None:
    text = (
        "a\n```python\nx = 1\n```\n\n<!-- no-run -->\n```python\ny = z\n```\n"
        "* b\n  ```python\n  w = x\n  ```\n```\nno\n```\n"
    )
    blocks = python_blocks(text)
    assert [(b.line, b.code, b.run) for b in blocks] == [
        (3, "x = 1", True),
        (8, "y = z", False),
        (12, "w = x", True),
    ]
    script = as_script([b for b in blocks if b.run])
    assert script.splitlines()[2] == "x = 1"
    assert script.splitlines()[11] == "w = x"


def test_an_unclosed_block_is_an_error() -> None:
    with pytest.raises(AssertionError, match="opened on line 2"):
        python_blocks("a\n```python\nx = 1\n")
