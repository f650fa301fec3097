"""The order that the benchmark over networks plans for a measured network is executed, with equal gradients."""

from dataclasses import replace

import numpy as np
import pytest

from pipeloom.catalog import load_cluster
from pipeloom.cost.hardware import Link as ClusterLink
from side_by_side import contest, theory
from side_by_side.case import Case, Contender, Link, Plan
from side_by_side.planned import as_planned, question_of

CASE = Case(
    name="small",
    pp=2,
    loops=1,
    num_microbatches=3,
    forward_s=0.002,
    backward_s=0.004,
    message_bytes=2**16,
    link=Link(100, 1),
)


def measured(case):
    """What ``pipeloom profile`` would find on hosts with the network of a case."""
    link = ClusterLink(latency_s=case.link.latency_s, bytes_per_s=case.link.bytes_per_s)
    cluster = load_cluster("dgx-a100")
    device = replace(cluster.device, peak_flops_per_s={"fp32": 1e11}, num_multiprocessors=0)
    return replace(cluster, device=device, intra=link, inter=link, collective_curves={})


def test_the_question_has_the_seconds_and_bytes_of_the_case():
    sharded = replace(CASE, dp=2, loops=4, message_bytes=64 * 1024, weight_bytes=3_000_000)
    for case in (CASE, sharded, replace(sharded, message_bytes=32 * 1024, weight_bytes=1_500_000)):
        question = question_of(case, measured(case))
        shape = question.shape
        assert question.seq * shape.hidden * 4 == case.message_bytes
        assert shape.layers == case.pp * case.loops
        if case.dp > 1:
            assert shape.layer_matrix_parameters * 4 == pytest.approx(case.weight_bytes, rel=0.01)


def test_the_planned_order_is_executed_with_the_gradients_of_the_others():
    planned = as_planned(CASE, measured(CASE), tries=20)
    assert planned.given is not None
    assert theory.bound_s(CASE, planned) <= theory.theory_s(CASE, planned, planned.given) * (1 + 1e-9)
    breadth_first = Contender("pipeloom", "breadth-first", 1)
    assert theory.theory_s(CASE, planned, planned.given) <= theory.theory_s(
        CASE, breadth_first, contest.compute_order(CASE, breadth_first)
    )
    local = replace(CASE, link=None)
    contenders = (breadth_first, planned, Contender("pipeloom", "zb-h1", 1))
    first, *others = contest.run(Plan(local, contenders, repetitions=1, compares_gradients=True))
    for other in others:
        for name, gradient in first.gradients.items():
            np.testing.assert_array_equal(other.gradients[name], gradient)
