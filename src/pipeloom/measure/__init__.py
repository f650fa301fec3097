"""Measures this machine for a cluster file: matrix products, memory, host, links, collectives."""

from pipeloom.measure.describe import describe_cluster
from pipeloom.measure.findings import Findings
from pipeloom.measure.machine import Request, measure_machine

__all__ = ["Findings", "Request", "describe_cluster", "measure_machine"]
