from hypothesis import given
from hypothesis import strategies as st

from ragflash.engine.stop import StopMatcher


def shown(stops, pieces):
    matcher = StopMatcher(stops)
    texts = [matcher.feed(piece) for piece in pieces]
    return [*texts, matcher.finish()], matcher.found


def test_text_that_may_begin_a_stop_string_waits():
    assert shown(["END"], ["a E", "N", "X E"]) == (["a ", "", "ENX ", "E"], False)


def test_text_ends_before_a_stop_string_split_over_pieces():
    assert shown(["END"], ["ab E", "ND c", "d"]) == (["ab ", "", "", ""], True)


def test_the_earliest_of_several_wins():
    assert shown(["cd", "bc"], ["abcd"])[0] == ["a", ""]


def test_empty_stop_strings_stop_nothing():
    assert shown([""], ["ab"]) == (["ab", ""], False)


@given(st.text("ab"), st.text("ab", min_size=1, max_size=4))
def test_streamed_by_character_equals_cut_whole(text, stop):
    texts, found = shown([stop], [*text])
    assert "".join(texts) == text.partition(stop)[0]
    assert found == (stop in text)
