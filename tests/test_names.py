"""What a user calls things: written in another way, by another name, nearly right, wrong."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.hardware.devices import catalog, named
from foretrace.model.decoder_config import DECODERS, decoder_named
from foretrace.names import keyed, near, plain, question, resolve
from foretrace.techniques.arguments import _convert
from foretrace.techniques.registry import ALIASES, technique, techniques


@given(st.sampled_from(sorted(DECODERS)), st.sampled_from([str.upper, str.title, lambda text: text.replace("-", " ")]))
def test_case_and_signs_do_not_matter(name: str, write: object) -> None:
    assert resolve(write(name), DECODERS) == name  # type: ignore[operator]


@given(st.text(max_size=20))
def test_what_is_answered_is_known(text: str) -> None:
    known = list(techniques())
    assert resolve(text, known, ALIASES) in (None, *known)
    assert set(near(text, known, ALIASES)) <= set(known)
    assert question(text, known, ALIASES, lists="see there.")


def test_aliases_mean_something_that_exists() -> None:
    assert set(ALIASES.values()) <= set(techniques())
    assert not {plain(each) for each in ALIASES} & {plain(each) for each in techniques()}
    assert technique("amp").name == technique("Mixed_Precision").name == "mixed-precision"
    assert technique("FSDP").name == "fully-sharded" and technique("torch.compile").name == "compiled"


@pytest.mark.parametrize(
    ("written", "short"),
    [("h100", "H100-SXM5-80GB"), ("NVIDIA H100", "H100-SXM5-80GB"), ("A100 SXM4 80GB", "A100-SXM4-80GB"),
     ("tesla v100", "V100-SXM2"), ("H200", "H200-SXM-141GB"), ("a100-80gb", "A100-SXM4-80GB"),
     ("A100 40GB", "A100-SXM4-40GB")],
)  # fmt: skip
def test_devices(written: str, short: str) -> None:
    assert named(written).short == short


@given(st.sampled_from([device.short for device in catalog()]))
def test_every_device_by_its_own_name(short: str) -> None:
    assert named(short).short == named(short.lower().replace("-", " ")).short == short


@pytest.mark.parametrize(("wrong", "right"), [("h1000", "h100"), ("h20", "H200"), ("mi300", "MI300X")])
def test_near_misses_of_devices(wrong: str, right: str) -> None:
    try:
        assert right.lower() in named(wrong).short.lower()
    except ForetraceError as error:
        assert f"did you mean {right}" in str(error)


@pytest.mark.parametrize(
    ("release", "name"),
    [("meta-llama/Llama-2-7b", "llama-2-7b"), ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
     ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"), ("meta-llama/Llama-3.1-70B", "llama-3-70b"),
     ("codellama/CodeLlama-34b-hf", "codellama-34b"), ("mosaicml/mpt-7b", "mpt-7b"), ("mosaicml/other", "")],
)  # fmt: skip
def test_decoders_by_the_name_of_their_release(release: str, name: str) -> None:
    assert decoder_named(release) == name


def test_choices_are_known_in_every_writing() -> None:
    """Of all parameters of all techniques that are chosen from a list."""
    chosen = 0
    for name, kind in techniques().items():
        for each in kind.parameters():
            for choice in each.choices:
                written = str(choice).upper().replace("_", "-")
                assert _convert(name, each, written) == choice
                chosen += 1
    assert chosen > 10


def test_a_device_is_also_what_its_driver_calls_it() -> None:
    assert named("NVIDIA H100 80GB HBM3").short == "H100-SXM5-80GB"
    assert named("Tesla V100-SXM2-32GB").short == "V100-SXM2"
    whole = [pattern for each in catalog() for pattern in each.patterns if "*" not in pattern]
    assert whole and all(named(pattern) is not None for pattern in whole)


def test_words_with_keys_say_what_is_wrong_with_them() -> None:
    assert keyed(["lease-s=600", "on=a=b"], ("lease_s", "on"), "policy dally") == {"lease_s": "600", "on": "a=b"}
    for words, said in (
        (["600"], "policy dally: '600' is no key=value; it takes lease-s=, on=."),
        (["leases=1"], "policy dally has no parameter leases; did you mean lease-s=?"),
        (["qqqq=1"], "policy dally has no parameter qqqq; it takes lease-s=, on=."),
        (["lease-s=1", "lease_s=2"], "policy dally: lease-s is given twice; keep one."),
    ):
        with pytest.raises(ForetraceError, match=re.escape(said)):
            keyed(words, ("lease_s", "on"), "policy dally", sign="-")
    with pytest.raises(ForetraceError, match="it takes no parameters"):
        keyed(["x=1"], (), "fifo")
