"""DeepSpeed: its JSON. Pipeline stages, recomputation and sequences are split by the model's code, not by it."""

from __future__ import annotations

import json

from foretrace.plan.export.launch import InexpressiblePlanError, LaunchedPlan


def write(launch: LaunchedPlan) -> str:
    """Return batch, ZeRO stage and AutoTP, as `deepspeed.initialize(config=...)` reads them."""
    at = launch.at
    launch.without("pipeline", "virtual", at="stages are cut in code, by PipelineModule")
    launch.without("context", "sequence", at="its JSON splits no sequence")
    launch.without("expert", at="experts are split in code, by its MoE layer")
    launch.without("recompute", at="its JSON turns none on, the model's code does")
    if at.zero == 0 and at.overlap and at.data > 1:
        raise InexpressiblePlanError("overlap=1 with zero=0 (it overlaps what ZeRO sends)", "fix overlap=0")
    said: dict[str, object] = {
        "train_batch_size": launch.batch,
        "train_micro_batch_size_per_gpu": at.micro,
        "gradient_accumulation_steps": launch.micro_batches,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": at.zero, **({"overlap_comm": bool(at.overlap)} if at.zero else {})},
    }
    if at.tensor > 1:
        said["tensor_parallel"] = {"autotp_size": at.tensor}
    return json.dumps(said, indent=2) + "\n"
