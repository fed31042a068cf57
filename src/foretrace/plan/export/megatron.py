"""Megatron-LM: arguments of its pretrain scripts; Megatron-Bridge: settings that go over those of a recipe, as YAML."""

from __future__ import annotations

import json

from foretrace.plan.export.launch import InexpressiblePlanError, LaunchedPlan, options
from foretrace.plan.transformers.model import RECOMPUTATIONS

_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}  # ZeRO stage -> what Megatron-FSDP calls it


def _settings(launch: LaunchedPlan) -> list[tuple[str, str, object]]:
    """Return Megatron-LM's option, fields of Megatron-Bridge's `ConfigContainer`, and their value; "" where there is
    none.
    """
    at = launch.at
    if at.virtual > 1 and at.pipeline == 2 and not at.overlap:  # Megatron's own validation refuses it
        raise InexpressiblePlanError("virtual stages on pipeline=2 without overlap", "fix overlap=1")
    again, sharded = RECOMPUTATIONS[at.recompute] if at.recompute else None, at.zero > 1
    full = again == "full"
    experts: list[tuple[str, str, object]] = [
        ("expert-model-parallel-size", "model.expert_model_parallel_size", at.expert),
        ("expert-tensor-parallel-size", "model.expert_tensor_parallel_size", at.tensor),
    ]
    shards: list[tuple[str, str, object]] = [
        ("data-parallel-sharding-strategy", "ddp.data_parallel_sharding_strategy", _SHARDED.get(at.zero)),
        ("no-gradient-accumulation-fusion", "", True),
        ("", "model.gradient_accumulation_fusion ddp.average_in_collective", False),
        ("ckpt-format", "checkpoint.ckpt_format", "fsdp_dtensor"),
    ]
    return [
        *(experts if launch.model.experts > 1 else ()),
        ("tensor-model-parallel-size", "model.tensor_model_parallel_size", at.tensor),
        ("sequence-parallel", "model.sequence_parallel", bool(at.sequence)),
        ("context-parallel-size", "model.context_parallel_size", at.context),
        ("pipeline-model-parallel-size", "model.pipeline_model_parallel_size", at.pipeline),
        ("num-virtual-stages-per-pipeline-rank", "model.virtual_pipeline_model_parallel_size",
         at.virtual if at.virtual > 1 else None),
        ("no-overlap-p2p-communication", "", at.virtual > 1 and not at.overlap),
        ("micro-batch-size", "train.micro_batch_size", at.micro),
        ("global-batch-size", "train.global_batch_size", launch.batch),
        ("", "model.seq_length dataset.seq_length", launch.model.length),
        ("bf16", "", True),
        ("recompute-granularity", "model.recompute_granularity", again),
        ("recompute-method", "model.recompute_method", "uniform" if full else None),
        ("recompute-num-layers", "model.recompute_num_layers", 1 if full else None),
        ("use-distributed-optimizer", "optimizer.use_distributed_optimizer ddp.use_distributed_optimizer", at.zero > 0),
        ("use-megatron-fsdp", "ddp.use_megatron_fsdp dist.use_megatron_fsdp", sharded),
        *(shards if sharded else [("", "ddp.data_parallel_sharding_strategy", "no_shard")]),
        ("overlap-grad-reduce", "ddp.overlap_grad_reduce", bool(at.overlap)),
        ("overlap-param-gather", "ddp.overlap_param_gather", bool(at.overlap and at.zero)),
    ]  # fmt: skip


def write(launch: LaunchedPlan) -> str:
    """Return sizes, degrees and batch; data, tokenizer, position embedding, norms and optimizer stay the user's to
    give.
    """
    model, grouped = launch.model, launch.model.kv_heads < launch.model.heads
    sizes = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.inner,
        "num-attention-heads": model.heads,
        "group-query-attention": grouped,
        "num-query-groups": model.kv_heads if grouped else None,
        "kv-channels": model.head,
        "seq-length": model.length,
        "max-position-embeddings": model.length,
        "vocab-size": model.words,
        "swiglu": model.gated,
        "disable-bias-linear": model.gated,
        "untie-embeddings-and-output-weights": not model.tied,
        "num-experts": model.experts if model.experts > 1 else None,
        "moe-router-topk": model.active if model.experts > 1 else None,
    }
    split = {option: value for option, _, value in _settings(launch) if option}
    return "\n".join([*options(sizes), *options(split), ""])


def write_bridge(launch: LaunchedPlan) -> str:
    """Return the same over a recipe, whose sizes of the model stay."""
    sections: dict[str, list[str]] = {}
    for _, fields, value in _settings(launch):
        for section, _, name in (each.partition(".") for each in fields.split()):
            sections.setdefault(section, []).append(f"  {name}: {json.dumps(value)}")
    return "\n".join([f"# {launch.title}", *(row for name in sections for row in (f"{name}:", *sections[name])), ""])
