"""From the flags to the parts of a run: data, model, plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_flex.arguments import plan_of
from megatron_flex.cluster.profile import Profile, ProfileError
from megatron_flex.config.config import Config
from megatron_flex.data.batches import BatchSource
from megatron_flex.data.errors import DataError
from megatron_flex.data.gpt import GptSamples
from megatron_flex.data.masking import BertVocabulary
from megatron_flex.data.pairs import PairSamples
from megatron_flex.data.paths import Split
from megatron_flex.data.prompts import Prompt, Prompts, read_asked
from megatron_flex.data.samples import Overlong
from megatron_flex.data.sources import DataConfig, DataSets
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.decode import room
from megatron_flex.model.tensor_cut import check
from megatron_flex.planner.plan import Plan, PlanError
from megatron_flex.planner.tensor import TensorParallel, check_profile
from megatron_flex.runtime.machine import machine_name
from megatron_flex.tokenizers.base import Tokenizer, TokenizerError
from megatron_flex.tokenizers.build import build_tokenizer
from megatron_flex.tokenizers.chat_template import find_template, home


@dataclass(frozen=True)
class Parts:
    """What a run works with; equal on every worker.

    ``train``, ``valid`` and ``test`` are ``None`` where no document belongs to them. ``warnings``
    are sentences on the data; ``profile`` is what was measured of the layers, if it was.
    """

    model: ModelConfig
    plan: Plan
    train: BatchSource | None
    valid: BatchSource | None
    test: BatchSource | None
    warnings: tuple[str, ...] = ()
    questions: Questions | None = None
    profile: Profile | None = None


@dataclass(frozen=True)
class Questions:
    """What ``--eval-generate`` asks: prompts, how many tokens may follow, and what ends them."""

    asked: tuple[Prompt, ...]
    tokens: int
    stops: tuple[tuple[int, ...], ...]
    said: Callable[[tuple[int, ...]], str]


def assemble(config: Config) -> Parts:
    """Open the data and derive model and plan; nothing large is allocated.

    Raises ``DataError``, ``TokenizerError`` or ``PlanError`` that says what to change.
    """
    t = config.tokenizer
    tokenizer = build_tokenizer(
        t.tokenizer_type,
        tokenizer_model=t.tokenizer_model,
        vocab_file=t.vocab_file,
        merge_file=t.merge_file,
        vocab_size=t.vocab_size,
    )
    try:
        model = config.model_config(tokenizer.vocab_size)
        check(model, config.parallel.tensor_model_parallel_size)
    except ValueError as error:  # --padded-vocab-size, for this tokenizer
        raise TokenizerError(str(error)) from error
    profile = _profile(config, model)
    sets = DataSets(_data_config(config, model, tokenizer))
    train = None
    if not config.evaluation.skip_train:
        train = sets.source(Split.TRAIN)
        if train is None:
            raise sets.nothing_for(Split.TRAIN, "training needs documents")
    valid = sets.source(Split.VALID, repeat=False)
    if valid is None and config.evaluation.eval_interval is not None:
        raise sets.nothing_for(Split.VALID, "--eval-interval needs validation data")
    test = sets.source(Split.TEST, repeat=False)
    warnings = _warnings((train, valid, test), tokenizer.eod)
    questions = _questions(config, model, tokenizer)
    return Parts(model, plan_of(config, model), train, valid, test, warnings, questions, profile)


def _questions(config: Config, model: ModelConfig, tokenizer: Tokenizer) -> Questions | None:
    """The prompts of ``--eval-generate``, which fit the model."""
    e, t = config.evaluation, config.tokenizer
    if e.eval_generate is None:
        return None
    asked = read_asked(e.eval_generate, "--eval-generate")
    template = None
    if not all(isinstance(one, str) for one in asked):
        template = find_template(
            tokenizer, home(t.tokenizer_model or t.vocab_file), e.chat_template
        )
    prompts = Prompts(tokenizer, template)
    made = tuple(prompts.make(one) for one in asked)
    for prompt in made:
        try:
            room(model, len(prompt.ids), 1)
        except ValueError as error:
            raise DataError(f"--eval-generate {e.eval_generate}: {error}") from error
    return Questions(made, e.eval_generate_tokens, tuple(prompts.stops()), prompts.said)


def _warnings(sources: Iterable[BatchSource | None], eod: int | None) -> tuple[str, ...]:
    """What is odd about pairs of prompt and completion, and about conversations."""
    sets = [samples for source in sources if source is not None for samples in source.sets]
    found = [s.as_conversations() for s in sets if isinstance(s, GptSamples)]
    if eod is not None:
        found += [s.ended_prompts(eod) for s in sets if isinstance(s, PairSamples)]
    return tuple(dict.fromkeys(text for text in found if text is not None))


def _profile(config: Config, model: ModelConfig) -> Profile | None:
    """The file's; one of another model is refused, and one worker warns of another machine's."""
    path = config.flexpipe.flexpipe_profile
    if path is None or config.flexpipe.measures:
        return None
    profile = Profile.load(Path(path))
    try:
        profile.check_model(model)
        if profile.tensor > 1:  # one of whole layers is divided by the cost model
            p = config.parallel
            check_profile(
                profile, TensorParallel(p.tensor_model_parallel_size, p.sequence_parallel)
            )
    except ProfileError as error:
        raise PlanError(f"--flexpipe-profile {path}: {error}") from error
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    doubt = profile.doubt(machine_name(device))
    if doubt is not None and os.environ.get("RANK", "0") == "0":
        print(f"warning: --flexpipe-profile {path}: {doubt}", file=sys.stderr, flush=True)
    return profile


def _data_config(config: Config, model: ModelConfig, tokenizer: Tokenizer) -> DataConfig:
    d, bert = config.data, config.architecture == "bert"
    return DataConfig(
        vocab_size=model.vocab_size,
        seed=config.training.seed,
        data_path=d.data_path,
        train_data_path=d.train_data_path,
        valid_data_path=d.valid_data_path,
        test_data_path=d.test_data_path,
        split=d.split,
        mock_data=d.mock_data,
        mmap_bin_files=d.mmap_bin_files,
        sample_format="bert" if bert else d.sample_format,
        pair_keys=d.pair_keys,
        max_sample_length=d.max_sample_length,
        overlong=Overlong(d.overlong),
        bert=bert_vocabulary(tokenizer) if bert else None,
        bert_binary_head=config.model.bert_binary_head,
        mask_prob=d.mask_prob,
    )


def bert_vocabulary(tokenizer: Tokenizer) -> BertVocabulary:
    """What masking needs of ``tokenizer``; raises ``DataError`` if a special token is missing."""
    cls, sep, mask = tokenizer.cls, tokenizer.sep, tokenizer.mask
    if cls is None or sep is None or mask is None:
        raise DataError(
            "BERT needs a tokenizer with [CLS], [SEP] and [MASK]: take --tokenizer-type"
            " BertWordPieceLowerCase, BertWordPieceCase or HuggingFaceTokenizer with such tokens"
        )
    return BertVocabulary(tokenizer.vocab_size, cls, sep, mask, tokenizer.continuation)
