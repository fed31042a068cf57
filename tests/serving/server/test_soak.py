"""The benchmarks that try to break a server, for a short while."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")


@pytest.mark.slow("a server under load for 20 seconds, with processes that start all the time")
def test_no_answer_is_lost_or_wrong_while_everything_goes_wrong() -> None:
    import serve_soak

    words = "--seconds 20 --rate 25 --change-every 2 --kill-every 4"
    seen = serve_soak.run(serve_soak.parser().parse_args(words.split()))
    assert not seen.trouble
    assert seen.answered > 100 and seen.reconfigurations > 1 and seen.kills and seen.slow and seen.left


@pytest.mark.slow("hundreds of drawn requests for a server")
def test_what_nobody_should_send_is_answered_as_the_description_says() -> None:
    pytest.importorskip("schemathesis")
    import serve_fuzz

    found = serve_fuzz.run(400)
    assert not found.trouble
    assert found.drawn > 100 and found.changed == 200 and {"200", "400", "422"} <= found.statuses.keys()
