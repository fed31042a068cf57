"""Megatron-Bridge: settings that go over those of a recipe, as YAML; sizes of the model are the recipe's."""

from __future__ import annotations

import json

from foretrace.plan.export.launch import LaunchedPlan
from foretrace.plan.export.megatron import SHARDED, check
from foretrace.plan.transformers.model import RECOMPUTATIONS


def write(launch: LaunchedPlan) -> str:
    """Fields of its `ConfigContainer` by section."""
    at = launch.at
    check(launch)
    full = RECOMPUTATIONS[at.recompute] == "full"
    sharded = at.zero > 1
    model: dict[str, object] = {
        "seq_length": launch.model.length,
        "tensor_model_parallel_size": at.tensor,
        "sequence_parallel": bool(at.sequence),
        "context_parallel_size": at.context,
        "pipeline_model_parallel_size": at.pipeline,
        "virtual_pipeline_model_parallel_size": at.virtual if at.virtual > 1 else None,
        "recompute_granularity": RECOMPUTATIONS[at.recompute] if at.recompute else None,
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
    }
    if launch.model.experts > 1:
        model |= {"expert_model_parallel_size": at.expert, "expert_tensor_parallel_size": at.tensor}
    sections: dict[str, dict[str, object]] = {
        "model": model,
        "train": {"micro_batch_size": at.micro, "global_batch_size": launch.batch},
        "dataset": {"seq_length": launch.model.length},
        "optimizer": {"use_distributed_optimizer": at.zero > 0},
        "ddp": {
            "use_distributed_optimizer": at.zero > 0,
            "overlap_grad_reduce": bool(at.overlap),
            "overlap_param_gather": bool(at.overlap and at.zero),
            "use_megatron_fsdp": sharded,
            "data_parallel_sharding_strategy": SHARDED[at.zero] if sharded else "no_shard",
        },
        "dist": {"use_megatron_fsdp": sharded},
    }
    if sharded:
        sections["model"]["gradient_accumulation_fusion"] = False
        sections["ddp"]["average_in_collective"] = False
        sections["checkpoint"] = {"ckpt_format": "fsdp_dtensor"}
    lines = [f"# {launch.title}"]
    for name, fields in sections.items():
        lines += [f"{name}:", *(f"  {key}: {json.dumps(value)}" for key, value in fields.items())]
    return "\n".join([*lines, ""])
