"""Files of clusters with several kinds of nodes: read, refused with every problem, written and read again."""

from dataclasses import replace
from pathlib import Path

import pytest
from clusters import mixed, nodes, slow_link
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.catalog import load_cluster, names
from pipeloom.catalog.cluster_files import cluster_to_toml
from pipeloom.errors import ConfigError, UserError

EXAMPLE = Path(__file__).parents[2] / "examples" / "a100-and-v100.toml"
A100, V100 = load_cluster("dgx-a100"), load_cluster("dgx-1-v100")

SHORT = """
name = "short"

[[groups]]
name = "new"
num_nodes = 2
cluster = "dgx-a100"

[[groups]]
name = "old"
num_nodes = 3
cluster = "dgx-1-v100"
price_per_device_hour = 1.5

[[links]]
between = ["old", "new"]
latency_us = 40
gb_per_s = 10
"""


def read(folder, text):
    file = folder / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return load_cluster(str(file))


def problems(folder, text):
    with pytest.raises(ConfigError) as caught:
        read(folder, text)
    return caught.value.problems


def test_a_group_takes_its_nodes_from_another_file(tmp_path):
    cluster = read(tmp_path, SHORT)
    assert cluster.part(0, 16) == replace(A100, name="new")
    assert cluster.part(16, 24) == replace(V100, name="old", price_per_device_hour=1.5)
    between = cluster.route(8, 16, 8).inter
    assert (between.latency_s, between.bytes_per_s) == (pytest.approx(40e-6), 10e9)
    assert cluster.num_devices == 40


def test_a_file_beside_the_cluster_is_found_wherever_one_is(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(cluster_to_toml(V100), encoding="utf-8")
    monkeypatch.chdir("/")
    assert read(tmp_path, SHORT.replace("dgx-1-v100", "mine.toml")) == read(tmp_path, SHORT)


def test_a_file_in_the_current_folder_is_not_taken_for_one_beside_the_cluster(tmp_path, monkeypatch):
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "mine.toml").write_text(cluster_to_toml(V100), encoding="utf-8")
    monkeypatch.chdir(tmp_path / "current")
    (problem,) = problems(tmp_path, SHORT.replace("dgx-1-v100", "mine.toml"))
    assert f"there is no cluster '{tmp_path / 'mine.toml'}'" in problem


def test_the_example_is_two_kinds_with_a_slower_link():
    cluster = load_cluster(str(EXAMPLE))
    assert [(kind.device.name, number) for kind, number in cluster.kinds(64)] == [
        ("a100-sxm-80gb", 32), ("v100-sxm-32gb", 32),
    ]  # fmt: skip
    between = cluster.route(24, 32, 8).inter.bytes_per_s
    assert between < min(kind.inter.bytes_per_s for kind, _ in cluster.kinds(64))
    assert cluster.price_per_hour(64) is not None


def test_all_problems_of_groups_and_links_are_reported_together(tmp_path):
    text = SHORT.replace("num_nodes = 2", 'num_nodes = 0\ncolor = "red"').replace('name = "old"', 'name = "new"')
    text = text.replace("gb_per_s = 10", "gb_per_s = 0").replace("price_per_device_hour = 1.5", "[groups.device]")
    assert problems(tmp_path, f"price_per_device_hour = 1\n{text}") == (
        "[groups, number 1] num_nodes must be a whole number of at least 1, found 0",
        "every group must have a name of its own, found new 2 times",
        "link between old and new: between must be two of the groups new, new, found ['old', 'new']",
        "link between old and new: gb_per_s must be a number from 1e-06 to 1,000,000 GB/s, found 0",
        "there is no key 'price_per_device_hour' here",
        "group new: there is no key 'color' here",
        "group new: there is no key 'device' here",
    )


def test_a_group_with_nodes_of_its_own_has_to_say_everything_about_them(tmp_path):
    text = SHORT.replace('cluster = "dgx-1-v100"', "[groups.intra]\nlatency_us = -1\nspeed = 3")
    found = problems(tmp_path, text.replace("price_per_device_hour = 1.5", ""))
    assert {
        "group old: device must be a table, found None",
        "group old: devices_per_node must be a whole number of at least 1, found None",
        "group old: [intra] latency_us is in microseconds and must be 0 or a number of at least 0.01, found -1",
        "group old: inter must be a table, found None",
        "group old: [intra] there is no key 'speed' here",
    } <= set(found)


def test_problems_of_a_file_that_a_group_names_are_reported_with_the_rest(tmp_path):
    (tmp_path / "wrong.toml").write_text('name = "wrong"\ndevices_per_node = 8\n', encoding="utf-8")
    (tmp_path / "groups.toml").write_text(SHORT, encoding="utf-8")
    wrong = problems(tmp_path, SHORT.replace("dgx-1-v100", "wrong.toml").replace("num_nodes = 2", ""))
    assert wrong[0] == "[groups, number 1] num_nodes must be a whole number of at least 1, found None"
    assert "group old: wrong.toml: device must be a table, found None" in wrong
    assert problems(tmp_path, SHORT.replace("dgx-1-v100", "groups.toml")) == (
        "group old: cluster must have nodes of one kind, found groups.toml, which has groups",
    )
    (unknown,) = problems(tmp_path, SHORT.replace("dgx-1-v100", "dgx-1-v10"))
    assert unknown.startswith("group old: there is no cluster 'dgx-1-v10': did you mean 'dgx-1-v100'?")


def test_links_need_groups_and_each_pair_has_one(tmp_path):
    link = SHORT[SHORT.index("[[links]]") :]
    other = link.replace('["old", "new"]', '["new", "old"]')
    assert problems(tmp_path, SHORT + other) == ("two links are between old and new; expected one",)
    assert problems(tmp_path, SHORT + link.replace('"new"', '"old"')) == (
        "link between old and old: between must be two of the groups new, old, found ['old', 'old']",
    )
    assert problems(tmp_path, cluster_to_toml(A100) + link) == ("there is no key 'links' here",)
    assert problems(tmp_path, 'name = "none"\ngroups = []') == ("groups must be at least one table",)
    assert problems(tmp_path, 'name = "none"\ngroups = 3') == (
        "groups must be a list of tables, found 3", "groups must be at least one table",
    )  # fmt: skip


def test_an_unknown_key_is_reported_in_inner_tables_too(tmp_path):
    text = cluster_to_toml(A100).replace("launch_us", "num_multiprocesors = 5\nlaunch_us")
    assert problems(tmp_path, text) == (
        "[device] there is no key 'num_multiprocesors' here; did you mean 'num_multiprocessors'?",
    )


@pytest.mark.parametrize("order", [("new", "old"), ("old", "new")])
def test_what_is_written_is_read_again_in_the_order_that_was_chosen(order, tmp_path):
    cluster = read(tmp_path, SHORT).reordered(order)
    assert [group.name for group in cluster.groups] == list(order)
    assert read(tmp_path, cluster_to_toml(cluster)) == cluster


@given(number=st.integers(1, 4), gb_per_s=st.floats(0.1, 100), name=st.sampled_from(names("clusters")))
def test_every_kind_of_nodes_survives_in_a_group(tmp_path_factory, number, gb_per_s, name):
    folder = tmp_path_factory.getbasetemp()
    link = slow_link("plain", name, gb_per_s=float(f"{gb_per_s:.4g}"), latency_s=5 * 1e-6)
    cluster = mixed((nodes("plain"), number), (load_cluster(name), 2), links=[link])
    assert read(folder, cluster_to_toml(cluster, {"": ["Two kinds."]})) == cluster


def test_the_head_of_a_written_file_has_its_comment(tmp_path):
    text = cluster_to_toml(read(tmp_path, SHORT), {"": ["Chosen by somebody."]})
    assert text.startswith('# Chosen by somebody.\nname = "short"\n\n[[groups]]\nname = "new"\nnum_nodes = 2\n')


def test_an_unknown_cluster_is_still_the_users_error():
    with pytest.raises(UserError, match="there is no cluster 'a100-and-v100'"):
        load_cluster("a100-and-v100")
