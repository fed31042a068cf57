"""torchtitan 0.2: a TOML job configuration; later versions are configured in Python."""

from __future__ import annotations

import json

from foretrace.plan.export.launch import InexpressiblePlanError, LaunchedPlan
from foretrace.plan.transformers.model import RECOMPUTATIONS

# (layers, hidden, heads, heads of keys and values, words) -> flavor of its llama3.
FLAVORS = {
    (32, 4096, 32, 8, 128256): "8B",
    (80, 8192, 64, 8, 128256): "70B",
    (126, 16384, 128, 8, 128256): "405B",
}


def write(launch: LaunchedPlan) -> str:
    """Return model, batch, degrees and recomputation; everything else has torchtitan's defaults."""
    model, at = launch.model, launch.at
    flavor = FLAVORS.get((model.layers, model.hidden, model.heads, model.kv_heads, model.words))
    if not flavor or not model.gated or model.tied:
        raise InexpressiblePlanError(
            f"the sizes of {model.name} (its llama3 comes as {', '.join(FLAVORS.values())})", "plan llama-3-8b"
        )
    if at.tensor > 1 and not at.sequence:
        raise InexpressiblePlanError(f"tensor={at.tensor} without sequence=1 (it splits norms, too)", "fix sequence=1")
    if RECOMPUTATIONS[at.recompute] == "selective":
        raise InexpressiblePlanError("selective recomputation (its own is of other operators)", "fix recompute=0 or 2")
    if at.zero == 1:
        raise InexpressiblePlanError("zero=1 (FSDP shards gradients and weights, too)", "fix zero=2 or 3")
    if not at.zero and (at.data > 1 or at.context > 1) and (at.tensor * at.pipeline * at.context > 1):
        raise InexpressiblePlanError("zero=0 with several degrees (it replicates weights alone)", "fix zero=2 or 3")
    schedule = "Interleaved1F1B" if at.virtual > 1 else "1F1B"
    sections: dict[str, dict[str, object]] = {
        "job": {"description": launch.title},
        "model": {"name": "llama3", "flavor": flavor},
        "training": {
            "local_batch_size": launch.per_replica if at.pipeline > 1 else at.micro,
            "global_batch_size": launch.batch,
            "seq_len": model.length,
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1 if at.zero else at.data,
            "data_parallel_shard_degree": at.data if at.zero else 1,
            "tensor_parallel_degree": at.tensor,
            "context_parallel_degree": at.context,
            "pipeline_parallel_degree": at.pipeline,
        },
        "activation_checkpoint": {"mode": RECOMPUTATIONS[at.recompute]},
    }
    if at.zero:
        sections["parallelism"]["fsdp_reshard_after_forward"] = "always" if at.zero == 3 else "never"
    if at.pipeline > 1:
        sections["parallelism"] |= {
            "pipeline_parallel_schedule": schedule,
            "pipeline_parallel_microbatch_size": at.micro,
            "pipeline_parallel_layers_per_stage": model.layers // (at.pipeline * at.virtual),
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    lines = []
    for name, fields in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items()), ""]
    return "\n".join(lines)
