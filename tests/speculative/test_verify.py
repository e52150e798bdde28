from ragflash.speculative.verify import verify_chain


def run(draft, target, *, last=99):
    """Verify `draft` against a target that says `target`, row by row; `last` ends the output."""
    emitted, asked = [], []

    def choose(row):
        assert len(emitted) == row, "a row is chosen after all rows before it were emitted"
        asked.append(row)
        return target[row]

    def emit(token):
        emitted.append(token)
        return token != last

    accepted = verify_chain(draft, choose, emit)
    return emitted, accepted, asked


def test_all_accepted_gives_one_token_more():
    assert run((4, 5), (4, 5, 6)) == ([4, 5, 6], 2, [0, 1, 2])


def test_first_difference_is_replaced_and_ends_the_chain():
    assert run((4, 5, 6), (4, 7, 8, 9)) == ([4, 7], 1, [0, 1])


def test_no_draft_is_plain_decoding():
    assert run((), (4,)) == ([4], 0, [0])


def test_end_inside_the_draft_keeps_the_token_that_ended_it():
    assert run((4, 99, 5), (4, 99, 5, 6)) == ([4, 99], 2, [0, 1])


def test_end_at_a_difference():
    assert run((4, 5), (99, 1, 2)) == ([99], 0, [0])
