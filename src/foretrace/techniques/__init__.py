"""Named optimisations: each predicts its effect on a `TaskGraph` and says what it assumes.

The techniques are loaded when they are first used: `foretrace.techniques.PrefetchData(workers=4)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace.techniques.activation_compression import ActivationCompression
    from foretrace.techniques.activation_offload import ActivationOffload
    from foretrace.techniques.activation_recomputation import ActivationRecomputation
    from foretrace.techniques.arguments import parse
    from foretrace.techniques.base import Technique
    from foretrace.techniques.batch_size import BatchSize
    from foretrace.techniques.bucket_fusion import BucketFusion
    from foretrace.techniques.channels_last import ChannelsLast
    from foretrace.techniques.compiled import Compiled
    from foretrace.techniques.contention import Contention
    from foretrace.techniques.cuda_graphs import CudaGraphs
    from foretrace.techniques.data_parallel import DataParallel
    from foretrace.techniques.faster_device import FasterDevice
    from foretrace.techniques.fully_sharded import FullySharded
    from foretrace.techniques.fused_optimizer import FusedOptimizer
    from foretrace.techniques.gradient_accumulation import GradientAccumulation
    from foretrace.techniques.gradient_compression import GradientCompression
    from foretrace.techniques.hierarchical_allreduce import HierarchicalAllreduce
    from foretrace.techniques.local_steps import LocalSteps
    from foretrace.techniques.mixed_precision import MixedPrecision
    from foretrace.techniques.model_parallel_compression import ModelParallelCompression
    from foretrace.techniques.parameter_server import ParameterServer
    from foretrace.techniques.partial_backprop import PartialBackprop
    from foretrace.techniques.prefetch_data import PrefetchData
    from foretrace.techniques.priority import Priority
    from foretrace.techniques.reconstruct_batchnorm import ReconstructBatchnorm
    from foretrace.techniques.registry import techniques
    from foretrace.techniques.replace_kernel import ReplaceKernel
    from foretrace.techniques.selection import Remove, Scale
    from foretrace.techniques.structured_dropout import StructuredDropout
    from foretrace.techniques.tensor_partition import TensorPartition
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
    "ActivationCompression": "activation_compression",
    "ActivationOffload": "activation_offload",
    "ActivationRecomputation": "activation_recomputation",
    "BatchSize": "batch_size",
    "BucketFusion": "bucket_fusion",
    "ChannelsLast": "channels_last",
    "Compiled": "compiled",
    "Contention": "contention",
    "CudaGraphs": "cuda_graphs",
    "DataParallel": "data_parallel",
    "FasterDevice": "faster_device",
    "FullySharded": "fully_sharded",
    "FusedOptimizer": "fused_optimizer",
    "GradientAccumulation": "gradient_accumulation",
    "GradientCompression": "gradient_compression",
    "HierarchicalAllreduce": "hierarchical_allreduce",
    "LocalSteps": "local_steps",
    "MixedPrecision": "mixed_precision",
    "ModelParallelCompression": "model_parallel_compression",
    "ParameterServer": "parameter_server",
    "PartialBackprop": "partial_backprop",
    "PrefetchData": "prefetch_data",
    "Priority": "priority",
    "ReconstructBatchnorm": "reconstruct_batchnorm",
    "Remove": "selection",
    "ReplaceKernel": "replace_kernel",
    "Scale": "selection",
    "StructuredDropout": "structured_dropout",
    "Technique": "base",
    "TensorPartition": "tensor_partition",
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
