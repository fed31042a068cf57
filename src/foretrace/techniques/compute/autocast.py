"""Which operators automatic mixed precision keeps in float32 (PyTorch, "Autocast Op Reference"), as recorded."""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Mask
from foretrace.graph.taskgraph import Phase, TaskGraph

# Run in float32 on CUDA devices: autocast's list, by the operators that do the work.
_CUDA_FORWARD = frozenset((
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "cumprod", "cumsum", "dist", "cosine_similarity", "norm", "linalg_vector_norm", "linalg_norm", "prod",
    "renorm", "sum", "logsumexp", "softplus", "cdist", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "cosine_embedding_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "margin_ranking_loss",
    "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
    "triplet_margin_loss",
))  # fmt: skip
# The same, with backward operators that then run in float32, too.
_CUDA_BOTH = frozenset((
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward", "nll_loss_forward",
    "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "mse_loss_backward", "smooth_l1_loss_backward",
    "huber_loss_backward", "binary_cross_entropy_backward",
))  # fmt: skip
# On processors: what is given 16-bit inputs, as recorded (the list names `lstm` by what runs inside it).
CPU_LOWER = frozenset((
    "conv1d", "conv2d", "conv3d", "_convolution", "convolution", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "mm", "bmm", "addmm", "baddbmm", "addbmm", "linear", "matmul", "linalg_vecdot",
    "scaled_dot_product_attention", "_native_multi_head_attention", "mkldnn_rnn_layer", "prelu",
))  # fmt: skip
# On processors: what is given float32 inputs.
CPU_SINGLE = frozenset((
    "cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd", "nll_loss_forward", "nll_loss2d_forward", "mse_loss",
    "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
    "ctc_loss", "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss", "poisson_nll_loss", "avg_pool3d",
    "adaptive_avg_pool3d", "max_unpool2d", "max_unpool3d", "grid_sampler", "prod", "quantile", "nanquantile", "cdist",
    "trace", "stft", "inverse", "cholesky", "reflection_pad1d", "reflection_pad2d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d",
))  # fmt: skip
_CPU_BOTH = frozenset((
    "nll_loss_forward", "nll_loss_backward", "mse_loss", "mse_loss_backward", "binary_cross_entropy",
    "binary_cross_entropy_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "avg_pool3d", "prod", "quantile",
    "stft", "cdist",
))  # fmt: skip
# Work on parameters that stay in float32, on indices, or without arithmetic.
_TABLES = ("embedding", "index", "gather", "scatter", "fill_", "zero_", "arange", "random", "bernoulli", "_to_copy")


def stays_single(graph: TaskGraph) -> Mask:
    """Return tasks whose work autocast leaves in float32 (n rows): by operator, and everything outside forward and
    backward.

    What has no ATen operator (custom kernels, communication) is left alone.
    """
    cpu = graph.info.platform == "cpu"
    both = np.zeros(len(graph.names) + 1, dtype=np.bool_)
    forward = np.zeros(len(graph.names) + 1, dtype=np.bool_)
    both[-1] = True
    for index in np.unique(graph.op[graph.op >= 0]).tolist():
        name = graph.names[index]
        base = name.removeprefix("aten::")
        both[index] = base == name or base in (_CPU_BOTH if cpu else _CUDA_BOTH) or base.startswith(_TABLES)
        forward[index] = not cpu and base in _CUDA_FORWARD
    ahead = np.isin(graph.phase, (Phase.FORWARD, Phase.RECOMPUTE))
    outside = ~ahead & (graph.phase != Phase.BACKWARD)
    return np.asarray(both[graph.op] | (forward[graph.op] & ahead) | outside)
