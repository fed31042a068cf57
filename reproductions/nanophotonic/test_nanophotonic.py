"""The transfer matrix against tmm and closed forms; the protocol in small."""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from reproductions.nanophotonic import protocol
from reproductions.nanophotonic.films import HIGH, LOW, WAVELENGTHS, Film, indices, reflectance


@pytest.mark.parametrize("polarization", ["s", "p"])
@pytest.mark.parametrize("angle", [0.0, 0.3, 1.1])
def test_reflectance_is_that_of_tmm(polarization: str, angle: float) -> None:
    tmm = pytest.importorskip("tmm", reason="tmm is not installed: pip install tmm")
    designs, stack = np.random.default_rng(0).uniform(5, 400, (4, 9)), indices(9)
    found = reflectance(designs, WAVELENGTHS[::8], stack, angle=angle, polarization=polarization)
    known = [
        [tmm.coh_tmm(polarization, list(stack), [inf, *each, inf], angle, w)["R"] for w in WAVELENGTHS[::8]]
        for each in designs
    ]
    assert np.abs(found - known).max() < 1e-12


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_quarter_waves_have_a_closed_form(pairs: int) -> None:
    """((n_0 n_l^2p - n_s n_h^2p) / (n_0 n_l^2p + n_s n_h^2p))^2, at the wavelength that they are a quarter of."""
    stack = indices(2 * pairs)
    thickness = np.array([[550 / (4 * n) for n in stack[1:-1]]])
    ratio = stack[-1] * (HIGH / LOW) ** (2 * pairs)
    found = reflectance(thickness, np.array([550.0]), stack)[0, 0]
    assert found == pytest.approx(((1 - ratio) / (1 + ratio)) ** 2, abs=1e-12)


def test_no_film_is_bare_glass() -> None:
    found = reflectance(np.zeros((1, 4)), WAVELENGTHS, indices(4))
    assert np.abs(found - (0.52 / 2.52) ** 2).max() < 1e-12


def test_a_spectrum_of_the_wrong_length_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match="must have 81 shares from 0 to 1, of 400 to 800 nm, got 3 from"):
        Film([0.1, 0.2, 0.3])
    path = tmp_path / "spectrum.txt"
    path.write_text("0.1\nmany\n")
    with pytest.raises(ForetraceError, match="must hold numbers"):
        protocol.designed(path, "hybrid:cmaes", 10)


def test_a_film_is_designed_for_a_spectrum(tmp_path: Path) -> None:
    path = tmp_path / "spectrum.txt"
    path.write_text("\n".join(["0.2"] * 81))
    assert protocol.designed(path, "hybrid:mcmc", 60).count("nm: error 0.") == 1


def test_the_protocol_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cma")
    assert protocol.main(["--quick", "--seeds", "1", "--problem", "films"]) == 0
    out = capsys.readouterr().out
    assert out.count("| CMA-ES, learned start |") == 3 and "### films, ideal filters (1 targets)" in out
