"""Megatron-LM: arguments of its pretrain scripts, one on a line, as `megatron/training/arguments.py` reads them."""

from __future__ import annotations

from foretrace.plan.export.launch import InexpressiblePlanError, LaunchedPlan, options
from foretrace.plan.transformers.model import RECOMPUTATIONS

SHARDED = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}  # ZeRO stage -> what Megatron-FSDP calls it


def write(launch: LaunchedPlan) -> str:
    """Sizes, degrees and batch; data, tokenizer, position embedding, norms and optimizer stay the user's to give."""
    model, at = launch.model, launch.at
    check(launch)
    sizes = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.inner,
        "num-attention-heads": model.heads,
        "group-query-attention": model.kv_heads < model.heads,
        "num-query-groups": model.kv_heads if model.kv_heads < model.heads else None,
        "kv-channels": model.head,
        "seq-length": model.length,
        "max-position-embeddings": model.length,
        "vocab-size": model.words,
        "swiglu": model.gated,
        "disable-bias-linear": model.gated,
        "untie-embeddings-and-output-weights": not model.tied,
        "num-experts": model.experts if model.experts > 1 else None,
        "moe-router-topk": model.active if model.experts > 1 else None,
        "expert-model-parallel-size": at.expert if model.experts > 1 else None,
        "expert-tensor-parallel-size": at.tensor if model.experts > 1 else None,
    }
    degrees = {
        "tensor-model-parallel-size": at.tensor,
        "sequence-parallel": bool(at.sequence),
        "context-parallel-size": at.context,
        "pipeline-model-parallel-size": at.pipeline,
        "num-virtual-stages-per-pipeline-rank": at.virtual if at.virtual > 1 else None,
        "no-overlap-p2p-communication": at.virtual > 1 and not at.overlap,
        "micro-batch-size": at.micro,
        "global-batch-size": launch.batch,
        "bf16": True,
        "recompute-granularity": RECOMPUTATIONS[at.recompute] if at.recompute else None,
        "recompute-method": "uniform" if RECOMPUTATIONS[at.recompute] == "full" else None,
        "recompute-num-layers": 1 if RECOMPUTATIONS[at.recompute] == "full" else None,
        "use-distributed-optimizer": at.zero > 0,
        "use-megatron-fsdp": at.zero > 1,
        "data-parallel-sharding-strategy": SHARDED[at.zero] if at.zero > 1 else None,
        "no-gradient-accumulation-fusion": at.zero > 1,
        "ckpt-format": "fsdp_dtensor" if at.zero > 1 else None,
        "overlap-grad-reduce": bool(at.overlap),
        "overlap-param-gather": bool(at.overlap and at.zero),
    }
    return "\n".join([*options(sizes), *options(degrees), ""])


def check(launch: LaunchedPlan) -> None:
    """Refuse what Megatron's own validation of arguments does."""
    at = launch.at
    if at.virtual > 1 and at.pipeline == 2 and not at.overlap:
        raise InexpressiblePlanError("virtual stages on pipeline=2 without overlap", "fix overlap=1")
