"""Techniques from text, and what a wrong text is told."""

from __future__ import annotations

import pytest

from foretrace.errors import ForetraceError
from foretrace.techniques import MixedPrecision, PrefetchData, Remove, Scale
from foretrace.techniques.arguments import parse, parse_all


def test_words_become_parameters() -> None:
    assert parse("prefetch-data workers=2 host-contention=1.2") == PrefetchData(workers=2, host_contention=1.2)
    assert parse("scale name=*gemm* by=0.5") == Scale(named="*gemm*", by=0.5)
    assert parse("remove name='a b' kind=kernel step=1") == Remove(named="a b", kind="kernel", step=1)
    assert parse_all(["mixed-precision", "prefetch-data"]) == (MixedPrecision(), PrefetchData())


@pytest.mark.parametrize(
    "technique", [PrefetchData(workers=7), Scale(named="a b*|c'", by=1.5), MixedPrecision(dtype="float16", gemm=3.0)]
)
def test_a_technique_is_written_as_it_is_read(technique: PrefetchData) -> None:
    assert parse(str(technique)) == technique


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no technique"),
        ("prefech", "no technique 'prefech'; did you mean prefetch-data"),
        ("qqq", "no technique 'qqq'; choose activation-compression, "),
        ("prefetch-data worker=2", "has no parameter worker; did you mean workers="),
        ("prefetch-data 4", "'4' is no key=value; it takes workers="),
        ("prefetch-data workers=two", "workers=two is not a whole number"),
        ("prefetch-data workers=2 workers=3", "given twice"),
        ("scale name=x", "scale needs by="),
        ("scale name=x by=fast", "by=fast is not a number"),
        ("batch-size by=inf", "by=inf is not a finite number"),
        ("scale name=x by=nan", "by=nan is not a finite number"),
        ("mixed-precision dtype=int8", "dtype=int8 is not one of auto, bfloat16, float16"),
        ("scale name='x", "close the quote"),
    ],
)
def test_wrong_words_are_told_how_to_mend(text: str, said: str) -> None:
    with pytest.raises(ForetraceError, match=said.replace("(", r"\(")):
        parse(text)
