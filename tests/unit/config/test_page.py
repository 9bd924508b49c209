"""docs/flags.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_of_flags_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "flags.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_page_that_differs_is_noticed(tmp_path: Path) -> None:
    copy = tmp_path / "tools" / "flags.py"
    copy.parent.mkdir()
    copy.write_text((ROOT / "tools" / "flags.py").read_text())
    (tmp_path / "megatron_flex").symlink_to(ROOT / "megatron_flex")
    (tmp_path / "docs").mkdir()
    page = (ROOT / "docs" / "flags.md").read_text()
    (tmp_path / "docs" / "flags.md").write_text(page.replace("| 1234 |", "| 1235 |"))
    done = subprocess.run(
        [sys.executable, copy, "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "out of date" in done.stderr
