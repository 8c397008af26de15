# SPDX-License-Identifier: Apache-2.0
"""Everything that a recipe may say, with its defaults: the table in docs/train.md is that of these classes.

Each key is checked by itself here; what does not go together is found by `checks`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    create_model,
)

from hyper_parallel.planning.roles import (
    ROLES,
    find_elastic,
    select_axes,
    select_row_axes,
)

Count = Annotated[int, Field(ge=1)]
Some = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Part(BaseModel):
    """A part of a recipe; keys that it does not know are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True
    )


class Model(Part):
    """The model: a class in a file, or a folder of Hugging Face."""

    file: Path | None = Field(
        default=None, description="Python file with the model's class"
    )
    class_: str | None = Field(
        default=None, alias="class", description="name of the class in that file"
    )
    arguments: dict[str, Any] = Field(
        default={},
        description="its keyword arguments, or the fields of the one dataclass that it takes",
    )
    huggingface: Path | None = Field(
        default=None,
        description="folder with `config.json`, tokenizer and `*.safetensors`, for `transformers`",
    )
    weights: bool = Field(
        default=True,
        description="whether a `huggingface` model begins with its weights; else it is drawn",
    )
    start: Path | None = Field(
        default=None,
        description="checkpoint whose model the training begins with, whoever wrote it; its optimizer is not read",
    )


class Data(Part):
    """The text, and how batches are drawn from it."""

    corpus: Literal["python"] | None = Field(
        default=None,
        description="`python`: 2 MB of Python's own documentation and code",
    )
    text: Path | None = Field(
        default=None, description="a text file, or a folder of them"
    )
    files: str = Field(default="**/*.txt", description="which files of that folder")
    tokens: Literal["bytes", "model"] = Field(
        default="bytes",
        description="`bytes`, 256 of them, or `model`: the tokenizer of `model.huggingface`",
    )
    batch: Count = Field(
        default=8, description="sequences a step, of all ranks together"
    )
    length: Count = Field(default=128, description="tokens a sequence")
    held_out: Share = Field(
        default=0.05,
        description="the last part of the text, which is for evaluation alone",
    )


class Axes(Part):
    """How many ranks there are along each axis of the mesh, by its role; None where that is for the others to say."""

    def sizes(self) -> dict[str, int | None]:
        """The sizes in the order of the axes, the outermost first, whatever order the recipe has them in."""
        return {name: getattr(self, name) for name in ROLES}

    def take(self, ranks: int) -> Axes:
        """The same mesh on so many ranks, if the axis that takes what the others leave can make it fit."""
        elastic = find_elastic()
        sizes = self.sizes()
        if sizes[elastic] is not None:
            return self
        others = math.prod(size for size in sizes.values() if size is not None)
        if ranks % others:
            return self
        return self.model_copy(update={elastic: ranks // others})


if TYPE_CHECKING:
    Mesh = Axes  # a type checker cannot read the table
else:
    _KEYS = {
        name: (
            Count if role.default is not None else Count | None,
            Field(default=role.default, description=role.description),
        )
        for name, role in ROLES.items()
    }
    Mesh = create_model("Mesh", __base__=Axes, __doc__=Axes.__doc__, **_KEYS)


Placing = Annotated[str, Field(pattern=r"^(?i:shard\(-?\d+\)|replicate)$")]


class Style(Part):
    """How a module lies on the `tp` axis, or experts on the `ep` axis."""

    style: Literal[
        "colwise",
        "rowwise",
        "fused_colwise",
        "sequence",
        "replicate",
        "experts",
        "parts_of_experts",
    ]
    input: Placing | None = None
    output: Placing | None = None
    heads: Count | None = None
    sections: Count | tuple[Count, ...] | None = None
    sequence_dim: int | None = None


def _named(value: Any) -> Any:
    return {"style": value} if isinstance(value, str) else value


class Plan(Part):
    """How the model lies on the mesh: found for it, a function in a file, or styles by the names of modules."""

    auto: bool = Field(
        default=False,
        description="whether a plan is found for the model, as `hyper-parallel plan` prints it; `plan: auto` is short "
        "for this key, and a `huggingface` model needs neither",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="of such a plan: whether `tp` shards what is between the blocks along the sequence",
    )
    file: Path | None = Field(
        default=None, description="Python file with the plan's function"
    )
    function: str | None = Field(
        default=None,
        description="`f(model, mesh)` puts the model on the mesh; `f(config)` returns a plan from names to styles",
    )
    arguments: dict[str, Any] = Field(
        default={}, description="further keyword arguments of that function"
    )
    styles: dict[str, Annotated[Style, BeforeValidator(_named)]] = Field(
        default={},
        description="or: a style for each pattern of module names, as `blocks.*.mlp.up: colwise`",
    )


def _by_word(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


Dtype = Literal["float32", "float64", "bfloat16", "float16"]


class Precision(Part):
    """The dtypes of a model whose state `dp_shard` divides."""

    parameters: Literal["float32", "float64", "bfloat16"] = Field(
        default="float32",
        description="of parameters, gradients and optimizer; `precision: float32` is short for this key",
    )
    compute: Dtype | None = Field(
        default=None,
        description="in which parameters are gathered and used; null: their own",
    )
    reduce: Dtype | None = Field(
        default=None, description="in which gradients are reduced; null: `compute`"
    )
    output: Dtype | None = Field(
        default=None, description="of the outputs of units; null: as computed"
    )

    @property
    def is_mixed(self) -> bool:
        """Whether units compute or reduce in another dtype than that of the parameters."""
        return any((self.compute, self.reduce, self.output))


def _by_dtype(value: Any) -> Any:
    return {"parameters": value} if isinstance(value, str) else value


class Sharding(Part):
    """How the state of a model is divided along `dp_shard`."""

    units: tuple[str, ...] | None = Field(
        default=None,
        description="patterns of modules that are gathered one at a time; null: the repeated blocks",
    )
    reshard_after_forward: bool | Count | None = Field(
        default=None,
        description="whether parameters are freed between forward and backward, or groups of how many ranks keep "
        "them; null: all but those outside of `units`",
    )


class Context(Part):
    """How attention is computed on sequences that `cp` divides."""

    method: Literal["allgather", "ring", "ulysses"] = Field(
        default="allgather",
        description="keys and values are gathered, or go round, or heads are exchanged for positions",
    )
    ulysses_degree: Count | None = Field(
        default=None,
        description="how many neighbours exchange heads; keys go between such groups as `method` says",
    )
    load_balance: bool = Field(
        default=True,
        description="whether each rank has an early and a late part of a sequence: the same work in causal attention",
    )


class Experts(Part):
    """How experts are kept busy alike."""

    bias_rate: float = Field(
        default=0.0,
        ge=0,
        description="how much the bias of an `MoE` module's experts with too few tokens rises in a step, and that of "
        "others falls",
    )


class Pipeline(Part):
    """How the layers are divided along `pp`, and in which order micro batches run."""

    schedule: str = Field(
        default="1F1B",
        description="the name of a schedule (`hyper-parallel schedule` compares them), or a CSV file of one",
    )
    micro_batches: Count | None = Field(
        default=None,
        description="into how many parts the sequences of a step are divided; null: one sequence each",
    )
    stages_per_rank: Count | None = Field(
        default=None,
        description="of schedules that leave it open; null: as many as the schedule has, or 2",
    )
    split: tuple[str, ...] | None = Field(
        default=None,
        description="the names of the blocks that begin a stage after the first; null: stages of equal cost",
    )
    first: tuple[str, ...] = Field(
        default=(),
        description="patterns of modules that the first stage runs; else those in front of the blocks",
    )
    last: tuple[str, ...] = Field(
        default=(),
        description="patterns of modules that the last stage runs; else those behind the blocks",
    )

    @property
    def path(self) -> Path:
        """The schedule as a file."""
        return Path(self.schedule)


class Recompute(Part):
    """Which activations backward computes again."""

    mode: Literal["none", "full", "selective"] = Field(
        default="none",
        description="`none`, `full`, or `selective`: all but matrix products and attention; "
        "`recompute: full` is short for this key",
    )
    modules: tuple[str, ...] | None = Field(
        default=None,
        description="patterns of module names; null: the repeated blocks, the largest list of modules",
    )


def _by_mode(value: Any) -> Any:
    return {"mode": value} if isinstance(value, str) else value


class Optimizer(Part):
    """How parameters follow gradients. Only matrices decay."""

    kind: Literal["adamw", "adam", "sgd"] = Field(
        default="adamw", description="`adamw`, `adam` or `sgd`"
    )
    lr: Positive = Field(default=1e-3, description="highest learning rate")
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.95), description="of `adamw` and `adam`"
    )
    eps: Positive = Field(default=1e-8, description="of `adamw` and `adam`")
    momentum: Share = Field(default=0.0, description="of `sgd`")
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="of matrices"
    )
    clip: Positive | None = Field(
        default=1.0, description="largest norm of all gradients together; null: any"
    )


class Schedule(Part):
    """How the learning rate goes up and down."""

    kind: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="`cosine`, `linear` or `constant`"
    )
    warmup: Some = Field(default=0, description="steps until the rate is highest")
    decay_steps: Count | None = Field(
        default=None, description="step at which it is lowest; null: `steps`"
    )
    floor: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="the lowest rate, as a part of the highest"
    )


class Evaluation(Part):
    """The loss on text that is never trained on."""

    every: Some = Field(
        default=0, description="steps between evaluations, and one at the end; 0: none"
    )
    batches: Count = Field(default=4, description="batches each time")


class Checkpoints(Part):
    """When the training is saved, into `folder`."""

    every: Some = Field(
        default=0,
        description="steps between checkpoints; with a `folder` there is always one at the end",
    )
    keep: Count | None = Field(
        default=3,
        description="checkpoints of which older ones are removed; null: all stay",
    )
    asynchronous: bool = Field(
        default=True, description="whether they are written while the training goes on"
    )


class Logging(Part):
    """What is told, and where."""

    every: Count = Field(
        default=10,
        description="steps between the lines where there is no terminal for a bar",
    )
    tensorboard: bool = Field(
        default=False,
        description="whether TensorBoard's log is written too, to `folder/tensorboard`",
    )
    collectives: bool = Field(
        default=False,
        description="whether what one step communicates is written to `folder/collectives.json`",
    )


class Communication(Part):
    """How long ranks wait for each other."""

    timeout: Positive = Field(
        default=600,
        description="seconds that a rank waits in a collective for the others, before it says who is missing",
    )
    grace: Positive = Field(
        default=30,
        description="seconds that a rank may wait in one collective after SIGTERM or SIGINT, before it is ended",
    )


class Recipe(Part):
    """One training."""

    framework: Literal["torch", "mindspore"] = Field(
        default="torch", description="`torch` or `mindspore`"
    )
    seed: Some = Field(
        default=0, description="of the model's first weights and of the batches"
    )
    steps: Count = Field(description="train until so many steps are done")
    precision: Annotated[Precision, BeforeValidator(_by_dtype)] = Precision()
    folder: Path | None = Field(
        default=None,
        description="where logs and checkpoints go, relative to the current directory; null: nowhere",
    )
    model: Model = Field(description="")
    data: Data = Field(description="")
    mesh: Mesh = Mesh()
    plan: Annotated[Plan, BeforeValidator(_by_word)] = Plan()
    sharding: Sharding = Sharding()
    context: Context = Context()
    experts: Experts = Experts()
    pipeline: Pipeline = Pipeline()
    recompute: Annotated[Recompute, BeforeValidator(_by_mode)] = Recompute()
    swap: tuple[str, ...] = Field(
        default=(),
        description="patterns of modules whose activations wait in host memory for backward; saves none on a CPU",
    )
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    logging: Logging = Logging()
    communication: Communication = Communication()

    _path: Path = PrivateAttr(Path())

    @property
    def path(self) -> Path:
        """The file that it was read from."""
        return self._path

    def input_path(self, path: Path) -> Path:
        """A path that the recipe names for reading: relative ones are relative to the recipe."""
        return self._path.parent / path

    @property
    def finds_plan(self) -> bool:
        """Whether a plan is found for the model: if that is asked for, or a Hugging Face model has none."""
        plan = self.plan
        has_none = plan.file is None and not plan.styles
        return plan.auto or (has_none and self.model.huggingface is not None)

    @property
    def axes(self) -> dict[str, int]:
        """The size of every axis of the mesh, by its role, the outermost first."""
        return select_axes(self.mesh.sizes())

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The sizes alone."""
        return tuple(self.axes.values())

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return math.prod(self.mesh_shape)

    @property
    def data_ranks(self) -> int:
        """Into how many parts the rows of a batch are divided."""
        return math.prod(select_row_axes(self.axes).values())

    @property
    def rows_of_rank(self) -> int:
        """How many sequences of a batch each rank has."""
        return self.data.batch // self.data_ranks

    def values(self) -> dict[str, Any]:
        """All of it as plain values, as JSON has them."""
        return self.model_dump(mode="json", by_alias=True)


def keys(part: type[Part] = Recipe, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, what it means) of everything that a recipe may say."""
    for name, field in part.model_fields.items():
        key, kind = f"{prefix}{field.alias or name}", field.annotation
        if isinstance(kind, type) and issubclass(kind, Part):
            yield from keys(kind, f"{key}.")
        else:
            yield (
                key,
                _told("needed" if field.is_required() else field.default),
                field.description or "",
            )


def _told(default: Any) -> str:
    """A default as a recipe would have it."""
    return default if isinstance(default, str) else json.dumps(default)
