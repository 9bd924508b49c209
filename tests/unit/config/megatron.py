"""Names and defaults of Megatron-LM's flags (branch core_r0.16.0)."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, Any] = {
    "--num-layers": None,
    "--hidden-size": None,
    "--ffn-hidden-size": None,
    "--num-attention-heads": None,
    "--kv-channels": None,
    "--group-query-attention": False,
    "--num-query-groups": 1,
    "--seq-length": None,
    "--max-position-embeddings": None,
    "--position-embedding-type": "learned_absolute",
    "--rotary-base": 10000,
    "--rotary-percent": 1.0,
    "--use-rope-scaling": False,
    "--rope-scaling-factor": 8.0,
    "--normalization": "LayerNorm",
    "--norm-epsilon": 1e-05,
    "--swiglu": False,
    "--openai-gelu": False,
    "--apply-residual-connection-post-layernorm": False,
    "--apply-layernorm-1p": False,
    "--untie-embeddings-and-output-weights": False,
    "--disable-bias-linear": False,
    "--add-qkv-bias": False,
    "--qk-layernorm": False,
    "--hidden-dropout": 0.1,
    "--attention-dropout": 0.1,
    "--init-method-std": 0.02,
    "--make-vocab-size-divisible-by": 128,
    "--bert-no-binary-head": False,
    "--no-persist-layer-norm": False,
    "--transformer-impl": "transformer_engine",
    "--attention-backend": "auto",
    "--data-path": None,
    "--data-args-path": None,
    "--train-data-path": None,
    "--valid-data-path": None,
    "--test-data-path": None,
    "--per-split-data-args-path": None,
    "--split": None,
    "--mock-data": False,
    "--num-workers": 2,
    "--no-mmap-bin-files": False,
    "--mask-prob": 0.15,
    "--tokenizer-type": None,
    "--tokenizer-model": None,
    "--vocab-file": None,
    "--merge-file": None,
    "--vocab-size": None,
    "--padded-vocab-size": None,
    "--vocab-extra-ids": 0,
    "--micro-batch-size": None,
    "--global-batch-size": None,
    "--rampup-batch-size": None,
    "--train-iters": None,
    "--train-samples": None,
    "--exit-interval": None,
    "--exit-duration-in-mins": None,
    "--exit-signal-handler": False,
    "--seed": 1234,
    "--optimizer": "adam",
    "--weight-decay": 0.01,
    "--clip-grad": 1.0,
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.999,
    "--adam-eps": 1e-08,
    "--calculate-per-token-loss": False,
    "--lr": None,
    "--min-lr": 0.0,
    "--lr-decay-style": "linear",
    "--lr-decay-iters": None,
    "--lr-decay-samples": None,
    "--lr-warmup-fraction": None,
    "--lr-warmup-iters": 0,
    "--lr-warmup-samples": 0,
    "--lr-warmup-init": 0.0,
    "--lr-wsd-decay-style": "exponential",
    "--lr-wsd-decay-iters": None,
    "--lr-wsd-decay-samples": None,
    "--override-opt_param-scheduler": False,
    "--override-opt-param-scheduler": False,
    "--use-checkpoint-opt_param-scheduler": False,
    "--use-checkpoint-opt-param-scheduler": False,
    "--start-weight-decay": None,
    "--end-weight-decay": None,
    "--weight-decay-incr-style": "constant",
    "--save": None,
    "--save-interval": None,
    "--persistent-save-interval": None,
    "--save-retain-interval": None,
    "--no-save-optim": False,
    "--no-save-rng": False,
    "--load": None,
    "--no-load-optim": False,
    "--no-load-rng": False,
    "--ckpt-step": None,
    "--finetune": False,
    "--pretrained-checkpoint": None,
    "--use-checkpoint-args": False,
    "--exit-on-missing-checkpoint": False,
    "--ckpt-format": "torch_dist",
    "--async-save": False,
    "--log-interval": 100,
    "--log-throughput": False,
    "--log-params-norm": False,
    "--log-num-zeros-in-grad": False,
    "--log-progress": False,
    "--timing-log-level": 0,
    "--tensorboard-dir": None,
    "--tensorboard-log-interval": 1,
    "--tensorboard-queue-size": 1000,
    "--log-timers-to-tensorboard": False,
    "--no-log-loss-scale-to-tensorboard": False,
    "--disable-log-loss-scale-to-tensorboard": False,
    "--log-validation-ppl-to-tensorboard": False,
    "--log-memory-to-tensorboard": False,
    "--log-world-size-to-tensorboard": False,
    "--wandb-project": None,
    "--wandb-exp-name": None,
    "--wandb-save-dir": None,
    "--wandb-entity": None,
    "--eval-interval": None,
    "--eval-iters": 100,
    "--skip-train": False,
    "--full-validation": False,
    "--profile": False,
    "--profile-step-start": 10,
    "--profile-step-end": 12,
    "--use-pytorch-profiler": False,
    "--profile-ranks": (0,),
    "--tensor-model-parallel-size": 1,
    "--sequence-parallel": False,
    "--pipeline-model-parallel-size": 1,
    "--pipeline-model-parallel-layout": None,
    "--num-layers-per-virtual-pipeline-stage": None,
    "--num-virtual-stages-per-pipeline-rank": None,
    "--decoder-first-pipeline-num-layers": None,
    "--decoder-last-pipeline-num-layers": None,
    "--account-for-embedding-in-pipeline-split": False,
    "--account-for-loss-in-pipeline-split": False,
    "--overlap-grad-reduce": False,
    "--use-distributed-optimizer": False,
    "--overlap-param-gather": False,
    "--distributed-backend": "nccl",
    "--distributed-timeout-minutes": 10,
    "--use-cpu-initialization": False,
    "--recompute-granularity": None,
    "--recompute-activations": False,
    "--recompute-method": None,
    "--recompute-num-layers": None,
    "--recompute-modules": None,
    "--bf16": False,
    "--fp8-format": None,
    "--fp8-recipe": "delayed",
    "--accumulate-allreduce-grads-in-fp32": False,
    "--attention-softmax-in-fp32": False,
}
"""Default of each flag that is accepted here under Megatron-LM's name; switches are off."""

_NAMES = """
num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels group-query-attention
num-query-groups seq-length max-position-embeddings position-embedding-type rotary-base
rotary-percent normalization norm-epsilon swiglu untie-embeddings-and-output-weights
disable-bias-linear qk-layernorm hidden-dropout attention-dropout init-method-std
make-vocab-size-divisible-by bert-no-binary-head transformer-impl attention-backend spec
data-path train-data-path valid-data-path test-data-path data-args-path split data-cache-path
mock-data num-workers no-mmap-bin-files mask-prob short-seq-prob
micro-batch-size global-batch-size rampup-batch-size train-iters train-samples exit-interval
exit-duration-in-mins exit-signal-handler seed optimizer weight-decay clip-grad adam-beta1
adam-beta2 adam-eps calculate-per-token-loss
lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-iters lr-warmup-samples
lr-warmup-fraction lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters
override-opt_param-scheduler use-checkpoint-opt_param-scheduler start-weight-decay
end-weight-decay
save load save-interval save-retain-interval ckpt-format ckpt-step finetune
pretrained-checkpoint use-checkpoint-args exit-on-missing-checkpoint no-save-optim no-load-optim
no-save-rng no-load-rng async-save
log-interval log-throughput log-params-norm log-num-zeros-in-grad log-progress timing-log-level
tensorboard-dir tensorboard-log-interval log-memory-to-tensorboard wandb-project wandb-exp-name
wandb-save-dir eval-interval eval-iters skip-train full-validation profile profile-step-start
profile-step-end profile-ranks
tensor-model-parallel-size pipeline-model-parallel-size pipeline-model-parallel-layout
decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
num-layers-per-virtual-pipeline-stage sequence-parallel use-distributed-optimizer
overlap-grad-reduce distributed-backend distributed-timeout-minutes use-cpu-initialization
recompute-activations recompute-granularity recompute-method recompute-num-layers
recompute-modules fp16 bf16 loss-scale accumulate-allreduce-grads-in-fp32
attention-softmax-in-fp32
tokenizer-type tokenizer-model vocab-file merge-file vocab-size padded-vocab-size
vocab-extra-ids
"""
LISTED = _NAMES.split()
"""Flags that must be accepted, or refused with a reason (without their dashes)."""
