"""A configuration as a TaskGraph: the simulated step beside the closed form that the search runs on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretrace.plan.transformers.model import Parallelism, machine, softwares
from foretrace.plan.transformers.plan import plan_decoder
from foretrace.plan.transformers.shape import TransformerSizes
from foretrace.plan.transformers.space import ParallelismSpace
from foretrace.simulate.timeline import simulate


@st.composite
def spaces(draw: st.DrawFn) -> tuple[ParallelismSpace, Parallelism]:
    """A small model of any proportions on few devices, and one of its valid configurations."""
    heads = 2 ** draw(st.integers(0, 5))
    model = TransformerSizes(
        name="drawn", layers=draw(st.sampled_from([1, 2, 6, 8, 12, 24])), hidden=heads * 64, heads=heads,
        kv_heads=heads, inner=heads * 256, words=draw(st.sampled_from([1, 1000, 200_000])),
        length=2 ** draw(st.integers(4, 12)), experts=draw(st.sampled_from([1, 12])), active=1,
    )  # fmt: skip
    on = machine(draw(st.sampled_from(["a100-80gb", "v100", "h100"])), network_gb_s=draw(st.sampled_from([0.1, 12.5])))
    pipeline, virtual, data = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    tensor = draw(st.sampled_from([each for each in (1, 2, 8) if each <= heads]))
    micro, groups = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    assume(model.layers % (pipeline * virtual) == 0 and (virtual == 1 or pipeline > 1))
    at = Parallelism(
        tensor=tensor, sequence=draw(st.integers(0, 1)) if tensor > 1 else 0, context=draw(st.sampled_from([1, 2])),
        pipeline=pipeline, virtual=virtual, data=data, expert=data if model.experts > 1 else 1, micro=micro,
        recompute=draw(st.integers(0, 2)), zero=draw(st.integers(0, 3)) if data > 1 else 0,
        overlap=draw(st.integers(0, 1)),
    )  # fmt: skip
    count = groups * (pipeline if virtual > 1 else 1)
    if virtual == 1 and at.zero < 2 and 1 < pipeline <= count + 1:
        at = replace(at, versions=draw(st.integers(1, 2)))
    by = softwares()[draw(st.sampled_from(sorted(softwares())))]
    batch = count * data * micro
    return ParallelismSpace(model=model, on=on, software=by, devices=at.devices, batch=batch), at


@settings(max_examples=80, deadline=None)
@given(spaces())
def test_the_simulated_step_is_the_closed_form(drawn: tuple[ParallelismSpace, Parallelism]) -> None:
    """The same to the rounding of tasks; with overlap longer, by no more than the hidden part of every hop."""
    space, at = drawn
    closed = space.cost(at)
    graph = space.expand(at)
    simulated = simulate(graph).step_time_s
    rounding = 0.5e-9 * len(graph)
    hidden = space.stage_costs(at)[0].hop_s
    assert (hidden > 0) == bool(at.overlap and at.pipeline > 1)
    count = space.batch // (at.data * at.micro)
    assert -rounding <= simulated - closed.seconds <= 2 * count * at.virtual * hidden + rounding


def test_a_plan_is_simulated() -> None:
    found = plan_decoder("gpt2-xl", devices=16, device="a100-80gb", batch=64, fixed={"pipeline": 4, "overlap": 0})
    assert found.simulated.step_time_s == pytest.approx(found.best.seconds, rel=1e-6)
