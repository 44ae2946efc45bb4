"""The graph itself: walking, finding, and naming what is gone."""

from itertools import pairwise

import pytest

from flows.lineage.graph import Lineage, LineageQueryError, Node


def chain(*keys: str) -> Lineage:
    graph = Lineage()
    for key in keys:
        graph.add(Node(key, "thing", key.upper(), sha256=f"{key}0123456789"))
    for parent, child in pairwise(keys):
        graph.link(parent, child)
    return graph


def keys(nodes) -> list[str]:
    return [n.key for n in nodes]


def test_walks_both_ways():
    graph = chain("a", "b", "c")
    assert keys(graph.ancestors("c")) == ["a", "b"] and keys(graph.descendants("a")) == ["b", "c"]
    assert keys(graph.parents("c")) == ["b"] and keys(graph.children("a")) == ["b"]
    assert graph.ancestors("a") == [] and graph.descendants("c") == []


def test_around_leaves_strangers_out():
    graph = chain("a", "b", "c")
    graph.add(Node("sibling", "thing", "S"))
    graph.link("a", "sibling")
    around = graph.around("c")
    assert keys(around.nodes()) == ["a", "b", "c"] and around.edges() == [("a", "b"), ("b", "c")]


def test_a_diamond_puts_each_node_right_of_all_it_was_made_from():
    graph = chain("a", "b", "d")
    graph.add(Node("c", "thing", "C"))
    graph.link("b", "c")
    graph.link("c", "d")
    assert [keys(g) for g in graph.generations()] == [["a"], ["b"], ["c"], ["d"]]


def test_found_by_key_name_hash_and_the_hash_s_beginning():
    graph = Lineage()
    graph.add(Node("x", "bundle", "B", sha256="ab12cd34ef", names=("champion",)))
    for query in ("x", "champion", "ab12cd34ef", "ab12cd", "AB12CD"):
        assert graph.find(query).key == "x"


@pytest.mark.parametrize("query", ["", "ab12c", "nothing", "ff00ff"])
def test_a_query_that_names_nothing_says_what_can_be_asked(query):
    graph = Lineage()
    graph.add(Node("x", "bundle", "B", sha256="ab12cd34ef"))
    with pytest.raises(LineageQueryError, match="id of a data row"):
        graph.find(query)


def test_an_ambiguous_beginning_lists_the_choices():
    graph = Lineage()
    graph.add(Node("x", "bundle", "One", sha256="abcdef01"))
    graph.add(Node("y", "bundle", "Two", sha256="abcdef02"))
    with pytest.raises(LineageQueryError, match="can mean 2 things") as error:
        graph.find("abcdef")
    assert "x  One" in str(error.value) and "y  Two" in str(error.value)


def test_a_node_seen_twice_is_found_if_either_is_and_keeps_every_name():
    graph = Lineage()
    graph.add(Node("x", "model", "X", found=False, names=("old",), facts={"a": "1"}))
    graph.add(Node("x", "model", "X", where="here", names=("new",), facts={"b": "2"}))
    node = graph.node("x")
    assert node.found and node.where == "here" and node.names == ("old", "new")
    assert node.facts == {"a": "1", "b": "2"}


def test_a_link_to_what_was_never_added_is_an_error():
    graph = chain("a")
    with pytest.raises(KeyError, match="no node b"):
        graph.link("a", "b")


def test_a_thing_is_never_made_from_itself():
    graph = chain("a")
    graph.link("a", "a")
    assert graph.edges() == []
