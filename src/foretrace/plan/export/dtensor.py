"""PyTorch alone: a Python file that splits a model by DTensor's tensor parallelism and FSDP2's `fully_shard`."""

from __future__ import annotations

import textwrap

from foretrace.plan.export.launch import SHARDS_ALL, LaunchedPlan, UnsupportedSetting, lacking, selective

_CODE = '''"""{title}

Every process of torchrun calls `parallelize(model)` before it makes its optimizer. Change names of modules for yours.
"""

import torch
from torch import nn
{wrapper}from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

REPLICAS, SHARDS, TENSOR = {replicas}, {shards}, {tensor}
MICRO_BATCH, ACCUMULATION = {micro}, {accumulation}  # samples of a backward pass; such passes of a step
BLOCKS = "model.layers"
STYLES = {{
    "columns": ({columns}),
    "rows": ({rows}),
    "words in": ({words_in}),
    "words out": ({words_out}),
}}  # by the last part of a module's name


def parallelize(model: nn.Module, device: str = "cuda", dtype: torch.dtype | None = torch.bfloat16) -> nn.Module:
    """Split the model over all processes, in place; `dtype`: of arithmetic, gradients are summed in float32."""
    mesh = init_device_mesh(device, (REPLICAS, SHARDS, TENSOR), mesh_dim_names=("replica", "shard", "tensor"))
{body}    return model
'''
_TENSOR = """    makes = {
        "columns": ColwiseParallel,
        "rows": RowwiseParallel,
        "words in": lambda: RowwiseParallel(input_layouts=Replicate()),
        "words out": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    style = {name: makes[kind] for kind, names in STYLES.items() for name in names}
    plan = {name: style[last]() for name, _ in model.named_modules() if (last := name.rpartition(".")[2]) in style}
    if not plan:
        raise ValueError("no module has a name that STYLES knows; add yours")
    parallelize_module(model, mesh["tensor"], plan)
"""
_BLOCKS = "    blocks = model.get_submodule(BLOCKS)\n"
_RECOMPUTED = "    for at, block in enumerate(blocks):\n        blocks[at] = checkpoint_wrapper(block)\n"
_SHARDED = """    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*blocks, model):
        fully_shard(part, mesh={mesh}, mp_policy=policy, reshard_after_forward={reshard})
"""
_WRAPPER = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n"


REFUSES = [
    *lacking("pipeline", "virtual", why="stages need a schedule"),
    *lacking("context", "sequence", why="its modules see whole sequences"),
    UnsupportedSetting(lambda plan: plan.model.experts > 1, "{model.experts} experts (routing is the model's own code)",
            "plan a dense model"),
    UnsupportedSetting(lambda plan: plan.model.kv_heads % plan.at.tensor > 0,
            "tensor={at.tensor} over {model.kv_heads} heads of keys", "fix tensor={model.kv_heads}"),
    selective("it wraps whole layers"),
    SHARDS_ALL,
]  # fmt: skip


def write(launch: LaunchedPlan) -> str:
    """Return the file. Linear layers go by the names that decoders of `transformers` have; tied weights stay whole."""
    model, at = launch.model, launch.at
    full, words = bool(at.recompute), not model.tied
    # Replicated: shards of one process, so that gradients are summed over replicas and weights stay whole.
    sharded = _SHARDED.format(mesh='mesh["shard"]' if at.zero else 'mesh["replica", "shard"]', reshard=at.zero == 3)
    body = _TENSOR if at.tensor > 1 else ""
    body += _BLOCKS if full or at.data > 1 else ""
    body += (_RECOMPUTED if full else "") + (sharded if at.data > 1 else "")
    return _CODE.format(
        title=textwrap.fill(f"{launch.title}.", 110), wrapper=_WRAPPER if full else "",
        replicas=1 if at.zero else at.data, shards=at.data if at.zero else 1, tensor=at.tensor,
        micro=at.micro, accumulation=launch.micro_batches,
        columns='"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"',
        rows='"o_proj", "out_proj", "down_proj", "fc2"',
        words_in='"embed_tokens",' if words else "", words_out='"lm_head",' if words else "", body=body,
    )  # fmt: skip
