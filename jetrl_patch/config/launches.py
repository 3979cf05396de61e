"""What an adapter says about the launches of its framework, as types: for the doctor, the launcher and ``scripts.official``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jetrl_patch.config.settings import Config
from jetrl_patch.errors import JetrlError


class Pool(NamedTuple):
    """GPUs that a launch asks Ray for."""

    setting: str
    per_node: int
    nodes: int


class Place(NamedTuple):
    """A file, folder or hub name that a setting points to; ``path`` is empty if the setting is required but missing."""

    setting: str
    path: str


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a launch needs on its machine.

    Attributes:
        pools: its GPUs; no pool shares a GPU with another.
        num_gpus: the setting that tells Ray how many GPUs there are, and its value (None: Ray counts them).
        cluster: the setting and the address of a running Ray cluster; an empty path if the launch starts Ray.
        models: models other than the policy.
        tokenizer: where the tokenizer is.
        data: data files, and data sets of a hub if the framework supports them.
        files: the user's code.
        own_data: whether the user's own class reads the data. A path then need not be a file.
        interpreter: the command that runs Ray's workers instead of this Python; otherwise an empty path.
        resumes: the checkpoint that the run resumes from; an empty path if it starts from scratch.
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
    resumes: Place


class Stored(NamedTuple):
    """How something is stored: bytes per parameter, and the number of ranks that share them."""

    bytes: float
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where a launch stores the policy, for an estimate of its memory.

    Attributes:
        trainer: the engine and its ranks in words; without ``weights``, why the trainer's part is unknown.
        weights, gradients: of the trainer.
        optimizer: FP32 masters, which the optimizer keeps next to AdamW's moments and splits in the same way.
        reshards: whether gathered weights are freed after a layer's forward.
        offloaded: those of "weights", "gradients" and "optimizer" that are in CPU memory.
        tensor_parallel, expert_parallel: the rollout's sizes.
        utilization: the share of a GPU that an engine takes; None if the setting is not a share.
    """

    trainer: str
    weights: Stored | None = None
    gradients: Stored | None = None
    optimizer: Stored | None = None
    reshards: bool = True
    offloaded: tuple[str, ...] = ()
    tensor_parallel: int = 1
    expert_parallel: int = 1
    utilization: float | None = None


@dataclass(frozen=True, kw_only=True)
class Saves:
    """What a launch validates and writes.

    Attributes:
        validates: when it validates, in words with the settings; empty for never.
        when: when it writes a checkpoint, in words with the setting; empty for never.
        contents: what a checkpoint has: "model" and "optimizer", as the trainer holds them, and "exported".
        exported: bytes per parameter of a model that is written for other programs.
        folder: where checkpoints go.
        kept: how many of them are kept; None for all.
        final: where the exported model goes at the end; empty for nowhere.
    """

    validates: str
    when: str
    contents: tuple[str, ...]
    exported: float
    folder: str
    kept: int | None
    final: str = ""


class Launch(Protocol):
    """What the doctor and the launcher ask. ``settings`` is the framework's own object, as its main function receives it."""

    @property
    def programs(self) -> Collection[str]:
        """The modules whose command lines ``read`` can parse, the framework's main program first."""

    def read(self, arguments: Sequence[str], target: str = ..., /) -> Any:
        """Parse the command line of one of ``programs``. Raises ConfigError with the framework's message."""

    def asked_for(self, settings: Any, environ: Mapping[str, str], /) -> Config | None:
        """The plugin's settings among the framework's; None if there are none."""

    def chosen(self, settings: Any, asked: Config, /) -> Config:
        """The plugin's settings, with those that the user left open as the training engine needs them."""

    def problems(self, settings: Any, config: Config, /) -> Iterator[JetrlError]:
        """Yield an error for each setting that the plugin cannot support."""

    def complete(self, settings: Any, config: Config, /) -> list[str]:
        """Write what the mode needs into the settings. Returns a description of each change."""

    def model_path(self, settings: Any, /) -> tuple[str, str]:
        """The path of the model, and the name of its setting."""

    def program_problem(self, target: str, /) -> JetrlError | None:
        """The error for an unsupported program of the framework, given as a dotted module or a script's path; else None."""

    def needs_flash_attn(self, settings: Any, /) -> str:
        """The setting that needs flash-attn on a GPU, or an empty string."""

    def needs(self, settings: Any, /) -> Needs:
        """What a launch with these settings needs on its machine."""

    def storage(self, settings: Any, config: Config, /) -> Storage:
        """Where a launch with these settings stores the policy."""

    def saves(self, settings: Any, /) -> Saves:
        """What a launch with these settings validates and writes."""
