"""llama-3-8b on 16 devices: tensor 2, pipeline 1, data 8, micro-batch 2, none recomputation, ZeRO 2, overlap, 64
samples per step.

Every process of torchrun calls `parallelize(model)` before it makes its optimizer. Change names of modules for yours.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

REPLICAS, SHARDS, TENSOR = 1, 8, 2
MICRO_BATCH, ACCUMULATION = 2, 4  # samples of a backward pass; such passes of a step
BLOCKS = "model.layers"
STYLES = {
    "columns": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"),
    "rows": ("o_proj", "out_proj", "down_proj", "fc2"),
    "words in": ("embed_tokens",),
    "words out": ("lm_head",),
}  # by the last part of a module's name


def parallelize(model: nn.Module, device: str = "cuda", dtype: torch.dtype | None = torch.bfloat16) -> nn.Module:
    """Split the model over all processes, in place; `dtype`: of arithmetic, gradients are summed in float32."""
    mesh = init_device_mesh(device, (REPLICAS, SHARDS, TENSOR), mesh_dim_names=("replica", "shard", "tensor"))
    makes = {
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
    blocks = model.get_submodule(BLOCKS)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=False)
    return model
