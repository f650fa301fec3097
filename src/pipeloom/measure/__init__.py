"""Measures the machine it runs on, as a cluster file describes one: products, memory, host, links, collectives."""

from pipeloom.measure.describe import describe_cluster
from pipeloom.measure.findings import Findings
from pipeloom.measure.machine import Request, measure_machine

__all__ = ["Findings", "Request", "describe_cluster", "measure_machine"]
