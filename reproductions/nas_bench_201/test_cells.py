"""Networks of NAS-Bench-201 from their cell string, against PyTorch's own count of a real network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrace.cost.calls import Family
from foretrace.cost.devices.roofline import MATRIX
from foretrace.errors import ForetraceError
from reproductions.nas_bench_201.cells import OPERATIONS, operator_graph, parse, space
from reproductions.nas_bench_201.tables import read_networks

LARGEST = "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|nor_conv_3x3~0|nor_conv_3x3~1|nor_conv_3x3~2|"
EMPTY = "|none~0|+|none~0|none~1|+|none~0|none~1|none~2|"
MIXED = "|avg_pool_3x3~0|+|nor_conv_1x1~0|skip_connect~1|+|nor_conv_3x3~0|none~1|skip_connect~2|"


def test_flops_and_parameters_are_the_published_ones() -> None:
    """Dong and Yang publish 220.12 M multiply-adds and 1.531546 M parameters of the largest network for CIFAR-10."""
    found = space([LARGEST, EMPTY])
    assert found.flops[0] / 2e6 == pytest.approx(220.12, abs=0.005)
    assert found.parameters.tolist() == [1_531_546, 73_306]


@pytest.mark.parametrize("arch", [LARGEST, EMPTY, MIXED])
def test_work_agrees_with_a_real_network(arch: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = real_network(arch), 2
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(batch, 3, 32, 32))
    counted = counter.get_total_flops()
    found, graph = space([arch]), operator_graph(arch, batch)
    assert batch * found.flops[0] == counted
    matrix = np.isin(graph.calls.family, MATRIX)
    assert graph.calls.flops[matrix].sum() == counted
    assert graph.calls.nbytes[matrix].sum() == pytest.approx(found.nbytes(batch)[0])
    parameters = sum(each.numel() for each in model.parameters())
    assert found.parameters[0] == parameters == graph.parameters
    assert len(graph) == found.kernels()[0]
    assert (graph.calls.family == Family.CONV).sum() == sum(isinstance(m, torch.nn.Conv2d) for m in model.modules())


def real_network(arch: str):  # type: ignore[no-untyped-def]  # PyTorch is optional here
    from torch import nn

    def block(a: int, b: int, kernel: int, stride: int = 1) -> nn.Module:
        conv = nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=False)
        return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(b))

    class Edge(nn.Module):
        def __init__(self, kind: str, c: int) -> None:
            super().__init__()
            self.kind = kind
            self.inner: nn.Module = nn.Identity()
            if kind.startswith("nor_conv"):
                self.inner = block(c, c, int(kind[-1]))
            elif kind == "avg_pool_3x3":
                self.inner = nn.AvgPool2d(3, 1, 1)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return x * 0 if self.kind == "none" else self.inner(x)

    class Cell(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.edges = nn.ModuleList(nn.ModuleList(Edge(kind, c) for kind in node) for node in parse(arch))

        def forward(self, x):  # type: ignore[no-untyped-def]
            nodes = [x]
            for node in self.edges:
                nodes.append(sum(edge(value) for edge, value in zip(node.children(), nodes, strict=True)))
            return nodes[-1]

    class Reduction(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.main = nn.Sequential(block(a, b, 3, 2), block(b, b, 3))
            self.shortcut = nn.Sequential(nn.AvgPool2d(2, 2), nn.Conv2d(a, b, 1, bias=False))

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.main(x) + self.shortcut(x)

    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)]
    for i, c in enumerate((16, 32, 64)):
        layers += [Reduction(c // 2, c)] if i else []
        layers += [Cell(c) for _ in range(5)]
    head = [nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *head).eval()


def test_a_cell_is_read_whatever_the_order_of_its_edges() -> None:
    cell = parse(MIXED)
    assert cell == (("avg_pool_3x3",), ("nor_conv_1x1", "skip_connect"), ("nor_conv_3x3", "none", "skip_connect"))
    swapped = "|avg_pool_3x3~0|+|skip_connect~1|nor_conv_1x1~0|+|none~1|skip_connect~2|nor_conv_3x3~0|"
    assert parse(swapped) == cell
    assert space([MIXED]).counts.tolist() == [[1, 2, 1, 1, 1]] and len(OPERATIONS) == 5


@pytest.mark.parametrize(("text", "says"), [
    ("|none~0|", "1 nodes"),
    ("|none~0|+|none~0|+|none~0|none~1|none~2|", "node 2 has 1 edges"),
    ("|none~0|+|none~0|none~0|+|none~0|none~1|none~2|", "one edge from each"),
    ("|none~0|+|none~0|none~2|+|none~0|none~1|none~2|", "one edge from each"),
    ("|none~0|+|none~0|maxpool~1|+|none~0|none~1|none~2|", "'maxpool' is none of"),
    ("|none~0|+|none~0|none|+|none~0|none~1|none~2|", "'none' is no edge"),
])  # fmt: skip
def test_a_wrong_cell_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ForetraceError, match=says) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_intensity_grows_with_the_batch_as_weights_are_read_once() -> None:
    found = space([LARGEST, MIXED])
    assert (found.intensity(256) > found.intensity(1)).all()
    with pytest.raises(ForetraceError, match="no images"):
        operator_graph(LARGEST, 0)


# --- files ---------------------------------------------------------------------------------------------------


def write(folder: Path, archs: str, latencies: str) -> tuple[Path, Path]:
    a, b = folder / "archs.csv", folder / "latencies.csv"
    a.write_text(archs)
    b.write_text(latencies)
    return a, b


def test_files_are_joined_by_network(tmp_path: Path) -> None:
    archs = f"arch_idx,arch\n0,{LARGEST}\n1,{EMPTY}\n"
    found = read_networks(*write(tmp_path, archs, "arch_idx,2080ti_1,raspi4,2080ti_256\n1,2,3,4\n0,5,6,7\n"))
    assert found.flops.tolist() == space([EMPTY, LARGEST]).flops.tolist()
    assert found.latencies_s["2080ti_256"].tolist() == [0.004, 0.007]
    assert sorted(found.nbytes) == [1, 256]


@pytest.mark.parametrize(("archs", "latencies", "says"), [
    ("arch_idx,arch\n", "arch_idx,2080ti_1\n0,1\n", "no networks below"),
    ("arch_idx,cell\n0,x\n", "arch_idx,2080ti_1\n0,1\n", "no column arch;"),
    (f"arch_idx,arch\n1,{EMPTY}\n", "arch_idx,2080ti_1\n0,1\n", "lacks network 0"),
    (f"arch_idx,arch\n0,{EMPTY}\n", "arch_idx\n0\n", "has no latencies"),
    (f"arch_idx,arch\n0,{EMPTY}\n", "arch_idx,cray_1\n0,1\n", "names no known device"),
    (f"arch_idx,arch\n0,{EMPTY}\n", "arch_idx,2080ti_1\n0,fast\n", "no number of milliseconds"),
    (f"arch_idx,arch\n0,{EMPTY}\n", "arch_idx,2080ti_1\n0,-1\n", "line 2"),
])  # fmt: skip
def test_wrong_files_are_named(tmp_path: Path, archs: str, latencies: str, says: str) -> None:
    with pytest.raises(ForetraceError, match=says):
        read_networks(*write(tmp_path, archs, latencies))


def test_files_that_are_not_there_are_said_to_be_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match="HayeonLee/HELP"):
        read_networks(None, None)
    with pytest.raises(ForetraceError, match=r"does not exist; .*HayeonLee/HELP"):
        read_networks(tmp_path / "no.csv", tmp_path / "none.csv")
