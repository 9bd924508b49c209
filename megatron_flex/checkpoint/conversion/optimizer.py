"""Megatron-LM's optimizer state, which counts parameters, from and to tensors by parameter name.

A rank numbers its parameters group by group (those with weight decay, then the others), in the
order in which its modules have them. That is the order of the model's own state in a file of
Megatron-LM's, and :func:`in_order` gives it for files that are written here.

Source: megatron-core 0.16, optimizer/{__init__,optimizer}.py.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron_flex.checkpoint.conversion.weights import Training, state_name
from megatron_flex.checkpoint.errors import CheckpointError
from megatron_flex.model.config import ModelConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"
"""Kinds of optimizer state: Adam's moments, and the float32 weights of a bfloat16 model."""


def kinds_of(config: ModelConfig) -> tuple[str, ...]:
    """The kinds of state that a model's optimizer has."""
    return MOMENTS if config.params_dtype == "float32" else (*MOMENTS, MASTER)


_MODULES = (
    "embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings",
    "layers", "final_layernorm", "lm_head.dense", "lm_head.layer_norm", "output_layer",
    "binary_head", "pooler.dense",
)  # fmt: skip
_IN_LAYER = (
    "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv",
    "self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm",
    "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
_LEAVES = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")


def _place(name: str) -> tuple[int, ...]:
    module, _, leaf = name.rpartition(".")
    _, _, rest = module.partition(".layers.")
    if rest:
        number, _, module = rest.partition(".")
        place = _MODULES.index("layers"), int(number), _IN_LAYER.index(module)
    else:
        plain = module.removeprefix("decoder.").removeprefix("encoder.")
        place = _MODULES.index(plain), 0, 0
    return *place, _LEAVES.index(leaf)


def in_order(names: Iterable[str]) -> list[str]:
    """Parameters of a stage, by either layer specification's names, in its modules' order."""
    return sorted(names, key=_place)


def decays(name: str, dimensions: int) -> bool:
    """Megatron's rule: no weight decay for biases and one-dimensional parameters."""
    return not name.endswith("bias") and dimensions > 1


def _groups(names: Sequence[str], dimensions: Mapping[str, int]) -> list[list[str]]:
    """Names with weight decay, and those without."""
    return [[n for n in names if decays(n, dimensions[n]) is kind] for kind in (True, False)]


def written(
    names: Sequence[str],
    dimensions: Mapping[str, int],
    find: Callable[[str, str], torch.Tensor],
    training: Training,
    *,
    mixed: bool,
    torch_adam: bool,
) -> dict[str, Any]:
    """The state of one rank's optimizer.

    Args:
        names: its parameters, in their order.
        dimensions: of each.
        find: the tensor of a kind and a name.
        training: where the run stood.
        mixed: a bfloat16 model, which has master weights.
        torch_adam: for PyTorch's AdamW, which counts steps with each parameter; the others do in
            each group.
    """
    state: dict[int, dict[str, torch.Tensor]] = {}
    groups: list[dict[str, Any]] = []
    masters: list[list[torch.Tensor]] = []
    for decayed, members in zip((True, False), _groups(names, dimensions), strict=True):
        first = len(state)
        for number, name in enumerate(members, start=first):
            state[number] = {kind: find(kind, name) for kind in MOMENTS}
            if torch_adam:
                state[number]["step"] = torch.tensor(float(training.steps))
        groups.append({**_group(training, decayed), "params": list(range(first, len(state)))})
        masters.append([find(MASTER, name) for name in members] if mixed else [])
    inner = {"state": state, "param_groups": groups}
    return {"optimizer": inner, "fp32_from_fp16_params": masters} if mixed else inner


def _group(training: Training, decayed: bool) -> dict[str, Any]:
    """Values of a parameter group; learning rate and weight decay are the scheduler's to set."""
    schedule = training.schedule
    return {
        "lr": schedule["max_lr"],
        "betas": training.betas,
        "eps": training.eps,
        "weight_decay": schedule["end_wd"] if decayed else 0.0,
        "bias_correction": True,
        "step": training.steps,
        "is_expert_parallel": False,
        "default_config": True,
        "wd_mult": 1.0 if decayed else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": schedule["max_lr"],
        "min_lr": schedule["min_lr"],
    }


def common(training: Training) -> dict[str, Any]:
    """What a distributed checkpoint has of the optimizer beside its tensors."""
    groups = [_group(training, decayed) for decayed in (True, False)]
    inner: dict[str, Any] = {"param_groups": groups}
    inner["state"] = {"common_step": torch.tensor(float(training.steps))}
    return inner


def read(
    content: Any, names: Sequence[str], dimensions: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Tensors of one rank's optimizer state, by our names; the reverse of :func:`written`.

    Raises:
        CheckpointError: it is of another optimizer, or of other parameters.
    """
    inner, masters = content, None
    if isinstance(content, dict) and "fp32_from_fp16_params" in content:
        inner, masters = content["optimizer"], content["fp32_from_fp16_params"]
    try:
        groups, state = inner["param_groups"], inner["state"]
        found: dict[str, torch.Tensor] = {}
        for place, group in enumerate(groups):
            decayed = group.get("wd_mult", group.get("pre_wd_mult")) != 0.0
            members = _groups(names, dimensions)[0 if decayed else 1]
            if len(members) != len(group["params"]):
                raise CheckpointError(
                    f"the optimizer has {len(group['params'])} parameters with wd_mult"
                    f" {1.0 if decayed else 0.0}, the model has {len(members)}"
                )
            for name, number in zip(members, group["params"], strict=True):
                for kind in MOMENTS:
                    found[state_name(kind, name)] = state[number][kind]
            if masters is not None:
                for name, master in zip(members, masters[place], strict=True):
                    found[state_name(MASTER, name)] = master
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"its optimizer is not Megatron-LM's plain Adam ({error!r})"
        ) from error
    if len(found) != len(names) * (2 if masters is None else 3):
        raise CheckpointError("its optimizer has not all parameters of the model")
    return found


def steps_of(content: Any) -> int:
    """How many updates were made, by any of the ways in which optimizers count them."""
    inner = content.get("optimizer", content) if isinstance(content, dict) else content
    try:
        state = inner.get("state") or {}
        values = [group.get("step") for group in inner["param_groups"]]
        values.append(state.get("common_step"))
        values += [one.get("step") for key, one in state.items() if key != "common_step"][:1]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"its optimizer is not Megatron-LM's plain Adam ({error!r})"
        ) from error
    known = {int(value) for value in values if value is not None}
    if len(known) != 1:
        raise CheckpointError(f"its optimizer does not say how many updates it made ({known})")
    return known.pop()


def training_of(content: Any, arguments: Namespace, head: Mapping[str, Any]) -> Training:
    """Where a run of Megatron-LM stood; ``head`` is what its file has beside the optimizer."""
    schedule = head.get("opt_param_scheduler")
    if not isinstance(schedule, dict):
        raise CheckpointError("there is no opt_param_scheduler beside it")
    plain = Training(0, {})
    return Training(
        steps_of(content),
        dict(schedule),
        (
            getattr(arguments, "adam_beta1", plain.betas[0]),
            getattr(arguments, "adam_beta2", plain.betas[1]),
        ),
        getattr(arguments, "adam_eps", plain.eps),
        float(head.get("num_floating_point_operations_so_far", 0.0) or 0.0),
    )
