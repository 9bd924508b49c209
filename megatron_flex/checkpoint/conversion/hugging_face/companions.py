"""What lies beside the weights of a Hugging Face directory: configuration and tokenizer.

They travel with the weights: a converted checkpoint has them in ``hugging_face/``, and its
arguments name the tokenizer there.
"""

from __future__ import annotations

import json
import secrets
import shutil
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_flex.checkpoint import layout
from megatron_flex.checkpoint.conversion.hugging_face.files import read_json
from megatron_flex.data.turns import Turns
from megatron_flex.tokenizers.base import Tokenizer, TokenizerError
from megatron_flex.tokenizers.build import build_tokenizer
from megatron_flex.tokenizers.chat_template import ChatTemplate, find_template
from megatron_flex.tokenizers.export import NotConvertible, hugging_face_files
from megatron_flex.tokenizers.hugging_face import HuggingFaceTokenizer
from megatron_flex.tokenizers.sentence_piece import (
    GPTSentencePieceTokenizer,
    SentencePieceTokenizer,
)

CONFIG = "config.json"
GENERATION = "generation_config.json"
FOLDER = "hugging_face"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

_CARRIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
NOT_QWEN = (
    "transformers' AutoTokenizer takes the tokenizer of any qwen2 for Qwen's own: load this one"
    " with transformers.PreTrainedTokenizerFast"
)
PATHS = ("tokenizer_model", "vocab_file", "merge_file")
"""Arguments that name a file."""

# Arguments of each kind of tokenizer, and the name of the file there.
_FILES: Mapping[str, Mapping[str, str]] = {
    "HuggingFaceTokenizer": {"tokenizer_model": "tokenizer.json"},
    "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "GPTSentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "BertWordPieceLowerCase": {"vocab_file": "vocab.txt"},
    "BertWordPieceCase": {"vocab_file": "vocab.txt"},
}


def companions_in(directory: Path) -> list[Path]:
    """The files of a Hugging Face directory that are no weights."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and path.suffix in _CARRIED
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
    ]


def install(source: Path, directory: Path) -> Path:
    """Copy the companions to ``directory/hugging_face``, all or none; returns that folder."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = directory / FOLDER
    if folder.resolve() == source.resolve():
        return folder
    temporary = directory / f".tmp-{FOLDER}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        copy(companions_in(source), temporary)
        layout.replace_directory(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def moved(arguments: Mapping[str, Any], source: Path, directory: Path) -> dict[str, Any]:
    """Arguments that name files of ``source``, with the copies that ``install`` makes of them."""
    result, folder = dict(arguments), directory.absolute() / FOLDER
    for name in PATHS:
        if name in result and Path(result[name]).parent == source:
            result[name] = str(folder / Path(result[name]).name)
    return result


def located(arguments: Mapping[str, Any], directory: Path | str) -> dict[str, Any]:
    """Arguments of a checkpoint in ``directory``, whose files are not where this process is.

    A relative path is one from where the run was started. Files often lie beside the checkpoints,
    or above them: from there a path that is not known here is looked for.
    """
    result, above = dict(arguments), Path(directory).absolute()
    for name in PATHS:
        path = result.get(name)
        if not path or Path(path).is_absolute() or Path(path).exists():
            continue
        found = (parent / path for parent in above.parents)
        result[name] = str(next((p for p in found if p.exists()), path))
    return result


def copy(files: list[Path], directory: Path) -> None:
    """Copy files into a directory, and wait until the disk has them."""
    for path in files:
        layout.write_synced(directory / path.name, path.read_bytes())
    layout.sync_directory(directory)


def beside(directory: Path, arguments: Namespace) -> Path | None:
    """The companions of a checkpoint: converted into its directory, or where its tokenizer is."""
    folders = [directory / FOLDER]
    folders += [Path(p).parent for name in PATHS if (p := getattr(arguments, name, None))]
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def tokenizer_arguments(directory: Path, rows: int) -> tuple[dict[str, Any], str]:
    """Megatron's arguments for the tokenizer in a directory, for a model with so many ``rows``.

    Also returns a sentence about a tokenizer that cannot be used, or an empty one.
    """
    kinds = [
        kind
        for kind, files in _FILES.items()
        if all((directory / file).is_file() for file in files.values())
    ]
    if not kinds:
        return {}, "there are no tokenizer files: the checkpoint has the NullTokenizer"
    kind, described = kinds[0], directory / TOKENIZER_CONFIG
    if kind == "BertWordPieceLowerCase" and described.is_file():
        kind = kind if read_json(described).get("do_lower_case", True) else "BertWordPieceCase"
    files = _FILES[kind]
    paths = {argument: str((directory / file).absolute()) for argument, file in files.items()}
    try:
        size = _built({"tokenizer_type": kind, **paths}).vocab_size
    except TokenizerError as error:
        return {}, f"the tokenizer cannot be used here ({error}): there is the NullTokenizer"
    if size > rows:
        return {}, (
            f"{kind} has {size} ids here and the model {rows} rows: the checkpoint has the"
            " NullTokenizer"
        )
    return {"tokenizer_type": kind, **paths, "vocab_extra_ids": rows - size}, ""


def tokenizer_files(arguments: Namespace) -> tuple[dict[str, bytes], str]:
    """Files of the tokenizer that a checkpoint was trained with, by their names in a directory.

    A SentencePiece model gets those beside it from which transformers makes the same ids. Also
    returns a sentence if there are none, or an empty one.
    """
    found: dict[str, Path] = {}
    for argument, file in _FILES.get(getattr(arguments, "tokenizer_type", ""), {}).items():
        given = getattr(arguments, argument, None)
        if given is None:
            return {}, ""
        path = Path(given)
        if path.is_dir():
            path = path / file
        if not path.is_file():
            return {}, f"{path} is not there: the directory has no tokenizer; copy its files there"
        found[file] = path
        for name in (TOKENIZER_CONFIG, "special_tokens_map.json", CHAT_TEMPLATE):
            if (path.parent / name).is_file():
                found[name] = path.parent / name
    contents = {name: path.read_bytes() for name, path in found.items()}
    if "tokenizer.model" not in contents:
        return contents, ""
    tokenizer = _built(vars(arguments))
    assert isinstance(tokenizer, SentencePieceTokenizer | GPTSentencePieceTokenizer)
    contents.pop("special_tokens_map.json", None)
    try:
        made = hugging_face_files(tokenizer)
    except NotConvertible as reason:
        return contents, (
            f"transformers makes other ids of {found['tokenizer.model']}, since {reason}: encode"
            " texts with SentencePiece itself"
        )
    if TOKENIZER_CONFIG in found:  # what is said of ids follows from the model
        config = {**read_json(found[TOKENIZER_CONFIG]), **json.loads(made[TOKENIZER_CONFIG])}
        made[TOKENIZER_CONFIG] = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    return contents | made, ""


def end_with_the_turn(directory: Path) -> None:
    """Have ``generation_config.json`` name the token that ends an answer, beside others.

    Nothing is done where the chat template has none; a sentence says so.
    """
    try:
        tokenizer = HuggingFaceTokenizer(str(directory))
        template = find_template(tokenizer, directory, None)
        end = Turns(ChatTemplate(template)).end if template.own else ""
    except TokenizerError as error:
        print(f"what ends an answer is not known: {error}")
        return
    ids = tokenizer.encode(end)
    if len(ids) != 1:
        print(
            "the model was trained on conversations, and no single token ends an answer: stop"
            f" generation at {end!r}"
            if end
            else "there is no chat template beside the model"
        )
        return
    path = directory / GENERATION
    values = read_json(path) if path.is_file() else {}
    found = values.get("eos_token_id", read_json(directory / CONFIG).get("eos_token_id"))
    known = found if isinstance(found, list) else [] if found is None else [found]
    if ids[0] not in known:
        values["eos_token_id"] = [*known, ids[0]] if known else ids[0]
        content = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        layout.write_synced(path, content.encode())


def end_token(arguments: Namespace) -> int | None:
    """The id that ends a document, if the checkpoint's tokenizer is there and says it."""
    try:
        return _built(vars(arguments)).eod
    except TokenizerError:
        return None


def _built(arguments: Mapping[str, Any]) -> Tokenizer:
    return build_tokenizer(
        arguments.get("tokenizer_type") or "",
        **{name: arguments.get(name) for name in PATHS},
        vocab_size=None,
    )
