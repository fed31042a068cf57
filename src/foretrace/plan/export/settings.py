"""Settings of training software: Megatron-LM, Megatron-Bridge, DeepSpeed, torchtitan 0.2 (later: Python), DTensor."""

from __future__ import annotations

import json
import textwrap

from foretrace.plan.export.launch import SHARDS_ALL, LaunchedPlan, UnsupportedSetting, lacking, options, selective
from foretrace.plan.transformers.model import RECOMPUTATIONS
from foretrace.shipped import filled

_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}  # ZeRO stage -> what Megatron-FSDP calls it
# (layers, hidden, heads, heads of keys and values, words) -> flavor of torchtitan's llama3.
_FLAVORS = {
    (32, 4096, 32, 8, 128256): "8B",
    (80, 8192, 64, 8, 128256): "70B",
    (126, 16384, 128, 8, 128256): "405B",
}


def _flavor(launch: LaunchedPlan) -> str | None:
    model = launch.model
    sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.words)
    return _FLAVORS.get(sizes) if model.gated and not model.tied else None


MEGATRON_REFUSES = [
    UnsupportedSetting(lambda plan: plan.at.virtual > 1 and plan.at.pipeline == 2 and not plan.at.overlap,
            "virtual stages on pipeline=2 without overlap", "fix overlap=1"),
]  # fmt: skip  # as Megatron's own validation
DEEPSPEED_REFUSES = [
    *lacking("pipeline", "virtual", why="stages are cut in code, by PipelineModule"),
    *lacking("context", "sequence", why="its JSON splits no sequence"),
    *lacking("expert", why="experts are split in code, by its MoE layer"),
    *lacking("recompute", why="its JSON turns none on, the model's code does"),
    UnsupportedSetting(lambda plan: plan.at.zero == 0 and plan.at.overlap > 0 and plan.at.data > 1,
            "overlap=1 with zero=0 (it overlaps what ZeRO sends)", "fix overlap=0"),
]  # fmt: skip
TORCHTITAN_REFUSES = [
    UnsupportedSetting(lambda plan: _flavor(plan) is None,
            f"the sizes of {{model.name}} (its llama3 comes as {', '.join(_FLAVORS.values())})", "plan llama-3-8b"),
    UnsupportedSetting(lambda plan: plan.at.tensor > 1 and not plan.at.sequence,
            "tensor={at.tensor} without sequence=1 (it splits norms, too)", "fix sequence=1"),
    selective("its own is of other operators"),
    SHARDS_ALL,
    UnsupportedSetting(lambda plan: not plan.at.zero and max(plan.at.data, plan.at.context) > 1
            and plan.at.tensor * plan.at.pipeline * plan.at.context > 1,
            "zero=0 with several degrees (it replicates weights alone)", "fix zero=2 or 3"),
]  # fmt: skip
DTENSOR_REFUSES = [
    *lacking("pipeline", "virtual", why="stages need a schedule"),
    *lacking("context", "sequence", why="its modules see whole sequences"),
    UnsupportedSetting(lambda plan: plan.model.experts > 1, "{model.experts} experts (routing is the model's own code)",
            "plan a dense model"),
    UnsupportedSetting(lambda plan: plan.model.kv_heads % plan.at.tensor > 0,
            "tensor={at.tensor} over {model.kv_heads} heads of keys", "fix tensor={model.kv_heads}"),
    selective("it wraps whole layers"),
    SHARDS_ALL,
]  # fmt: skip


def _megatron(launch: LaunchedPlan) -> list[tuple[str, str, object]]:
    """Return Megatron-LM's option, fields of Megatron-Bridge's `ConfigContainer`, and their value; "" for none."""
    at = launch.at
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


def megatron(launch: LaunchedPlan) -> str:
    """Return arguments of Megatron-LM's pretrain scripts; data, tokenizer, positions, norms and optimizer are left."""
    model, grouped, mixed = launch.model, launch.model.kv_heads < launch.model.heads, launch.model.experts > 1
    sizes = {
        "num-layers": model.layers, "hidden-size": model.hidden, "ffn-hidden-size": model.inner,
        "num-attention-heads": model.heads, "group-query-attention": grouped,
        "num-query-groups": model.kv_heads if grouped else None, "kv-channels": model.head,
        "seq-length": model.length, "max-position-embeddings": model.length, "vocab-size": model.words,
        "swiglu": model.gated, "disable-bias-linear": model.gated,
        "untie-embeddings-and-output-weights": not model.tied, "num-experts": model.experts if mixed else None,
        "moe-router-topk": model.active if mixed else None,
    }  # fmt: skip
    split = {option: value for option, _, value in _megatron(launch) if option}
    return "\n".join([*options(sizes), *options(split), ""])


def megatron_bridge(launch: LaunchedPlan) -> str:
    """Return YAML of the same that goes over a recipe, whose sizes of the model stay."""
    sections: dict[str, list[str]] = {}
    for _, fields, value in _megatron(launch):
        for section, _, name in (each.partition(".") for each in fields.split()):
            sections.setdefault(section, []).append(f"  {name}: {json.dumps(value)}")
    return "\n".join([f"# {launch.title}", *(row for name in sections for row in (f"{name}:", *sections[name])), ""])


def deepspeed(launch: LaunchedPlan) -> str:
    """Return batch, ZeRO stage and AutoTP, as `deepspeed.initialize(config=...)` reads them."""
    at = launch.at
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


def torchtitan(launch: LaunchedPlan) -> str:
    """Return model, batch, degrees and recomputation as TOML; everything else has torchtitan's defaults."""
    model, at, piped = launch.model, launch.at, launch.at.pipeline > 1
    sections: dict[str, dict[str, object]] = {
        "job": {"description": launch.title},
        "model": {"name": "llama3", "flavor": _flavor(launch)},
        "training": {
            "local_batch_size": launch.per_replica if piped else at.micro,
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
    if piped:
        sections["parallelism"] |= {
            "pipeline_parallel_schedule": "Interleaved1F1B" if at.virtual > 1 else "1F1B",
            "pipeline_parallel_microbatch_size": at.micro,
            "pipeline_parallel_layers_per_stage": model.layers // (at.pipeline * at.virtual),
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    lines = []
    for name, fields in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in fields.items()), ""]
    return "\n".join(lines)


def dtensor(launch: LaunchedPlan) -> str:
    """Return a Python file for PyTorch alone: DTensor's tensor parallelism and FSDP2's `fully_shard`.

    Linear layers go by the names that decoders of `transformers` have; tied weights stay whole. Replicas are shards of
    one process, so that gradients are summed over them and weights stay whole.
    """
    return filled(
        "foretrace.plan.export", "parallelize.py.j2", title=textwrap.fill(f"{launch.title}.", 110), at=launch.at,
        recompute=bool(launch.at.recompute), tied=launch.model.tied, accumulation=launch.micro_batches,
    )  # fmt: skip
