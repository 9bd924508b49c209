#!/usr/bin/env python3
"""Write the dialogues of the package chitchat-dataset (MIT licence) as conversations, one a line.

    pip install chitchat-dataset
    python examples/finetune/chitchat.py --output runs/chat/chitchat.jsonl

Who speaks first is the user, the other the assistant; what one of them sends in a row is one
message. Dialogues in which nobody answers (3,151 of 7,168) are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any


def conversation(dialogue: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """The messages of one dialogue; ``None`` if nobody answers."""
    sent = [
        (part["sender"], part["text"].strip())
        for message in dialogue["messages"]
        for part in message
        if part["text"].strip()
    ]
    if len({sender for sender, _ in sent}) != 2:
        return None
    return [
        {
            "role": "user" if sender == sent[0][0] else "assistant",
            "content": "\n".join(text for _, text in parts),
        }
        for sender, parts in groupby(sent, key=lambda part: part[0])
    ]


def write(path: Path, conversations: Iterable[list[dict[str, str]]]) -> None:
    """Write a file, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            for messages in conversations:
                stream.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main(words: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Write the dialogues of chitchat-dataset as conversations.", allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--limit", type=int, help="write so many of them; default: all")
    flags = parser.parse_args(words)
    try:
        import chitchat_dataset
    except ImportError:
        print("chitchat: the data are not here: pip install chitchat-dataset", file=sys.stderr)
        return 1
    dialogues = list(chitchat_dataset.Dataset().values())
    usable = [messages for d in dialogues if (messages := conversation(d)) is not None]
    chosen = usable[: flags.limit]
    try:
        write(flags.output, chosen)
    except OSError as error:
        print(f"chitchat: {error}", file=sys.stderr)
        return 1
    print(f"{len(chosen)} of {len(dialogues)} dialogues: {flags.output}")
    print(f"in {len(dialogues) - len(usable)} others nobody answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
