"""A process with a model: batches in shared memory, and how its end is noticed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.run import usable
from foretrace.serving.server.split import ModelInstance
from foretrace.serving.server.worker import ModelWorker

pytest.importorskip("torch")


def test_it_answers_as_the_model_does_and_leaves(script: Path) -> None:
    source = ModelSource(name=f"{script}:net")
    model = source.load()
    worker = ModelWorker(source, ModelInstance(threads=1, batch=4), usable()[:1])
    assert worker.ready() == model.facts
    x, word = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 2, 3])
    worker.inputs["x"][:], worker.inputs["word"][:] = x, word
    worker.submit(4)
    run = worker.receive()
    assert run.seconds > 0 and not run.wrong and not run.error
    for name, expected in model({"x": x, "word": word}).items():
        np.testing.assert_allclose(worker.outputs[name], expected, rtol=1e-5)

    worker.inputs["x"][2] = -1.0  # the root of it is no number
    worker.submit(3)
    assert worker.receive().wrong == {2: "output root is not a number (NaN)"}
    worker.inputs["word"][0] = 99
    worker.submit(1)
    assert worker.receive().error.startswith("IndexError")
    worker.end()
    assert not Path(f"/proc/{worker.pid}").exists() or worker.ended()


def test_a_process_that_dies_is_an_end_of_file(script: Path) -> None:
    worker = ModelWorker(ModelSource(name=f"{script}:net"), ModelInstance(threads=1, batch=4), usable()[:1])
    worker.ready()
    worker.inputs["x"][0], worker.inputs["word"][0] = 666, 0
    worker.submit(1)
    with pytest.raises(EOFError):
        worker.receive()
    assert worker.ended() == "ended with code 7"
    worker.end()
    killed = ModelWorker(ModelSource(name=f"{script}:net"), ModelInstance(threads=1, batch=4), usable()[:1])
    killed.ready()
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(EOFError):
        killed.receive()
    assert killed.ended() == "was ended by SIGKILL"
    killed.end()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no processor affinity on this system")
def test_it_stays_on_its_cores(script: Path) -> None:
    core = usable()[-1]
    worker = ModelWorker(ModelSource(name=f"{script}:net"), ModelInstance(threads=1, batch=1), (core,))
    worker.ready()
    assert os.sched_getaffinity(worker.pid) == {core}
    worker.end()
    assert worker.ended() == "ended with code 0"


def test_a_model_that_cannot_be_loaded_is_a_sentence_and_no_process(script: Path) -> None:
    for name, words in (("broken", "no weights here"), ("three", "must return"), ("none", "no function none")):
        worker = ModelWorker(ModelSource(name=f"{script}:{name}"), ModelInstance(threads=1, batch=1), usable()[:1])
        with pytest.raises(ForetraceError, match=words):
            worker.ready()
    worker = ModelWorker(ModelSource(name=f"{script}:net"), ModelInstance(threads=1, batch=1), (999,))
    with pytest.raises(ForetraceError, match="cores that this process may use"):
        worker.ready()
    end = time.monotonic() + 200
    while Path(f"/proc/{worker.pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker.pid}").exists()
