"""libtorchbeast.nest, as TorchBeast's users know it."""

import pytest

from libtorchbeast import nest

N = (1, [2, {"b": 3, "a": (4, ())}])


def test_map_keeps_types_and_the_order_of_keys():
    result = nest.map(lambda x: 10 * x, N)
    assert result == (10, [20, {"b": 30, "a": (40, ())}])
    assert list(result[1][1]) == ["b", "a"]


def test_map_of_a_leaf_is_the_function():
    assert nest.map(str, 5) == "5"
    assert nest.map(lambda x: x is None, None) is True


def test_map_hands_on_what_the_function_raises():
    with pytest.raises(ZeroDivisionError):
        nest.map(lambda x: 1 / (x - 3), N)


def test_map_many_passes_a_list_and_map_many2_two_arguments():
    assert nest.map_many(sum, (1, {"a": 2}), (10, {"a": 20})) == (11, {"a": 22})
    assert nest.map_many(sum, (1, 2), (10, 20), (100, 200)) == (111, 222)
    assert nest.map_many2(lambda a, b: (b, a), {"x": 1}, {"x": 2}) == {"x": (2, 1)}


def test_zip_makes_lists_of_leaves():
    assert nest.zip((1, {"a": 2}), (3, {"a": 4})) == ([1, 3], {"a": [2, 4]})


def test_dicts_match_by_key_and_keep_the_first_order():
    result = nest.map_many2(lambda a, b: (a, b), {"y": 1, "x": 2}, {"x": 20, "y": 10})
    assert result == {"y": (1, 10), "x": (2, 20)} and list(result) == ["y", "x"]


def test_tuples_match_lists():
    assert nest.map_many2(max, (1, 2), [2, 1]) == (2, 2)


def test_flatten_pack_as_and_front():
    assert nest.flatten(N) == [1, 2, 3, 4]
    assert nest.pack_as(N, nest.flatten(N)) == N
    assert nest.pack_as(N, iter("abcd")) == ("a", ["b", {"b": "c", "a": ("d", ())}])
    assert nest.front(N) == 1
    assert nest.front(((), [5])) == 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: nest.map_many2(max, (1, 2), (1,)),
            "expected a tuple of 2, got a tuple",
        ),
        (lambda: nest.map_many2(max, {"a": 1}, {"b": 1}), r"keys {'a'}, got .* {'b'}"),
        (lambda: nest.map_many2(max, {"a": 1}, {}), r"keys {'a'}, got .* {}"),
        (lambda: nest.map_many2(max, (), {}), "expected a tuple of 0, got a dict"),
        (lambda: nest.zip({"a": (1, 2)}, {"a": (1, {})}), "at 'a/1': expected a leaf"),
        (lambda: nest.map_many(max), "at least one nest"),
        (lambda: nest.zip(), "at least one nest"),
        (lambda: nest.pack_as((1, 2), [1]), "got 1 leaves, expected 2"),
        (lambda: nest.pack_as((1, 2), [1, 2, 3]), "got 3 leaves, expected 2"),
        (lambda: nest.front({"a": ()}), "no leaves"),
        (lambda: nest.map(max, {1: 2}), "strings for keys, got 1"),
    ],
)
def test_mistakes_are_value_errors_that_say_where(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_list_that_contains_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="deeper than 32"):
        nest.flatten(loop)
