"""The interface of a training framework's adapter: the counterpart of ``Installer`` in ``sync/receive.py``.

A module with these functions is a ``Trainer``. The adapter offers it in ``Services``, where mypy compares signatures.
This package holds what every framework shares; the adapter calls it:

1. settings: ``problems`` checks the framework's settings against a table of ``rules.Rule``, ``complete`` completes them;
2. driver: writes ``Config.to_env()`` into the framework's settings; every other process calls ``marks.check``;
3. model: ``prepare`` converts it before it is wrapped, through ``sync.source.convert``;
4. sync: ``guard.begin_sync``, then ``Source.stream`` over full weights, then ``report.sync_report``;
5. log: ``report.sync_metrics`` and ``mismatch.step_metrics`` go into ``state.Driver``, and from there into the step's log.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError

__all__ = ["Needs", "Place", "Pool", "Trainer"]


class Pool(NamedTuple):
    """GPUs that a launch asks Ray for."""

    setting: str
    per_node: int
    nodes: int


class Place(NamedTuple):
    """A file, folder or name of a hub that a setting points to; ``path`` is empty where the setting is required but missing."""

    setting: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a launch takes from the machine that it runs on.

    Attributes:
        pools: its GPUs; no pool shares a GPU with another.
        num_gpus: the setting that tells Ray how many GPUs there are, and its value (None: Ray counts them).
        cluster: the setting and the address of a running Ray cluster; an empty path if Ray is started by the launch.
        models: further models besides the policy.
        tokenizer: where the tokenizer is.
        data: data files; a hub's data sets count if the framework takes them.
        files: the user's code.
        own_data: whether a class of the user's own reads the data, so that a path need not be a file.
        interpreter: the command that runs Ray's workers instead of this Python; an empty path if there is none.
    """

    pools: tuple[Pool, ...]
    num_gpus: tuple[str, int | None]
    cluster: Place
    models: tuple[Place, ...]
    tokenizer: Place
    data: tuple[Place, ...]
    files: tuple[Place, ...]
    own_data: bool
    interpreter: Place


class Trainer(Protocol):
    """A training framework. ``settings`` is the framework's own object, as its main function receives it."""

    @property
    def programs(self) -> Collection[str]:
        """The programs, by module, whose command lines ``read`` can parse; the first is the framework's main one."""

    def read(self, arguments: Sequence[str], target: str = ..., /) -> Any:
        """Parse the command line of one of ``programs``. Raises ConfigError with the framework's message."""

    def asked_for(self, settings: Any, environ: Mapping[str, str], /) -> Config | None:
        """Return the plugin's settings found among the framework's, or None if there are none."""

    def chosen(self, settings: Any, asked: Config, /) -> Config:
        """Return the plugin's settings with those that the training engine decides, where the user left them open."""

    def problems(self, settings: Any, config: Config, /) -> Iterator[JetrlError]:
        """Yield an error for each setting that the plugin cannot support."""

    def complete(self, settings: Any, config: Config, /) -> list[str]:
        """Write what the mode needs into the settings. Returns a description of each change."""

    def model_path(self, settings: Any, /) -> tuple[str, str]:
        """Return the path of the model and the name of the setting that holds it."""

    def program_problem(self, target: str, /) -> JetrlError | None:
        """Return the error for one of the framework's programs that the plugin does not support, None for any other.

        Args:
            target: dotted name of a module, or path of a script.
        """

    def needs_flash_attn(self, settings: Any, /) -> str:
        """Return the setting that needs flash-attn on a GPU, or an empty string."""

    def needs(self, settings: Any, /) -> Needs:
        """Return what a launch with these settings takes from its machine."""

    def prepare(self, model: Any, config: Config, engine: Any, /) -> object:
        """Convert a loaded model in place, before it is wrapped. Return the ``Source`` of its weight syncs.

        Args:
            engine: the framework's object that holds the model.
        """
