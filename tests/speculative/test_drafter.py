import pytest

from ragflash.speculative.drafter import Draft

TREE = Draft((4, 8, 5, 7, 6), "mtp", (-1, -1, 0, 0, 2), ("mtp", "lookup", "mtp", "mtp", "lookup"))


def test_leaves_and_their_paths_make_up_the_tree():
    assert TREE.leaves() == (1, 3, 4)
    assert [TREE.path(leaf) for leaf in TREE.leaves()] == [(1,), (0, 3), (0, 2, 4)]


def test_a_chain_needs_no_parents():
    chain = Draft((4, 5, 6), "lookup")
    assert chain.is_chain
    assert Draft((4, 5, 6), "lookup", (-1, 0, 1)).is_chain
    assert not TREE.is_chain
    assert (chain.leaves(), chain.path(2)) == ((2,), (0, 1, 2))


def test_the_first_tokens_of_a_draft_are_one():
    assert TREE.first(3) == Draft((4, 8, 5), "mtp", (-1, -1, 0), ("mtp", "lookup", "mtp"))
    assert TREE.first(9) is TREE


def test_what_follows_a_dropped_token_goes_with_it():
    assert TREE.without({0}) == Draft((8,), "mtp", (-1,), ("lookup",))
    assert Draft((1, 2, 3), "mtp").without({1}) == Draft((1,), "mtp")
    assert TREE.without(()) is TREE


def test_every_token_knows_who_proposed_it():
    assert [TREE.source_of(index) for index in range(5)] == [*TREE.sources]
    assert Draft((1,), "mtp").source_of(0) == "mtp"


@pytest.mark.parametrize("parents", [(0, 0), (1, 0), (-2, -1), (-1,), (-1, 0, 1)])
def test_every_token_has_a_parent_that_comes_first(parents):
    with pytest.raises(ValueError, match="parent"):
        Draft((1, 2), "mtp", parents)


def test_sources_are_as_many_as_tokens():
    with pytest.raises(ValueError, match="sources"):
        Draft((1, 2), "mtp", sources=("mtp",))
