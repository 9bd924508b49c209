"""Flags and values of Megatron-LM that are refused, each with the reason and what to do instead.

When a feature arrives, its flags move from here into a group.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Flags that are refused for one reason, which continues the sentence '--x: ...'."""

    flags: tuple[str, ...]
    reason: str
    instead: str

    def __str__(self) -> str:
        return f"{self.reason}; {self.instead}"


def _refuse(flags: str, reason: str, instead: str) -> Refusal:
    return Refusal(tuple(f"--{name}" for name in flags.split()), reason, instead)


_DENSE = "models are dense GPT and BERT"

FLAGS: tuple[Refusal, ...] = (
    # Memory.
    _refuse(
        "distribute-saved-activations",
        "it divides the inputs of recomputed layers over tensor-parallel workers",
        "use --sequence-parallel, which divides them too",
    ),
    _refuse(
        "checkpoint-activations",
        "Megatron-LM no longer has it",
        "use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    _refuse(
        "overlap-param-gather-with-optimizer-step num-distributed-optimizer-instances",
        "a block's parameters are gathered as soon as it is updated, over all its replicas",
        "use --use-distributed-optimizer alone",
    ),
    _refuse(
        "use-precision-aware-optimizer",
        "master weights and moments are float32",
        "use --use-distributed-optimizer to split them over the replicas of a stage",
    ),
    _refuse(
        "optimizer-cpu-offload optimizer-offload-fraction cpu-offloading-num-layers"
        " fine-grained-activation-offloading offload-modules",
        "what lives in the host's memory is part of a plan, unit by unit",
        "name the units in --flexpipe-plan, or on CPUs let --flexpipe choose them",
    ),
    # Parallelism of other kinds.
    _refuse(
        "tp-comm-overlap tp-comm-overlap-cfg",
        "Transformer Engine's layers are not shared among workers",
        "remove it",
    ),
    _refuse(
        "overlap-p2p-communication-warmup-flush microbatch-group-size-per-virtual-pipeline-stage",
        "the schedule places every message, and groups have as many micro-batches as stages",
        "remove it",
    ),
    _refuse(
        "context-parallel-size cp-comm-type hierarchical-context-parallel-sizes"
        " hybrid-context-parallel max-seqlen-per-dp-cp-rank",
        "samples are not divided over workers",
        "use more stages for long samples",
    ),
    _refuse(
        "expert-model-parallel-size expert-tensor-parallel-size num-experts moe-router-topk"
        " moe-grouped-gemm moe-ffn-hidden-size moe-aux-loss-coeff moe-token-dispatcher-type"
        " moe-router-load-balancing-type",
        _DENSE,
        "remove it",
    ),
    _refuse(
        "use-megatron-fsdp use-torch-fsdp2 data-parallel-sharding-strategy",
        "parameters are placed by the plan",
        "use more stages to need less memory",
    ),
    _refuse(
        "no-overlap-p2p-communication no-align-grad-reduce no-align-param-gather ddp-num-buckets"
        " ddp-bucket-size ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw"
        " no-gradient-reduce-div-fusion use-tp-pp-dp-mapping no-scatter-gather-tensors-in-pipeline",
        "the schedule places every message and one reduction for each block",
        "remove it",
    ),
    _refuse(
        "model-parallel-size",
        "Megatron-LM no longer has it",
        "use --pipeline-model-parallel-size",
    ),
    # Precision.
    _refuse(
        "fp16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis"
        " fp16-lm-cross-entropy",
        "bfloat16 has the same speed as half precision and needs no loss scaling",
        "use --bf16",
    ),
    _refuse(
        "fp8-margin fp8-amax-history-len fp8-amax-compute-algo fp8-interval",
        "it is for delayed scaling, whose result depends on the order of micro-batches on each"
        " worker, and so on the plan",
        "remove it",
    ),
    _refuse(
        "fp8-param-gather no-fp8-wgrad first-last-layers-bf16 num-layers-at-start-in-bf16"
        " num-layers-at-end-in-bf16 fp8-quantizer-factory",
        "with --fp8-format all layers multiply in fp8, from weights that are kept in bfloat16",
        "remove it",
    ),
    _refuse(
        "fp4-format fp4-recipe fp4-param-gather",
        "fp4 draws random numbers for its rounding, which would differ between plans",
        "use --fp8-format",
    ),
    _refuse(
        "grad-reduce-in-bf16",
        "gradients are always reduced in fp32, so that plans do not change the result",
        "remove it",
    ),
    _refuse(
        "fp32-residual-connection apply-query-key-layer-scaling",
        "the blocks have megatron-core's default number formats",
        "remove it",
    ),
    # Model.
    _refuse(
        "spec",
        "layers are built as attention and MLP blocks, which a custom specification cannot be"
        " cut into",
        "remove it",
    ),
    _refuse(
        "squared-relu quick-geglu",
        "the MLP has GELU or SwiGLU",
        "use --swiglu, --openai-gelu or no flag",
    ),
    _refuse(
        "use-rotary-position-embeddings no-position-embedding",
        "it is deprecated in Megatron-LM",
        "use --position-embedding-type",
    ),
    _refuse(
        "rotary-interleaved rotary-seq-len-interpolation-factor no-rope-freq rope-type",
        "rotary frequencies are the plain ones or Llama 3.1's, and a channel is paired with the one"
        " half a head away",
        "remove it, or use --use-rope-scaling",
    ),
    _refuse(
        "window-size window-attn-skip-freq",
        "attention sees the whole sample",
        "remove it",
    ),
    _refuse(
        "multi-latent-attention mtp-num-layers experimental-attention-variant"
        " heterogeneous-layers-config-path qk-clip"
        " is-hybrid-model hybrid-override-pattern encoder-num-layers decoder-num-layers"
        " encoder-seq-length decoder-seq-length use-legacy-models",
        _DENSE,
        "remove it",
    ),
    # Kernels.
    _refuse(
        "use-flash-attn",
        "the attention kernel follows from the device",
        "remove it",
    ),
    _refuse(
        "no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion"
        " no-bias-dropout-fusion no-rope-fusion"
        " no-gradient-accumulation-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl"
        " disable-jit-fuser enable-cuda-graph cuda-graph-impl",
        "the kernels that it chooses are not used",
        "remove it",
    ),
    _refuse(
        "use-mcore-models",
        "megatron-core modules are always used",
        "remove it",
    ),
    # Data.
    _refuse(
        "reset-position-ids reset-attention-mask eod-mask-loss"
        " no-create-attention-mask-in-dataloader",
        "one document is one sample: positions, attention and targets never cross its border, and"
        " no mask is stored",
        "remove it",
    ),
    _refuse(
        "dataloader-type",
        "the order of the samples follows from --seed, one permutation an epoch",
        "remove it",
    ),
    _refuse(
        "phase-transition-iterations per-dataset-sequences-path object-storage-cache-path",
        "data sets are named by prefix",
        "use --data-path, or --train-data-path and its like",
    ),
    _refuse(
        "data-cache-path dataloader-fast-cache-load dataloader-defer-npy-index-mmap"
        " num-dataset-builder-threads",
        "the order of the samples is computed, not stored: there is nothing to cache",
        "remove it",
    ),
    _refuse(
        "short-seq-prob",
        "one document is one sample, as long as it is",
        "remove it",
    ),
    _refuse(
        "tokenizer-metadata tokenizer-special-tokens legacy-tokenizer tiktoken-pattern"
        " tiktoken-num-special-tokens tiktoken-special-tokens tokenizer-sentencepiece-legacy"
        " tokenizer-hf-use-fast tokenizer-hf-include-special-tokens trust-remote-code",
        "tokenizers are read from local files as they are",
        "remove it",
    ),
    # Training.
    _refuse(
        "batch-size",
        "Megatron-LM no longer has it",
        "use --micro-batch-size",
    ),
    _refuse(
        "warmup",
        "Megatron-LM no longer has it",
        "use --lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
    ),
    _refuse(
        "decrease-batch-size-if-needed",
        "a global batch may have any size",
        "remove it",
    ),
    _refuse(
        "no-check-for-nan-in-loss-and-grad check-for-spiky-loss check-for-large-grads",
        "an iteration whose gradient norm is not finite is always skipped and counted",
        "remove it",
    ),
    _refuse(
        "exit-signal exit-signal-handler-for-dataloader",
        "the signal is SIGTERM",
        "use --exit-signal-handler",
    ),
    _refuse(
        "decoupled-lr decoupled-min-lr sgd-momentum apply-wd-to-qk-layernorm",
        "all weights have one learning rate and one weight decay",
        "remove it",
    ),
    _refuse(
        "manual-gc manual-gc-interval no-manual-gc-eval empty-unused-memory-level"
        " train-sync-interval iterations-to-skip",
        "the training loop has no such switch",
        "remove it",
    ),
    _refuse(
        "deterministic-mode",
        "on CPUs all results are deterministic, on CUDA as far as the kernels are",
        "remove it",
    ),
    # Checkpoints.
    _refuse(
        "use-dist-ckpt dist-ckpt-format ckpt-fully-parallel-save no-ckpt-fully-parallel-save"
        " ckpt-fully-parallel-load ckpt-assume-constant-structure dist-ckpt-strictness"
        " auto-detect-ckpt-format ckpt-convert-format ckpt-convert-save use-persistent-ckpt-worker"
        " dist-ckpt-optim-fully-reshardable",
        "checkpoints have one format, which any number of workers writes and reads in parallel",
        "remove it",
    ),
    _refuse(
        "use-mp-args-from-checkpoint-args",
        "a checkpoint does not depend on the layout that wrote it",
        "remove it",
    ),
    _refuse(
        "non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir"
        " non-persistent-local-ckpt-dir replication",
        "every checkpoint is a full one",
        "use --save-interval with --keep-last-n, and --async-save",
    ),
    # Logging and evaluation.
    _refuse(
        "record-memory-history memory-snapshot-path",
        "the allocator's history exists on CUDA only",
        "use --profile --use-pytorch-profiler",
    ),
    _refuse(
        "log-memory-interval log-device-memory-used log-energy log-max-attention-logit"
        " logging-level",
        "there is no such record",
        "remove it, or use --log-memory-to-tensorboard for memory",
    ),
    _refuse(
        "timing-log-option no-barrier-with-level-1-timing",
        "iterations are timed as a whole in this version",
        "use --profile --use-pytorch-profiler for their parts",
    ),
    _refuse(
        "test-mode multiple-validation-sets",
        "there is one validation set",
        "remove it",
    ),
    _refuse(
        "local-rank lazy-mpu-init",
        "ranks come from the environment, which torchrun sets",
        "remove it",
    ),
)

VALUES: dict[str, dict[str, str]] = {
    "--transformer-impl": {
        "inference_optimized": "it is for inference; use local",
    },
    "--fp8-recipe": {
        "delayed": "its scales follow from what each worker computed before, so the result would"
        " depend on the plan, and on when a layer moved; use tensorwise, blockwise or mxfp8",
        "custom": "the recipes are Transformer Engine's own; use tensorwise, blockwise or mxfp8",
    },
    "--attention-backend": {
        "": "the kernel follows from the device: PyTorch's or flash-attn's variable-length"
        " kernels on CUDA, a blockwise path on CPUs; use auto, or no flag",
    },
    "--position-embedding-type": {
        "mrope": "it is for multi-modal models; use rope",
        "relative": "it needs an attention bias, which packed samples do not have; use rope",
    },
    "--timing-log-level": {
        "": "iterations are timed as a whole in this version; use --profile --use-pytorch-profiler"
        " for their parts",
    },
    "--recompute-modules": {
        "layernorm": "a norm is recomputed with its half of the layer; use core_attn or mlp",
        "mla_up_proj": "there is no latent attention; use core_attn",
        "moe": "models are dense; use mlp",
        "moe_act": "models are dense; use mlp",
        "shared_experts": "models are dense; use mlp",
    },
    "--optimizer": {
        "sgd": "only Adam's state travels with the layers; use adam",
        "muon": "it needs whole matrices of all layers at once; use adam",
        "dist_muon": "it needs whole matrices of all layers at once; use adam",
    },
    "--ckpt-format": {
        "torch_dist": "megatron-core writes it on CUDA only; use torch_dcp, or no flag",
        "torch": "its files depend on the layout; use torch_dcp, or no flag",
        "fsdp_dtensor": "it belongs to Megatron FSDP; use torch_dcp, or no flag",
    },
    "--tokenizer-type": {
        "Llama2Tokenizer": "use SentencePieceTokenizer, or HuggingFaceTokenizer with its"
        " tokenizer.json",
        "TikTokenizer": "use HuggingFaceTokenizer with a tokenizer.json",
        "MultimodalTokenizer": "models are text only",
        "NullMultimodalTokenizer": "models are text only",
        "SFTTokenizer": "chat templates are not applied; write prompt and completion as a pair",
    },
}
"""Reasons for values that the flag's choices leave out; ``""`` is any value."""

BY_FLAG: dict[str, Refusal] = {flag: refusal for refusal in FLAGS for flag in refusal.flags}
