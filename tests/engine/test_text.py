from hypothesis import given
from hypothesis import strategies as st

from ragflash.engine.output import Output
from ragflash.engine.request import FinishReason
from ragflash.engine.text import IncrementalDecoder

PIECES = ["44 6f 6e 65 20 e2 9c", "85 20 f0 9f", "a7 be"]


def output_of(pieces, **options):
    settings = {"max_tokens": 100, "stop": (), "cursor": None, "stop_ids": frozenset()}
    data = [bytes.fromhex(piece) for piece in pieces]
    return Output(token_bytes=data, **{**settings, **options})


def test_o21_characters_split_between_tokens():
    output = output_of(PIECES)
    deltas = []
    for token in range(3):
        output.append(token)
        deltas.append(output.take_text())
    assert deltas == ["Done ", "✅ ", "🧾"]
    assert output.text == "Done ✅ 🧾"


def test_o21_unfinished_bytes_at_the_end_are_one_replacement_mark():
    output = output_of(PIECES, max_tokens=2)
    assert output.append(0)
    assert not output.append(1)
    assert output.reason is FinishReason.LENGTH
    assert output.text == output.take_text() == "Done ✅ \N{REPLACEMENT CHARACTER}"


@given(st.text(), st.data())
def test_any_cut_of_the_bytes_gives_the_same_text(text, data):
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)))))
    decoder = IncrementalDecoder()
    pieces = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    shown = [decoder.feed(piece) for piece in pieces]
    assert "".join([*shown, decoder.finish()]) == text
