from __future__ import annotations

import ast
import json
import sysconfig
from pathlib import Path

import pytest

from tools.stdlib_corpus import definitions, main, source_files

STDLIB = Path(sysconfig.get_paths()["stdlib"])

MODULE = '''\
import os

def plain(a,
          b):
    """Says
    what."""

    # why
    return a


@decorated
@twice(1)
async def bare():
    # only a comment above
    await b


class Group(Base):
    \'\'\'Doc.\'\'\'
    x = 1

    def inner(self):
        return 1


def one(): return 1
def documented(): "only this"
class Empty: pass
if os.name:
    def hidden(): pass
'''


def test_definitions_are_cut_at_the_end_of_their_docstring() -> None:
    found = {d.name: (d.head, d.body) for d in definitions(MODULE)}
    assert list(found) == ["plain", "bare", "Group", "one", "documented", "Empty"]
    assert found["plain"] == (
        'def plain(a,\n          b):\n    """Says\n    what."""\n',
        "\n    # why\n    return a\n",
    )
    assert found["bare"] == (
        "@decorated\n@twice(1)\nasync def bare():\n",
        "    # only a comment above\n    await b\n",
    )
    assert found["Group"][0] == "class Group(Base):\n    '''Doc.'''\n"
    assert found["one"] == ("def one(): ", "return 1\n")
    assert found["documented"] == ('def documented(): "only this"\n', "")
    assert found["Empty"] == ("class Empty: ", "pass\n")


@pytest.mark.parametrize("name", ["enum.py", "dataclasses.py", "decimal.py", "functools.py"])
def test_head_and_body_are_the_source_of_real_modules(name: str) -> None:
    source = (STDLIB / name).read_text(encoding="utf-8")
    nodes = [
        n
        for n in ast.parse(source).body
        if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    found = list(definitions(source))
    assert [d.name for d in found] == [n.name for n in nodes]
    for definition, node in zip(found, nodes, strict=True):
        segment = ast.get_source_segment(source, node)
        assert segment is not None
        whole = definition.head + definition.body
        assert whole.endswith(segment + "\n")
        assert whole.startswith("@" if node.decorator_list else segment[:10])
        docstring = ast.get_docstring(node)
        if docstring is not None and definition.body.strip():
            assert ast.get_docstring(ast.parse(definition.head + "    pass\n").body[0]) == (  # type: ignore[arg-type]
                docstring
            )


def test_the_corpus_is_one_definition_a_line_in_order_and_repeatable(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert main(["--output", str(first), "--root", str(STDLIB / "email")]) == 0
    assert main(["--output", str(second), "--root", str(STDLIB / "email")]) == 0
    assert first.read_bytes() == second.read_bytes()
    records = [json.loads(line) for line in first.read_text(encoding="utf-8").splitlines()]
    assert len(records) > 50
    origins = list(dict.fromkeys(r["origin"].split(":")[0] for r in records))
    files = [p.relative_to(STDLIB / "email").as_posix() for p in source_files(STDLIB / "email")]
    assert origins == [f for f in files if f in origins]
    for record in records:
        ast.parse(record["text"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_pairs_are_prompts_with_something_to_complete(tmp_path: Path) -> None:
    output = tmp_path / "pairs.jsonl"
    root = tmp_path / "src"
    root.mkdir()
    (root / "m.py").write_text(MODULE)
    assert main(["--output", str(output), "--root", str(root), "--format", "pair"]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r["origin"] for r in records] == [
        "m.py:plain", "m.py:bare", "m.py:Group", "m.py:one", "m.py:Empty",
    ]  # fmt: skip
    assert all(r["prompt"] and r["completion"].strip() for r in records)


def test_tests_and_files_that_are_not_python_are_left_out(tmp_path: Path) -> None:
    for name in ("a/b.py", "a/test/c.py", "a/tests/d.py", "site-packages/e.py", "a/notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def f():\n    pass\n")
    (tmp_path / "old.py").write_text("print 'two'\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\ndef g():\n    'caf\xe9'\n")
    (tmp_path / "bad.py").write_bytes(b"def h():\n    'caf\xe9'\n")
    assert [p.relative_to(tmp_path).as_posix() for p in source_files(tmp_path)] == [
        "bad.py", "latin.py", "old.py", "a/b.py",
    ]  # fmt: skip
    output = tmp_path / "out" / "corpus.jsonl"
    assert main(["--output", str(output), "--root", str(tmp_path)]) == 0
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [r["origin"] for r in records] == ["latin.py:g", "a/b.py:f"]
    assert "café" in records[0]["text"]


def test_a_directory_without_source_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.jsonl").write_text("an earlier one")
    assert main(["--output", str(tmp_path / "c.jsonl"), "--root", str(tmp_path / "no")]) == 1
    assert "no Python source below" in capsys.readouterr().err
    assert (tmp_path / "c.jsonl").read_text() == "an earlier one"
