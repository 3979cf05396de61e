"""Replacements that call the original while the process is not patched.

``disable()`` restores every attribute, but a caller may still hold the replacement: a bound method, a name imported from
another module, a class that Ray copied. So a patch marks its ``make`` with ``@while_active``, and the replacement needs no
check of its own. Unmarked are replacements that must act in an unpatched process too, such as the one that makes an
unpatched worker refuse a patched trainer's command.
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
    """Like ``while_active``, but only for settings that ``wanted`` accepts; ``None`` accepts all of them, unread.

    The check runs at each call; for a coroutine, when it is awaited.
    """

    def mark(make: Make) -> Make:
        @functools.wraps(make)
        def marked(original: Any) -> Callable[..., Any]:
            replacement = make(original)

            def chosen() -> Any:
                on = runtime.is_active() and (wanted is None or wanted(runtime.active_config()))
                return replacement if on else original

            if inspect.iscoroutinefunction(replacement):

                async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                    return await chosen()(*args, **kwargs)

                return asynchronous

            def gated(*args: Any, **kwargs: Any) -> Any:
                return chosen()(*args, **kwargs)

            return gated

        return marked

    return mark


#: marks a ``make`` whose replacement calls the original in an unpatched process
while_active = while_config(None)
