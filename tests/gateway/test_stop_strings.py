from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.stop_strings import StopStrings

unhurried = settings(deadline=None)  # a busy machine is no failure
SHORT = st.text("ab", max_size=12)


def run(stops: list[str], pieces: list[str], keep_stop: bool = False) -> tuple[list[str], str | None]:
    """The texts that go out, and the stop string that ended them."""
    matcher = StopStrings(stops, keep_stop)
    texts = []
    for piece in pieces:
        checked = matcher.push(piece)
        texts.append(checked.text)
        if checked.stop is not None:
            return texts, checked.stop
    return [*texts, matcher.flush()], None


def cut_by_hand(stops: list[str], text: str) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first; of two that end together, the longer one counts."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@unhurried
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=4), st.lists(SHORT, max_size=6))
def test_any_split_is_cut_where_the_first_stop_string_is_complete(stops: list[str], pieces: list[str]) -> None:
    texts, stop = run(stops, pieces)
    assert ("".join(texts), stop) == cut_by_hand(stops, "".join(pieces))


@unhurried
@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(SHORT, max_size=6))
def test_what_was_sent_never_has_to_be_taken_back(stops: list[str], pieces: list[str]) -> None:
    texts, _stop = run(stops, pieces)
    expected, _ = cut_by_hand(stops, "".join(pieces))
    sent = ""
    for text in texts:
        sent += text
        assert expected.startswith(sent)


@unhurried
@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4), st.lists(SHORT, max_size=6))
def test_kept_stop_string_ends_the_text(stops: list[str], pieces: list[str]) -> None:
    texts, stop = run(stops, pieces, keep_stop=True)
    expected, expected_stop = cut_by_hand(stops, "".join(pieces))
    assert ("".join(texts), stop) == (expected + (expected_stop or ""), expected_stop)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["\n\nUser"], keep_stop=False)
    assert matcher.push("hello\n").text == "hello"
    assert matcher.push("you\n\nUs").text == "\nyou"
    assert matcher.push("e it").text == "\n\nUse it"


def test_stop_string_that_overlaps_itself_is_found() -> None:
    assert run(["aab"], ["aa", "ab"]) == (["", "a"], "aab")


@unhurried
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(SHORT, max_size=6),
    st.integers(0, 6),
)
def test_only_what_is_complete_where_it_may_end_counts(stops: list[str], pieces: list[str], num_first: int) -> None:
    matcher = StopStrings(stops, keep_stop=True)
    sent, stop = "", None
    for idx, piece in enumerate(pieces):
        checked = matcher.push(piece, may_end=idx >= num_first)
        sent, stop = sent + checked.text, checked.stop
        if stop is not None:
            break
    text, num_first_chars = "".join(pieces), len("".join(pieces[:num_first]))
    ends = [end for end in range(num_first_chars + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    if ends:
        complete = [other for other in stops if text[: ends[0]].endswith(other)]
        assert (sent, stop) == (text[: ends[0]], max(complete, key=len))
    else:
        assert (sent + matcher.flush(), stop) == (text, None)


def test_without_stop_strings_text_passes() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)
