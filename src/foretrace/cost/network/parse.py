"""From what a user writes to a `Network`: a link, a cluster file, a table of measured collectives, NCCL's model."""

from __future__ import annotations

from pathlib import Path

from foretrace.cost.network.link_network import LinkNetwork, cluster_network
from foretrace.cost.network.network import Network, none_left, split
from foretrace.errors import ForetraceError
from foretrace.hardware.cluster import Cluster, parse_link
from foretrace.hardware.cluster_file import load

_CLUSTERS = (".yaml", ".yml")
_TABLES = (".json", ".csv", ".gz", ".txt", ".log", ".out")


def network(text: str, workers: int, *, in_flight: int = 1) -> Network:
    """Return a network from what a user writes, for so many workers.

    - a link between all workers: "1gbit", "25gbit/10us";
    - a cluster: the path of a YAML file (docs/network.md);
    - measured collectives: the path of a table (JSON of `foretrace calibrate network`, CSV, output of nccl-tests), with
      options behind commas: "table.csv,per-node=4", "table.csv,wiring=none";
    - NCCL's own model: "nccl:H100-SXM5-80GB", with options: "nccl:h200,nodes=4,nics=8,nic=400gbit".

    Raises ForetraceError with the sentence that says what is wrong.
    """
    if workers < 1:
        raise ForetraceError(f"{workers} workers cannot communicate; one is the least.")
    head, options = split(text)
    if head.lower().startswith("nccl:"):
        from foretrace.cost.network.nccl import nccl_network

        return nccl_network(head[5:], workers, options, in_flight=in_flight)
    path = Path(head)
    if path.suffix.lower() in _CLUSTERS:
        none_left(options, text)
        return cluster_network(load(path), workers, in_flight=in_flight)
    if path.suffix.lower() in _TABLES or (path.is_file() and "/" in head):
        from foretrace.cost.network.tables import table_network

        return table_network(path, workers, options, in_flight=in_flight)
    none_left(options, text)
    try:
        link = parse_link(head)
    except ForetraceError as error:
        raise ForetraceError(
            f"{error} Or name a cluster (FILE.yaml), measured collectives (FILE.json, FILE.csv) or nccl:DEVICE."
        ) from None
    cluster = Cluster(name=head, nodes=workers, per_node=1, inside=link, between=link)
    return LinkNetwork(cluster=cluster, name=head, in_flight=in_flight)
