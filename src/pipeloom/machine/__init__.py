"""Measures the machine it runs on, as a cluster file tells one: products, memory, host, links, collectives."""

from pipeloom.machine.describe import describe_cluster
from pipeloom.machine.findings import Findings
from pipeloom.machine.measure import Request, measure_machine

__all__ = ["Findings", "Request", "describe_cluster", "measure_machine"]
