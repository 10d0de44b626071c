"""What the faults of the table of faults put in place of our functions.

Each takes the original function and returns the faulty one, which has the original's signature (for a method,
``self`` included). Those here are general; those written for one function are beside, by the rows that use
them, and named after what they break.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

Function = Callable[..., Any]


def does_nothing(original: Function) -> Function:
    """The call is skipped: it returns None."""

    def faulty(*args: Any, **kwargs: Any) -> None:
        return None

    return faulty


def returns(value: Any) -> Callable[[Function], Function]:
    """The call is skipped and answers ``value``."""

    def replace(original: Function) -> Function:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            return value

        return faulty

    return replace


def passes_through(index: int = 0) -> Callable[[Function], Function]:
    """The call is skipped and answers its positional argument ``index`` (0 is ``self`` for a method)."""

    def replace(original: Function) -> Function:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            return args[index]

        return faulty

    return replace


def changes_result(change: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """The call is made and its result changed on the way out."""

    def replace(original: Function) -> Function:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            return change(original(*args, **kwargs))

        return faulty

    return replace


def changes_arguments(change: Callable[..., tuple[Any, ...]]) -> Callable[[Function], Function]:
    """The call is made with ``change(*args)`` for its positional arguments."""

    def replace(original: Function) -> Function:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            return original(*change(*args), **kwargs)

        return faulty

    return replace


def forgets_keyword(name: str) -> Callable[[Function], Function]:
    """The call is made without a keyword argument."""

    def replace(original: Function) -> Function:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **{key: value for key, value in kwargs.items() if key != name})

        return faulty

    return replace


def gives_a_null_context(original: Function) -> Function:
    """Nothing is different inside."""
    return lambda *args, **kwargs: nullcontext()
