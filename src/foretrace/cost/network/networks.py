"""From what a user writes to a `Network`: a link, a cluster file, a table of measured collectives, NCCL's model."""

from __future__ import annotations

from pathlib import Path

from foretrace.cost.network.network import LinkNetwork, Network
from foretrace.errors import ForetraceError
from foretrace.hardware.cluster import Cluster, parse_link
from foretrace.plaintext import whole_number

_CLUSTERS = (".yaml", ".yml")
# Rates of the catalog are reached to 70 - 90 %; latency per step depends on protocol and size (LL a fifth of Simple).
_CATALOG_SPREAD = 0.25
_CATALOG_LATENCY = (0.2, 2.5)
_TABLES = (".json", ".csv", ".gz", ".txt", ".log", ".out")


def parse(text: str, workers: int, *, in_flight: int = 1) -> Network:
    """See `foretrace.cost.network.network.network`. Raises ForetraceError."""
    if workers < 1:
        raise ForetraceError(f"{workers} workers cannot communicate; one is the least.")
    head, options = _options(text)
    if head.lower().startswith("nccl:"):
        from foretrace.cost.network.nccl import nccl_network

        return nccl_network(head[5:], workers, options, in_flight=in_flight)
    path = Path(head)
    if path.suffix.lower() in _CLUSTERS:
        _none_left(options, text)
        return cluster_network(Cluster.load(path), workers, in_flight=in_flight)
    if path.suffix.lower() in _TABLES or (path.is_file() and "/" in head):
        from foretrace.cost.network.tables import table_network

        return table_network(path, workers, options, in_flight=in_flight)
    _none_left(options, text)
    try:
        link = parse_link(head)
    except ForetraceError as error:
        raise ForetraceError(
            f"{error} Or name a cluster (FILE.yaml), measured collectives (FILE.json, FILE.csv) or nccl:DEVICE."
        ) from None
    cluster = Cluster(name=head, nodes=workers, per_node=1, inside=link, between=link)
    return LinkNetwork(cluster=cluster, name=head, in_flight=in_flight)


def cluster_network(cluster: Cluster, workers: int, *, in_flight: int = 1) -> LinkNetwork:
    """The quickest algorithms on a cluster. Raises ForetraceError where it has fewer devices than workers."""
    if cluster.workers < workers:
        raise ForetraceError(f"{cluster.name} has {cluster.workers} devices, not {workers}; add machines or use fewer.")
    catalog = any("catalog" in link.source for link in (cluster.inside, cluster.between))
    return LinkNetwork(
        cluster=cluster,
        name=cluster.name,
        in_flight=in_flight,
        algorithm="quickest",
        spread=_CATALOG_SPREAD if catalog else LinkNetwork.spread,
        latency_factors=_CATALOG_LATENCY if catalog else None,
        members=workers,
    )


def _options(text: str) -> tuple[str, dict[str, str]]:
    """What stands before the first comma, and the key=value pairs behind it."""
    head, *rest = (part.strip() for part in text.strip().split(","))
    options: dict[str, str] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ForetraceError(f"{text!r}: {part!r} is no option; write key=value, e.g. per-node=4.")
        options[key.strip()] = value.strip()
    return head, options


def _none_left(options: dict[str, str], text: str) -> None:
    if options:
        raise ForetraceError(f"{text!r}: {', '.join(options)} says nothing here; leave it out.")


def whole(options: dict[str, str], key: str, default: int) -> int:
    """An option that is a whole number above 0. Raises ForetraceError."""
    if key not in options:
        return default
    number = whole_number(text := options.pop(key))
    if number is None or number < 1:
        raise ForetraceError(f"{key}={text} is no whole number above 0.")
    return number


def none_else(options: dict[str, str], where: str, allowed: str) -> None:
    """Raise ForetraceError where an option is left that nobody knows."""
    if options:
        raise ForetraceError(f"{where}: {', '.join(options)} is unknown; there are {allowed}.")
