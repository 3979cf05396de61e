"""A replacement counts only while this process is patched; otherwise its caller gets the original.

``disable()`` restores every attribute, but a caller may hold the replacement itself: a bound method, a name imported from
another module, a class that Ray has copied. So a patch's ``make`` is marked ``@while_active``, and what it makes need not
ask. Not marked is what must act in an unpatched process too, such as a worker that refuses a patched trainer's order.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.config import Config

__all__ = ["while_active", "while_config"]

Make = Callable[[Any], Callable[..., Any]]


def while_config(wanted: Callable[[Config], bool] | None) -> Callable[[Make], Make]:
    """As ``while_active``, and only in settings that are ``wanted``.

    The question is asked at each call; a coroutine asks when it is awaited.
    """

    def mark(make: Make) -> Make:
        @functools.wraps(make)
        def marked(original: Any) -> Callable[..., Any]:
            ours = make(original)

            def chosen() -> Any:
                on = runtime.is_active() and (wanted is None or wanted(runtime.active_config()))
                return ours if on else original

            if inspect.iscoroutinefunction(ours):

                async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                    return await chosen()(*args, **kwargs)

                return asynchronous

            def gated(*args: Any, **kwargs: Any) -> Any:
                return chosen()(*args, **kwargs)

            return gated

        return marked

    return mark


#: marks a ``make`` whose replacement gives way to the original in a process that is not patched
while_active = while_config(None)
