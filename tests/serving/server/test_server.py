"""A real server, asked by the protocol's official client, by others, and by those that should not ask."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import numpy as np
import pytest

from foretrace.cli.app import run
from foretrace.serving.server.models import LoadedModel, ModelSource
from tests.serving.server.conftest import Serve

pytest.importorskip("torch")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
X, WORD = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([0, 4])


@pytest.fixture(scope="module")
def url(serve: Serve, script: Path) -> str:
    return serve(f"{script}:net", "--split", "1x1:4", "--queue", "50")[0]


@pytest.fixture(scope="module")
def model(script: Path) -> LoadedModel:
    return ModelSource(name=f"{script}:net").load()


def ask(
    url: str, method: str = "GET", body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:  # fmt: skip
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers or {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, dict(response.headers), response.read()
    except HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def refused(url: str, body: Any, **more: Any) -> tuple[int, str]:
    status, _, text = ask(url, "POST", body, **more)
    return status, json.loads(text)["error"]


@pytest.mark.parametrize("binary", [True, False])
def test_the_official_client_gets_the_answers_of_the_model(url: str, model: LoadedModel, binary: bool) -> None:
    http = pytest.importorskip("tritonclient.http")
    client = http.InferenceServerClient(url.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("nets")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    about = client.get_model_metadata("nets")
    assert about["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, 3]}, {"name": "word", "datatype": "INT64", "shape": [-1]},
    ]  # fmt: skip
    inputs = [http.InferInput("x", [2, 3], "FP32"), http.InferInput("word", [2], "INT64")]
    for each, array in zip(inputs, (X, WORD), strict=True):
        each.set_data_from_numpy(array, binary_data=binary)
    wanted = [http.InferRequestedOutput("y", binary_data=binary)]
    found = client.infer("nets", inputs, outputs=wanted, request_id="seven")
    np.testing.assert_allclose(found.as_numpy("y"), model({"x": X, "word": WORD})["y"], rtol=1e-5)
    assert found.get_response()["id"] == "seven" and found.as_numpy("root") is None
    every = client.infer("nets", inputs, model_version="1", timeout=60_000_000)
    np.testing.assert_allclose(every.as_numpy("root"), np.sqrt(X), rtol=1e-5)
    with pytest.raises(Exception, match="is given twice, or no input"):
        client.infer("nets", [http.InferInput("z", [1], "FP32").set_data_from_numpy(np.ones(1, np.float32))])
    client.close()


def test_plain_json_and_more_samples_than_run_at_once(url: str, model: LoadedModel) -> None:
    x = np.random.default_rng(0).uniform(0, 1, (11, 3)).astype(np.float32)
    word = np.arange(11) % 5
    status, _, text = ask(f"{url}/predict", "POST", {"x": x.tolist(), "word": word.tolist()})
    assert status == 200
    np.testing.assert_allclose(json.loads(text)["y"], model({"x": x, "word": word})["y"], rtol=1e-4)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "no such JSON"),
        ({"x": [[1, 2, 3]]}, 400, "every input with the same number of samples"),
        ({"x": [[1, 2, 3]], "word": [0, 1]}, 400, "every input with the same number"),
        ({"x": [[1, 2]], "word": [0]}, 400, "an input must be x FP32 [samples, 3], got [1, 2]"),
        ({"x": [[1, 2], [3]], "word": [0]}, 400, "lists of equal lengths"),
        ({"x": [["a", 2, 3]], "word": [0]}, 400, "FP32 numbers"),
        ({"x": [[1e300, 2, 3]], "word": [0]}, 400, "numbers that FP32 can"),
        ({"x": [[1, 2, 3]], "word": [0.5]}, 400, "INT64 numbers"),
        ({"x": [[1, 2, 3]], "word": [1 << 80]}, 400, "INT64 numbers"),
        (
            {"x": [[1, 2, 3]], "word": [0], "z": [1]},
            400,
            "input 'z' is given twice, or no input; the model takes x FP32",
        ),
        ({"x": [], "word": []}, 400, "an input must be x FP32 [samples, 3], got [0]"),
        ({"x": [[1, 2, 3]], "word": [99]}, 422, "IndexError: index out of range"),
        ({"x": [[-1, 2, 3]], "word": [0]}, 422, "output root is not a number (NaN)"),
        ({"x": [[1, 2, 3]] * 51, "word": [0] * 51}, 413, "at most 50 samples"),
        (b"[" * 100_000, 400, "no such JSON"),
    ],
)
def test_a_request_that_cannot_be_answered_says_why(url: str, body: Any, status: int, words: str) -> None:
    found = refused(f"{url}/predict", body)
    assert found[0] == status and words in found[1]


def test_the_same_in_the_protocol(url: str) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    word = {"name": "word", "datatype": "INT64", "shape": [1], "data": [0]}
    infer = f"{url}/v2/models/nets/infer"
    changes: list[tuple[dict[str, object], str]] = [
        ({"datatype": "FP64"}, "must be x FP32 [samples, 3], got 'FP64'"), ({"shape": [3]}, "got 'FP32' [3]"),
        ({"shape": [-1, 3]}, "got 'FP32' [-1, 3]"),
        ({"data": [1, 2]}, "must have 3 numbers, got 2"), ({"data": None}, "FP32 numbers in lists|must have 3 numbers"),
        ({"parameters": {"binary_data_size": 12}}, "must have 12 bytes and no data"), ({"name": "z"}, "or no input"),
    ]  # fmt: skip
    for change, words in changes:
        status, said = refused(infer, {"inputs": [tensor | change, word]})
        assert status == 400 and any(each in said for each in words.split("|")), said
    assert refused(infer, {"inputs": [tensor, word], "outputs": [{"name": "n"}]})[1].startswith("output 'n' cannot")
    assert refused(infer, {"inputs": [tensor, word], "parameters": {"timeout": 0}})[0] == 400
    assert refused(infer, {"inputs": [tensor, word], "parameters": {"timeout": 1}})[0] == 504
    assert refused(infer, b"{}", headers={"Inference-Header-Content-Length": "9"})[0] == 400
    assert refused(infer, b"{}", headers={"Content-Encoding": "gzip"})[0] == 415
    assert refused(f"{url}/v2/models/other/infer", {})[0] == 404
    assert ask(f"{url}/nowhere")[0] == 404 and ask(f"{url}/predict")[0] == 405


def test_names_of_foreign_machines_are_refused_without_a_token(url: str) -> None:
    assert ask(f"{url}/split", headers={"Host": "evil.example:80"})[0] == 403
    assert ask(f"{url}/v2/health/live", headers={"Host": "evil.example:80"})[0] == 200


def test_the_split_changes_while_requests_go_on(url: str, model: LoadedModel) -> None:
    expected = model({"x": X, "word": WORD})["y"]

    def one(number: int) -> bool:
        status, _, text = ask(f"{url}/predict", "POST", {"x": X.tolist(), "word": WORD.tolist()})
        return status == 200 and np.allclose(json.loads(text)["y"], expected, rtol=1e-4)

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(one, i) for i in range(60)]
        for split in ("1x1:8", "1x1:2"):
            status, _, text = ask(f"{url}/split", "PUT", {"split": split})
            assert status == 200 and json.loads(text)["split"] == split, text
        assert all(each.result() for each in asked)
    assert refused_split(url, "9999x1:1") == 422 and refused_split(url, "2x") == 422 and refused_split(url, 3) == 400
    assert refused_split(url, "1x1:51") == 422


def refused_split(url: str, split: object) -> int:
    return ask(f"{url}/split", "PUT", {"split": split})[0]


def test_a_request_that_kills_processes_takes_no_other_with_it(url: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        bodies = [{"x": [[666 if i == 1 else i, 1, 1]], "word": [0]} for i in range(4)]
        found = list(threads.map(lambda body: ask(f"{url}/predict", "POST", body), bodies))
    assert [status for status, *_ in found] == [200, 503, 200, 200]
    assert "ended with code 7, twice" in json.loads(found[1][2])["error"] and found[1][1]["retry-after"] == "1"


def test_metrics_and_description(url: str) -> None:
    text = ask(f"{url}/metrics")[2].decode()
    assert 'foretrace_requests_total{status="200"}' in text and "foretrace_batch_samples_bucket" in text
    document = json.loads(ask(f"{url}/openapi.json")[2])
    assert document["openapi"] == "3.1.0" and "/v2/models/nets/infer" in document["paths"]


def test_a_token_is_needed_and_enough(serve: Serve, script: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-long-enough-token\n")
    url, _ = serve(f"{script}:net", "--split", "1x1:1", "--token-file", str(token))
    status, headers, _ = ask(f"{url}/split")
    assert status == 401 and headers["www-authenticate"] == "Bearer"
    for given in ("Bearer wrong", "Basic a-long-enough-token", "Bearer é"):
        assert ask(f"{url}/split", headers={"Authorization": given})[0] == 401
    assert ask(f"{url}/split", headers={"Authorization": "Bearer a-long-enough-token", "Host": "a.example"})[0] == 200
    assert ask(f"{url}/v2/health/ready")[0] == 200  # what an orchestrator asks, which has no token


def test_requests_over_tls(serve: Serve, script: Path, model: LoadedModel, tmp_path: Path) -> None:
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs openssl, which makes the certificate")
    certificate, key = str(tmp_path / "certificate.pem"), str(tmp_path / "key.pem")
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run([openssl, *made, *named], check=True, capture_output=True)
    url, _ = serve(f"{script}:net", "--split", "1x1:1", "--certificate", certificate, "--key", key)
    assert url.startswith("https://127.0.0.1:")
    body = json.dumps({"x": X.tolist(), "word": WORD.tolist()}).encode()
    trusting = ssl.create_default_context(cafile=certificate)
    with urllib.request.urlopen(f"{url}/predict", body, timeout=60, context=trusting) as response:
        np.testing.assert_allclose(json.load(response)["y"], model({"x": X, "word": WORD})["y"], rtol=1e-4)
    with pytest.raises(URLError, match="certificate verify failed"):
        urllib.request.urlopen(f"{url}/predict", body, timeout=60)
    with pytest.raises((HTTPException, OSError)):
        urllib.request.urlopen(url.replace("https", "http"), timeout=60)


def test_a_model_that_hangs_is_late_and_its_process_ended(serve: Serve, script: Path) -> None:
    url, _ = serve(f"{script}:net", "--split", "1x1:1", "--deadline-s", "3")
    (pid,) = json.loads(ask(f"{url}/split")[2])["processes"]
    assert refused(f"{url}/predict", {"x": [[777, 1, 1]], "word": [0]})[0] == 504
    end = time.monotonic() + 200
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    while ask(f"{url}/v2/health/ready")[0] != 200 and time.monotonic() < end:
        time.sleep(0.1)
    assert ask(f"{url}/predict", "POST", {"x": [[1, 1, 1]], "word": [0]})[0] == 200


def test_clients_that_left_and_a_stop_while_requests_are_here(serve: Serve, script: Path) -> None:
    url, server = serve(f"{script}:net", "--split", "1x1:1")
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"x": [[1, 2, 3]] * 40, "word": [0] * 40}).encode()
    head = f"POST /predict HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for sent in (head[:20], head + body[:10], head + body):
        with socket.create_connection((host, int(port))) as gone:
            gone.sendall(sent)
    with socket.create_connection((host, int(port))) as here:
        here.sendall(head + body)
        ask(f"{url}/v2/health/live")  # whoever came later was answered: the request has been read
        server.send_signal(signal.SIGTERM)
        here.settimeout(200)
        assert here.recv(100).startswith(b"HTTP/1.1 200")
    assert server.wait(timeout=200) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["MODEL:net", "--host", "0.0.0.0"], "lets other machines ask, which needs a token; give --token-file FILE"),
        (["MODEL:net", "--host", "no.such.invalid"], "is no address"),
        (["MODEL:net", "--port", "TAKEN"], "cannot be had (Address already in use); give another one."),
        (["MODEL:net", "--split", "2x1"], "a split must be INSTANCESxTHREADS:BATCH"),
        (["MODEL:net", "--split", "999x1:1"], "cores that there are"),
        (["MODEL:net", "--certificate", "MODEL"], "go together"),
        (["MODEL:net", "--certificate", "MODEL", "--key", "MODEL"], "the certificate or its key cannot be used"),
        (["MODEL:net", "--token-file", "/dev/null"], "must be one word of 16 to 4,096 characters"),
        (["MODEL:net", "--token-file", "/dev/zero"], "must be one word of 16 to 4,096 characters"),
        (["MODEL:net", "--plan", "MODEL"], "is no JSON of foretrace serve plan"),
        (["MODEL:net", "--plan", "MODEL", "--split", "1x1:1"], "give one of them"),
        (["resnet5o"], "did you mean resnet50"),
    ],
)
def test_mistakes_are_one_sentence(
    script: Path, words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [each.replace("MODEL", str(script)).replace("TAKEN", port) for each in words]
        code = run(["serve", *given, *([] if "--port" in words else ["--port", "0"])])
    found = capfd.readouterr()
    assert (code, found.out) == (2, "") and said in found.err, found.err
    assert len(found.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("function", "split", "said"),
    [("broken", "1x1:1", "no weights here"), ("unseeded", "2x1:1", "must be the same model whenever it is loaded")],
)
def test_mistakes_of_processes_are_one_sentence(script: Path, function: str, split: str, said: str) -> None:
    """In a process of its own: also what those that load the model print is seen."""
    if split.startswith("2") and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    command = [sys.executable, "-m", "foretrace", "serve", f"{script}:{function}", "--split", split, "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout) == (2, "") and said in found.stderr, found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
