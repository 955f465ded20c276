"""What Prometheus scrapes: the sums of each campaign, and how many findings are in each state."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from sqlalchemy import Connection

from fuzz.service import reads
from fuzz.service.triage import STATES

HELP = {
    "launches": "Launches that ended.", "sequences": "Sequences that were compared.",
    "cells": "Cells that were read and compared.",
    "wrong_cells": "Cells that differ from the mask.",
    "kernels": "Kernels that were compiled.", "compile_seconds": "Seconds spent on compiling.",
    "run_seconds": "Seconds spent on launches.",
    "kernel_seconds": "Seconds for which kernels ran.",
}


def exposed(connection: Connection) -> bytes:
    """All of it in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(connection))
    return generate_latest(registry)


class _Collector:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def collect(self) -> Iterator[Metric]:
        found = reads.all_campaigns(self.connection)
        for name in (*reads.SUMS, *reads.TIMES):
            metric = CounterMetricFamily(f"maskproof_{name}", HELP[name], labels=["campaign"])
            for one in found:
                metric.add_metric([one["name"]], one["totals"][name])
            yield metric
        alive = GaugeMetricFamily("maskproof_campaign_alive", "Whether a process runs it.",
                                  labels=["campaign"])
        heard = GaugeMetricFamily("maskproof_heard_timestamp_seconds",
                                  "When a process that runs it was heard of.", labels=["campaign"])
        combinations = GaugeMetricFamily(
            "maskproof_combinations", "Combinations of path and boundary class.",
            labels=["campaign", "reached"])
        for one in found:
            alive.add_metric([one["name"]], float(one["alive"]))
            if one["run"] is not None:
                heard.add_metric([one["name"]], one["run"]["seen"])
            rows = reads.coverage_table(self.connection, one["id"], by=("release",))
            reached = sum(row["reached"] for row in rows)
            whole = sum(row["combinations"] for row in rows)
            combinations.add_metric([one["name"], "yes"], reached)
            combinations.add_metric([one["name"], "no"], whole - reached)
        yield from (alive, heard, combinations)
        states = GaugeMetricFamily("maskproof_findings", "Findings of the store in each state.",
                                   labels=["state"])
        counted = reads.states(self.connection)
        for state in STATES:
            states.add_metric([state], counted.get(state, 0))
        yield states
