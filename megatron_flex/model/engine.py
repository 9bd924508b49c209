"""Layers of Transformer Engine's modules: megatron-core's wrappers of them, with our attention.

Three things differ from what Megatron-LM does with them:

* Parameters are views of slabs, which come and go, so modules are built without memory (meta
  device) and keep nothing that follows from a weight: fp8 weights are made of it in every pass, and
  no recipe has scales that depend on earlier passes.
* A weight's gradient is added where the slab's is (``main_grad``), always: no pass is the first.
* The weight half of a split backward goes to the tape of its pass. Transformer Engine has a queue
  for it in each module (``WeightGradStore``), from which passes would have to be taken in the order
  in which they were put there; here each forward leaves a queue of its own.

Checked against the sources of 2.9 to 2.20 (``transformer_engine/pytorch/module``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron_flex.imports import quick_import
from megatron_flex.model.block import MAIN_GRAD
from megatron_flex.model.config import ModelConfig
from megatron_flex.model.megatron import (
    IdentityOp,
    LayerModules,
    TransformerConfig,
    core_config,
)
from megatron_flex.model.tape import Tape, recorded_on


@cache
def engine_config(config: ModelConfig) -> TransformerConfig:
    """The megatron-core configuration of a model of Transformer Engine's modules."""
    return core_config(
        config,
        init_model_with_meta_device=True,
        gradient_accumulation_fusion=True,
        # Else the first pass of a step replaces the gradient, and fp8 weights outlive an update.
        disable_parameter_transpose_cache=True,
        layernorm_zero_centered_gamma=config.apply_layernorm_1p,
        fp8=config.fp8_format,
        fp8_recipe=config.fp8_recipe,
    )


def engine_modules(*, fused: bool = True) -> LayerModules:
    """The classes of megatron-core's layer specs for Transformer Engine.

    ``fused``: a norm is part of the linear layer that follows it.

    Raises:
        ImportError: the package is not there.
    """
    with quick_import():
        from megatron.core.extensions import transformer_engine as te

    if not te.HAVE_TE:
        raise ImportError("Transformer Engine is not installed: use --transformer-impl local")
    norm, column = te.TENorm, te.TEColumnParallelLinear
    if fused:
        norm, column = IdentityOp, te.TELayerNormColumnParallelLinear
    return LayerModules(
        norm, column, te.TERowParallelLinear, te.TENorm, engine_config, shared=False
    )


class _OwedWeight:
    """What one forward of a linear layer has for a ``WeightGradStore``: its pass's tape."""

    def __init__(self, tape: Tape, bias: nn.Parameter | None) -> None:
        self._tape = tape
        self._bias = bias

    def delay_wgrad_compute(self) -> bool:
        """Whether the weight's gradient waits."""
        return True

    def put(self, tensors: list[Any], product: Callable[..., object]) -> None:
        """Take what ``product(*tensors)``, the gradient of the weight, is made of.

        The product of bfloat16 matrices would make the bias's gradient too. But that belongs to the
        input half, as do all of one dimension. In fp8 it has been made there.
        """
        gradient = tensors[1]
        if self._bias is not None and type(gradient) is Tensor:
            _gradient_of(self._bias).add_(gradient.flatten(0, -2).sum(0))

        def add() -> None:
            product(*tensors)

        self._tape.put(add)


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:  # a parameter outside of slabs
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class EnginePasses:
    """What the linear layers of a half layer need before each of its forwards."""

    def __init__(self, layer: nn.Module, config: ModelConfig, number: int) -> None:
        """``number``: of the layer in the model, from 0."""
        with quick_import():
            from megatron.core import fp8_utils
            from megatron.core.extensions import transformer_engine as te

        kinds = (te.TELinear, te.TELayerNormColumnParallelLinear)
        linears = [module for module in layer.modules() if isinstance(module, kinds)]
        self._linears: list[tuple[Any, Any]] = [(one, one.wgrad_store) for one in linears]
        self._config = config
        self._number = number
        self._context: Callable[..., AbstractContextManager[object]] = fp8_utils.get_fp8_context

    @contextmanager
    def forward(self, tokens: int, *, training: bool) -> Iterator[None]:
        """Run a forward of so many tokens in this.

        Raises:
            ValueError: fp8 kernels cannot take so many in training. Otherwise they are not asked:
                a completion adds one token after the other.
        """
        aligned = tokens % self._config.alignment == 0
        if training and not aligned:
            raise ValueError(
                f"fp8 needs multiples of {self._config.alignment} tokens, this micro-batch has"
                f" {tokens}: give --flexpipe-align-tokens {self._config.alignment}"
            )
        narrow: AbstractContextManager[object] = nullcontext()
        if self._config.fp8_format is not None and aligned:
            narrow = self._context(engine_config(self._config), self._number)
        if torch.is_grad_enabled():
            self._prepare(recorded_on())
        try:
            with narrow:
                yield
        finally:  # the pass has what it was given; a module keeps nothing of a slab
            for linear, own in self._linears:
                linear.wgrad_store = own

    def _prepare(self, tape: Tape | None) -> None:
        for linear, _ in self._linears:
            setattr(linear.weight, MAIN_GRAD, _gradient_of(linear.weight))
            # The bias of others is added outside of them.
            bias = linear.bias if linear.use_bias and not linear.te_return_bias else None
            if tape is not None:
                linear.wgrad_store = _OwedWeight(tape, bias)
