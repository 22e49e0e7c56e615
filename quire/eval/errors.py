"""What `quire eval` refuses."""


class EvalMistakeError(Exception):
    """A flag or a file that it names is wrong; the message is one line that says which, and for a file the line."""
