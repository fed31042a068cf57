"""The names of the package, techniques in the order in which they are listed: `lazy.py` loads them from here."""

# isort: off
from foretrace.techniques.base import Technique as Technique
from foretrace.techniques.whatif import WhatIf as WhatIf
from foretrace.techniques.arguments import parse as parse
from foretrace.techniques.registry import techniques as techniques
from foretrace.techniques.data.prefetch_data import PrefetchData as PrefetchData
from foretrace.techniques.compute.mixed_precision import MixedPrecision as MixedPrecision
from foretrace.techniques.compute.fused_optimizer import FusedOptimizer as FusedOptimizer
from foretrace.techniques.compute.cuda_graphs import CudaGraphs as CudaGraphs
from foretrace.techniques.compute.compiled import Compiled as Compiled
from foretrace.techniques.compute.channels_last import ChannelsLast as ChannelsLast
from foretrace.techniques.compute.batch_size import BatchSize as BatchSize
from foretrace.techniques.memory.gradient_accumulation import GradientAccumulation as GradientAccumulation
from foretrace.techniques.memory.activation_recomputation import ActivationRecomputation as ActivationRecomputation
from foretrace.techniques.compute.reconstruct_batchnorm import ReconstructBatchnorm as ReconstructBatchnorm
from foretrace.techniques.memory.activation_offload import ActivationOffload as ActivationOffload
from foretrace.techniques.memory.activation_compression import ActivationCompression as ActivationCompression
from foretrace.techniques.compute.structured_dropout import StructuredDropout as StructuredDropout
from foretrace.techniques.compute.speculative_decoding import SpeculativeDecoding as SpeculativeDecoding
from foretrace.techniques.compute.clustered_heads import ClusteredHeads as ClusteredHeads
from foretrace.techniques.compute.product_quantisation import ProductQuantisation as ProductQuantisation
from foretrace.techniques.distributed.data_parallel import DataParallel as DataParallel
from foretrace.techniques.distributed.fully_sharded import FullySharded as FullySharded
from foretrace.techniques.distributed.bucket_fusion import BucketFusion as BucketFusion
from foretrace.techniques.distributed.tensor_partition import TensorPartition as TensorPartition
from foretrace.techniques.distributed.priority import Priority as Priority
from foretrace.techniques.distributed.hierarchical_allreduce import HierarchicalAllreduce as HierarchicalAllreduce
from foretrace.techniques.distributed.parameter_server import ParameterServer as ParameterServer
from foretrace.techniques.distributed.local_steps import LocalSteps as LocalSteps
from foretrace.techniques.distributed.gradient_compression import GradientCompression as GradientCompression
from foretrace.techniques.distributed.model_parallel_compression import (
    ModelParallelCompression as ModelParallelCompression,
)
from foretrace.techniques.distributed.kfac import Kfac as Kfac
from foretrace.techniques.distributed.partial_backprop import PartialBackprop as PartialBackprop
from foretrace.techniques.data.contention import Contention as Contention
from foretrace.techniques.compute.faster_device import FasterDevice as FasterDevice
from foretrace.techniques.compute.sparse_accelerator import SparseAccelerator as SparseAccelerator
from foretrace.techniques.selection import ReplaceKernel as ReplaceKernel
from foretrace.techniques.selection import Scale as Scale
from foretrace.techniques.selection import Remove as Remove
