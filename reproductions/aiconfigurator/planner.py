"""Ask the reference planner for the rows of the table: planner.csv, beside this file.

    python -m venv other && other/bin/pip install aiconfigurator==0.12.0 foretrace
    other/bin/python -m reproductions.aiconfigurator.planner silicon_sample.csv.gz --rows 315 [--llama FOLDER]

Rows are drawn at random from the aggregated ones, with the sizes that `sample.py` gives them. The planner's newest
tables are used, whatever version was measured; FOLDER has the config.json of Llama-3.1-8B, which it does not ship.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
from pathlib import Path

from reproductions.aiconfigurator.sample import Measured, read

FILE = Path(__file__).with_name("planner.csv")
SEED = 0


def predicted() -> dict[str, tuple[float, float] | None]:
    """(TPOT, TTFT) in seconds by row; None of rows that the planner cannot predict."""
    with FILE.open(encoding="utf-8") as file:
        return {
            row["id"]: (float(row["tpot_s"]), float(row["ttft_s"])) if row["tpot_s"] else None
            for row in csv.DictReader(file)
        }


def ask(one: Measured, row: dict[str, str], llama: str) -> tuple[float, float]:
    """(TPOT, TTFT) in seconds; raises what the planner raises."""
    from aiconfigurator.cli.api import cli_estimate  # in an environment of its own

    dense, gemm = one.architecture == "llama-3-8b", row["gemm_quant_mode"]
    found = cli_estimate(
        llama if dense and llama else row["model_path"], one.system, mode="agg", backend_name=one.engine,
        isl=one.prompt, osl=one.output, batch_size=max(1, one.clients // one.layout.dp), tp_size=one.layout.tp,
        attention_dp_size=one.layout.dp, moe_tp_size=None if dense else one.layout.stage_devices // one.layout.ep,
        moe_ep_size=None if dense else one.layout.ep, gemm_quant_mode=None if gemm in ("", "int4_wo") else gemm,
        moe_quant_mode=row["moe_quant_mode"] or None,
    )  # fmt: skip
    return found.tpot / 1e3, found.ttft / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--rows", type=int, default=315)
    parser.add_argument("--llama", default="")
    given = parser.parse_args()
    with gzip.open(given.table, "rt", encoding="utf-8") as file:
        raw = {row["id"]: row for row in csv.DictReader(file)}
    rows = list(read(given.table).aggregated)
    random.Random(SEED).shuffle(rows)
    with FILE.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("id", "tpot_s", "ttft_s", "reason"))
        for one in rows[: given.rows]:
            try:
                table.writerow((one.id, *(f"{each:.6g}" for each in ask(one, raw[one.id], given.llama)), ""))
            except Exception as error:  # whatever the planner raises: the reason is kept
                table.writerow((one.id, "", "", f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"))
            file.flush()


if __name__ == "__main__":
    main()
