from ragflash.speculative.drafter import Draft
from ragflash.speculative.verify import permitted, verify


def run(draft, target, *, last=99):
    """Verify `draft` against a target that says `target`, row by row; `last` ends the output."""
    emitted, asked = [], []

    def choose(row):
        assert len(emitted) == len(asked), "a row is chosen after all rows before it were emitted"
        asked.append(row)
        return target[row]

    def emit(token):
        emitted.append(token)
        return token != last

    return emitted, verify(draft, choose, emit), asked


def chain(*token_ids):
    return Draft(token_ids, "test")


#      ┌ 4 ─┬ 5 ── 6
#  -1 ─┤    └ 7
#      └ 8 ── 5
TREE = Draft((4, 8, 5, 7, 6, 5), "test", (-1, -1, 0, 0, 2, 1))


def test_all_accepted_gives_one_token_more():
    assert run(chain(4, 5), (4, 5, 6)) == ([4, 5, 6], (0, 1), [0, 1, 2])


def test_first_difference_is_replaced_and_ends_the_chain():
    assert run(chain(4, 5, 6), (4, 7, 8, 9)) == ([4, 7], (0,), [0, 1])


def test_no_draft_is_plain_decoding():
    assert run(chain(), (4,)) == ([4], (), [0])


def test_end_inside_the_draft_keeps_the_token_that_ended_it():
    assert run(chain(4, 99, 5), (4, 99, 5, 6)) == ([4, 99], (0, 1), [0, 1])


def test_end_at_a_difference():
    assert run(chain(4, 5), (99, 1, 2)) == ([99], (), [0])


def test_walk_takes_the_branch_that_the_target_takes():
    assert run(TREE, (8, 0, 5, 0, 0, 0, 3)) == ([8, 5, 3], (1, 5), [0, 2, 6])
    assert run(TREE, (4, 7, 0, 0, 3, 0, 0)) == ([4, 7, 3], (0, 3), [0, 1, 4])
    assert run(TREE, (4, 5, 0, 6, 0, 3, 0)) == ([4, 5, 6, 3], (0, 2, 4), [0, 1, 3, 5])


def test_walk_ends_where_no_branch_goes_on():
    assert run(TREE, (4, 8, 0, 0, 0, 0, 0)) == ([4, 8], (0,), [0, 1])
    assert run(TREE, (5, 0, 0, 0, 0, 0, 0)) == ([5], (), [0])


def test_of_two_branches_alike_the_first_is_walked():
    twice = Draft((4, 4, 5), "test", (-1, -1, 1))
    assert run(twice, (4, 5, 0, 0)) == ([4, 5], (0,), [0, 1])


def test_every_branch_is_cut_where_it_may_not_go_on():
    def num_permitted(tokens):
        return [*tokens, 5].index(5)

    assert permitted(TREE, num_permitted) == Draft((4, 8, 7), "test", (-1, -1, 0))
    assert permitted(chain(4, 5, 6), num_permitted) == chain(4)
    assert permitted(TREE, len) is TREE
