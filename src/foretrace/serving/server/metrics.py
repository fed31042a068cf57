"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class ServerMetrics:
    """Counters and histograms of one server; what it holds now is read from these functions."""

    def __init__(
        self, waiting: Callable[[], float], running: Callable[[], float], instances: Callable[[], float]
    ) -> None:
        self.registry = kept = CollectorRegistry()
        self.requests = Counter("foretrace_requests", "Requests by status.", ["status"], registry=kept)
        self.request_s = Histogram("foretrace_request_seconds", "Time to answer a request.", registry=kept)
        self.batch = Histogram("foretrace_batch_samples", "Samples that an instance ran at once.", registry=kept,
                               buckets=[float(1 << i) for i in range(11)])  # fmt: skip
        self.batch_s = Histogram("foretrace_batch_seconds", "Time of the model for these.", registry=kept)
        self.deaths = Counter("foretrace_worker_deaths", "Processes that died at work.", registry=kept)
        self.retries = Counter("foretrace_retries", "Parts of requests that were run again.", registry=kept)
        self.reconfigurations = Counter("foretrace_reconfigurations", "Changes of the split.", registry=kept)
        samples = Gauge("foretrace_samples", "Samples in the server.", ["state"], registry=kept)
        samples.labels("waiting").set_function(waiting)
        samples.labels("running").set_function(running)
        Gauge("foretrace_instances", "Processes that run the model.", registry=kept).set_function(instances)
