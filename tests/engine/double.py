"""Stands for Transformer Engine where there is no GPU: its interface, in PyTorch, on the CPU.

With it megatron-core's own wrappers and the product's blocks run as they are, which shows what a
comparison of signatures cannot: which parameters there are, where gradients go, and when. It is no
part of the product, and says nothing about Transformer Engine's kernels.

Constructors and methods have the parameters that the sources declare (``signatures.json``), so a
call with another one fails. What the modules do was read there:

* ``wgrad_store`` is asked in the backward whether the weight's gradient waits, and given the two
  matrices and the product, which adds to ``main_grad``;
* in bfloat16 the product makes the bias's gradient; in fp8 it is made before, and the gradient of
  the output is no plain tensor any more;
* fp8 takes multiples of 8 tokens and 16 channels (``assert_dim_for_fp8_exec``).
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, rms_norm

VERSION = "2.11.0"
SIGNATURES: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("signatures.json").read_text()
)
RECIPES: list[str] = []
"""Class of the recipe of every product in fp8, in order."""


class WeightGradStore:
    """Never asks to wait: megatron-core's default."""

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        assert not delay_wgrad_compute

    def delay_wgrad_compute(self) -> bool:
        return False


class _State:
    recipe: Any = None


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    assert fp8_group is None
    before, _State.recipe = _State.recipe, fp8_recipe if enabled else None
    try:
        yield
    finally:
        _State.recipe = before


class Quantized:
    """An fp8 matrix; no tensor, as ``QuantizedTensorStorage`` is none."""

    def __init__(self, x: Tensor) -> None:
        scale = x.abs().amax().float().clamp(min=1e-12) / 448.0
        self.data = (x.float() / scale).to(torch.float8_e4m3fn)
        self.scale, self.dtype = scale, x.dtype

    def plain(self) -> Tensor:
        return (self.data.float() * self.scale).to(self.dtype)


def _plain(x: Tensor | Quantized) -> Tensor:
    return x.plain() if isinstance(x, Quantized) else x


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, x, bias, store, fused):  # type: ignore[no-untyped-def]
        flat = x.flatten(0, -2)
        if fp8 := _State.recipe is not None:
            RECIPES.append(type(_State.recipe).__name__)
            assert len(flat) % 8 == 0
            assert flat.shape[1] % 16 == 0
            flat, used = Quantized(flat), Quantized(weight)
        else:
            used = weight
        ctx.kept, ctx.weight, ctx.bias, ctx.fp8 = (flat, used), weight, bias, fp8
        ctx.store, ctx.fused, ctx.shape = store, fused, x.shape
        return linear(_plain(flat), _plain(used), bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (flat, used), grad = ctx.kept, grad.flatten(0, -2)
        grad_bias = None
        if ctx.fp8:
            grad_bias = None if ctx.bias is None else grad.sum(0)
            grad = Quantized(grad)
        grad_x = _plain(grad).mm(_plain(used)).view(ctx.shape)
        main = ctx.weight.main_grad if ctx.fused else None

        def product(x, dy):  # type: ignore[no-untyped-def]
            made = _plain(dy).t().mm(_plain(x))
            own = None if ctx.fp8 or ctx.bias is None else _plain(dy).sum(0)
            if main is None:
                return made, own
            return main.add_(made), own

        if ctx.store.delay_wgrad_compute():
            ctx.store.put([flat, grad], product)
            return None, grad_x, grad_bias, None, None
        made, own = product(flat, grad)
        grad_bias = own if grad_bias is None else grad_bias
        return None if ctx.fused else made, grad_x, grad_bias, None, None


class TransformerEngineBaseModule(nn.Module):
    """What both linear layers are."""

    def _build(self, given: dict[str, Any]) -> None:
        assert given["device"] == "meta", "a shell has no memory"
        assert given["tp_group"] is None
        assert given["tp_size"] == 1
        assert not given["delay_wgrad_compute"]
        assert not given["sequence_parallel"]
        assert given["parameters_split"] is None
        rows, columns = given["out_features"], given["in_features"]
        where = {"device": given["device"], "dtype": given["params_dtype"]}
        self.weight = nn.Parameter(torch.empty(rows, columns, **where))
        self.use_bias, self.return_bias = given["bias"], given["return_bias"]
        bias = torch.empty(rows, **where) if self.use_bias else None
        self.bias = nn.Parameter(bias) if bias is not None else torch.empty(0, **where)
        self.fuse_wgrad_accumulation = given["fuse_wgrad_accumulation"]
        self.wgrad_store = WeightGradStore(given["delay_wgrad_compute"])

    def _product(self, x: Tensor, is_first_microbatch: bool | None) -> Any:
        assert is_first_microbatch is None, "gradients must be added, and weights not be kept"
        added = self.bias if self.use_bias and not self.return_bias else None
        fused = self.fuse_wgrad_accumulation
        out = _Product.apply(self.weight, x, added, self.wgrad_store, fused)
        return (out, self.bias) if self.return_bias else out


class Linear(TransformerEngineBaseModule):
    """``transformer_engine.pytorch.Linear``."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self._build(bound("Linear.__init__", given, device="cuda", parameters_split=None,
                          delay_wgrad_compute=False, tp_size=1))  # fmt: skip
        self.save_original_input = False

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        return self._product(inp, is_first_microbatch)


class LayerNormLinear(TransformerEngineBaseModule):
    """``transformer_engine.pytorch.LayerNormLinear``."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        given = bound("LayerNormLinear.__init__", given, device="cuda", parameters_split=None,
                      delay_wgrad_compute=False, tp_size=1)  # fmt: skip
        where = {"device": given["device"], "dtype": given["params_dtype"]}
        width = given["in_features"]
        self.eps, self.normalization = given["eps"], given["normalization"]
        self.plus = 1.0 if given["zero_centered_gamma"] else 0.0
        self.layer_norm_weight = nn.Parameter(torch.empty(width, **where))
        if self.normalization == "LayerNorm":
            self.layer_norm_bias: nn.Parameter | None = nn.Parameter(torch.empty(width, **where))
        else:
            self.layer_norm_bias = None
        self._build(given)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        weight, shape = self.layer_norm_weight + self.plus, self.layer_norm_weight.shape
        if self.layer_norm_bias is not None:
            normed = layer_norm(inp, shape, weight, self.layer_norm_bias, self.eps)
        else:
            normed = rms_norm(inp, shape, weight, self.eps)
        return self._product(normed, is_first_microbatch)


class _Alone(nn.Module):
    """What norms that stand alone are given."""

    def __init__(self, **given: Any) -> None:
        given = bound(f"{type(self).__name__}.__init__", given)
        # The class of PyTorch's that comes next.
        super().__init__(given["hidden_size"], given["eps"], device=given["device"],
                         dtype=given["params_dtype"])  # fmt: skip
        self.plus = 1.0 if given["zero_centered_gamma"] else 0.0


class LayerNorm(_Alone, nn.LayerNorm):
    """``transformer_engine.pytorch.LayerNorm``."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.shape, self.weight + self.plus, self.bias, self.eps)


class RMSNorm(_Alone, nn.RMSNorm):
    """``transformer_engine.pytorch.RMSNorm``."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight + self.plus, self.eps)


def bound(name: str, given: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """``given``, if every version that was read takes it."""
    for version, declared in SIGNATURES.items():
        parameters = set(declared[name])
        unknown = {} if "**kwargs" in parameters else given.keys() - parameters
        assert not unknown, f"{name} of {version} takes no {unknown}"
    return {**defaults, **given}


class _Recipe:
    """A recipe, by its name."""

    def __init__(self, **given: Any) -> None:
        self.given = bound(type(self).__name__, given)


def install() -> None:
    """Have ``import transformer_engine`` find this."""
    assert "transformer_engine" not in sys.modules
    nothing = dict.fromkeys(("GroupedLinear", "DotProductAttention"), None)
    empty = {name: type(name, (), {}) for name in nothing}
    recipes = {n: type(n, (_Recipe,), {}) for n in
               ("Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling")}  # fmt: skip
    state = type("FP8GlobalStateManager", (), {"is_fp8_enabled": lambda: _State.recipe is not None})
    formats = type("Format", (), {"E4M3": "e4m3", "HYBRID": "hybrid"})
    top = _module("", __version__=VERSION, __path__=[])
    pytorch = _module("pytorch", __path__=[], Linear=Linear, LayerNormLinear=LayerNormLinear,
                      LayerNorm=LayerNorm, RMSNorm=RMSNorm, **empty)  # fmt: skip
    top.pytorch = pytorch  # type: ignore[attr-defined]
    top.common = _module("common", __path__=[])  # type: ignore[attr-defined]
    top.common.recipe = _module(
        "common.recipe", Format=formats, DelayedScaling=type("DelayedScaling", (), {}), **recipes
    )
    pytorch.ops = _module(  # type: ignore[attr-defined]
        "pytorch.ops", Sequential=object, FusibleOperation=object
    )
    pytorch.distributed = _module(  # type: ignore[attr-defined]
        "pytorch.distributed", CudaRNGStatesTracker=object, activation_recompute_forward=None
    )
    _module("pytorch.fp8", FP8GlobalStateManager=state, fp8_autocast=fp8_autocast)
    pytorch.fp8_autocast = fp8_autocast  # type: ignore[attr-defined]
    names = ("compute_score_for_moe_aux_loss", "moe_aux_loss", "topk_with_score_function")
    _module("pytorch.router", **{f"fused_{name}": None for name in names})
    _module("pytorch.tensor", __path__=[], QuantizedTensor=Quantized)
    assert list(inspect.signature(fp8_autocast).parameters) == SIGNATURES["v2.11"]["fp8_autocast"]


def _module(name: str, **content: Any) -> ModuleType:
    full = f"transformer_engine.{name}".rstrip(".")
    module = ModuleType(full)
    module.__spec__ = ModuleSpec(full, None, is_package="__path__" in content)
    vars(module).update(content)
    sys.modules[full] = module
    return module
