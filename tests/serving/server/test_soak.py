"""The benchmarks that try to break a server, for a short while."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[3] / "benchmarks" / "serve_fuzz.py"
pytest.importorskip("torch")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")


@pytest.mark.slow("a server under load for half a minute, with processes that start and die all the time")
def test_no_answer_is_lost_or_wrong_while_everything_goes_wrong() -> None:
    import serve_soak

    words = "--seconds 30 --rate 25 --change-every 2 --kill-every 8 --changes 4 --kills 2"
    seen = serve_soak.run(serve_soak.parser().parse_args(words.split()))
    assert not seen.trouble
    # The draws say how many are sent, about 750, and no slowness makes them fewer; all are answered but who left.
    assert seen.answered == seen.asked - seen.left and seen.answered > 600
    assert seen.reconfigurations >= 4 and seen.kills >= 2 and seen.slow and seen.left


@pytest.mark.slow("hundreds of drawn requests for a server")
def test_what_nobody_should_send_is_answered_as_the_description_says() -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    # In a process of its own: pytest rewrites its plug-ins, and schemathesis, which is one, nests too deeply for that.
    run = subprocess.run(
        [sys.executable, str(FUZZ), "--requests", "400", "--json"], capture_output=True, text=True, check=False
    )
    found = json.loads(run.stdout)
    assert (run.returncode, found["trouble"]) == (0, []), run.stderr
    assert (
        found["drawn"] > 100
        and found["drawn"] + found["changed"] == 400
        and {"200", "400", "422"} <= found["statuses"].keys()
    )
