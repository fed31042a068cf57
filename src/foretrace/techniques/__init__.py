"""Named optimisations: each predicts its effect on a `TaskGraph` and says what it assumes.

The techniques are loaded when they are first used: `foretrace.techniques.PrefetchData(workers=4)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace.techniques.arguments import parse
    from foretrace.techniques.base import Technique
    from foretrace.techniques.compute.batch_size import BatchSize
    from foretrace.techniques.compute.channels_last import ChannelsLast
    from foretrace.techniques.compute.compiled import Compiled
    from foretrace.techniques.compute.cuda_graphs import CudaGraphs
    from foretrace.techniques.compute.faster_device import FasterDevice
    from foretrace.techniques.compute.fused_optimizer import FusedOptimizer
    from foretrace.techniques.compute.mixed_precision import MixedPrecision
    from foretrace.techniques.compute.reconstruct_batchnorm import ReconstructBatchnorm
    from foretrace.techniques.compute.replace_kernel import ReplaceKernel
    from foretrace.techniques.compute.structured_dropout import StructuredDropout
    from foretrace.techniques.data.contention import Contention
    from foretrace.techniques.data.prefetch_data import PrefetchData
    from foretrace.techniques.distributed.bucket_fusion import BucketFusion
    from foretrace.techniques.distributed.data_parallel import DataParallel
    from foretrace.techniques.distributed.fully_sharded import FullySharded
    from foretrace.techniques.distributed.gradient_compression import GradientCompression
    from foretrace.techniques.distributed.hierarchical_allreduce import HierarchicalAllreduce
    from foretrace.techniques.distributed.local_steps import LocalSteps
    from foretrace.techniques.distributed.model_parallel_compression import ModelParallelCompression
    from foretrace.techniques.distributed.parameter_server import ParameterServer
    from foretrace.techniques.distributed.partial_backprop import PartialBackprop
    from foretrace.techniques.distributed.priority import Priority
    from foretrace.techniques.distributed.tensor_partition import TensorPartition
    from foretrace.techniques.memory.activation_compression import ActivationCompression
    from foretrace.techniques.memory.activation_offload import ActivationOffload
    from foretrace.techniques.memory.activation_recomputation import ActivationRecomputation
    from foretrace.techniques.memory.gradient_accumulation import GradientAccumulation
    from foretrace.techniques.registry import techniques
    from foretrace.techniques.selection import Remove, Scale
    from foretrace.techniques.whatif import WhatIf

__all__ = [
    "ActivationCompression",
    "ActivationOffload",
    "ActivationRecomputation",
    "BatchSize",
    "BucketFusion",
    "ChannelsLast",
    "Compiled",
    "Contention",
    "CudaGraphs",
    "DataParallel",
    "FasterDevice",
    "FullySharded",
    "FusedOptimizer",
    "GradientAccumulation",
    "GradientCompression",
    "HierarchicalAllreduce",
    "LocalSteps",
    "MixedPrecision",
    "ModelParallelCompression",
    "ParameterServer",
    "PartialBackprop",
    "PrefetchData",
    "Priority",
    "ReconstructBatchnorm",
    "Remove",
    "ReplaceKernel",
    "Scale",
    "StructuredDropout",
    "Technique",
    "TensorPartition",
    "WhatIf",
    "parse",
    "techniques",
]

_HOME = {
    "ActivationCompression": "memory.activation_compression",
    "ActivationOffload": "memory.activation_offload",
    "ActivationRecomputation": "memory.activation_recomputation",
    "BatchSize": "compute.batch_size",
    "BucketFusion": "distributed.bucket_fusion",
    "ChannelsLast": "compute.channels_last",
    "Compiled": "compute.compiled",
    "Contention": "data.contention",
    "CudaGraphs": "compute.cuda_graphs",
    "DataParallel": "distributed.data_parallel",
    "FasterDevice": "compute.faster_device",
    "FullySharded": "distributed.fully_sharded",
    "FusedOptimizer": "compute.fused_optimizer",
    "GradientAccumulation": "memory.gradient_accumulation",
    "GradientCompression": "distributed.gradient_compression",
    "HierarchicalAllreduce": "distributed.hierarchical_allreduce",
    "LocalSteps": "distributed.local_steps",
    "MixedPrecision": "compute.mixed_precision",
    "ModelParallelCompression": "distributed.model_parallel_compression",
    "ParameterServer": "distributed.parameter_server",
    "PartialBackprop": "distributed.partial_backprop",
    "PrefetchData": "data.prefetch_data",
    "Priority": "distributed.priority",
    "ReconstructBatchnorm": "compute.reconstruct_batchnorm",
    "Remove": "selection",
    "ReplaceKernel": "compute.replace_kernel",
    "Scale": "selection",
    "StructuredDropout": "compute.structured_dropout",
    "Technique": "base",
    "TensorPartition": "distributed.tensor_partition",
    "WhatIf": "whatif",
    "parse": "arguments",
    "techniques": "registry",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"foretrace.techniques.{_HOME[name]}"), name)
    raise AttributeError(f"module 'foretrace.techniques' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
