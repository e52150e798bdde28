"""Stop strings in streamed text."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string occurs; text that may be the start of one waits.

    Fed token by token, so that the result does not depend on how many tokens a step accepts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Return the text that may be shown: after a match that before it, later nothing."""
        if self.found:
            return ""
        text = self._held + text
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.found = True
            self._held = ""
            return text[: min(starts)]
        split = len(text) - self._num_held(text)
        self._held = text[split:]
        return text[:split]

    def finish(self) -> str:
        """Return what still waits; it was no stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
