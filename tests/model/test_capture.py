"""Captured steps: the same calls as recorded ones, FLOPs as PyTorch counts them, what is refused."""

from __future__ import annotations

import gc
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.cost.calls import Family, Precision
from foretrace.cost.operators.arguments import prepare
from foretrace.cost.operators.operator import Operator
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.model.capture.capture import capture, forward_only
from foretrace.model.capture.unroll import unrolled
from foretrace.model.decoder_config import DECODERS, DecoderConfig, decoder_config
from foretrace.model.decoder_modules import decoder, training_of
from foretrace.model.operator_graph import BEFORE, OperatorGraph, Role
from foretrace.training.training import Training
from foretrace.zoo.registry import job, training

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

SMALL = DecoderConfig(name="small", layers=4, hidden=32, heads=4, kv_heads=2, inner=48, words=64, length=8)


def plain(model: Any, *shapes: tuple[int, ...], loss: Callable[..., Any] | None = None, **settings: Any) -> Training:
    return Training(
        name="plain",
        model=model,
        optimizers=(torch.optim.AdamW(model.parameters()),),
        loader=[tuple(torch.zeros(each) for each in shapes)],
        loss=loss or (lambda module, batch: module(*batch).float().square().mean()),
        **settings,
    )


def network() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def products(graph: OperatorGraph) -> float:
    of = np.isin(graph.calls.family, (Family.GEMM, Family.CONV, Family.ATTENTION))
    return float(graph.calls.flops[of].sum())


def test_step_of_a_small_network() -> None:
    graph = capture(plain(network(), (2, 8)))
    forward = [node for node in graph.nodes if node.op == "aten::addmm"]
    assert [node.layer for node in forward] == ["0", "2"]
    assert forward[0].text == (
        '[[[16],[2,8],[8,16],[],[]],["float","float","float","Scalar","Scalar"],["","","","1","1"]]'
    )
    assert {node.layer for node in graph.nodes if node.op == "aten::mm"} == {"0", "2"}
    assert all(node.phase == Phase.BACKWARD for node in graph.nodes if node.op == "aten::mm")
    # two products forward; both gradients of the second layer, one of the first, whose input needs none
    assert products(graph) == 2 * 2 * (8 * 16 + 16 * 4) + 2 * 2 * (16 * 4 * 2 + 8 * 16)
    assert graph.parameters == 8 * 16 + 16 + 16 * 4 + 4
    assert graph.batch == 2
    assert {node.phase for node in graph.nodes} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    weights = [each for each in graph.storages if each.role == Role.WEIGHT]
    gradients = {each.name: each for each in graph.storages if each.role == Role.GRADIENT}
    for weight in weights:
        gradient = gradients[weight.name]
        assert weight.born == BEFORE and weight.dies == len(graph)
        assert gradient.nbytes == weight.nbytes
        assert graph.nodes[gradient.born].phase == Phase.BACKWARD
    state = [each for each in graph.storages if each.role == Role.OPTIMIZER and not each.name.endswith(".step")]
    assert sum(each.nbytes for each in state) == 2 * sum(each.nbytes for each in weights)  # made by the first step


def test_same_calls_as_a_real_step() -> None:
    """Every operator call that a profiler sees is captured, or is made inside of one that is."""
    from torch.profiler import ProfilerActivity, profile

    made = training("gnn")
    batch = next(made.batches())
    made.model.train()
    made.step(batch)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        made.step(batch)
    captured = {(node.op, node.text) for node in capture(job("gnn"), like="cpu").nodes}

    def inside(event: Any) -> bool:
        while event is not None:
            if event.name in names:
                return True
            event = event.cpu_parent
        return False

    names = {op for op, _ in captured}
    events = [each for each in profiler.events() if each.name.startswith("aten::")]
    heavy = [each for each in events if each.self_cpu_time_total > 0]
    found = sum(each.self_cpu_time_total for each in heavy if inside(each))
    assert found > 0.9 * sum(each.self_cpu_time_total for each in heavy)


def test_texts_are_those_of_a_recording(tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    made = plain(model, (2, 3, 4, 4), loss=lambda module, batch: module(*batch).softmax(-1).mean())
    batch = next(made.batches())
    made.step(batch)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        made.step(batch)
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    recorded = {
        (each["name"], json.dumps([each["args"][key] for key in ("Input Dims", "Input type", "Concrete Inputs")]))
        for each in events
        if "Input Dims" in each.get("args", {})
    }
    graph = capture(made, like="cpu")
    compared = {"convolution", "convolution_backward", "native_batch_norm", "native_batch_norm_backward", "relu",
                "threshold_backward", "addmm", "mm", "_softmax", "_softmax_backward_data", "mean", "expand", "view",
                "div", "sum", "t", "mul_", "lerp_", "addcmul_", "sqrt"}  # fmt: skip
    mine = {(n.op, json.dumps(json.loads(n.text))) for n in graph.nodes if n.op.removeprefix("aten::") in compared}
    assert {op for op, _ in mine} >= {"aten::convolution", "aten::native_batch_norm", "aten::_softmax", "aten::mul_"}
    assert not mine - recorded


@pytest.mark.parametrize("name", ["vgg11", "gnn"])
def test_flops_are_those_of_pytorchs_counter(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    made = training(name)
    batch = next(made.batches())
    with FlopCounterMode(display=False) as counter:
        made.step(batch)
    assert products(capture(job(name))) == counter.get_total_flops()


def test_batch_without_loading_it() -> None:
    graph = capture(job("gnn"), batch=4096)
    assert graph.batch == 4096
    assert products(graph) == pytest.approx(128 * products(capture(job("gnn"))), rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "like", "loaded"),
    [("tensors", "gpu", 6), ("texts", "gpu", 33), ("own collation", "gpu", 32), ("tensors", "cpu", 32)],
)
def test_few_samples_tell_the_sizes_of_a_batch(kind: str, like: Any, loaded: int) -> None:
    """Where all have the same, and their values do not matter."""
    asked: list[int] = []

    class Samples:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return (torch.ones(8), "a word") if kind == "texts" else (torch.ones(8), index)

    def collated(samples: Any) -> Any:
        return torch.stack([each for each, _ in samples]), torch.tensor([number for _, number in samples])

    more = {"collate_fn": collated} if kind == "own collation" else {}
    loader: Any = torch.utils.data.DataLoader(Samples(), batch_size=32, **more)
    made = replace(plain(network(), (2, 8), loss=lambda module, batch: module(batch[0]).mean()), loader=loader)
    graph = capture(made, like=like)
    assert (graph.batch, len(asked)) == (32, loaded)
    whole = capture(replace(made, loader=[(torch.ones(32, 8),)]), like=like)
    assert [(each.op, each.text) for each in graph.nodes] == [(each.op, each.text) for each in whole.nodes]


def test_full_size_needs_no_memory() -> None:
    graph = capture(job("vgg11", "full"))
    assert graph.parameters == 132_863_336
    assert sum(each.nbytes for each in graph.storages if each.role == Role.WEIGHT) == 4 * graph.parameters


def test_precision() -> None:
    autocast, cast = (capture(plain(network(), (2, 8)), precision=each) for each in ("bf16", "bf16-weights"))
    for graph in (autocast,):
        assert all("c10::BFloat16" in node.text for node in graph.nodes if node.op == "aten::mm")
    assert {each.nbytes for each in autocast.storages if each.name == "0.weight"} == {4 * 128}
    weights = [each for each in cast.storages if each.name == "0.weight" and each.role == Role.WEIGHT]
    assert [each.nbytes for each in weights] == [2 * 128]


def test_recomputation_is_a_phase_of_its_own() -> None:
    from torch.utils.checkpoint import checkpoint

    def loss(model: Any, batch: Any) -> Any:
        return model[2](checkpoint(lambda x: model[1](model[0](x)), batch[0], use_reentrant=False)).mean()

    graph = capture(plain(network(), (2, 8), loss=loss))
    again = [node for node in graph.nodes if node.phase == Phase.RECOMPUTE]
    assert [(node.op, node.layer) for node in again if node.op == "aten::addmm"] == [("aten::addmm", "0")]


def test_gpu_gets_fused_operators() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, 2, batch_first=True)

        def forward(self, x: Any) -> Any:
            q = self.lstm(x)[0][:, None]
            return nn.functional.dropout(nn.functional.scaled_dot_product_attention(q, q, q), 0.5)

    gpu = {node.op for node in capture(plain(Model(), (2, 4, 8)), like="gpu").nodes}
    cpu = {node.op for node in capture(plain(Model(), (2, 4, 8)), like="cpu").nodes}
    for name in ("_scaled_dot_product_efficient_attention", "_cudnn_rnn", "native_dropout", "_foreach_lerp_"):
        assert f"aten::{name}" in gpu
        assert f"aten::{name}" not in cpu
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in cpu


def test_module_at_inference() -> None:
    model = network()
    graph = capture(forward_only(plain(model, (3, 8))))
    assert {node.phase for node in graph.nodes} == {Phase.FORWARD}
    assert products(graph) == 2 * 3 * (8 * 16 + 16 * 4)
    assert not [each for each in graph.storages if each.role in (Role.ACTIVATION, Role.GRADIENT)]
    assert next(model.parameters()).device.type == "cpu"  # the model itself is left alone


@pytest.mark.parametrize("collects", [True, False])
def test_the_search_for_garbage_is_left_as_it_was(collects: bool) -> None:
    """What is frozen stays so, and a process in which nothing is frozen has nothing frozen afterwards."""
    frozen, enabled = gc.get_freeze_count(), gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        graphs = [capture(plain(network(), (2, 8)))]
        assert (gc.get_freeze_count() > 0, gc.isenabled()) == (frozen > 0, collects)
        gc.freeze()
        graphs.append(capture(plain(network(), (2, 8))))
        assert (gc.get_freeze_count() > 0, gc.isenabled()) == (True, collects)
        if not frozen:
            gc.unfreeze()
            graphs.append(capture(plain(network(), (2, 8))))
            assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if enabled else gc.disable)()
    assert all(each.nodes == graphs[0].nodes and each.storages == graphs[0].storages for each in graphs)


def test_training_is_left_alone() -> None:
    made = plain(network(), (2, 8))
    weight = next(made.model.parameters())
    before = weight.detach().clone()
    capture(made)
    assert torch.equal(weight, before)
    assert not made.optimizers[0].state
    assert made.optimizers[0].param_groups[0]["foreach"] is None
    assert nn.functional.scaled_dot_product_attention.__module__ != "foretrace.model.capture.like"


@pytest.mark.parametrize(
    ("look", "operator"),
    [
        (lambda x: x * 2 if x.sum() > 0 else x, "aten::_local_scalar_dense"),
        (lambda x: x * float(x.sum().item()), "aten::_local_scalar_dense"),
        (lambda x: x[x > 0], "aten::index"),
        (lambda x: torch.nonzero(x).float() + x.sum(), "aten::nonzero"),
        (lambda x: torch.masked_select(x, x > 0), "aten::masked_select"),
    ],
)
@pytest.mark.parametrize("like", ["gpu", "cpu"])
def test_what_depends_on_data_is_refused_by_name(look: Any, operator: str, like: Any) -> None:
    class Layer(nn.Module):
        def forward(self, x: Any) -> Any:
            return look(x)

    with pytest.raises(ForetraceError, match=r"layer 1\b.*") as error:
        capture(plain(nn.Sequential(nn.Linear(8, 4), Layer()), (2, 8)), like=like)
    assert operator in str(error.value)
    assert "recording" in str(error.value)


def test_values_made_of_sizes_are_known() -> None:
    class Layer(nn.Module):
        def forward(self, x: Any) -> Any:
            places = torch.arange(x.shape[1])
            return x * 2 if (places < 100).all() and places[-1].item() == 3 else x.nonzero()

    graph = capture(plain(nn.Sequential(nn.Linear(8, 4), Layer()), (2, 8)))
    assert any(node.op == "aten::mul" and node.layer == "1" for node in graph.nodes)


def test_wrong_settings_are_told() -> None:
    made = plain(network(), (2, 8))
    with pytest.raises(ForetraceError, match="batch_size"):
        capture(made, batch=4)
    with pytest.raises(ForetraceError, match="precision"):
        capture(made, precision="int3")
    with pytest.raises(ForetraceError, match="gpu or of a cpu"):
        capture(made, like="tpu")  # type: ignore[arg-type]


def test_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom foretrace import Training\n"
        "def training():\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    return Training(name='mine', model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),),\n"
        "                    loader=[torch.zeros(3, 4)], loss=lambda m, x: m(x).mean())\n",
        encoding="utf-8",
    )
    graph = capture(job(str(script)))
    assert graph.name == "mine"
    assert graph.parameters == 10


# --- unrolling


def canonical(graph: OperatorGraph) -> tuple[list[Any], list[Any]]:
    """A graph without the numbers of its tensors and storages."""
    storages = [(each.nbytes, each.role, each.born, each.dies, each.name) for each in graph.storages]
    made = {t: (i, k) for i, node in enumerate(graph.nodes) for k, t in enumerate(node.outputs)}
    rows = []
    for node in graph.nodes:
        reads = [made.get(t, storages[graph.tensors[t].storage]) for t in node.inputs]
        writes = [(graph.tensors[t].dims, graph.tensors[t].dtype, storages[graph.tensors[t].storage])
                  for t in node.outputs]  # fmt: skip
        rows.append((replace(node, inputs=(), outputs=()), reads, writes))
    return rows, sorted(storages, key=repr)


@pytest.mark.parametrize(
    "few",
    [
        SMALL,
        replace(SMALL, gated=False, tied=True, dropout=0.1),
        replace(SMALL, gated=False, loss="fused", unpads=True),
    ],
)
def test_unrolled_is_the_same_as_captured_whole(few: DecoderConfig) -> None:
    short = unrolled(capture(training_of(few, batch=2), precision="bf16-weights"), "layers", 7)
    whole = capture(training_of(replace(few, layers=7), batch=2), precision="bf16-weights")
    for mine, truth in zip(canonical(short), canonical(whole), strict=True):
        assert len(mine) == len(truth)
        for a, b in zip(mine, truth, strict=True):
            assert a == b
    assert whole.parameters == replace(few, layers=7).parameters
    for block in short.blocks:
        first = [(n.op, n.text) for n in short.nodes[block.first : block.first + block.length]]
        for k in range(block.times):
            at = block.first + k * block.length
            assert [(n.op, n.text) for n in short.nodes[at : at + block.length]] == first


def test_unlike_blocks_are_not_unrolled() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=i != 2) for i in range(4))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.raises(ForetraceError, match="capture it whole"):
        unrolled(capture(plain(Model(), (2, 8))), "layers", 6)


def test_decoder_is_the_one_of_transformers() -> None:
    """Parameters, FLOPs and peak of the same small Llama, made of transformers' modules."""
    transformers = pytest.importorskip("transformers")
    from foretrace.model.memory.memory import peak
    from foretrace.zoo.language import next_word_loss

    found = replace(SMALL, hidden=64, inner=96, words=256, length=32)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip

    def theirs() -> Training:
        model = transformers.LlamaForCausalLM(config)
        return Training(
            name="theirs", model=model, optimizers=(torch.optim.AdamW(model.parameters()),),
            loader=[{"input_ids": torch.zeros(2, 32, dtype=torch.long)}], loss=next_word_loss,
        )  # fmt: skip

    mine, truth = capture(training_of(found, batch=2)), capture(theirs)
    assert mine.parameters == truth.parameters == found.parameters
    assert products(mine) == pytest.approx(products(truth), rel=0.01)
    assert peak(mine).peak_bytes == pytest.approx(peak(truth).peak_bytes, rel=0.01)


def test_named_decoders_have_their_published_size() -> None:
    for name, thousand_millions in (("llama-2-7b", 6.74), ("llama-2-70b", 68.98), ("llama-3-8b", 8.03),
                                    ("llama-3-405b", 405.85), ("gpt3-175b", 174.6)):  # fmt: skip
        assert DECODERS[name].parameters / 1e9 == pytest.approx(thousand_millions, rel=1e-3)


def test_large_decoder() -> None:
    graph = decoder("llama-2-7b", length=128)
    assert graph.parameters == DECODERS["llama-2-7b"].parameters
    # 6 operations per weight of a product and word, less those of the embedding, which is looked up
    tokens = 128
    assert products(graph) == pytest.approx(6 * (graph.parameters - 32_000 * 4096) * tokens, rel=0.02)


def test_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100}  # fmt: skip
    path.write_text(json.dumps(config), encoding="utf-8")
    assert len({node.layer.split(".")[1] for node in decoder(str(path)).nodes if "layers." in node.layer}) == 5
    path.write_text(json.dumps(config | {"model_type": "mamba"}), encoding="utf-8")
    with pytest.raises(ForetraceError, match="mamba"):
        decoder_config(str(path))
    with pytest.raises(ForetraceError, match="did you mean llama-2-70b"):
        decoder_config("lama2-70b")
    assert decoder_config("Llama 2 70B") == DECODERS["llama-2-70b"]


@pytest.mark.parametrize("like", ["gpu", "cpu"])
def test_model_and_inputs_may_be_on_the_meta_device(like: Any) -> None:
    with torch.device("meta"):
        training = forward_only(plain(network(), (3, 8)))
    assert products(capture(training, like=like)) == 2 * 3 * (8 * 16 + 16 * 4)


def test_operators_of_a_processor_in_place_of_a_gpus_are_said() -> None:
    assert not capture(job("vgg11", "tiny")).notes
    (note,) = capture(job("deepspeech2", "tiny")).notes
    assert note.startswith("captured on tensors of a processor") and "_ctc_loss_backward" in note


def passes(update: str) -> float:
    """Bytes that an update moves, in arrays as large as the parameters."""
    graph = capture(training_of(SMALL), precision="bf16-weights", update=update)
    rows = [node for node in graph.nodes if node.phase == Phase.OPTIMIZER]
    return sum(node.read_bytes + node.written_bytes for node in rows) / (2 * graph.parameters)


def test_passes_of_an_update_are_those_of_its_kernels() -> None:
    # Fused: parameter, gradient and two moments read, all but the gradient written.
    assert passes("fused") == pytest.approx(7, rel=0.01)
    # Multi-tensor, what each reads and writes: mul_ 2, lerp_ 3, mul_ 2, addcmul_ 4, sqrt 2, div_ 2, add_ 2, addcdiv_ 4.
    assert passes("foreach") == pytest.approx(21, rel=0.05)
    with pytest.raises(ForetraceError, match="no fused implementation"):
        capture(
            replace(plain(net := network(), (2, 8)), optimizers=(torch.optim.ASGD(net.parameters()),)), update="fused"
        )


def test_autocast_is_seen_wherever_it_is_entered() -> None:
    def half(graph: OperatorGraph) -> bool:
        return all('"c10::BFloat16"' in node.text for node in graph.nodes if node.op == "aten::addmm")

    def own(module: Any, batch: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):  # as a script for a GPU has it
            return module(*batch).float().square().mean()

    assert half(capture(plain(network(), (2, 8)), precision="bf16"))
    assert half(capture(lambda: forward_only(plain(network(), (2, 8))), precision="bf16"))
    assert half(capture(plain(network(), (2, 8), loss=own)))
    assert not half(capture(plain(network(), (2, 8))))


def test_weights_without_data_are_not_drawn_and_all_others_are() -> None:
    seen: list[Any] = []

    def made() -> Training:
        seen.extend((torch.empty(4, device="cpu").normal_(), torch.zeros(4, device="cpu").uniform_(1, 2)))
        return plain(network(), (2, 8))

    draw, drawn = torch.Tensor.normal_, capture(made)
    assert torch.Tensor.normal_ is draw
    assert seen[0].unique().numel() == 4 and (seen[1] >= 1).all()
    assert [node.text for node in drawn.nodes] == [node.text for node in capture(plain(network(), (2, 8))).nodes]


COLD = """
import sys
from foretrace.model.capture.light import without_compiler
from foretrace.model.decoder_config import DECODERS, DecoderConfig, decoder_config
from foretrace.model.decoder_modules import decoder
import torch
with without_compiler():
    with without_compiler():
        assert not hasattr(sys.modules["torch._dynamo"], "__file__")
        import torch._dynamo.config
    import torch._dynamo
    assert torch._dynamo.__file__ and torch._dynamo.config.__spec__.origin
    assert sys.modules["torch._dynamo.config"] is torch._dynamo.config
assert not any(type(each).__name__ == "_StandIn" for each in sys.meta_path)
"""
FIRST = """
import sys
from foretrace.model.decoder_config import DECODERS, DecoderConfig, decoder_config
from foretrace.model.decoder_modules import decoder
DECODERS["small"] = DecoderConfig(name="small", layers=6, hidden=32, heads=4, kv_heads=2, inner=48, words=64, length=8)
for precision in ("bf16", "fp16", "bf16-weights", "fp32"):
    for training in (True, False):
        assert decoder("small", precision=precision, training=training).notes
"""


@pytest.mark.parametrize("script", [COLD, FIRST])
def test_from_a_cold_start(script: str) -> None:
    """In a process that has loaded nothing of PyTorch's compiler."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_recorded_update_moves_as_many_arrays(shared_data: Path) -> None:
    """Adam, `foreach`, on an H100: its kernels take as long as 19 arrays at the bandwidth that copies reach."""
    path = shared_data / "traces" / "triosim" / "h100_vgg13_kineto.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()), strict=False)["traceEvents"]
    seconds = sum(
        each["dur"] * 1e-6 for each in events if each.get("cat") == "kernel" and "multi_tensor" in each.get("name", "")
    )
    model = nn.Linear(1000, 133)
    job = replace(plain(model, (2, 1000)), optimizers=(torch.optim.Adam(model.parameters()),))
    graph = capture(job, update="foreach")
    rows = [node for node in graph.nodes if node.phase == Phase.OPTIMIZER]
    arrays = sum(node.read_bytes + node.written_bytes for node in rows) / (4 * graph.parameters)
    assert arrays == pytest.approx(19, rel=0.02)
    parameters = 133_047_848  # of VGG-13
    assert seconds == pytest.approx(arrays * 4 * parameters / (0.85 * 3350e9), rel=0.05)


def test_operators_that_have_a_kernel_of_their_own_stay_whole_on_a_processor() -> None:
    """PyTorch could take its backward pass apart, and does not."""
    found = [node.op for node in capture(plain(nn.Sequential(nn.Linear(8, 8), nn.SiLU()), (2, 8)), like="cpu").nodes]
    assert "aten::silu_backward" in found
    assert "aten::sigmoid" not in found


def test_values_of_the_batch_decide_nothing() -> None:
    def loss(module: Any, batch: Any) -> Any:
        return module(*batch).sum() * (2 if batch[0].sum().item() else 1)

    with pytest.raises(ForetraceError, match="a value of a tensor decides"):
        capture(plain(network(), (2, 8), loss=loss), like="cpu")


def test_convolutions_say_that_their_pictures_hold_channels_together() -> None:
    def loss(module: Any, batch: Any) -> Any:
        once = module(batch[0])
        return module(once.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)).sum()

    model = torch.nn.Conv2d(4, 4, 3, padding=1)
    made = capture(plain(model, (2, 4, 8, 8), loss=loss), like="cpu")
    found = [Operator(node.op, node.text) for node in made.nodes if "convolution" in node.op]
    assert [each.layout for each in found] == ["", "channels_last", "channels_last", ""]  # backward in reverse
    assert prepare(found[1]).args[0].is_contiguous(memory_format=torch.channels_last)
    assert prepare(found[2]).args[1].is_contiguous(memory_format=torch.channels_last)


def test_the_batch_is_not_written_to() -> None:
    found = plain(network(), (2, 8), loss=lambda module, batch: module(batch[0].add_(1.0).exp()).sum())
    assert capture(found, like="cpu").denormal
    assert not found.loader[0][0].any()  # type: ignore[index]


@pytest.mark.parametrize("like", ["gpu", "cpu"])
def test_16_bit_weights_compute_in_16_bit(like: Any) -> None:
    """What they are given is cast, too, and weights that several modules share stay one."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 8)
            self.again = nn.Linear(8, 8)
            self.again.weight = self.last.weight

        def forward(self, x: Any) -> Any:
            return self.again(self.last(self.norm(self.first(x)).mean((2, 3))))

    graph = capture(plain(Tied(), (2, 3, 8, 8)), like=like, precision="bf16-weights")
    matrix = np.isin(graph.calls.family, (Family.GEMM, Family.CONV))
    assert set(graph.calls.precision[matrix].tolist()) == {Precision.BF16}
    weights = [each.nbytes for each in graph.storages if each.role == Role.WEIGHT]
    assert sum(weights) == 2 * sum(each.numel() for each in Tied().parameters())


def test_gradients_of_picked_rows_are_added_in_place() -> None:
    class Pick(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(1000, 64))

        def forward(self, x: Any) -> Any:
            return self.table[torch.arange(50)] * x

    graph = capture(plain(Pick(), (50, 64)))
    node = next(each for each in graph.nodes if each.op.startswith("aten::index_put"))
    assert node.op == "aten::index_put_" and node.read_bytes + node.written_bytes < 4 * 1000 * 64
    tables = [each for each in graph.storages if each.nbytes == 4 * 1000 * 64 and each.born >= 0]
    assert len([each for each in tables if each.role == Role.GRADIENT]) == 1
    assert not [each for each in tables if graph.nodes[each.born].op.startswith("aten::index_put")]


def test_products_of_experts_in_float32() -> None:
    """PyTorch has sizes of `_grouped_mm` for bfloat16 alone; FLOPs are those of the words, not of all experts."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 32, 16))

        def forward(self, x: Any) -> Any:
            return torch._grouped_mm(x, self.weight, torch.arange(16, 65, 16, dtype=torch.int32))

    graph = capture(plain(Experts(), (64, 32)))
    assert products(graph) == 2 * 2 * 64 * 32 * 16  # forward, and the gradient of the weights


def test_what_a_model_does_not_take_is_one_sentence() -> None:
    def loss(module: Any, batch: Any) -> Any:
        raise ValueError("three channels are expected")

    with pytest.raises(ForetraceError, match="the step cannot be captured: three channels are expected; see that"):
        capture(plain(network(), (2, 8), loss=loss))
